"""Cost of a server's death: time to the next applied gradient, and to the next standby.

Two learners push dense gradients without a pause. The active server is killed (SIGKILL) at random
instants, or both servers at once. This process looks at the job's memory every LOOK_S. All times
begin at the kill and end when

    lease            every shard of the next server has its lease: it continues the dead one's work
    next gradient    a gradient is applied that was not at the kill: mostly the current one
    standby          one server serves and another one stands by again

`no death` is the control: the same wait for the next gradient, from instants without a kill. What
is beyond it is the price of the death. The peers train as many values with two processes, of which
one is killed:

    DDP under torchrun    torchrun starts both processes again, and each makes a step. The weights
                          are lost; loading a checkpoint would come on top
    torchft               the other process continues alone: its first step begun after the kill

ratio: the peer's median over that of gadei-ps, for the death of one process.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from gadei_ps import _native
from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.failover_peers import PEERS, Peer
from gadei_ps.benchmarks.gang import Failed
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.job.faults import Processes
from gadei_ps.machine import process
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import CONTROL, SHARD, STATE, SegmentKind
from gadei_ps.memory.shm import segment_name

LEARNERS = 2
LOOK_S = 2e-4
APART_S = 0.05
"""Kills come at a random instant of so long a time."""
PATIENCE_S = 60.0
SETTLED_S = 0.2
OURS, BOTH, CONTROL_ROW = "gadei-ps", "gadei-ps, both servers killed", "gadei-ps, no death"
LEASE, NEXT, STANDBY = "lease", "next gradient", "standby"
REACH_S = {
    (OURS, NEXT): 0.004,
    (BOTH, NEXT): 0.05,
    (OURS, STANDBY): 0.05,
}
"""Targets for the median (s)."""

Times = dict[tuple[str, str], list[float]]
"""Seconds by contender and by what is waited for."""


def await_(condition: Callable[[], object], what: str) -> float:
    """Look every LOOK_S; return when it was true first (time.monotonic). Raises Failed."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise Failed(f"{what} does not come")
        time.sleep(LOOK_S)
    return time.monotonic()


class Job:
    """A job with learners that push, whose servers are killed."""

    def __init__(self, size: int) -> None:
        """size: of the weights, in bytes."""
        self.name = f"failover-{os.getpid()}"
        self._config = from_mapping(
            {
                "name": self.name,
                "history": False,
                "optimizer": {"kind": "sgd", "lr": 1e-6},
                "tensors": [{"name": "w", "shape": [size // 4]}],
            },
            "failover",
        )
        self._chance = random.Random(size)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(Daemon(self._config, silent=True))
            for _ in range(LEARNERS):
                command = process.module_command("gadei_ps.benchmarks.failover_learner", self.name)
                learner = process.spawn(command)
                stack.callback(learner.wait)
                stack.callback(learner.kill)
            self.processes = Processes(self.name)
            self.control = self.processes.control
            await_(lambda: len(self.processes.learners()) == LEARNERS, "a learner")
            state = segment.attach(
                segment_name(self.name, "state"), SegmentKind.STATE, writable=False
            )
            self._state = state  # whose words are read by address
            self._find_words()
            start = self.consumed()
            await_(lambda: self._has_moved_by(start, 2), "a gradient")
            self._stack = stack.pop_all()
        return self

    def _find_words(self) -> None:
        """Find the addresses that are read again and again: a look must be short."""
        shards = range(int(self.control["shards"]))
        rows = [one.row for one in self.processes.learners() if one.row is not None]
        assert rows == list(range(LEARNERS))
        counts = self._state.word(STATE, "applied")
        of_shard = self._state.view(STATE)["applied"].strides[0]
        self._applied = [[counts + one * of_shard + row * 8 for one in shards] for row in rows]
        lines = self.processes.segment.word(CONTROL, "shard")
        tid = layout.offset(SHARD, "tid")
        self._tids = [lines + one * SHARD.itemsize + tid for one in shards]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- what is seen -------------------------------------------------------------------------

    def consumed(self) -> list[int]:
        """Return the number of gradients that every shard has applied, by learner."""
        return [min(map(_native.load, words)) for words in self._applied]

    def _has_moved_by(self, before: Sequence[int], count: int) -> bool:
        """Return whether so many gradients have been applied of one of the learners."""
        now = self.consumed()
        return any(b - a >= count for a, b in zip(before, now, strict=True))

    def _threads(self) -> list[int]:
        return [_native.load32(word) for word in self._tids]

    def _is_whole(self, dead: Sequence[int]) -> bool:
        """Return whether one server serves and another one stands by, none of them `dead`."""
        active, standby = self.processes.server(ready=True), self.processes.standby()
        if active is None or standby is None:
            return False
        return active.pid not in dead and standby.pid not in dead

    # -- what is done -------------------------------------------------------------------------

    def calm(self) -> None:
        """Wait until both servers are ready and a random time has passed."""
        await_(lambda: self._is_whole(()), "a standby")
        time.sleep(SETTLED_S + APART_S * self._chance.random())

    def wait(self) -> float:
        """Measure the time until the next gradient is applied, without a death (s)."""
        begin, before = time.monotonic(), self.consumed()
        return await_(lambda: self._has_moved_by(before, 1), "a gradient") - begin

    def kill(self, both: bool) -> dict[str, float]:
        """Kill the active server, and the other one before it. Seconds, by what is waited for."""
        active, standby = self.processes.server(ready=True), self.processes.standby()
        if active is None or standby is None:
            raise Failed("a server has died by itself")
        dead = [standby.pid, active.pid] if both else [active.pid]
        threads = self._threads()
        begin = time.monotonic()
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)  # what runs on another core is interrupted at once
        before = self.consumed()
        taken: list[float] = []

        def next_one() -> bool:
            moved = self._has_moved_by(before, 1)
            if not taken and not set(threads) & set(self._threads()):
                taken.append(time.monotonic() - begin)
            return moved

        found = {NEXT: await_(next_one, "a gradient after the kill") - begin}
        if not both:
            found[LEASE] = taken[0] if taken else found[NEXT]
        found[STANDBY] = await_(lambda: self._is_whole(dead), "a standby") - begin
        return found


def of_ours(size: int, kills: int, both: int) -> Times:
    """Kill the servers of one job. kills: deaths of the active server; both: of both servers."""
    times: Times = {}
    with Job(size) as job:
        for number in range(max(kills, both)):
            if number < kills:
                job.calm()
                times.setdefault((CONTROL_ROW, NEXT), []).append(job.wait())
                job.calm()
                _add(times, OURS, job.kill(both=False))
            if number < both:
                job.calm()
                _add(times, BOTH, job.kill(both=True))
    return times


def _add(times: Times, contender: str, found: Mapping[str, float]) -> None:
    for what, seconds in found.items():
        times.setdefault((contender, what), []).append(seconds)


def measure(quick: bool) -> Report:
    """Measure each size: our servers, then the peers."""
    size = sizes("failover", quick)
    header = ["contender", "MB", "until", "p50 ms", "p90 ms", "p99 ms", "kills"]
    report = Report(header)
    for number in size["bytes"]:
        times = of_ours(number, size["kills"], size["both"])
        for name, peer in PEERS.items():
            if size["peer_kills"]:
                _try(report, times, name, peer, number, size["peer_kills"])
        _tell(report, times, number)
    if not size["peer_kills"]:
        report.notes.append(f"{' and '.join(PEERS)} are left out: they take long to start again")
    return report


def _try(report: Report, times: Times, name: str, peer: Peer, size: int, kills: int) -> None:
    """Measure a peer, or notes why it does not take part."""
    try:
        times[name, NEXT] = peer(size, kills)
    except Failed as error:
        note = f"{name} is left out: {error}"
        if note not in report.notes:
            report.notes.append(note)


def _tell(report: Report, times: Times, size: int) -> None:
    """Add rows, lines and ratios of one size."""
    for (contender, what), seconds in times.items():
        p50, p90, p99 = (float(one) for one in np.quantile(seconds, [0.5, 0.9, 0.99]))
        told: dict[str, Any] = {"contender": contender, "bytes": size, "what": what}
        reach = REACH_S.get((contender, what))
        report.rows.append(
            told | summary(seconds) | {"p50": p50, "p90": p90, "p99": p99, "reach_s": reach}
        )
        shown = [f"{1e3 * one:.1f}" for one in (p50, p90, p99)]
        report.lines.append([contender, f"{size / 1e6:g}", what, *shown, f"{len(seconds)}"])
    ours = times[OURS, NEXT]
    for name in (CONTROL_ROW, *PEERS):
        theirs = times.get((name, NEXT))
        if theirs is not None:
            report.ratios.append(
                {
                    "contender": name,
                    "bytes": size,
                    "ratio": statistics.median(theirs) / statistics.median(ours),
                    "best_ratio": min(theirs) / min(ours),
                }
            )
