"""`gadei-ps chaos`: kills and stops processes of a job at random, and reports the consequences.

In a job of its own it also counts, in the weights, how often each published gradient was applied.
For a given job it reports only times and counters.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.chaos import observer
from gadei_ps.chaos.observer import Observer
from gadei_ps.chaos.tally import Count
from gadei_ps.chaos.targets import CountedJob, ExistingJob, OwnJob
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import ControlError, GadeiError, UsageError
from gadei_ps.job import faults
from gadei_ps.job.faults import Role, Target
from gadei_ps.machine import interrupts
from gadei_ps.memory.totals import counts
from gadei_ps.show.counts import counted
from gadei_ps.watchdog.restart import Policy

POLL_S = 0.002
REPORT_S = 5.0
LEAST_STOP_S, MOST_STOP_S = 0.1, 2.5
LIVES_S = 2.0  # a new watchdog is not hit for this time, so that it can start servers
ROUND_S = 10.0  # the first round waits at most this long for processes to hit
NUMBERS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass(frozen=True)
class Options:
    """Options of a campaign.

    own: the job to make if no job is given. impatient: kill the active server also while no standby
    is ready. say: called with a line of progress now and then.
    """

    seconds: float = 60.0
    targets: Sequence[Role] = tuple(Role)
    every_s: float = 0.5
    signals: Sequence[signal.Signals] = (signal.SIGKILL,)
    seed: int | None = None
    own: OwnJob = field(default_factory=OwnJob)
    impatient: bool = False
    say: Callable[[str], None] = lambda line: None


def run(job: str | None, options: Options) -> dict[str, Any]:
    """Run a campaign. Returns what `gadei-ps chaos --json` prints. Raises GadeiError."""
    odd = [one.name for one in options.signals if one not in NUMBERS]
    if odd:
        raise UsageError(f"--signals: {odd[0]} is not KILL or STOP; gadei-ps kill sends any")
    if job is not None:
        with interrupts.held():
            return _Chaos(ExistingJob(job), options).run()
    own = options.own
    with (
        interrupts.held(),
        # A silent one: it would report each death.
        _KilledDaemon(own.config(), verbose=own.verbose, silent=not own.verbose) as daemon,
        CountedJob(daemon, own) as victims,
    ):
        return _Chaos(victims, options).run()


class _KilledDaemon(Daemon):
    """A watchdog that is killed on purpose, and restarted after any number of kills."""

    policy = Policy(limit=sys.maxsize)


@dataclass
class _Chaos:
    """One run."""

    job: ExistingJob | CountedJob
    options: Options
    hits: Counter[tuple[Role, signal.Signals]] = field(default_factory=Counter)
    _stopped: list[tuple[float, Target]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seed = self.options.seed
        if self._seed is None:
            self._seed = random.SystemRandom().randrange(2**32)
        self._chance = random.Random(self._seed)
        self._processes = self.job.processes
        self._watchdog_since: tuple[int, float] = (0, 0.0)
        kills = signal.SIGKILL in self.options.signals
        self._round_number = signal.SIGKILL if kills else signal.SIGSTOP
        self._round_until = 0.0

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
        self._round_until = begin + ROUND_S
        due = begin + self.options.every_s
        reported = begin
        while (now := time.monotonic()) < end:
            interrupts.check()
            self.job.maintain()
            self._go_on(now)
            if now >= due and self._strike(now):
                due = time.monotonic() + self.options.every_s * (0.5 + self._chance.random())
            if now - reported >= REPORT_S:
                reported = now
                self.options.say(self._line(now - begin))
            time.sleep(POLL_S)

    def _line(self, seconds: float) -> str:
        done = [
            f"{sum(self.hits[role, number] for number in NUMBERS)} {role}"
            for role in self.options.targets
        ]
        version = int(self._processes.control["version"])
        return f"{seconds:.0f} s: hit {', '.join(done)}; {counted(version, 'gradient')} applied"

    def _strike(self, now: float) -> bool:
        """Hit one of the processes that can be hit now; False if there is none."""
        missed = self._missed() if now < self._round_until else []
        first = self._found([role for role in missed if role is not Role.WATCHDOG] or missed, now)
        # While roles are missed, other hits go to learners: any other would delay the missed roles.
        others = [role for role in self.options.targets if not missed or role is Role.LEARNER]
        found = first or self._found(others, now)
        if not found:
            return False
        target = self._chance.choice(found)
        number = self._round_number if first else self._chance.choice(list(self.options.signals))
        self._announce(target, number)
        if faults.send(target, number, owner=self._processes.owner) is None:
            return True
        self.hits[target.role, number] += 1
        if number == signal.SIGSTOP:
            self._stopped.append((now + self._chance.uniform(LEAST_STOP_S, MOST_STOP_S), target))
        return True

    def _missed(self) -> list[Role]:
        """Return the roles not hit in the first round, which kills if the options contain KILL."""
        missed = [role for role in self.options.targets if not self.hits[role, self._round_number]]
        # A job can do without its fork server, and does not wait for it.
        return [
            one for one in missed if one is not Role.FORK_SERVER or self._processes.fork_server()
        ]

    def _found(self, roles: Sequence[Role], now: float) -> list[Target]:
        return [one for role in roles if (one := self._target(role, now))]

    def _announce(self, target: Target, number: signal.Signals) -> None:
        """Notify the observer of the hit that follows."""
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
        """A process of this role to hit; None while an earlier fault of the role lasts."""
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
            case Role.FORK_SERVER:
                found = self._processes.fork_server()
            case Role.SERVER:
                found = self._processes.server(ready=True)
                alone = not self._free(self._processes.standby())
                if (alone or self._observer.waits_for_server) and not self.options.impatient:
                    return None
        return found if self._free(found) else None

    def _free(self, target: Target | None) -> bool:
        """Return whether the process exists and chaos has not stopped it."""
        return target is not None and target not in [stopped for _, stopped in self._stopped]

    def _go_on(self, now: float, *, everyone: bool = False) -> None:
        """Continue processes that were stopped long enough, and forget dead ones."""
        for entry in list(self._stopped):
            until, target = entry
            if everyone or now >= until or not target.alive:
                self._stopped.remove(entry)
                with contextlib.suppress(GadeiError):
                    faults.send(target, signal.SIGCONT, owner=self._processes.owner)

    # -- telling ------------------------------------------------------------------------------

    def _counters(self) -> Counter[str]:
        control = self._processes.control
        names = ("server_deaths", "learner_deaths", "watchdog_starts")
        return Counter(counts(control) | {name: int(control[name]) for name in names})

    def _report(self, seconds: float, before: Counter[str], count: Count | None) -> dict[str, Any]:
        counters = self._counters()
        counters.subtract(before)
        times = self._observer.times
        applied = counters["gradients_applied"] if count is None else count.applied
        kills, stops = (
            {str(role): self.hits[role, number] for role in self.options.targets}
            for number in NUMBERS
        )
        return {
            "job": self._processes.job,
            "own_job": count is not None,
            "seconds": seconds,
            "seed": self._seed,
            "kills": kills,
            "stops": stops,
            "missed": [str(role) for role in self._missed()],
            "failover_ms": observer.spread(times.failover),
            "restart_ms": observer.spread(times.restart),
            "activation_ms": observer.spread(times.activation),
            "takeover_ms": observer.spread(times.activation),  # its name before 0.3
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
