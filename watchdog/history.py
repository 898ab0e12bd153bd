"""A job's history, as the watchdog keeps it: how training goes, and what was changed meanwhile.

The watchdog looks at the control segment once a second and gives lines to a process that writes
them (history_writer.py). It never waits for that: what does not fit into the pipe is dropped.
"""

from __future__ import annotations

import collections
import contextlib
import math
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.errors import in_words
from gadei_ps.job import hyperparameters, sync_change
from gadei_ps.job.control import MOST_REPORTED
from gadei_ps.job.optimizer_config import Values
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.machine import process
from gadei_ps.machine.child import Child
from gadei_ps.memory import layout, totals
from gadei_ps.show.strict_json import finite
from gadei_ps.storage.history_file import line
from gadei_ps.watchdog import settings
from gadei_ps.watchdog.durations import HISTORY_END_S, HISTORY_KILL_S
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.servers import Failover

LEAST_POINT_S = 1.0  # between two points
MOST_POINT_S = 60.0
SHARE = 1 / 1000  # of the job's age: two points of an old job are further apart
KEPT = 200  # lines that wait for the pipe
WRITER_RETRY_S = 60.0  # before another writer is started
LEFT: dict[int, str] = {
    layout.Gone.DIED: "death",
    layout.Gone.HUNG: "eviction",
    layout.Gone.DAMAGED: "eviction",
}
"""Events by the reason why a learner left; all others are `detach`."""


@dataclass(eq=False)
class History:
    """The history of one job."""

    memory: JobMemory
    selector: selectors.BaseSelector
    log: Any
    _writer: Child | None = None
    _waiting: collections.deque[bytes] = field(
        default_factory=lambda: collections.deque(maxlen=KEPT)
    )
    _started_at: float = float("-inf")
    _fresh: bool = False
    _point_at: float = 0.0
    _before: tuple[float, int] | None = None  # when, and samples then
    _losses: tuple[int, float] = (0, 0.0)  # counted then, and their sum
    _reported: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Values reported since then: means, and their weights."""
    _version: int = -1
    _stale: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _settings: Values = field(default_factory=dict)
    _begun: bool = False
    _learners: dict[tuple[int, int], int] = field(default_factory=dict)
    _counts: tuple[int, int, int] = (0, 0, 0)

    def tick(self, now: float, failovers: Sequence[Failover] = ()) -> None:
        """Once a second: a point, if it is time for one, and what was changed. Raises nothing.

        failovers: those since the last call.
        """
        if not self.memory.config.history or self.memory.model is None:
            return
        if not self._begun:
            self._begin(now)
            return
        self._note_changes()
        self._note_learners()
        self._note_events(failovers)
        age = time.time() - int(self.memory.words["started"])
        if now - self._point_at >= min(max(LEAST_POINT_S, age * SHARE), MOST_POINT_S) * 0.9:
            self._point(now)
        self._flush(now)

    def begin(self, now: float) -> None:
        """Begin with the first learner: all its gradients may come in a second. Raises nothing."""
        if self._begun or not self.memory.config.history or self.memory.model is None:
            return
        if not self.memory.script.is_open:  # else its settings would look like a change
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = True
        restored = int(self.memory.words["checkpoint_version"]) > 0
        made = int(self.memory.words["checkpoints"]) > 0  # by this job since
        self._fresh = not self.memory.adopted and (made or not restored)
        self._settings = self._in_force()
        self._counts = self._event_counts()
        self._measure(now)
        self._losses = totals.losses(self.memory.words, self.memory.state_words)
        if restored and not (self._fresh or self.memory.adopted):
            self._add({"event": "restored"}, int(self.memory.words["checkpoint_version"]))
        self._note_learners()
        if self.memory.adopted:
            self._learners = self._there()
            self._event("adoption", learners=len(self._learners))
        self._note_events()

    def note(self, values: dict[str, float]) -> None:
        """Record a user's measurement, such as an accuracy. Raises nothing."""
        if self.memory.config.history:
            self._add({"measured": values})

    def report(self, values: Mapping[str, tuple[float, int]]) -> None:
        """Take values that a learner has reported into the next point, which has their mean.

        values: means, and the number of values in each. Raises nothing.
        """
        for name, (mean, count) in values.items():
            if name in self._reported or len(self._reported) < MOST_REPORTED:
                before, weight = self._reported.get(name, (0.0, 0))
                mean = before + (mean - before) * (count / (weight + count))
                self._reported[name] = mean, weight + count

    def close(self, finished: bool, failovers: Sequence[Failover] = ()) -> None:
        """Write the rest, as the job leaves this process. Waits HISTORY_END_S at most.

        finished: whether training was done when the job was stopped. failovers: those since the
        last tick().
        """
        now = time.monotonic()
        if self._begun and self.memory.config.history:
            self._note_changes()
            self._note_events(failovers)
            if self._writer is not None or self._waiting or int(self.memory.words["version"]) > 0:
                self._point(now)
                phase = int(self.memory.words["phase"])
                if phase > layout.Phase.DRAINING and self._version >= 0:
                    name = layout.Phase(phase).name.lower()
                    is_done = finished and phase == layout.Phase.STOPPED
                    ended = {"ended": "finished" if is_done else name}
                    self._add(ended)
                self._flush(now)
        if self._writer is not None:
            self._writer.end(HISTORY_END_S, HISTORY_KILL_S)  # a disk may block it
            self._writer = None

    # -- lines ----------------------------------------------------------------------------------

    def _in_force(self) -> Values:
        control = self.memory.control
        text = sync_change.text(control, sync_change.in_force(control))
        return settings.fields(self.memory.specs) | {"sync": text}

    def _note_changes(self) -> None:
        if not self.memory.is_settled:
            return
        before, now = self._settings, self._in_force()
        changed = {name: [before[name], now[name]] for name in now if now[name] != before[name]}
        self._settings = now
        if model := changed.pop("sync", None):
            self._add({"set": {"sync": model}})
        if changed:
            self._add({"set": changed}, int(self.memory.words["numbers_version"]))

    def _there(self) -> dict[tuple[int, int], int]:
        """Return the pid of each learner by its row and generation."""
        roster = self.memory.words["roster"]
        return {
            (row, int(roster[row]["generation"])): int(roster[row]["pid"])
            for row in self.memory.rings
            if roster[row]["name"] != layout.REPLICA
        }

    def _note_learners(self) -> None:
        """The pid of each learner that has come: the writer puts its command line there.

        Reading a command line may block, which the watchdog must not.
        """
        there = self._there()
        for learner in there.keys() - self._learners.keys():
            self._add({"pid": there[learner]})

    def _note_events(self, failovers: Sequence[Failover] = ()) -> None:
        """Note learners that have come or left, failovers and checkpoints."""
        before, now = self._counts, self._event_counts()
        there, roster, self._counts = self._there(), self.memory.words["roster"], now
        for learner in sorted(self._learners.keys() - there.keys()):
            row, generation = learner
            left = int(roster[row]["gone"])
            if int(roster[row]["generation"]) != generation:  # another one has its row already
                left = layout.Gone.DIED if now[0] > before[0] else layout.Gone.DETACHED
            self._event(LEFT.get(left, "detach"), learner=row, pid=self._learners[learner])
        for learner in sorted(there.keys() - self._learners.keys()):
            self._event("attach", learner=learner[0], pid=there[learner])
        self._learners = there
        for one in failovers:
            self._event("failover", ms=one.ms, dead_pid=one.dead_pid, pid=one.pid)
        if now[1] > before[1]:
            self._event(
                "checkpoint", checkpoint_version=int(self.memory.words["checkpoint_version"])
            )
        if now[2] > before[2]:
            self._event("checkpoint failed")

    def _event_counts(self) -> tuple[int, int, int]:
        """Return the learners that died, checkpoints, and those that failed."""
        words = self.memory.words
        deaths, checkpoints = int(words["learner_deaths"]), int(words["checkpoints"])
        return deaths, checkpoints, int(words["checkpoint_failures"])

    def _event(self, kind: str, **facts: float) -> None:
        self._add({"event": kind} | facts)

    def _point(self, now: float) -> None:
        """A line, unless nothing has happened since the last one."""
        version = int(self.memory.words["version"])
        if version == self._version and not self._reported:
            self._measure(now)
            return
        was = self._before
        samples, staleness = self._measure(now)
        count, summed = self._losses
        self._losses = totals.losses(self.memory.words, self.memory.state_words)
        losses = self._losses[0] - count
        rate = (samples - was[1]) / (now - was[0]) if was and now > was[0] else 0.0
        self._version = version
        self._add(
            totals.in_history(self.memory.words, self.memory.state_words)
            | {
                "samples_per_s": round(rate, 3),
                "loss_count": self._losses[0],
                "loss_sum": self._losses[1],
                "loss": (self._losses[1] - summed) / losses if losses > 0 else None,
                "staleness": staleness,
                "queue": self._queue(),
                "learners": len(self._there()),
                "learning_rate": self._learning_rate(),
            }
            | ({"reported": self._means()} if self._reported else {}),
            version,
        )
        self._reported = {}

    def _queue(self) -> int:
        """Return the gradients in the rings of learners, which may hold more by their own words."""
        words = self.memory.words
        slots, shards = int(words["slots"]), int(words["shards"])
        rings = (self.memory.rings[row].view(layout.RING) for row, _ in self._there())
        return sum(min(totals.in_ring(one, shards)[1], slots) for one in rings)

    def _learning_rate(self) -> float | None:
        """Learning rate of parameters without a group at the next step; None if there is none."""
        steps = int(self.memory.state_words["record"][0]["steps"])
        try:
            _, packed = hyperparameters.read(self.memory.words, self.memory.control.address)
            return OptimizerSpec.unpack(packed[-1]).rate(steps)
        except (ValueError, ArithmeticError, IndexError):  # shared memory may hold anything
            return None

    def _means(self) -> dict[str, float]:
        """Return the means of the values reported, as far as they are finite."""
        return {name: mean for name, (mean, _) in self._reported.items() if math.isfinite(mean)}

    def _measure(self, now: float) -> tuple[int, float | None]:
        """Return the samples so far, and the mean staleness since the last call."""
        self._point_at = now
        control = self.memory.words
        samples = totals.total(control, "samples", self.memory.state_words)
        self._before = now, samples
        stale, applied = 0, 0
        known: dict[tuple[int, int], tuple[int, int]] = {}
        for row in self.memory.rings:
            entry = control["roster"][row]
            key = row, int(entry["generation"])
            known[key] = int(entry["staleness_sum"]), int(entry["applied"])
            was = self._stale.get(key, (0, 0))
            if known[key][1] >= was[1]:  # a learner that has left has 0
                stale += known[key][0] - was[0]
                applied += known[key][1] - was[1]
        self._stale = known
        mean = round(stale / applied, 4) if applied > 0 else None
        return samples, mean

    def _add(self, values: dict[str, Any], version: int | None = None) -> None:
        version = int(self.memory.words["version"]) if version is None else version
        with contextlib.suppress(ValueError):
            values = {"time": round(time.time(), 3), "version": version} | values
            self._waiting.append(line(finite(values)))

    # -- the writer -----------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        if not self._waiting:
            return
        if self._writer is None and not self._start(now):
            return
        assert self._writer is not None
        while self._waiting and self._writer.send(self._waiting[0][:-1]):
            self._waiting.popleft()

    def _start(self, now: float) -> bool:
        if now - self._started_at < WRITER_RETRY_S:
            return False
        self._started_at = now
        path = str(self.memory.config.history_file())
        fresh = str(int(self._fresh))
        try:
            self._writer = Child(
                self.selector,
                process.module_command("gadei_ps.watchdog.history_writer", path, fresh),
                self._received,
                self._ended,
                how=None,  # it ends with its input, once all of that is written
            )
        except OSError as error:
            self.log.warning("no history is written", reason=in_words(error))
            return False
        self._fresh = False
        return True

    def _received(self, problem: bytes) -> None:
        path = str(self.memory.config.history_file())
        if problem:
            self.log.warning(
                "the history cannot be written for now; training continues",
                path=path,
                reason=problem.decode(errors="replace"),
            )
        else:
            self.log.info("the history is written again", path=path)

    def _ended(self, _: int) -> None:
        """The writer was killed; another one is started when lines wait."""
        self._writer = None
