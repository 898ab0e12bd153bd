"""Cutoff SGD: a superstep ends with its c-th gradient; later gradients are dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gadei_ps.sync.base import Commit, SyncModel
from gadei_ps.sync.parameters import Parameter, SpecError, choice, path, whole_number

if TYPE_CHECKING:
    from gadei_ps.sync.prediction import Predictor

_count = whole_number(1, 2**31 - 1)


class Cutoff(SyncModel):
    """Collects; the push of number c applies the mean of c gradients (Teng and Wood 2018).

    Algorithm 1. The cutoff c of a superstep is chosen before the superstep begins, in one of these
    ways:

    - `c`: fixed, as in the backup workers of Chen et al. 2016.
    - `by=order`: the c that maximises c / x_(c). x_(c) is the c-th of the ordered run times by
      Elfving's formula, for independent normal run times, alike for all (section 3.1.1).
    - `by=sampled`: the same from each learner's own recent run times, by Monte Carlo.
    - `file`: the same from the learned run-time model (sections 3.1.2 and 3.1.3).

    Learners that are not among the first c are stragglers. Their iteration is no longer `wanted`:
    they may give it up at once, and begin one of the current superstep. A late or empty gradient is
    dropped on arrival.

    A run time lasts from the grant of an iteration to its push. The run time of a straggler is
    censored: known only to be longer than the time until the cutoff (section 4.2). While the
    predictor knows too little, the superstep waits for all learners. It never waits for a learner
    that has left: c is at most the number of members.

    A joining learner takes part at once. But if the superstep waits for all learners, the first
    arrival closes it to others, as in BSP. A refused gradient is dropped and does not count among
    the c. Its learner waits for the next superstep.
    """

    name: ClassVar[str] = "cutoff"
    forms: ClassVar[tuple[str, ...]] = (
        "cutoff:c=6",
        "cutoff:6",
        "cutoff:by=order",
        "cutoff:by=sampled",
        "cutoff:file=MODEL.safetensors",
    )
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {
            "c": Parameter(_count, required=False),
            "by": Parameter(choice("order", "sampled"), required=False),
            "file": Parameter(path, required=False),
        }
    )
    on_arrival: ClassVar[bool] = False

    def __init__(
        self, c: int | None = None, by: str | None = None, file: str | None = None
    ) -> None:
        """Raise ValueError unless exactly one of the three is given."""
        super().__init__()
        if sum(given is not None for given in (c, by, file)) != 1:
            raise ValueError("give one of c, by and file")
        self.c = None if c is None else _count(c)
        self.by = by
        self.file = file
        self._predictor: Predictor | None = None
        self._made_for: int | None = None  # learners; None: any number
        self._superstep = 0
        self._closed = False
        self._cutoff = self.c  # of the current superstep; None: all learners
        self._since: dict[int, int] = {}  # by computing learner: the superstep in which it began
        self._waiting: dict[int, None] = {}  # for the next superstep, in order of arrival
        self._held: dict[int, None] = {}
        # A learner's number is its slot in the predictor. So a learner's column in a trace is its
        # column in a model. began, by learner: start of its current iteration; NaN: none.
        self._began = np.full(0, np.nan)
        self._times = np.full(0, np.nan)

    @property
    def cutoff(self) -> int | None:
        """The cutoff of the current superstep; None if it waits for all learners."""
        return self._cutoff

    def check(self, learners: int | None) -> None:
        """Raise SpecError if c or the file does not fit this number of learners."""
        if self.c is not None and learners is not None and self.c > learners:
            raise SpecError(f"cutoff: c = {self.c} is above the number of learners, {learners}")
        if self.file is not None:
            self._load()
            if learners is not None and self._made_for not in (None, learners):
                raise SpecError(
                    f"cutoff: the number of learners is {learners}, but {self.file} is for "
                    f"{self._made_for}: train one with gadei-ps runtime-model train"
                )

    def _load(self) -> None:
        """Make the predictor. Raises SpecError if the file cannot be used."""
        if self._predictor is not None or self.c is not None:
            return
        if self.file is not None:
            from gadei_ps.sync.run_time_model import RunTimeModel

            try:
                model = RunTimeModel.load(Path(self.file))
            except (OSError, ValueError) as error:
                raise SpecError(f"cutoff: {error}") from None
            self._predictor, self._made_for = model, model.learners
        else:
            from gadei_ps.sync.order_statistics import NormalPredictor, SampledPredictor

            self._predictor = NormalPredictor() if self.by == "order" else SampledPredictor()

    def obsolete_below(self, learner: int) -> int:
        """See SyncModel: above the clock while the learner is a straggler."""
        clock = self.clock(learner)
        since = self._since.get(learner)
        return clock + (since is not None and since < self._superstep)

    def _joined(self, learner: int, now: float) -> int:
        if learner >= self._began.size:
            more = np.full(max(8, learner + 1, self._began.size), np.nan)
            self._began = np.concatenate([self._began, more])
            self._times = np.concatenate([self._times, more])
        self._times[learner] = self._began[learner] = np.nan
        if learner in self._held or (self._closed and self._cutoff is None):
            self._waiting[learner] = None
        else:
            self._begin(learner, now)
        return 0

    def _left(self, learner: int, clock: int, now: float) -> list[Commit]:
        self._began[learner] = np.nan
        if self._since.pop(learner, None) is None:
            del self._waiting[learner]
        return self._cut(now)

    def _pushed(
        self, learner: int, clock: int, now: float, started: float | None, refused: bool
    ) -> list[Commit]:
        if self._since.pop(learner) < self._superstep:
            self._begin(learner, now)
            return [Commit((), (learner,))]
        self._closed = True
        self._waiting[learner] = None
        if refused:
            self._began[learner] = np.nan
            return [Commit((), (learner,)), *self._cut(now)]
        self._times[learner] = now - self._began[learner]
        self._began[learner] = np.nan
        self._held[learner] = None
        return self._cut(now)

    def _grant(self, learner: int, clock: int) -> int:
        return clock + (learner in self._since)

    def _begin(self, learner: int, now: float) -> None:
        self._since[learner] = self._superstep
        self._began[learner] = now

    def _cut(self, now: float) -> list[Commit]:
        """End the superstep if c gradients have arrived or no learner is left that could push."""
        enough = self._cutoff is not None and len(self._held) >= self._cutoff
        if not self._closed or (self._since and not enough):
            return []
        self._foresee(now)
        self._superstep += 1
        self._closed = False
        self._releases += 1
        waiting, self._waiting = self._waiting, {}
        for learner in waiting:
            self._begin(learner, now)
        held, self._held = self._held, {}
        return [Commit(tuple(sorted(held)))] if held else []

    def _foresee(self, now: float) -> None:
        """Give the run times of this superstep to the predictor, and choose the next cutoff."""
        if self.c is not None:
            return
        with contextlib.suppress(SpecError):  # `check` raises it
            self._load()
        if self._predictor is None:
            return
        learners = np.sort(np.fromiter(self._clocks, np.int64, len(self._clocks)))
        if not learners.size:
            self._cutoff = None
            return
        size = int(learners[-1]) + 1
        censored = np.isfinite(self._began[:size])
        times = np.where(censored, now - self._began[:size], self._times[:size])
        self._times[:] = np.nan
        self._predictor.observe(times, censored)
        expected = self._predictor.expected(learners)
        if expected is None:
            self._cutoff = None
        else:
            from gadei_ps.sync.order_statistics import best_cutoff

            self._cutoff = best_cutoff(expected)
