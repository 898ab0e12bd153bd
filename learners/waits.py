"""How a client waits, whose turn it is in its process, and what moves gradients beside it."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

from gadei_ps import _native
from gadei_ps.errors import (
    Evicted,
    GadeiError,
    JobFailed,
    JobStopped,
    PushTimeout,
    UsageError,
)
from gadei_ps.job.control import Lasting, Status, ask
from gadei_ps.learners.attach import Told
from gadei_ps.memory.layout import Phase

SLICE_NS = 100_000_000  # how long a wait may sleep before it looks whether the job lives
ANSWER_S = 1.0  # for the reason of a stop
GONE_S = 10.0  # how long a job may be without server and watchdog before its learners give up
FORKED = "this learner belongs to the parent process; attach after the fork"
LEFT = "this learner has detached from its job; attach again"


def stays(learner: object) -> UsageError:
    """For what is to be pickled or copied: memory and threads of a learner do not come along."""
    kind = type(learner).__name__
    return UsageError(
        f"this {kind} stays in the process that made it, and is not copied: make another {kind} in "
        "the child process"
    )


def limit(timeout_s: float | None) -> float | None:
    """When a time limit that begins now is over."""
    return None if timeout_s is None else time.monotonic() + timeout_s


class OnlyOne:
    """A call of several parts, of one thread at a time: the others get a UsageError.

    An interrupt may come at any instant. Python looks for one after a call of C, and where a
    function of Python begins; so `__exit__` is C, which has left before an interrupt can come.
    """

    def __init__(self, learner: _native.Learner, kind: int) -> None:
        self._learner = learner
        self._kind = kind
        self._leave = functools.partial(learner.leave, kind)

    def __enter__(self) -> None:
        try:
            self._learner.enter(self._kind)
        except ValueError as error:
            raise UsageError(str(error)) from None
        except BaseException:  # an interrupt, once it has entered
            self._leave()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._leave


class Carrier(Protocol):
    """What brings gradients into slots while the client does other things: a device's link."""

    def flush(self) -> None:
        """Waits until what is on its way is published."""

    def check(self) -> None:
        """Raises if what is on its way will never arrive."""

    def close(self) -> None:
        """Flushes, and lets go of the client's memory."""


class Closes(Protocol):
    """What is made around a client, such as an Optimizer."""

    def close(self) -> None:
        """Detaches the client, after what has to be done before."""


class Waits(Told):
    """The part of a client that waits."""

    job: str
    _connection: Lasting
    _learner: _native.Learner
    _gone_since: float | None
    """Since when the job seems dead, over all waits: each may be short."""
    _carrier: Callable[[], Carrier | None]
    _user: Callable[[], Closes | None] = staticmethod(lambda: None)

    def carried_by(self, carrier: Carrier) -> None:
        """Registers an asynchronous publisher. claim() flushes it first; waits fail if it fails;
        detach() closes it."""
        self._carrier = weakref.ref(carrier)

    def not_carried_by(self, carrier: Carrier) -> None:
        """The carrier has ended."""
        if self._carrier() is carrier:
            self._carrier = lambda: None

    def _land(self) -> None:
        """A slot is claimed by its number, and what is on its way has the next one."""
        if carrier := self._carrier():
            carrier.flush()

    def used_by(self, user: Closes) -> None:
        """Registers what is made around this client, and whose close() is to detach it."""
        self._user = weakref.ref(user)

    def leave(self) -> None:
        """Detaches, by the close() of what is made around this client."""
        user = self._user()
        if user is not None:
            user.close()
        else:
            self.detach()

    def detach(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise stays(self)

    def check_process(self) -> None:
        """Raises UsageError in a child process of the one that attached."""
        if self._learner.forked:
            raise UsageError(FORKED)

    def _wait(
        self,
        wait: Callable[..., int],
        arguments: tuple[int, ...],
        timeout_s: float | None,
        what: str,
        until: float | None = None,
    ) -> int:
        """Repeats a native wait in slices, looking between them whether the job lives.

        timeout_s: as the caller gave it. until: when that is over; by default counted from now.
        """
        if until is None:
            until = limit(timeout_s)
        while True:
            rest = SLICE_NS
            if until is not None:
                rest = max(0, int(min(rest, (until - time.monotonic()) * 1e9)))
            try:
                result = wait(*arguments, rest)
            except ValueError as error:  # another thread's turn, or detached
                raise UsageError(str(error)) from None
            if result >= 0 or result == _native.PS_FINISHED:
                self._gone_since = None
                return result
            if self._learner.left:  # its own doing, whatever has become of its place since
                raise UsageError(LEFT)
            if result == _native.PS_STOPPED:
                raise self._ended()
            if result == _native.PS_EVICTED:
                raise self._evicted()
            if carrier := self._carrier():
                carrier.check()
            now = time.monotonic()
            self._look_whether_it_lives(now)
            if until is not None and now >= until:
                raise PushTimeout(f"{what} within {timeout_s} s")

    def check_job(self) -> None:
        """For what waits for something else, again and again: raises JobStopped where the job has
        ended or is to end, and JobFailed where its processes have been gone for long."""
        if self.stopping or int(self._control["phase"]) == Phase.FAILED:
            raise self._ended()
        self._look_whether_it_lives(time.monotonic())

    def _look_whether_it_lives(self, now: float) -> None:
        """Raises JobFailed where the job's processes have been gone for long."""
        if _native.job_lives(self._control_at):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since > GONE_S:
            raise JobFailed(f"the server and the watchdog of job {self.job!r} are gone")

    def _evicted(self) -> Evicted:
        return Evicted(f"job {self.job!r} has given this learner's place away")

    def _ended(self) -> GadeiError:
        if int(self._control["phase"]) == Phase.FAILED:
            return JobFailed(f"job {self.job!r} has failed: its parameter server died")
        return JobStopped(f"job {self.job!r} {self._why_stopped()}")

    def _why_stopped(self) -> str:
        """As the watchdog reports it, if it still answers."""
        reason = None
        with contextlib.suppress(GadeiError):
            reason = ask(str(self._connection.path), Status(), ANSWER_S).get("stop_reason")
        return f"has ended: {reason}" if reason else "has been stopped"
