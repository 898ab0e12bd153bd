"""Batches of the server for torch's DataLoader, which asks for them ahead of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.client import Client, epoch_order
from gadei_ps.memory import layout

TOO_MANY = (
    f"{layout.AHEAD} batches of the sampler wait for their steps, and a learner may have no more: "
    "call step() once for each batch (`accumulate=` sets how many make one), and give the "
    "DataLoader fewer workers or a smaller prefetch_factor; their product is below {most}"
)
OTHER_WAVE = "the job's waves have another length than when the sampler was made: make a new one"


class JobSampler(torch.utils.data.Sampler[list[int]]):
    """The batches that the server hands to this learner; see Optimizer.sampler.

    For DataLoader(dataset, batch_sampler=...). A batch counts as answered by the step() that its
    gradient is in. DataLoader asks for batches before the steps of those that it has taken. What
    it asks for is taken from the server, and goes to another learner if this one dies. Nothing
    waits here that only a step of this learner could end: where the server has nothing to hand
    out meanwhile, DataLoader ends its pass, and asks again after its next batch.
    """

    def __init__(
        self,
        client: Client,
        begin: Callable[[], None],
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int,
        *,
        drop_last: bool,
        accumulate: int,
    ) -> None:
        """Set the job's work.

        begin: waits for the turn, and pulls the weights, of a step that nothing precedes.

        Raises UsageError, ControlError.
        """
        super().__init__()
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: give a number from 1 on")
        self._client = client
        self._begin = begin
        self._wave = client.wave
        self._parts = accumulate * self._wave
        self._unit = batch_size * self._parts
        """Samples that one gradient answers."""
        self._samples, self._seed = samples, seed
        rest = samples % self._unit
        if rest and not drop_last and rest < self._parts:
            raise UsageError(
                f"the last {rest} of {samples} samples do not fill {self._parts} mini-batches, "
                "which make one step: use drop_last=True"
            )
        whole = samples - rest if drop_last else samples
        client.set_work(whole, self._unit, epochs, seed)
        self._batches = -(-whole // self._unit)
        self._orders: dict[int, np.ndarray] = {}
        self._epoch = -1
        self.sized = True
        """Whether it has a length."""
        self.restart: Callable[[], None] = lambda: None
        """Drops the gradients of a batch that a loop has left: all of it comes again."""
        self._ended = True  # the last pass was made to its end
        self.finished = False
        """True if the job has answered all, or stops."""
        self._current: _Pass | None = None

    def __len__(self) -> int:
        """Return mini-batches of an epoch of the whole job: one learner may get all of them.

        Raises TypeError if it is to have no length.
        """
        if not self.sized:
            raise TypeError("a sampler that was made with sized=False has no length")
        return self._batches * self._parts

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job counts the epochs. Frameworks call it."""

    def __iter__(self) -> Iterator[list[int]]:
        if self._client.unanswered:
            self.restart()
        self._current = _Pass(self)
        return self._current

    def passes(self) -> Iterator[int]:
        """Yield epochs until the whole job has answered all: one pass of the DataLoader for each.

        One more than the job has epochs where a learner died late.
        """
        while self._client.unanswered or self._client.take_batch() is not None:
            yield self._first_epoch()
        self.finished = True

    @property
    def is_under_way(self) -> bool:
        """Whether a pass is under way, which waits for the turn when it has a batch."""
        return self._current is not None and not self._current.over

    def samples_in_flight(self) -> int:
        """Return samples that the next gradient answers; 0 if none."""
        return len(self._rows(self._client.unanswered_ids[0])) if self._client.unanswered else 0

    def __reduce__(self) -> Any:
        return self._client.__reduce__()

    def _first_epoch(self) -> int:
        """Return the epoch of a pass that begins with the oldest unanswered batch.

        A pass that follows a whole one is of a later epoch: passes are no more than epochs.
        """
        return max(self._client.unanswered_ids[0] >> 32, self._epoch + self._ended)

    def _rows(self, batch: int) -> np.ndarray:
        epoch, index = batch >> 32, batch & 0xFFFFFFFF
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-2]:
                del self._orders[old]
            self._orders[epoch] = epoch_order(self._samples, self._seed, epoch)
        return self._orders[epoch][index * self._unit : (index + 1) * self._unit]


class _Pass(Iterator[list[int]]):
    """One pass: to the end of an epoch, with what is left of epochs before it."""

    def __init__(self, sampler: JobSampler) -> None:
        self._of = sampler
        self._again = deque(sampler._client.unanswered_ids)
        """Batches that were taken before and not answered."""
        self._lists: deque[list[int]] = deque()  # of the current batch
        self._begun = self.over = False

    def __next__(self) -> list[int]:
        of = self._of
        if of._current is not self:
            raise StopIteration
        if not self._lists:
            if of._client.wave != of._wave:
                raise UsageError(OTHER_WAVE)
            batch = None if self.over else self._take()
            if batch is None:
                raise StopIteration
            self._lists.extend(part.tolist() for part in np.array_split(of._rows(batch), of._parts))
        return self._lists.popleft()

    def _take(self) -> int | None:
        """Return the next batch of this pass; None if there is none, or none just now."""
        of = self._of
        client = of._client
        first = not self._begun
        if self._again:
            batch: int | None = self._again.popleft()
        elif client.unanswered:
            first = False
            if not client.raise_ahead():
                raise UsageError(TOO_MANY.format(most=layout.AHEAD))
            batch = client.try_batch()
            if batch is None:
                return None
        else:
            first = True
            batch = client.take_batch()
            of.finished = batch is None
        if batch is None:
            self.over = of._ended = True
            return None
        if not self._begun:
            of._epoch, of._ended = of._first_epoch(), False
            self._begun = True
        if batch >> 32 > of._epoch:  # it stays taken, for the next pass
            self.over = of._ended = True
            return None
        if first:
            try:
                of._begin()
            except JobStopped:
                of.finished = True
                self.over = of._ended = True
                return None
        return batch
