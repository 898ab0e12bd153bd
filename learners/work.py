"""Mini-batches that the server hands out, so that each is answered once an epoch."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import GadeiError, JobStopped, PushTimeout, UsageError
from gadei_ps.job.control import FirstBatch, SetWork, StopJob
from gadei_ps.learners.waits import Waits
from gadei_ps.memory import layout, owned
from gadei_ps.memory.layout import Phase

DRAIN_S = 30.0
MOST_S = 3600.0
REASON = 400  # characters
STOPPED = "a learner has stopped it"
MOST = 2**31  # epochs, and batches of an epoch, are fewer
SLICE_S = 0.02  # between two looks whether the server has a batch


OTHERS = (
    "a batch of the server's has begun: take the rest of it first, by another loop over batches() "
    "or train_on()"
)


class Batch(NamedTuple):
    """A mini-batch that the server has handed to this learner."""

    epoch: int
    index: int  # type: ignore[assignment] # not the method of tuples
    indices: npt.NDArray[np.int64]
    """Samples of it, shape (at most batch_size,)."""

    @property
    def id(self) -> int:
        return layout.batch_id(self.epoch, self.index)


class Taken:
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

    def answered(self, batch: int | None) -> int:
        """The batch that a gradient answers: by default the oldest. Raises UsageError."""
        if batch is not None:
            whole("batch", batch)
            return batch
        return self._ids[0] if self._ids else layout.NO_BATCH

    def begin(self, batch: int | None) -> int:
        """The same for a gradient that is being published: no other one is to answer it."""
        if batch is not None:
            return self.answered(batch)
        try:
            return self._ids.popleft()
        except IndexError:
            return layout.NO_BATCH

    def put_back(self, batch: int | None, answers: int) -> None:
        """It has not been published. batch: as begin() got it; answers: as it returned it."""
        if batch is None and answers != layout.NO_BATCH:
            self._ids.appendleft(answers)

    def remove(self, batch: int) -> None:
        """It is answered, if it was taken at all."""
        if batch in self._ids:
            self._ids.remove(batch)


class Work(Waits, ABC):
    """The part of a client that takes batches."""

    _rings: tuple[int, int]
    _taken: Taken
    _taking: AbstractContextManager[None]
    _work: SetWork | None = None
    _last_push = False  # the job stops, and this learner has pushed since

    @abstractmethod
    def wait_turn(self, timeout_s: float | None = None) -> None:
        """Waits until the synchronization model lets this learner begin its next iteration."""

    def set_work(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> None:
        """Tells the server what to hand out; every learner may tell it, and all must say the same.

        Raises UsageError, ControlError.
        """
        self.check_process()
        for name, value in (("samples", samples), ("batch_size", batch_size), ("epochs", epochs)):
            whole(name, value, least=1)
        whole("seed", seed)
        batches = -(-samples // batch_size)
        if max(batches, epochs) >= MOST:
            raise UsageError(
                f"{batches} batches an epoch and {epochs} epochs: give fewer than {MOST} of each"
            )
        self._work = SetWork(batches=batches, epochs=epochs, seed=seed)
        self._connection.request(self._work)

    def stop_job(self, reason: str = "", timeout_s: float = DRAIN_S) -> None:
        """Ends the job for all its learners, such as when a validation no longer improves.

        Returns at once; this learner should end its loop, too. Loops over batches() end after the
        batch in hand. Learners with data of their own see `stopping`; their second push after that
        raises JobStopped. All that is pushed is applied, and the last checkpoint is written.
        reason: one line for the log and for the learners. timeout_s: how long learners may stay
        attached, at most 3600. Raises UsageError, ControlError.
        """
        self.check_process()
        if not isinstance(reason, str):
            raise UsageError(f"stop_job({reason!r}): give the reason as a text")
        if not 0 < timeout_s <= MOST_S:
            raise UsageError(f"stop_job(timeout_s={timeout_s}): give a number up to {MOST_S}")
        line = " ".join(reason.split()).encode(errors="backslashreplace").decode()[:REASON]
        self._connection.request(
            StopJob(drain=True, wait=False, timeout_s=timeout_s, reason=line or STOPPED)
        )

    def begins_as_another(self, digest: int) -> bool:
        """Whether another learner has begun with a mini-batch of this digest.

        False if no watchdog answers now.
        """
        with contextlib.suppress(GadeiError):
            reply = self._connection.request(FirstBatch(digest=digest), patience_s=0.0)
            return bool(reply["alike"])
        return False

    def _end_own_data(self) -> None:
        """Raises JobStopped at the second push of a learner without batches() after a stop.

        The first one is that of the iteration in which the learner can see that the job stops.
        """
        if self._work is None and self.stopping:
            if self._last_push:
                raise self._ended()
            self._last_push = True

    def more_in_hand(self) -> bool:
        """Has the job hand out one batch more ahead than this learner has, if that is wanted.

        False where it has as many as a learner may have.
        """
        wanted = self.unanswered + 1
        if wanted > layout.AHEAD:
            return False
        if wanted > int(self._control["ahead"]) and self._work is not None:
            self._connection.request(self._work.model_copy(update={"ahead": wanted}))
        return True

    def try_batch(self) -> int | None:
        """Id of a batch that comes before others are answered; None when there is none.

        Waits only while the server has one to hand out.
        """
        while True:
            try:
                return self.take_batch(SLICE_S)
            except PushTimeout:
                if not self._has_more():
                    return None

    def _has_more(self) -> bool:
        """The ledger's rule of the same name, of words that may change meanwhile."""
        control = self._control
        if int(control["work"]) != layout.Work.WORKING:
            return False
        if owned.is_on(control):
            return bool(int(control["requeued"])) or owned.left(control)
        following, epochs_done = int(control["next"]), int(control["epochs_done"])
        if int(control["requeued"]) or following & 0xFFFFFFFF != int(control["batches"]):
            return True
        return (following >> 32) + 1 < int(control["epochs"]) and epochs_done >= following >> 32

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Mini-batches as the server hands them out, until all epochs are done or the job stops.

        samples: rows of the data set, which every learner has whole. Each epoch is shuffled anew
        by (seed, epoch), so that all learners agree. Every batch is to be answered by one push.
        Also waits for the turn that the synchronization model gives. Under WSP a batch is a wave:
        `wave` mini-batches of batch_size, whose gradients are added up and pushed as one. After a
        loop that was left early, the next one begins with the batches that are not answered.
        """
        left = self._taken.ids
        for batch in self._taken_batches(samples, batch_size * self.wave, epochs, seed, left=left):
            try:
                self.wait_turn()
            except JobStopped:
                return
            yield batch

    def waves(
        self,
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        *,
        before_wait: Callable[[], object] | None = None,
    ) -> Iterator[list[Batch]]:
        """The same a wave at a time: its mini-batches of batch_size, at most `wave` of them.

        Waits for no turn: wait_mini_batch() does, for each of them. before_wait: is called when no
        batch is there; it must answer all that are taken, for which others may wait.
        """
        size = batch_size * self.wave
        for whole in self._taken_batches(samples, size, epochs, seed, before_wait):
            cuts = range(batch_size, len(whole.indices), batch_size)
            yield [whole._replace(indices=part) for part in np.split(whole.indices, cuts)]

    def _taken_batches(
        self,
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int,
        before_wait: Callable[[], object] | None = None,
        left: Sequence[int] = (),
    ) -> Iterator[Batch]:
        """left: ids of batches that this learner has already, which come first."""
        self.set_work(samples, batch_size, epochs, seed)
        order = np.empty(0, np.int64)
        epoch = -1
        for taken in chain(left, iter(lambda: self._take(before_wait), None)):
            index = taken & 0xFFFFFFFF
            if taken >> 32 != epoch:
                epoch = taken >> 32
                order = epoch_order(samples, seed, epoch)
            yield Batch(epoch, index, order[index * batch_size : (index + 1) * batch_size])

    def _take(self, before_wait: Callable[[], object] | None) -> int | None:
        if before_wait is None:
            return self.take_batch()
        if len(self._taken) < int(self._control["ahead"]):
            try:
                return self.take_batch(0.0)
            except PushTimeout:
                pass
        before_wait()
        return self.take_batch()

    def take_batch(self, timeout_s: float | None = None) -> int | None:
        """Id of the next batch handed to this learner; None when there will be no more."""
        self.check_process()
        if len(self._taken) >= int(self._control["ahead"]):
            raise UsageError(
                f"batches that wait for their gradients: {len(self._taken)}; "
                "push once for each batch"
            )
        try:
            what = "no batch was handed out"
            with self._taking:
                taken = self._wait(_native.take_work, self._rings, timeout_s, what)
        except JobStopped:
            return None
        if taken == _native.PS_FINISHED:
            if int(self._control["phase"]) == Phase.FAILED:
                raise self._ended()
            return None
        self._taken.add(taken)
        return taken

    @property
    def unanswered(self) -> int:
        """Batches taken that no push has answered yet."""
        return len(self._taken)

    @property
    def in_hand(self) -> tuple[int, ...]:
        """Their ids, in the order in which pushes answer them."""
        return self._taken.ids


def whole(name: str, value: int, least: int = 0, most: int = 2**63 - 1) -> None:
    """Raises UsageError unless it is a whole number from `least` to `most`."""
    try:
        if least <= operator.index(value) <= most:
            return
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}: use a whole number from {least} to {most}")


def epoch_order(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch's samples, shape (samples,); the same in every learner."""
    return np.random.default_rng([seed, epoch]).permutation(samples)
