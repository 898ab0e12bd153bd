"""Mini-batches that the server hands out, so that each is answered once an epoch."""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import UsageError
from gadei_ps.memory import layout


class Batch(NamedTuple):
    """A mini-batch that the server has handed to this learner."""

    epoch: int
    index: int  # type: ignore[assignment] # not the method of tuples
    indices: npt.NDArray[np.int64]
    """Samples of it, shape (at most batch_size,)."""

    @property
    def id(self) -> int:
        return layout.batch_id(self.epoch, self.index)


class Unanswered:
    """Batches that are taken and that no gradient has answered yet, the oldest first."""

    def __init__(self) -> None:
        self._ids: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def add(self, batch: int) -> None:
        self._ids.append(batch)

    def next(self, batch: int | None) -> int:
        """Return the batch that a gradient answers: by default the oldest. Raises UsageError."""
        if batch is not None:
            check_integer("batch", batch)
            return batch
        return self._ids[0] if self._ids else layout.NO_BATCH

    def begin(self, batch: int | None) -> int:
        """Return the same for a gradient that is being published, which no other one answers."""
        answers = self.next(batch)
        if batch is None and self._ids:
            self._ids.popleft()
        return answers

    def put_back(self, batch: int | None, answers: int) -> None:
        """Take the gradient back, which was not published.

        batch: the argument of begin(). answers: its result.
        """
        if batch is None and answers != layout.NO_BATCH:
            self._ids.appendleft(answers)

    def remove(self, batch: int) -> None:
        """Record that a batch is answered, if it was taken at all."""
        if batch in self._ids:
            self._ids.remove(batch)


def check_integer(name: str, value: int, least: int = 0, most: int = 2**63 - 1) -> None:
    """Raise UsageError unless the value is an integer from `least` to `most`."""
    try:
        if least <= operator.index(value) <= most:
            return
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}: use a whole number from {least} to {most}")


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of an epoch's samples, shape (samples,); the same in every learner."""
    return np.random.default_rng([seed, epoch]).permutation(samples)
