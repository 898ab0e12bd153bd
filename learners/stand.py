"""When a learner computes no gradients: its pauses, and stands, when the others compute none."""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterator

from gadei_ps import _native
from gadei_ps.errors import UsageError
from gadei_ps.learners.waits import Waits
from gadei_ps.memory.layout import FrameKind

NO_STAND = "the other learners did not stand still"


class Stands(Waits, ABC):
    """The part of a client that pauses, and that has others stand still."""

    _rings: tuple[int, int]
    _paused = 0
    """Blocks of pause() that are open."""
    _standing = False

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what takes long and computes no gradient, such as a validation.

        The job does not kill this learner meanwhile. Under BSP the others wait for it, so that the
        run stays repeatable; under the other models they go on without it. Publishes first what a
        device has on its way. May be nested. Raises UsageError.
        """
        self.check_process()
        self._land()
        self._paused += 1
        try:
            if self._paused == 1:
                _native.pause_learner(*self._rings, 1)
            yield
        finally:
            self._paused -= 1
            if not self._paused and not self._learner.left:
                _native.pause_learner(*self._rings, 0)

    @contextlib.contextmanager
    def stand(self, timeout_s: float | None = None) -> Iterator[None]:
        """All other learners stand still within the block; this one may read and assign weights.

        Each of them finishes its iteration in hand, which is applied before the block begins, and
        begins no other until it has ended. In the block nobody else changes the weights: what
        pull() copies is of one instant, and what assign() writes is there unchanged at the end.
        A learner that never waits for its turn is stopped at its next push instead; that gradient
        is applied after the block. Of several learners that ask, one has its block after the other.

        This learner pushes nothing meanwhile. If it dies or detaches, the others go on; if it hangs
        longer than the job's learner_timeout_s, it is killed: see keep_standing(). A server that
        dies meanwhile changes nothing. Raises PushTimeout if the others do not stand still in time,
        JobStopped, JobFailed, UsageError. A stop of the job waits for the end of the block; when
        its time is over, the block ends with JobStopped, and what is assigned then is refused.
        """
        self.check_process()
        if self._standing:
            raise UsageError("stand: this learner has the others stand still already")
        if self._learner.kind in (FrameKind.DENSE, FrameKind.ROWS):
            raise UsageError("stand: a gradient is begun and not pushed yet: push it first")
        self._land()
        self._standing = True
        try:
            _native.ask_to_stand(*self._rings, 1)
            self._wait(_native.wait_stand, self._rings, timeout_s, NO_STAND)
            yield
            if not (self._learner.left or _native.stands(*self._rings)):
                raise self._ended() if self.stopping else self._evicted()
        finally:
            self._standing = False
            if not self._learner.left:
                _native.ask_to_stand(*self._rings, 0)

    def keep_standing(self) -> None:
        """Within a block of stand() that takes long: tells the job that this learner lives.

        For any thread. Raises JobStopped or JobFailed if the job has ended or is to end.
        """
        self.check_process()
        _native.beat(self._rings[0])
        self.check_job()

    def _trains(self) -> None:
        """Raises UsageError where this learner must not push, for the others stand still."""
        if self._standing:
            raise UsageError("stand: the others stand still: push after the block has ended")
