"""`gadei-ps chaos`: kills and stops processes of a job at random, and looks what becomes of it.

With a job of its own it also counts, in the weights, how often each published gradient has been
applied (tally.py). Its learners are started again when they die, and so is its watchdog; servers
are the watchdog's business. Of somebody else's job it only tells times and counters.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gadei_ps import config, faults, layout, observer, process
from gadei_ps.daemon import Daemon
from gadei_ps.errors import ControlError, GadeiError, JobFailed, SegmentError, UsageError
from gadei_ps.faults import Processes, Role, Target
from gadei_ps.launch import JOB_VARIABLE
from gadei_ps.layout import Phase
from gadei_ps.learners.chaos_learner import EXACT, LEDGER
from gadei_ps.observer import Observer
from gadei_ps.tally import Count, Ring, Tally
from gadei_ps.watchdog.restart import Policy

POLL_S = 0.002
REPORT_S = 5.0
DRAIN_S = 60.0
LEAST_STOP_S, MOST_STOP_S = 0.1, 2.5
HANG_S = 1.0  # some stops are longer, so that the watchdog has hung servers to kill
LIVES_S = 0.5  # a watchdog of ours gets so long before it is hit again
MAX_FAILURES = 20  # of our learners in a row, by themselves
ADAPTIVE_LR = 1e-3
NUMBERS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass(frozen=True)
class Options:
    """What is asked for. learners, optimizer, weight_bytes and shards: of a job of our own.

    impatient: the active server is also killed while none stands by. say: hears a line now and
    then.
    """

    seconds: float = 60.0
    targets: Sequence[Role] = tuple(Role)
    every_s: float = 0.5
    signals: Sequence[signal.Signals] = (signal.SIGKILL,)
    seed: int | None = None
    learners: int = 2
    optimizer: str = "sgd"
    weight_bytes: int = 2_000_000
    shards: int = 0
    impatient: bool = False
    verbose: bool = False
    say: Callable[[str], None] = lambda line: None


def run(job: str | None, options: Options) -> dict[str, Any]:
    """The whole of it; what `gadei-ps chaos --json` prints. Raises GadeiError."""
    odd = [one.name for one in options.signals if one not in NUMBERS]
    if odd:
        raise UsageError(f"--signals: {odd[0]} is not KILL or STOP; gadei-ps kill sends any")
    if job is not None:
        return _Chaos(_Given(job), options).run()
    wanted = _config(options)
    policy = Policy(limit=sys.maxsize)  # it is killed on purpose
    with (
        Daemon(wanted, verbose=options.verbose, policy=policy) as daemon,
        _Own(daemon, options) as own,
    ):
        return _Chaos(own, options).run()


def _config(options: Options) -> config.JobConfig:
    """Of a job of our own."""
    values = max(1, options.weight_bytes // 4 // layout.CHUNK) * layout.CHUNK
    # A rate of 1 keeps what SGD makes of whole numbers exact.
    rate = 1.0 if options.optimizer == EXACT else ADAPTIVE_LR
    wanted = config.from_mapping(
        {
            "name": f"chaos-{os.getpid()}",
            "optimizer": {"kind": options.optimizer, "lr": rate},
            "shards": options.shards,
            "hang_s": HANG_S,
            "tensors": [
                {"name": "w", "shape": [values]},
                {"name": "ledger", "shape": [LEDGER], "role": "buffer"},
            ],
        },
        "chaos",
    )
    shards = wanted.resolved_shards(values + LEDGER)
    if layout.shard_range(values + LEDGER, shards, shards - 1)[0] >= values:
        raise UsageError(
            f"--size: {options.weight_bytes} bytes are too few for {shards} shards; "
            f"use at least {LEDGER * 4 * shards}"
        )
    return wanted


# -- whose job it is ------------------------------------------------------------------------------


class _Given:
    """Somebody else's job: nothing in it is started again by us."""

    def __init__(self, job: str) -> None:
        self.processes = Processes(job)
        if self.processes.server() is None and self.processes.watchdog() is None:
            raise ControlError(f"job {self.processes.job!r} is dead: it has no server, no watchdog")

    def look_after(self) -> None:
        if int(self.processes.control["phase"]) >= Phase.STOPPED:
            raise JobFailed(f"job {self.processes.job!r} has ended")

    def learners(self) -> list[Target]:
        return self.processes.learners()

    def count(self) -> Count | None:
        return None


@dataclass(eq=False)
class _Learner:
    """A learner of ours: its process, and its ring once it is attached."""

    child: subprocess.Popen[bytes]
    said: bytes = b""
    target: Target | None = None
    ring: Ring | None = None


class _Own:
    """A job of our own, with learners that can be counted."""

    def __init__(self, daemon: Daemon, options: Options) -> None:
        self._daemon = daemon
        self._options = options
        self.processes = Processes(daemon.config.name)
        self._tally = Tally(daemon.config.name, options.optimizer == EXACT)
        self._learners: list[_Learner] = []
        self._failures = 0

    def __enter__(self) -> _Own:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._learners:
            one.child.kill()
            one.child.wait()

    def look_after(self) -> None:
        """Starts again what is dead; lets learners push whose rings are mapped."""
        self._daemon.check()
        while len(self._learners) < self._options.learners:
            self._learners.append(self._start())
        for one in list(self._learners):
            if one.child.poll() is not None:
                self._bury(one)
            elif one.ring is None:
                self._admit(one)

    def learners(self) -> list[Target]:
        return [one.target for one in self._learners if one.target is not None]

    def _start(self) -> _Learner:
        child = process.spawn(
            [sys.executable, "-m", "gadei_ps.learners.chaos_learner", self._options.optimizer],
            env=os.environ | {JOB_VARIABLE: str(self._daemon.socket), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._options.verbose else subprocess.DEVNULL,
        )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        return _Learner(child)

    def _admit(self, one: _Learner) -> None:
        assert one.child.stdout is not None
        assert one.child.stdin is not None
        one.said += one.child.stdout.read() or b""
        if not one.said.endswith(b"\n"):
            return
        row, generation = map(int, one.said.split())
        # Its name may be gone already: then the learner is dying, and has pushed nothing.
        with contextlib.suppress(FileNotFoundError, SegmentError, BrokenPipeError):
            one.ring = Ring(self.processes.job, row, generation)
            start = process.start_ticks(one.child.pid)
            one.target = Target(Role.LEARNER, one.child.pid, start, row, generation)
            one.child.stdin.write(b"\n")
            one.child.stdin.flush()

    def _bury(self, one: _Learner) -> None:
        self._learners.remove(one)
        if one.ring is not None and one.target is not None:
            assert one.target.generation is not None
            self._tally.add(one.target.generation, one.ring.published)
        for pipe in (one.child.stdin, one.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._failures = self._failures + 1 if one.child.returncode > 0 else 0
        if self._failures >= MAX_FAILURES:
            raise JobFailed("learners fail by themselves again and again; --verbose shows why")

    def count(self) -> Count | None:
        """Kills the learners and waits until all that they have published is consumed."""
        for one in list(self._learners):
            one.child.kill()
            one.child.wait()
            self._bury(one)
        until = time.monotonic() + DRAIN_S
        roster = self.processes.control["roster"]
        while (roster["retired"] != roster["generation"]).any() and time.monotonic() < until:
            self._daemon.check()
            time.sleep(POLL_S)
        control = self.processes.control
        return self._tally.count(int(control["past_dropped"]) + int(roster["dropped"].sum()))


# -- faults ---------------------------------------------------------------------------------------


@dataclass
class _Chaos:
    """One run."""

    job: _Given | _Own
    options: Options
    kills: Counter[Role] = field(default_factory=Counter)
    stops: Counter[Role] = field(default_factory=Counter)
    _stopped: list[tuple[float, Target]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seed = self.options.seed
        if self._seed is None:
            self._seed = random.SystemRandom().randrange(2**32)
        self._chance = random.Random(self._seed)
        self._processes = self.job.processes
        self._watchdog_since: tuple[int, float] = (0, 0.0)

    def run(self) -> dict[str, Any]:
        try:
            self._observer = Observer(self._processes)
        except FileNotFoundError:
            raise ControlError(
                f"job {self._processes.job!r} has no model yet: attach a learner first"
            ) from None
        self._observer.start()
        begin = time.monotonic()
        before = self._counters()
        try:
            self._rage(begin)
        finally:
            self._go_on(time.monotonic(), everyone=True)
            self._observer.stop()
        seconds = time.monotonic() - begin
        count = self.job.count()
        return self._report(seconds, before, count)

    def _rage(self, begin: float) -> None:
        end = begin + self.options.seconds
        due = begin + self.options.every_s
        told = begin
        while (now := time.monotonic()) < end:
            self.job.look_after()
            self._go_on(now)
            if now >= due and self._strike(now):
                due = time.monotonic() + self.options.every_s * (0.5 + self._chance.random())
            if now - told >= REPORT_S:
                told = now
                self.options.say(self._line(now - begin))
            time.sleep(POLL_S)

    def _line(self, seconds: float) -> str:
        done = [f"{self.kills[role] + self.stops[role]} {role}" for role in self.options.targets]
        version = int(self._processes.control["version"])
        return f"{seconds:.0f} s: hit {', '.join(done)}; {version:,} gradients applied"

    def _strike(self, now: float) -> bool:
        """Hits one of those that can be hit just now; False if there is none."""
        found = [one for role in self.options.targets if (one := self._target(role, now))]
        if not found:
            return False
        target = self._chance.choice(found)
        number = self._chance.choice(list(self.options.signals))
        self._announce(target, number)
        if faults.send(target, number) is None:
            return True
        if number == signal.SIGKILL:
            self.kills[target.role] += 1
        else:
            self.stops[target.role] += 1
            self._stopped.append((now + self._chance.uniform(LEAST_STOP_S, MOST_STOP_S), target))
        return True

    def _announce(self, target: Target, number: signal.Signals) -> None:
        """Tells the observer what is about to happen."""
        pushing = [one for one in self.job.learners() if one.alive and self._free(one)]
        match target.role:
            case Role.SERVER if number == signal.SIGKILL:
                replaced = self._free(self._processes.standby())
                self._observer.server_dies(replaced=replaced, starved=not pushing)
            case Role.LEARNER:
                last = not [one for one in pushing if one != target]
                if number == signal.SIGKILL:
                    disturbed = self._observer.waits_for_server or bool(self._stopped)
                    disturbed = disturbed or self._processes.watchdog() is None
                    self._observer.learner_dies(target, disturbed=disturbed, last=last)
                else:
                    self._observer.learner_stops(last=last)
            case _:
                self._observer.other_hit()

    def _target(self, role: Role, now: float) -> Target | None:
        """Who could be hit; None where that would only be a fault upon the same fault."""
        match role:
            case Role.LEARNER:
                free = [one for one in self.job.learners() if one.alive and self._free(one)]
                return self._chance.choice(free) if free else None
            case Role.WATCHDOG:
                found = self._processes.watchdog()
                if found is not None and self._watchdog_since[0] != found.pid:
                    self._watchdog_since = found.pid, now
                if now - self._watchdog_since[1] < LIVES_S:
                    return None
            case Role.STANDBY:
                found = self._processes.standby()
            case Role.SERVER:
                found = self._processes.server(ready=True)
                alone = not self._free(self._processes.standby())
                if (alone or self._observer.waits_for_server) and not self.options.impatient:
                    return None
        return found if self._free(found) else None

    def _free(self, target: Target | None) -> bool:
        """Whether there is one, and it has not been stopped by us."""
        return target is not None and target not in [stopped for _, stopped in self._stopped]

    def _go_on(self, now: float, *, everyone: bool = False) -> None:
        """Continues those that have been stopped long enough, and forgets the dead."""
        for entry in list(self._stopped):
            until, target = entry
            if everyone or now >= until or not target.alive:
                self._stopped.remove(entry)
                with contextlib.suppress(GadeiError):
                    faults.send(target, signal.SIGCONT)

    # -- telling ------------------------------------------------------------------------------

    def _counters(self) -> Counter[str]:
        """The job's own."""
        control = self._processes.control
        roster = control["roster"]
        counted = {
            f"gradients_{name}": int(control[f"past_{name}"]) + int(roster[name].sum())
            for name in ("applied", "dropped", "refused")
        }
        names = ("server_deaths", "learner_deaths", "watchdog_starts")
        return Counter(counted | {name: int(control[name]) for name in names})

    def _report(self, seconds: float, before: Counter[str], count: Count | None) -> dict[str, Any]:
        counters = self._counters()
        counters.subtract(before)
        times = self._observer.times
        applied = counters["gradients_applied"] if count is None else count.applied
        return {
            "job": self._processes.job,
            "own_job": count is not None,
            "seconds": seconds,
            "seed": self._seed,
            "kills": {str(role): self.kills[role] for role in self.options.targets},
            "stops": {str(role): self.stops[role] for role in self.options.targets},
            "failover_ms": observer.spread(times.fail_over),
            "restart_ms": observer.spread(times.restart),
            "takeover_ms": observer.spread(times.take_over),
            "reclaim_ms": observer.spread(times.reclaim) | {"disturbed": times.disturbed},
            "published": None if count is None else count.published,
            "applied": applied,
            "dropped": counters["gradients_dropped"],
            "refused": counters["gradients_refused"],
            "lost": None if count is None else count.lost,
            "applied_twice": None if count is None else count.applied_twice,
            "torn_values": None if count is None else count.torn,
            "ledger": (
                "checked in the weights"
                if count is not None
                else "not checked: that needs a job of its own (gadei-ps chaos without JOB)"
            ),
            "gradients_per_s": applied / seconds,
            "counters": dict(counters),
            "clean": None if count is None else count.clean,
        }
