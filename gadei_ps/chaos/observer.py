"""Measures times after faults: a thread that reads the job's memory and mostly sleeps.

Times are those of time.monotonic(). While it waits for an event, the thread looks every SLEEP_S. A
look takes some microseconds, so that the servers keep the cores.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gadei_ps.job.faults import Processes, Target
from gadei_ps.memory import segment
from gadei_ps.memory.layout import STATE, SegmentKind
from gadei_ps.memory.shm import segment_name

SLEEP_S = 50e-6
REST_S = 0.1
GIVE_UP_S = 60.0  # another fault may have made the awaited event impossible


@dataclass(eq=False)
class _Failover:
    """The measurement after the death of an active server."""

    at: float
    generation: int
    tids: np.ndarray
    replaced: bool
    starved: bool
    """True: no learner was left to push, so the time says nothing about servers."""
    base: np.ndarray | None = None
    """Gradients consumed, by row, when the first thread of the next server was seen."""


@dataclass
class Times:
    """Times in seconds.

    failover, restart: from the kill of the active server to the next applied gradient, with and
    without a standby. activation: from the kill to the next active server, with a standby.
    disturbed: number of reclaims during which servers or watchdog were hit too.
    """

    failover: list[float] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    activation: list[float] = field(default_factory=list)
    reclaim: list[float] = field(default_factory=list)
    disturbed: int = 0


class Observer(threading.Thread):
    """Observes one job. Raises FileNotFoundError if the job has no model yet."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(name="observer", daemon=True)
        control = processes.control
        self._control = control
        self._shards = slice(int(control["shards"]))
        owner = processes.owner
        name = segment_name(processes.job, "state", owner)
        if not int(control["model_ready"]):  # the segment may be half made
            raise FileNotFoundError(name)
        self._segment = segment.attach(name, SegmentKind.STATE, writable=False, owner=owner)
        self._applied = self._segment.view(STATE)["applied"][self._shards]
        self._tids = control["shard"]["tid"][self._shards]
        self._retired = control["roster"]["retired"]
        self.times = Times()
        self._failovers: list[_Failover] = []
        self._activations: list[_Failover] = []
        self._reclaims: list[tuple[Target, float, bool]] = []
        self._hit_at = float("-inf")
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._awake = threading.Event()
        self._quit = False

    @property
    def waits_for_server(self) -> bool:
        """True from the kill of the active server until the next gradient is applied."""
        return bool(self._failovers or self._activations)

    def server_dies(self, *, replaced: bool, starved: bool) -> None:
        """Call this just before the active server is killed.

        replaced: a standby is ready. starved: no learner pushes now.
        """
        generation = int(self._control["lease_generation"])
        one = _Failover(time.monotonic(), generation, self._tids.copy(), replaced, starved)
        self._await(self._failovers, one)
        one.at = self._hit_at = time.monotonic()
        with self._lock:
            self._activations.append(one)

    def learner_dies(self, learner: Target, *, disturbed: bool, last: bool) -> None:
        """Call this just before this learner is killed.

        disturbed: servers or watchdog are not up. last: no other learner pushes now.
        """
        self.learner_stops(last=last)
        self._await(self._reclaims, (learner, time.monotonic(), disturbed))

    def learner_stops(self, *, last: bool) -> None:
        """Call this just before a learner is stopped. last: no other learner pushes now."""
        if last:
            with self._lock:
                for one in self._failovers:
                    one.starved = True

    def other_hit(self) -> None:
        """The watchdog or a standby is hit, so rings of dead learners may be reclaimed later."""
        self._hit_at = time.monotonic()

    def _await(self, where: list[Any], one: Any) -> None:
        """Return when the thread is awake, so that measured times do not include waking it."""
        self._awake.clear()
        with self._lock:
            where.append(one)
        self._wake.set()
        self._awake.wait(1.0)

    def stop(self) -> None:
        self._quit = True
        self._wake.set()
        self.join()

    def run(self) -> None:
        while not self._quit:
            self._wake.wait(REST_S)
            self._awake.set()
            with self._lock:
                self._look()
                if not (self._failovers or self._activations or self._reclaims):
                    self._wake.clear()
            time.sleep(SLEEP_S)

    def _look(self) -> None:
        """Record the awaited events that have happened by now."""
        consumed = self._applied.min(axis=0)  # before the leases: so consumed before
        now = time.monotonic()
        for one in list(self._failovers):
            if one.base is None:
                if (self._tids != one.tids).any():
                    one.base = consumed
                continue
            np.minimum(one.base, consumed, out=one.base)  # restarts with a row's learner
            if (consumed > one.base).any():
                if not one.starved:
                    times = self.times.failover if one.replaced else self.times.restart
                    times.append(now - one.at)
                self._failovers.remove(one)
        generation = int(self._control["lease_generation"])
        for one in list(self._activations):
            if generation != one.generation:
                if one.replaced:
                    self.times.activation.append(now - one.at)
                self._activations.remove(one)
        for one_gone in list(self._reclaims):
            learner, at, disturbed = one_gone
            if int(self._retired[learner.row]) == learner.generation:
                self._reclaims.remove(one_gone)
                if disturbed or self._hit_at > at:
                    self.times.disturbed += 1
                else:
                    self.times.reclaim.append(now - at)
        for waiting in (self._failovers, self._activations):
            waiting[:] = [one for one in waiting if now - one.at < GIVE_UP_S]
        self._reclaims[:] = [one for one in self._reclaims if now - one[1] < GIVE_UP_S]


def spread(seconds: list[float]) -> dict[str, float | int | None]:
    """Return percentiles (ms); None if nothing was measured."""
    found: dict[str, float | int | None] = dict.fromkeys(("p50", "p99", "max"))
    if seconds:
        values = np.percentile(np.array(seconds) * 1e3, (50, 99, 100)).tolist()
        found = dict(zip(found, values, strict=True))
    return found | {"samples": len(seconds)}
