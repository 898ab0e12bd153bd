"""One `group run` at a time looks after a run: it has an actor of Ray, which ends with it.

Through that actor, other commands tell it what they have done to machines of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gadei_ps.cluster.actor import NAMESPACE
from gadei_ps.errors import ClusterError
from gadei_ps.machine import process

FREE_S = 3.0
"""For an actor to end whose process has ended."""
LAST_S = 100.0
"""For a command that was killed to end what it has begun."""
ANSWER_S = 5.0
POLL_S = 0.1

Told = dict[str, Any]


class Process(NamedTuple):
    """A process of one host: a pid may be reused, and means nothing in another pid namespace."""

    pid: int
    start: int
    namespace: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The one that has this pid here, now."""
        return cls(pid, process.start_ticks(pid), process.namespace())

    @property
    def is_known(self) -> bool:
        """Whether this process can tell anything of it."""
        return self.namespace == process.namespace()

    @property
    def lives(self) -> bool:
        """Whether it may run."""
        return not self.is_known or process.alive(self.pid, self.start)


class Holder:
    """Says which command looks after a run. It is on the host of that command."""

    def __init__(self, who: str, command: Process, driver: Process) -> None:
        """who: the command, in words. driver: does what the command has ordered."""
        self._who, self._command, self._driver = who, command, driver
        self._has_begun = False
        self._missed: tuple[int, ...] = ()
        self._ended: dict[int, Told] = {}

    def state(self) -> tuple[str, bool]:
        """The command in words, and whether it lives."""
        return self._who, self._command.lives

    def let_go(self) -> None:
        """If the command was killed, and its driver has nothing to take back, kills that as well.

        It may wait for a machine that does not answer; the next command is not to wait for that.
        """
        is_left = self._driver.is_known and self._driver.lives
        if self._has_begun and is_left and not self._command.lives:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._driver.pid, signal.SIGKILL)

    def note(self, has_begun: bool, missed: tuple[int, ...]) -> None:
        """What Lease tells."""
        self._has_begun, self._missed = has_begun, missed

    def missed(self) -> tuple[int, ...]:
        """See Lease.miss()."""
        return self._missed

    def tell(self, ended: Mapping[int, Told]) -> None:
        """How another command has ended machines: summaries, by the machines' numbers."""
        self._ended |= ended

    def told(self) -> dict[int, Told]:
        """What tell() was given since the last time."""
        told, self._ended = self._ended, {}
        return told


class Lease:
    """What the command that looks after a run keeps meanwhile."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._has_begun = False

    def begun(self) -> None:
        """From here on, the machines go on without the command, and nothing is taken back."""
        self._has_begun = True
        self.miss(())

    def miss(self, machines: Collection[int]) -> None:
        """The command waits for these, which Ray does not know.

        To be told again and again: where its actor dies, the next one knows nothing.
        """
        self._holder.note.remote(self._has_begun, tuple(sorted(machines)))

    def told(self) -> dict[int, Told]:
        """How other commands have ended machines, since the last time."""
        told: dict[int, Told] = _asked(self._holder.told.remote()) or {}
        return told


def take(run: str, say: Callable[[str], None]) -> Lease:
    """What this process holds while it looks after the run; to be kept.

    A command that was killed is waited for. say: is given a line on that. Raises ClusterError if
    another process looks after the run.
    """
    context = ray.get_runtime_context()
    name, who = _name(run), f"{ray.util.get_node_ip_address()}, process {os.getppid()}"
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_restarts": -1,
        # Where this process is: it ends there with its node.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
    }
    ours = who, Process.of(os.getppid()), Process.of(os.getpid())
    since, killed, is_told = time.monotonic(), "", False
    while True:
        with contextlib.suppress(ValueError):  # the name is taken
            return Lease(ray.remote(Holder).options(**options).remote(*ours))
        if (state := _asked_of(run, "state")) is not None:
            killed, lives = state
            if lives:
                raise ClusterError(_taken(run, killed))
            _asked_of(run, "let_go")
        passed_s = time.monotonic() - since
        if killed and passed_s > FREE_S and not is_told:
            say(
                f"waiting for the group run at {killed}, which was killed, to end what it has begun"
            )
            is_told = True
        if not killed and passed_s > FREE_S:
            raise ClusterError(_taken(run, "a place that does not answer"))
        if passed_s > LAST_S:
            raise ClusterError(
                f"run {run}: the group run at {killed} was killed, and has not ended what it had "
                f"begun in {LAST_S:g} s: run the same command again"
            )
        time.sleep(POLL_S)


def _taken(run: str, where: str) -> str:
    return (
        f"run {run} has its group run already, at {where}: end that command first, its machines go "
        "on"
    )


def tell(run: str, ended: Mapping[int, Told]) -> None:
    """Tells the command that looks after the run, if one does, how machines of it were ended.

    ended: summaries of machines, by their numbers. To be told before Ray forgets them.
    """
    _asked_of(run, "tell", ended)


def missed(run: str) -> tuple[int, ...]:
    """Machines that the command waits for though Ray does not know them."""
    found: tuple[int, ...] = _asked_of(run, "missed") or ()
    return found


def _name(run: str) -> str:
    return f"{run}:run"


def _asked_of(run: str, what: str, *how: Any) -> Any:
    """An answer of the run's actor; None if there is none, or if it does not answer."""
    try:
        holder = ray.get_actor(_name(run), NAMESPACE)
    except ValueError:
        return None
    return _asked(getattr(holder, what).remote(*how))


def _asked(reference: Any) -> Any:
    with contextlib.suppress(RayError, GetTimeoutError):
        return ray.get(reference, timeout=ANSWER_S)
    return None
