"""Requests of the control socket's clients, and the replies.

Learners attach, detach, and bring the model and their work. Tools ask for the status, checkpoints,
another synchronization model, and the end.
"""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps import sync
from gadei_ps.errors import CheckpointError, ControlError, GadeiError, JobFailed, NotSaved, in_words
from gadei_ps.job import control, modes
from gadei_ps.job.config import check_room
from gadei_ps.job.control import (
    Attach,
    Checkpoint,
    Copy,
    Detach,
    Discard,
    FirstBatch,
    Launch,
    LeaveOut,
    Load,
    Measured,
    Offer,
    Own,
    Reload,
    SetOptimizer,
    SetSync,
    SetWork,
    Status,
    StopJob,
)
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Work
from gadei_ps.watchdog import changing, owning, settings, status
from gadei_ps.watchdog.admission import Admission
from gadei_ps.watchdog.checkpoints import Checkpoints
from gadei_ps.watchdog.history import History
from gadei_ps.watchdog.launches import Launches
from gadei_ps.watchdog.loading import Loading
from gadei_ps.watchdog.lock import NameLock
from gadei_ps.watchdog.maker import Maker
from gadei_ps.watchdog.memory import JobMemory
from gadei_ps.watchdog.refusals import Refusals
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.sockets import Client, ControlServer, failure
from gadei_ps.watchdog.start import Start
from gadei_ps.watchdog.stopping import Stopping


class Requests:
    """A job's control socket, and all that it answers."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        memory: JobMemory,
        roster: Roster,
        servers: Servers,
        checkpoints: Checkpoints,
        stopping: Stopping,
        maker: Maker,
        history: History,
        learners: int,
        log: Any,
    ) -> None:
        """Listen at `path`. Raises ControlError.

        learners: how many of their rings must fit beside a model.
        """
        self._memory = memory
        self._roster = roster
        self._servers = servers
        self._checkpoints = checkpoints
        self._stopping = stopping
        self._log = log
        self._maker = maker
        self._history = history
        self._unreachable = ""  # why nobody can connect
        self._sockets = ControlServer(path, selector, self._handle, self._closed)
        self._start = Start(memory, learners)
        self._refusals = Refusals(memory, log)
        self._loading = Loading(memory, log)
        own = memory.config.learners
        self._launches = Launches(own.count if own is not None else 0)
        self._admission = Admission(
            self._sockets, memory, roster, stopping, maker, self._start, learners, log
        )

    @property
    def _control(self) -> np.void:
        return self._memory.control.view(layout.CONTROL)

    def _closed(self, client: Client) -> None:
        self._admission.closed(client)

    def look(self, now: float) -> None:
        """Do the work between two requests. Every tick."""
        self._admission.look(now)
        self._start.hand_out(self._stopping.begun)
        self._refusals.look(now)
        changing.look(self._memory)
        self._loading.look()

    def expire(self, lock: NameLock | None) -> None:
        """Drop clients that have begun a message and do not end it.

        Makes the socket and the lock file again if somebody has removed or replaced them.
        """
        self._sockets.expire()
        if lock is None or (lock.is_named() and self._sockets.is_named()):
            self._unreachable = ""
            return
        try:
            if not lock.is_named():
                lock.renew()
            self._sockets.renew()
        except (GadeiError, OSError) as error:
            why = in_words(error)
            if why != self._unreachable:
                self._log.error("the job's socket is lost, and cannot be made", reason=why)
            self._unreachable = why
        else:
            path = str(self._sockets.path)
            self._log.warning("the socket or its lock was removed: made again", socket=path)

    def end(self, failed: str) -> None:
        """Answers clients that wait for the job's end, and removes the socket.

        failed: why the job has failed; empty if it has not.
        """
        self._admission.end(failed)
        if self._stopping.begun:
            error: GadeiError | None = JobFailed(failed) if failed else None
            if self._stopping.problem:
                error = NotSaved(self._stopping.report())
            final = failure(error) if error is not None else self.report()
            for client in self._stopping.waiting:
                self._sockets.reply(client, final)
        self._sockets.shut_down()

    def _handle(self, client: Client, request: control.Request) -> dict[str, Any] | None:
        match request:
            case Status():
                return self.report()
            case Offer():
                return self._admission.offer(client, request)
            case Attach():
                return self._admission.attach(client, request)
            case FirstBatch():
                return self._admission.first_batch(client, request)
            case Detach():
                return self._detach(client, request)
            case Measured():
                self._history.note(request.values)
                return {}
            case Reload():
                return self._reload(request)
            case SetOptimizer():
                return self._set_optimizer(request)
            case SetSync():
                return self._set_sync(request)
            case SetWork():
                return self._set_work(request)
            case Launch():
                return self._launches.reserve(client.pid, request, self._roster.rows)
            case LeaveOut():
                return self._leave_out(request)
            case Checkpoint():
                self._checkpoint(client)
                return None
            case Copy():
                self._copy(client, request)
                return None
            case Own():
                self._stopping.refuse()
                return owning.own(self._memory, request)
            case Load():
                self._stopping.refuse()
                return {"answer": self._loading.ask(request)}
            case Discard():
                self._discard(client)
                return None
            case StopJob():
                self._stopping.asked = True
                self._stopping.begin(request.drain, request.timeout_s, request.reason)
                if not request.wait:
                    return {}
                self._stopping.waiting.append(client)
                return None

    def report(self) -> dict[str, Any]:
        """The job's status."""
        report = status.report(self._memory)
        for one in report["learners"]:
            standing = self._roster.standing.get(one["row"])
            one["holds_up_s"] = standing.stands_s if standing else None
            one["killed_in_s"] = standing.left_s if standing else None
        report["commands"] = self._launches.report()
        report["server_private_bytes"] = self._servers.private_bytes()
        report["standby_pid"] = self._servers.standby_pid
        report["standby_missing"] = self._servers.why_alone or None
        report["server_stuck"] = self._servers.stuck or None
        report["checkpoint_age_s"] = self._checkpoints.age_s
        report["last_checkpoint"] = self._checkpoints.last or None
        report["checkpoint_warning"] = self._checkpoints.warning or None
        report["newer_checkpoint"] = self._checkpoints.newer or None
        report["names_lost"] = self._memory.unnamed
        report["stop_reason"] = self._stopping.reason or None
        report["saves_on_stop"] = self._stopping.saves
        report["making"] = self._maker.facts
        report["start"] = self._start.report()
        return report

    def _checkpoint(self, client: Client) -> None:
        """The reply comes when the checkpoint is on the disk, or is not."""
        self._stopping.refuse()
        if coming := self._admission.model_coming:
            raise CheckpointError(f"{coming}; there is nothing to save yet")

        def heard(outcome: dict[str, Any]) -> None:
            failed = not outcome["ok"]
            error = CheckpointError(outcome.get("error", ""))
            self._sockets.reply(client, failure(error) if failed else outcome)

        self._checkpoints.ask(heard)

    def _copy(self, client: Client, request: Copy) -> None:
        """The reply comes when the copy is in the client's file, or is not."""
        if not client.fds:
            raise ControlError("copy: no file came with the request")

        def heard(outcome: dict[str, Any]) -> None:
            failed = not outcome["ok"]
            error = ControlError(f"no copy of the job: {outcome.get('error', '')}")
            self._sockets.reply(client, failure(error) if failed else outcome)

        self._checkpoints.ask(heard, client.fds.pop(0), slots=request.slots)

    def _discard(self, client: Client) -> None:
        """Raise ControlError if no checkpoint is newer: a stop must not lose anything.

        Raises JobStopped if a stop that saves has begun.
        """
        self._stopping.refuse()
        if not self._checkpoints.newer:
            raise ControlError("no checkpoint is newer than the memory: stop without --discard")
        self._stopping.discards = True
        self._stopping.asked = True
        self._stopping.begin(drain=False, timeout_s=1.0)
        self._stopping.waiting.append(client)

    def _detach(self, client: Client, request: Detach) -> dict[str, Any]:
        self._roster.detach(client.pid, request.row, request.generation)
        return {}

    def _leave_out(self, request: LeaveOut) -> dict[str, Any]:
        """Exclude ended learners. A launcher's do not count if the job file has learners."""
        if self._memory.config.learners is None:
            self._start.leave_out(request.number)
        return {}

    def _reload(self, request: Reload) -> dict[str, Any]:
        self._stopping.refuse()
        memory = self._memory
        new, changed = settings.changed(
            memory.control, memory.config, request.config, memory.script
        )
        changes = memory.changes.still(new)
        settings.specs_of(new, memory.script, changes)
        if new != memory.config:
            memory.config, memory.changes = new, changes
            memory.enter_settings()
            self._roster.limit(new.learner_timeout_s)
            self._servers.limit(new.hang_s)
            self._log.info("the job file has changed", **changed)
        return {"changed": changed}

    def _set_optimizer(self, request: SetOptimizer) -> dict[str, Any]:
        self._stopping.refuse()
        changed = changing.change(self._memory, request)
        if changed:
            self._log.info("changing the optimizer's numbers", **changed)
        return {"changed": changed}

    def _set_sync(self, request: SetSync) -> dict[str, Any]:
        self._stopping.refuse()
        job = self._memory.config.name
        attached = len(self._roster.rows)
        learners = (
            self._memory.config.learners.count if self._memory.config.learners else attached or None
        )
        try:
            wanted = sync.parse(request.sync)
            wanted.check(learners)
            check_room(wanted)
        except sync.SpecError as error:
            raise ControlError(str(error)) from None
        memory = self._memory.control
        if modes.wanted(memory) != modes.done(memory):
            raise ControlError(
                f"job {job!r} is just changing to "
                f"{modes.text(memory, modes.wanted(memory))}; ask again once it has"
            )
        wave = int(self._control["wave"])
        if int(self._control["work"]) == Work.WORKING and wanted.wave != wave:
            raise ControlError(
                f"the job hands out batches of waves of {wave}, not {wanted.wave}: "
                "that cannot change while it works on them"
            )
        if self._memory.model is None:
            modes.begin(memory, wanted)  # no server has looked at it yet
            return {"changes": True, "sync": str(wanted)}
        # A file may have been rewritten.
        if (
            str(wanted) == modes.text(memory, modes.done(memory))
            and "file" not in wanted.parameters
        ):
            return {"changes": False, "sync": str(wanted)}
        self._log.info("changing the synchronization model", sync=str(wanted))
        modes.ask(memory, wanted)
        self._memory.ring_bells()
        return {"changes": True, "sync": str(wanted)}

    def _set_work(self, request: SetWork) -> dict[str, Any]:
        self._stopping.refuse()
        control_ = self._control
        wanted = (request.batches, request.epochs, request.seed)
        if int(control_["work"]) != Work.NONE or int(control_["batches"]):
            have = tuple(int(control_[name]) for name in ("batches", "epochs", "seed"))
            if have != wanted:
                raise ControlError(
                    "the job hands out work already: batches, epochs, seed are "
                    f"{have}, not {wanted}"
                )
            if request.ahead > int(control_["ahead"]):
                control_["ahead"] = request.ahead
                self._memory.ring_bells()
            return {"set": False}
        memory = self._memory.control
        if modes.wanted(memory) != modes.done(memory):
            coming = sync.parse(modes.text(memory, modes.wanted(memory)))
            if coming.wave != int(control_["wave"]):
                raise ControlError(
                    f"the job is just changing to {coming}, with waves of {coming.wave}; ask again"
                )
        control_["ahead"] = max(int(control_["ahead"]), request.ahead)
        control_["next"] = 0
        control_["epochs_done"] = 0
        control_["epochs"], control_["seed"] = wanted[1:]
        control_["batches"] = wanted[0]  # last: with it the next watchdog continues from here
        self._start.hand_out(stopping=False)
        return {"set": True}
