"""A job's stop: learners leave, the last checkpoint is made, waiting clients are notified.

begin    the stop word in control: learners finish their gradient, or leave at once
leaving  until no ring is left, or the time is up
closed   the stop word again: nobody publishes any more; all that is published is applied
saving   the last checkpoint, where the job file asks for one
over     the watchdog's main loop ends

After `closed` the stop continues as long as it makes progress, and fails if it makes none: the
memory stays then.

So the last checkpoint has every gradient whose push has returned, and no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gadei_ps import _native
from gadei_ps.errors import CheckpointError, JobStopped
from gadei_ps.job import service
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Phase, Stop
from gadei_ps.watchdog.checkpoint_writer import failed_by
from gadei_ps.watchdog.checkpoints import Checkpoints, Outcome
from gadei_ps.watchdog.durations import LEAVE_NOW_S, PUBLISH_S, STOP_END_S, STOP_SILENT_S
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.liveness import START_LATE_S, Watch
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.sockets import Client


@dataclass(eq=False)
class Stopping:
    """The stop of one job, before it begins and while it runs."""

    memory: JobMemory
    roster: Roster
    checkpoints: Checkpoints
    notify: Notify
    log: Any
    blocked: Callable[[], str] = lambda: ""
    """Reason why nothing can be applied, as no server can replace the active one; or empty."""
    begun: bool = False
    asked: bool = False
    """Whether a client has asked for it."""
    discards: bool = False
    """Whether there is to be none."""
    reason: str = ""
    """Reason of the stop, if a learner or a limit has stopped the job."""
    finished: bool = False
    """Whether training was done when the stop began."""
    problem: str = ""
    """Reason why there is no last checkpoint."""
    waiting: list[Client] = field(default_factory=list)
    """Clients that are notified when the job has ended."""
    _until: float = float("inf")
    _closed_at: float = 0.0
    _saving: bool = False
    _saved: bool = False
    _watch: Watch = field(default_factory=lambda: Watch(STOP_SILENT_S, START_LATE_S))
    _sign: object = None

    @property
    def learners_leave(self) -> bool:
        """Whether learners are awaited now."""
        return self.begun and not self._saving

    @property
    def saves(self) -> bool:
        """Whether the job ends with a checkpoint."""
        config = self.memory.config.checkpoint
        wanted = config is not None and config.on_stop and not self.discards
        return wanted and self.memory.state is not None

    def refuse(self) -> None:
        """Raise JobStopped once the stop has begun."""
        if self.begun:
            raise self.refusal()

    def refusal(self) -> JobStopped:
        """Return the error for requests to a job that stops."""
        return JobStopped(f"job {self.memory.config.name!r} is stopping")

    def begin(
        self, drain: bool, timeout_s: float, reason: str = "", *, finished: bool = False
    ) -> None:
        """Once more: the stricter of both counts.

        drain: learners have timeout_s seconds to finish, and what they have published is applied.
        finished: whether training is done.
        """
        self.finished = finished and (self.finished or not self.begun)
        if reason and not self.reason:
            self.reason = reason
            self.log.warning("stopping", reason=reason)  # also in the logs of commands
        else:
            self.log.info("stopping", drain=drain)
        self._set_stop(Stop.DRAIN if drain else Stop.NOW)
        self.memory.words["phase"] = Phase.DRAINING
        self._until = min(self._until, time.monotonic() + (timeout_s if drain else LEAVE_NOW_S))
        self.begun = True
        self.notify.stopping(timeout_s + STOP_END_S)

    def over(self, now: float) -> bool:
        """Return whether learners and then the last checkpoint are done. Every tick."""
        if not self._closed_at:
            if self.memory.rings and now <= self._until:
                return False
            if self.roster.rows:
                self.log.warning("learners still attached", rows=self.roster.rows)
            self._closed_at = now
            self._set_stop(Stop.CLOSED)
        stuck, blocked = self._is_stuck(now), self.blocked()
        if not self._saving:
            self.roster.close_rings(hung=now > self._closed_at + PUBLISH_S)
            if self.memory.rings:
                if blocked:
                    self.problem = f"published gradients were not applied: {blocked}"
                elif stuck:
                    self.problem = f"published gradients were not applied for {STOP_SILENT_S:.0f} s"
                return bool(self.problem)
            self._saving = True
            words = self.memory.words
            fresh = int(words["version"]) != int(words["checkpoint_version"])
            if not self.saves or not (fresh or not int(words["checkpoints"])):
                return True
            try:
                if blocked:
                    raise CheckpointError(blocked)
                self.checkpoints.ask(self._received)
            except CheckpointError as error:
                self._received(failed_by(str(error)))
        elif stuck and not self._saved:
            directory = self.memory.config.checkpoint_directory()
            why = f"{directory}: the disk has made no progress for {STOP_SILENT_S:.0f} s"
            self._received(failed_by(why))
        return self._saved

    def _is_stuck(self, now: float) -> bool:
        """Return whether the end makes no progress. Asks the manager for more time if it does."""
        sign = (len(self.memory.rings), int(self.memory.words["version"]), self.checkpoints.moved)
        if sign != self._sign:
            if self._sign is not None:
                self.notify.more_time(STOP_SILENT_S + STOP_END_S)
            self._sign = sign
        return bool(self._watch.check(now, {"stop": (self._saving, *sign)}))

    def _set_stop(self, wanted: Stop) -> None:
        """Store the stop word, which a stop never reverts, before it looks at any ring."""
        word = self.memory.control.word(layout.CONTROL, "stop")
        last = max(wanted, int(self.memory.words["stop"]))
        _native.store32(word, last)  # SYNC POINT: closed
        self.memory.ring_bells()  # each a full fence, before a look at any ring

    def _received(self, outcome: Outcome) -> None:
        self._saved = True
        self.problem = "" if outcome["ok"] else outcome["error"]

    def done(self) -> str:
        """Return the message of a complete stop."""
        words, newest = self.memory.words, self.checkpoints.newer
        if not newest and int(words["checkpoints"]):
            newest = int(words["checkpoint_version"])
        has = f"the newest checkpoint has version {newest}" if newest else "there is no checkpoint"
        return f"stopped at version {int(words['version'])}; {has}"

    def report(self) -> str:
        """Return the message of a stop without its last checkpoint."""
        job, words = self.memory.config.name, self.memory.words
        if self.memory.unnamed:
            rest = "its segments have lost their names, so what came after is gone"
        elif service.runs_in(job, watchdog=True):
            end = service.expected(job).end_unit
            rest = (
                f"{end} tries once more to save what is in memory; see "
                f"{service.expected(job).systemctl('status', end)}"
            )
        else:
            rest = (
                "what it has learned stays in memory: continue with "
                f"{service.serve(job)}, or drop it with {service.command(job, f'gc {job}')}"
            )
        what = f"its last checkpoint failed: {self.problem}" if self._saving else self.problem
        return (
            f"job {job!r} has stopped at version {int(words['version'])}, but {what}; the "
            f"newest checkpoint is of version {int(words['checkpoint_version'])}; {rest}"
        )
