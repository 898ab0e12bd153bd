"""How often each gradient of `gadei-ps chaos` is in the weights: read there, not from counters.

What was published is read from the heads of the rings, which their learners alone write. What was
applied is read from the ledger tensor (gadei_ps/chaos/learner.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.chaos.learner import BODY, LANES, sign
from gadei_ps.memory import segment, weights
from gadei_ps.memory.layout import RING, STATE, SegmentKind
from gadei_ps.memory.segment import Segment, segment_name


@dataclass(frozen=True)
class Count:
    """torn: values of weights, optimizer state or ledger that differ from what they must be."""

    published: int
    applied: int
    lost: int
    applied_twice: int
    torn: int

    @property
    def clean(self) -> bool:
        return not (self.lost or self.applied_twice or self.torn)


class Ring:
    """A learner's ring, read-only: it is read when the learner is dead and the name gone."""

    def __init__(self, job: str, row: int, generation: int) -> None:
        """Raises FileNotFoundError or SegmentError, also if the row is another learner's."""
        name = segment_name(job, f"ring.{row}")
        self._segment = segment.attach(name, SegmentKind.RING, writable=False)
        if int(self._segment.header["generation"]) != generation:
            raise FileNotFoundError(name)

    @property
    def published(self) -> int:
        return _native.load(self._segment.word(RING, "head"))


@dataclass
class Tally:
    """Of one job, whose weights and state stay mapped. exact: `w` is moved by plain addition."""

    job: str
    exact: bool
    _published: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        def attach(part: str, kind: SegmentKind) -> Segment:
            return segment.attach(segment_name(self.job, part), kind, writable=False)

        self._weights = attach("weights", SegmentKind.WEIGHTS)
        self._state = attach("state", SegmentKind.STATE)
        model = weights.read_table(self._weights)
        self._model = model
        views = model.views(weights.data(self._weights))
        self._w, self._ledger = views["w"], views["ledger"]

    def add(self, generation: int, published: int) -> None:
        """A learner of this generation is dead; its ring's head said so many."""
        self._published[generation % LANES] += published

    def count(self, dropped: int) -> Count:
        """When nothing is in a ring any more. dropped: gradients that were meant not to count."""
        published = np.zeros(LANES)
        for lane, number in self._published.items():
            published[lane] = number
        applied = self._ledger[:LANES].astype(np.float64)
        signs = np.array([sign(lane) for lane in range(LANES)])
        lost = int(np.maximum(0, published - applied).sum())
        return Count(
            int(published.sum()),
            int(applied.sum()),
            max(0, lost - dropped),
            int(np.maximum(0, applied - published).sum()),
            self._torn(float((signs * applied).sum())),
        )

    def _torn(self, total: float) -> int:
        """Chunks that took part in fewer or more gradients than others, as values that differ."""
        body = self._ledger[LANES:]
        assert body.size == BODY
        torn = int((body != np.float32(total)).sum())
        if self.exact:
            return torn + int((self._w != np.float32(-total)).sum())
        # All values of `w` get the same gradients, all alike, so they and their state stay the same
        # to the last bit; the last shard, which holds the body, has some of them too.
        return torn + sum(_odd_ones(values) for values in (self._w, *self._slots()))

    def _slots(self) -> list[np.ndarray]:
        """The optimizer's state of `w`."""
        state = self._state.view(STATE)
        starts = [
            int(state["slots_at"]) + stream * int(state["slot_bytes"])
            for stream in range(int(state["streams"]))
        ]
        return [self._state.array(np.float32, self._w.size, at) for at in starts]


def _odd_ones(values: np.ndarray) -> int:
    """How many differ, to the bit, from the last one."""
    bits: Any = values.view(np.uint32)
    return int((bits != bits[-1]).sum())
