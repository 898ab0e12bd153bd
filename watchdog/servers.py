"""The two parameter servers: started, watched, killed when they hang, started again.

A failover needs no help from here: the kernel hands the leases over. The watchdog starts the next
server that stands by. If no server is alive, it makes new leases first.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import in_words
from gadei_ps.machine import ownership, process
from gadei_ps.memory import build, layout, lifecycle, reserve
from gadei_ps.memory.layout import CONTROL, SHARD, ServerState
from gadei_ps.memory.lifecycle import Stage
from gadei_ps.watchdog import restart
from gadei_ps.watchdog.durations import SERVER_END_S, SERVER_KILL_S, SERVER_SILENT_S
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.liveness import Watch, progress
from gadei_ps.watchdog.restart import GIVE_UP, Exit, Policy
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.server_starter import FILES_INTERVAL_S, Server, ServerStarter

NUMBERS = (0, 1)
STANDBY_LIMIT_S = 30.0  # it maps and fills page tables of all rings, which may be large
MEASURED_S = 1.0  # the kernel looks at all pages, and the status may be asked for often
RESTART_EXPECTED_S = 1.0  # after a death: the next server is started within milliseconds
MOST_FAILOVERS = 100  # that wait for the history, which takes them once a second
REFUSED_RETRY_S = 600.0  # until a refused build with the same files is tried again


@dataclass(eq=False)
class ServerProcess:
    """A server process: a program, a fork of the fork server, or an adopted one."""

    number: int
    pid: int
    pidfd: int
    made: Server | None = None  # unless adopted
    version: int = 0  # of the job when the server started
    killed: str = ""  # why we killed it
    killed_at: float = math.inf
    active: bool = False  # was seen to be the active one
    beat: int = 0  # that its line showed when its start began
    before_s: float = 0.0  # processor time until then
    loaded: bool = False  # its main loop turns
    loading_s: float = 0.0  # processor time from its start's begin until then
    ready: bool = False  # its start was complete at the last look

    def kill(self, why: str) -> None:
        self.killed, self.killed_at = why, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@dataclass(frozen=True)
class Failover:
    """Change of the active server after a death.

    ms: from the notice of the death until the next server was seen to be active.
    """

    dead_pid: int
    pid: int
    ms: float


@dataclass(eq=False)
class Servers:
    """Both servers of a job.

    failed: called if the job fails.
    """

    memory: JobMemory
    selector: selectors.BaseSelector
    log: Any
    failed: Callable[[str], None]
    options: Options = field(default_factory=Options)
    policy: Policy = field(default_factory=Policy, init=False)
    running: dict[int, ServerProcess] = field(default_factory=dict, init=False)
    _exits: tuple[Exit, ...] = ()
    _last_exit: float = float("-inf")
    _reported_alone: bool = False
    _refused: frozenset[tuple[str, int, int]] | None = None  # files of a build that cannot serve us
    _refused_at: float = 0.0
    _looked_at: float = 0.0
    _private_bytes: tuple[int, float, int] = (0, 0.0, 0)
    """Pid of the measured server, until when the measurement is used, and its result."""
    _reported_refused: bool = False
    stuck: str = ""
    """Name of a killed server that does not end, and the reason; or empty."""
    blocked: str = ""
    """The same if it is the active one, so that nothing can be applied any more."""
    _failovers: list[Failover] = field(default_factory=list, init=False)
    """Those that the history has not taken yet."""
    _inactive: tuple[int, float] | None = None
    """Pid of an active server that has died, and the time; until the next one is active."""
    _hung: Watch = field(init=False)
    _idle: Watch = field(init=False)
    _stuck: Watch = field(init=False)
    _starter: ServerStarter = field(init=False)

    def __post_init__(self) -> None:
        self._starter = ServerStarter(
            self.selector, self.log, self._started, self._not_started, self._fork_server_died
        )
        if self.options.fork_server is not None:
            self._starter.take(self.options.fork_server)
        self._hung, self._idle, self._stuck = Watch(0.0), Watch(0.0), Watch(SERVER_SILENT_S)

    @property
    def active_pid(self) -> int:
        """Pid of the server that holds the managers' lease, or held it last."""
        return int(self.memory.words["lease_pid"])

    @property
    def standby_pid(self) -> int:
        """Pid of the server that can become active; 0 if there is none just now."""
        for one in self.running.values():
            if one.active:
                continue  # even while it is dying and the other one is active
            is_standby = self._stage(one) is Stage.STANDBY
            if is_standby and process.alive(one.pid, int(self._line(one.number)["start"])):
                return one.pid
        return 0

    def _line(self, number: int) -> np.void:
        line: np.void = self.memory.words["server"][number]
        return line

    @property
    def serving(self) -> bool:
        """Whether the active server is alive and serves, or is about to."""
        return self._is_one_in(Stage.RECOVERING, Stage.SERVING)

    def _stage(self, one: ServerProcess) -> Stage:
        return lifecycle.stage(self.memory.words, one.number)

    def _is_one_in(self, *stages: Stage) -> bool:
        return any(self._stage(one) in stages for one in self.running.values())

    def loading_s(self) -> list[float]:
        """Processor time that each server has used to load or compile the kernels, s."""
        return [self._starter.busy_s, *(self._loading_s(one) for one in self.running.values())]

    def _loading_s(self, one: ServerProcess) -> float:
        """Return the processor time of loading (s), with that of its compilers.

        It stops growing in the main loop: a server that turns without getting ready makes no
        progress.
        """
        if not one.loaded:
            one.loading_s = process.tree_cpu_s(one.pid) - one.before_s
            one.loaded = int(self._line(one.number)["beat"]) != one.beat
        return one.loading_s

    def _follow_start(self, one: ServerProcess) -> None:
        """Note if the server starts again: it compiles code for the optimizer of a new model."""
        line = self._line(one.number)
        if one.ready and int(line["state"]) == ServerState.STARTING:
            one.beat, one.before_s = int(line["beat"]), process.tree_cpu_s(one.pid)
            one.loaded = False
        one.ready = int(line["state"]) == ServerState.READY

    # -- starting -------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Adopt the servers of a dead watchdog."""
        for number in NUMBERS:
            line = self._line(number)
            pid = int(line["pid"])
            pidfd = ownership.open_process(pid, int(line["start"]))
            if pidfd is None:
                self._clear(number)
                continue
            self._watch(ServerProcess(number, pid, pidfd))
            self.log.info("server adopted", pid=pid)

    def tick(self, now: float) -> None:
        """Start servers that are missing and due, kill those that hang. Called every tick."""
        self._prepare_starter(now)
        self._look_for_failover()
        free = [number for number in NUMBERS if number not in self.running]
        wait = restart.delay(self._exits, now, self.policy)
        if wait == GIVE_UP and self.serving:
            wait = self.policy.longest_s
            if not self._reported_alone:
                self._reported_alone = True
                self.log.error("no second server gets ready; continuing with one")
        elif wait == GIVE_UP:
            self.failed(
                f"servers died {self.policy.limit} times in a row without applying a gradient; "
                "see their messages above"
                + (f"; {limit}" if (limit := reserve.address_space()) else "")
            )
            return
        if free and not self._starter.coming and now >= self._last_exit + wait:
            self._start_missing(free[0], now)
        self._kill_hung(now)
        self._look_for_stuck(now)

    def _start_missing(self, number: int, now: float) -> None:
        if self._is_refused(now):
            if not self.running and not self._reported_refused:
                self._reported_refused = True
                self.log.error(
                    "no server is left, and the installed gadei-ps is another build than the "
                    "job's: install that one again, or stop the job"
                )
            return
        if not self.running:
            try:
                if self._unknown_holder():
                    return
            except OSError as error:
                self._not_started(error)
                return
            self._make_leases()
        # One after the other: two would both compile, and only one can stand by. The active server
        # must have all leases: if it never gets them, no server may be left, so that new ones are
        # made.
        elif not (self.memory.config.standby and self._is_one_in(Stage.SERVING)):
            return
        if not self.memory.names_lost():  # else it could not map them
            self._starter.ask(number, self._arguments(number))
        elif not self.running:
            self.failed("the last server died, and segments have lost their names (RemoveIPC?)")

    def _not_started(self, error: OSError) -> None:
        """No memory, process or descriptor is available."""
        now = time.monotonic()
        reason = reserve.own_limit(error, 0) or in_words(error)
        self.log.error("cannot start a server", reason=reason)
        self._last_exit = now
        self._exits = restart.remembered((*self._exits, Exit(now, useful=False)), self.policy)

    def _is_refused(self, now: float) -> bool:
        """Return whether the files on the disk are still those of another build than the job's.

        Its servers end at once, and the job's memory waits for the right ones.
        """
        if self._refused is None:
            return False
        if now < self._looked_at + FILES_INTERVAL_S:
            return True
        self._looked_at = now
        if now < self._refused_at + REFUSED_RETRY_S and build.files() == self._refused:
            return True
        self._refused = None
        self._reported_refused = False
        return False

    @property
    def why_alone(self) -> str:
        """Reason why no server can stand by; empty if none is known."""
        if self._refused is None:
            return ""
        return "the installed gadei-ps is another build than the job's"

    def _unknown_holder(self) -> bool:
        """Return whether an unknown server holds leases, and kill it. Raises OSError."""
        pidfd = ownership.open_process(self.active_pid, int(self.memory.words["lease_start"]))
        if pidfd is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        return True

    def _make_leases(self) -> None:
        """Make new leases; no server is alive."""
        at = self.memory.control.address
        _native.store32(at + layout.offset(CONTROL, "lease_state"), 0)
        for word in ("sleepers", "lease_shards"):
            _native.store(at + layout.offset(CONTROL, word), 0)
        for field_ in ("lease", "standby_lease"):
            _native.lease_make(at + layout.offset(CONTROL, field_))
        for index in range(layout.MAX_SHARDS):
            shard = at + layout.offset(CONTROL, "shard") + index * SHARD.itemsize
            _native.lease_make(shard + layout.offset(SHARD, "lease"))

    @property
    def expects(self) -> bool:
        """Whether a server is about to be started or to get ready."""
        wanted = 1 + self.memory.config.standby
        some = len(self.running) < wanted or self._starter.coming
        return some and time.monotonic() < self._last_exit + RESTART_EXPECTED_S

    def _arguments(self, number: int) -> list[str]:
        """Return the arguments of gadei_ps.server.manager."""
        config = self.memory.config
        given = [config.name, str(number), str(config.orphan_s), *self.options.flags]
        given += ["--learners", str(self.memory.learners)]
        given += ["--patience", str(config.learner_timeout_s)]
        if config.cores:
            given += ["--cores", config.cores]
        return [*given, "--core-dumps"] if config.core_dumps else given

    def _started(self, made: Server) -> None:
        """A server has begun. It waits until it is named here."""
        line = self._line(made.number)
        line["start"] = made.start
        line["state"] = ServerState.STARTING
        line["confirmed"] = 0
        line["pid"] = made.pid
        self.memory.words["server_starts"] += 1
        version = int(self.memory.words["version"])
        self._watch(ServerProcess(made.number, made.pid, made.pidfd, made, version))
        _native.bell(self.memory.control.word(CONTROL, "manager_bell"))

    def _prepare_starter(self, now: float) -> None:
        """Prepare the fork server, with the code that the next server needs."""
        ready = sum(self.memory.words["server"]["state"] == ServerState.READY)
        self._starter.prepare(int(self.memory.words["optimizer"]), int(ready))
        self._starter.tick(now)
        if self._starter.pid != int(self.memory.words["fork_server_pid"]):
            # At no instant the words of two stand together.
            self.memory.words["fork_server_pid"] = 0
            with contextlib.suppress(OSError):  # no descriptor is free
                self.memory.words["fork_server_start"] = process.start_ticks(self._starter.pid)
                self.memory.words["fork_server_pid"] = self._starter.pid

    def _fork_server_died(self) -> None:
        self.memory.words["fork_server_deaths"] += 1

    def _watch(self, one: ServerProcess) -> None:
        one.beat = int(self._line(one.number)["beat"])
        self.running[one.number] = one
        self.selector.register(one.pidfd, selectors.EVENT_READ, lambda _: self._died(one))

    # -- dying ----------------------------------------------------------------------------------

    def _look_for_failover(self) -> None:
        if self._inactive is None or not self._is_one_in(Stage.SERVING):
            return
        (dead_pid, since), self._inactive = self._inactive, None
        ms = round((time.monotonic() - since) * 1e3, 1)
        one = Failover(dead_pid, self.active_pid, ms)
        self._failovers = [*self._failovers[-MOST_FAILOVERS:], one]

    def take_failovers(self) -> list[Failover]:
        """Return the failovers since the last call."""
        found, self._failovers = self._failovers, []
        return found

    def _died(self, one: ServerProcess) -> None:
        if one.active or one.pid == self.active_pid:
            self._inactive = self._inactive or (one.pid, time.monotonic())
        self.selector.unregister(one.pidfd)
        os.close(one.pidfd)
        del self.running[one.number]
        code = None if one.made is None else self._starter.code_of(one.made)
        if one.made is not None and code == build.REFUSED:  # it has logged why
            self._refused = one.made.files
            self._starter.renew()
            self._refused_at = self._looked_at = self._last_exit = time.monotonic()
            self._clear(one.number)
            return
        control = self.memory.words
        control["server_deaths"] += 1
        ready = int(self._line(one.number)["state"]) == ServerState.READY
        advanced = int(control["version"]) != one.version or not self._waiting()
        now = time.monotonic()
        self._exits = restart.remembered((*self._exits, Exit(now, ready and advanced)), self.policy)
        self._last_exit = now
        self._clear(one.number)
        self.log.warning(
            "a server died",
            pid=one.pid,
            how=one.killed or _how(code),
            role="active" if one.active else "standby",
        )

    def _clear(self, number: int) -> None:
        line = self._line(number)
        line["pid"] = 0
        line["state"] = ServerState.NONE

    def _waiting(self) -> bool:
        """Return whether a published gradient is not applied yet."""
        if self.memory.state is None:
            return False
        applied = self.memory.state_words["applied"][: int(self.memory.words["shards"])]
        slots = int(self.memory.words["slots"])
        for row, ring in self.memory.rings.items():
            behind = int(ring.view(layout.RING)["head"]) - int(applied[:, row].min())
            if 0 < behind <= slots:  # else the learner has written over its head
                return True
        return False

    def _kill_hung(self, now: float) -> None:
        """Kill servers whose threads hang; even idle threads move ten times a second."""
        hang_s = self.memory.config.hang_s
        self._hung.limit_s, self._idle.limit_s = hang_s, max(STANDBY_LIMIT_S, hang_s)
        signs: dict[Hashable, Hashable] = {}
        idle: dict[Hashable, Hashable] = {}
        starting: list[ServerProcess] = []
        for one in self.running.values():
            self._follow_start(one)
            line, stage = self._line(one.number), self._stage(one)
            # True until its death, which may become known when the next one is active already.
            one.active = one.active or one.pid == self.active_pid
            # One that became active in the middle of its start serves at once, or hangs.
            succeeds = one.active and bool(int(self.memory.words["lease_shards"]))
            if stage not in lifecycle.READY and stage is not Stage.REPLACED and not succeeds:
                starting.append(one)
            elif not one.active:
                if self.active_pid not in {other.pid for other in self.running.values()}:
                    # The kernel should have given it the leases at once. It is killed for new ones.
                    signs[one.pid, "failover"] = 0
                idle[one.pid] = int(line["beat"])
            else:
                signs[one.pid, "manager"] = int(line["beat"])
                if self.memory.state is not None:
                    shards = int(self.memory.words["shards"])
                    beats = self.memory.words["shard"]["heartbeat"][:shards].tolist()
                    cursors = self.memory.state_words["record"]["cursor"][:shards].tolist()
                    for index, sign in enumerate(zip(beats, cursors, strict=True)):
                        signs[one.pid, index] = sign
        hung = {key[0] for key in self._hung.check(now, signs)}  # type: ignore[index]
        hung |= set(self._idle.check(now, idle))
        # Of both: a standby waits until the active server has compiled.
        steps = progress(sum(map(self._loading_s, starting)), SERVER_SILENT_S)
        stuck = set(self._stuck.check(now, {one.pid: steps for one in starting}))
        for one in self.running.values():
            if one.pid in hung and not one.killed:
                one.kill(f"hung for {hang_s} s")
            elif one.pid in stuck and not one.killed:
                one.kill(f"no progress of its start for {SERVER_SILENT_S:.0f} s")

    def _look_for_stuck(self, now: float) -> None:
        """A killed server that does not end keeps its leases, so no other one can replace it."""
        before, self.stuck, self.blocked = self.stuck, "", ""
        for one in self.running.values():
            if now - one.killed_at > SERVER_KILL_S:
                role = "active" if one.active else "standby"
                self.stuck = (
                    f"the {role} server, process {one.pid}, {one.killed}, and SIGKILL does not end "
                    "it: its control group is frozen (thaw it), or the kernel blocks it"
                )
                self.blocked = self.stuck if one.active else self.blocked
        if self.stuck and not before:
            self.log.error("a server cannot be replaced", reason=self.stuck)

    # -- ending ---------------------------------------------------------------------------------

    def close(self, *, leave: bool = False) -> None:
        """End both servers and the fork server: the standby first, so that it stays a standby.

        leave: servers continue without this watchdog; only the fork server ends.
        """
        ending = [] if leave else list(self.running.values())
        for one in sorted(ending, key=lambda one: one.pid == self.active_pid):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
                signal.pidfd_send_signal(one.pidfd, signal.SIGCONT)
            ended = process.gone(one.pidfd, 0.0 if self.stuck and one.killed else SERVER_END_S)
            if not ended:
                one.kill("did not end")
                ended = process.gone(one.pidfd, SERVER_KILL_S if self.stuck else SERVER_END_S)
            self.selector.unregister(one.pidfd)
            os.close(one.pidfd)
            if ended and one.made is not None and one.made.child is not None:
                one.made.child.wait()
        self.running.clear()
        self._starter.close()

    def private_bytes(self) -> int:
        """Return the private memory of the active server (bytes), at most MEASURED_S old."""
        pid, now = self.active_pid, time.monotonic()
        measured, until, private = self._private_bytes
        if pid != measured or now > until:
            private = process.private_bytes(pid)
            self._private_bytes = pid, now + MEASURED_S, private
        return private


def _how(code: int | None) -> str:
    if code is None:
        return "not our child: unknown how"
    if code < 0:
        return f"by {process.signal_name(-code)}"
    return f"with exit code {code}"
