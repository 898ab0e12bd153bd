"""Requests of the control socket's clients, and the replies.

Learners attach, detach, and bring the model and their work. Tools ask for the status, checkpoints,
another synchronization model, and the end.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from gadei_ps import metrics, sync
from gadei_ps.errors import CheckpointError, ControlError, GadeiError, JobFailed, NotSaved, in_words
from gadei_ps.job import control as messages
from gadei_ps.job import paths, sync_change
from gadei_ps.job.config import check_room
from gadei_ps.job.lock_file import NameLock
from gadei_ps.machine import log
from gadei_ps.memory import layout, owned, totals
from gadei_ps.memory.layout import Phase, Work
from gadei_ps.memory.segment import Segment
from gadei_ps.watchdog import script, settings
from gadei_ps.watchdog.admission import Admission
from gadei_ps.watchdog.batches import Batches
from gadei_ps.watchdog.checkpoints import Checkpoints, Outcome
from gadei_ps.watchdog.history import History
from gadei_ps.watchdog.initial_load import Loading
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.learners import ReservedNumbers
from gadei_ps.watchdog.refused_gradients import RefusalWarnings
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.sockets import Client, ControlServer, Reply, failure
from gadei_ps.watchdog.stopping import Stopping
from gadei_ps.watchdog.worker import Worker


@dataclass(eq=False)
class Requests:
    """A job's control socket, and all that it answers. Raises ControlError if it cannot listen."""

    selector: selectors.BaseSelector
    memory: JobMemory
    roster: Roster
    servers: Servers
    checkpoints: Checkpoints
    stopping: Stopping
    worker: Worker
    history: History
    _unreachable: str = ""  # why nobody can connect

    def __post_init__(self) -> None:
        job, own = self.memory.config.name, self.memory.config.learners
        self._log = log.get(job=job)
        self._sockets = ControlServer(
            paths.socket_path(job),
            self.selector,
            self._dispatch,
            lambda client: self._admission.closed(client),
        )
        self._batches = Batches(self.memory, self.memory.learners)
        self._refusals = RefusalWarnings(self.memory, self._log)
        self._loading = Loading(self.memory, self._log)
        self._reserved = ReservedNumbers(own.count if own is not None else 0)
        self._admission = Admission(
            self._sockets,
            self.memory,
            self.roster,
            self.stopping,
            self.worker,
            self._batches,
            self._log,
        )

    def tick(self, now: float) -> None:
        """Do the work between two requests. Every tick."""
        self._admission.tick(now)
        self._batches.hand_out(self.stopping.begun)
        self.memory.ask_for_settings()
        self._loading.tick()

    def expire(self, lock: NameLock | None) -> None:
        """Drop clients that have begun a message and do not end it; warn of refused gradients.

        Makes the socket and the lock file again if they were removed or replaced.
        """
        self._sockets.expire()
        self._refusals.tick(time.monotonic())
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

    def close(self, failed: str) -> None:
        """Answer clients that wait for the job's end, and remove the socket.

        failed: why the job has failed; empty if it has not.
        """
        self._admission.close(failed)
        if self.stopping.begun:
            error: GadeiError | None = JobFailed(failed) if failed else None
            if self.stopping.problem:
                error = NotSaved(self.stopping.report())
            final = failure(error) if error is not None else self.report()
            for client in self.stopping.waiting:
                self._sockets.reply(client, final)
        self._sockets.shut_down()

    def _dispatch(self, client: Client, request: messages.Request) -> Reply:
        if type(request) in REFUSED_AT_STOP:
            self.stopping.refuse()
        return HANDLERS[type(request)](self, request, client)

    def _detach(self, request: messages.Detach, client: Client) -> Reply:
        self.roster.detach(client.pid, request.row, request.generation)
        return {}

    def _measured(self, request: messages.Measured, client: Client) -> Reply:
        self.history.note(request.values)
        return {}

    def _reported(self, request: messages.Reported, client: Client) -> Reply:
        self.history.report(request.values)
        return {}

    def _leave_out(self, request: messages.LeaveOut, client: Client) -> Reply:
        """Exclude ended learners. A launcher's do not count if the job file has learners."""
        if self.memory.config.learners is None:
            self._batches.leave_out(request.number)
        return {}

    def _stop(self, request: messages.StopJob, client: Client) -> Reply:
        self.stopping.asked = True
        self.stopping.begin(
            request.drain, request.timeout_s, request.reason, finished=request.finished
        )
        if not request.wait:
            return {}
        self.stopping.waiting.append(client)
        return None

    def report(self) -> dict[str, Any]:
        """The job's status."""
        report = job_status(self.memory)
        for one in report["learners"]:
            awaited = self.roster.awaited.get(one["row"])
            one["holds_up_s"] = awaited.waited_s if awaited else None
            one["killed_in_s"] = awaited.left_s if awaited else None
        report |= {
            "commands": self._reserved.report(),
            "server_private_bytes": self.servers.private_bytes(),
            "standby_pid": self.servers.standby_pid,
            "standby_missing": self.servers.why_alone or None,
            "server_stuck": self.servers.stuck or None,
            "checkpoint_age_s": self.checkpoints.age_s,
            "last_checkpoint": self.checkpoints.last or None,
            "checkpoint_warning": self.checkpoints.warning or None,
            "newer_checkpoint": self.checkpoints.newer or None,
            "names_lost": self.memory.unnamed,
            "stop_reason": self.stopping.reason or None,
            "saves_on_stop": self.stopping.saves,
            "making": self.worker.facts,
            "start": self._batches.report(),
        }
        _limit(report)
        return report

    def _checkpoint(self, request: messages.Checkpoint, client: Client) -> Reply:
        """The reply comes when the checkpoint is on the disk, or is not."""
        if coming := self._admission.model_coming:
            raise CheckpointError(f"{coming}; there is nothing to save yet")

        def done(outcome: Outcome) -> None:
            error = None if outcome["ok"] else CheckpointError(outcome["error"])
            self._sockets.reply(client, failure(error) if error else outcome)

        self.checkpoints.ask(done)
        return None

    def _copy(self, request: messages.Copy, client: Client) -> Reply:
        """The reply comes when the copy is in the client's file, or is not."""
        if not client.fds:
            raise ControlError("copy: no file came with the request")

        def done(outcome: Outcome) -> None:
            error = (
                None if outcome["ok"] else ControlError(f"no copy of the job: {outcome['error']}")
            )
            self._sockets.reply(client, failure(error) if error else outcome)

        self.checkpoints.ask(done, client.fds.pop(0), slots=request.slots)
        return None

    def _discard(self, request: messages.Discard, client: Client) -> Reply:
        """Raise ControlError if no checkpoint is newer: a stop must not lose anything."""
        if not self.checkpoints.newer:
            raise ControlError("no checkpoint is newer than the memory: stop without --discard")
        self.stopping.discards = True
        self.stopping.asked = True
        self.stopping.begin(drain=False, timeout_s=1.0)
        self.stopping.waiting.append(client)
        return None

    def _reload(self, request: messages.Reload, client: Client) -> Reply:
        memory = self.memory
        new, changed = settings.changed(
            memory.control, memory.config, request.config, memory.script
        )
        changes = memory.changes.still(new)
        changes.specs(new, memory.script.settings)
        if new != memory.config:
            memory.config, memory.changes = new, changes
            memory.enter_settings()
            self.roster.limit(new.learner_timeout_s)
            self._log.info("the job file has changed", **changed)
        return {"changed": changed}

    def _set_optimizer(self, request: messages.SetOptimizer, client: Client) -> Reply:
        changed = self.memory.change_settings(request.values)
        if changed:
            self._log.info("changing hyperparameters", **changed)
        return {"changed": changed}

    def _set_sync(self, request: messages.SetSync, client: Client) -> Reply:
        config, memory = self.memory.config, self.memory.control
        try:
            wanted = sync.parse(request.sync)
            wanted.check(
                config.learners.count if config.learners else len(self.roster.rows) or None
            )
            check_room(wanted)
        except sync.SpecError as error:
            raise ControlError(str(error)) from None
        requested, in_force = sync_change.requested(memory), sync_change.in_force(memory)
        if requested != in_force:
            raise ControlError(
                f"job {config.name!r} is just changing to {sync_change.text(memory, requested)}; "
                "ask again once it has"
            )
        wave = int(self.memory.words["wave"])
        if int(self.memory.words["work"]) == Work.WORKING and wanted.wave != wave:
            raise ControlError(
                f"the job hands out batches of waves of {wave}, not {wanted.wave}: "
                "that cannot change while it works on them"
            )
        if self.memory.model is None:
            sync_change.initialize(memory, wanted)  # no server has looked at it yet
            return {"changes": True, "sync": str(wanted)}
        is_same = str(wanted) == sync_change.text(memory, in_force)
        if is_same and "file" not in wanted.parameters:  # which may have been rewritten
            return {"changes": False, "sync": str(wanted)}
        self._log.info("changing the synchronization model", sync=str(wanted))
        sync_change.request(memory, wanted)
        self.memory.ring_bells()
        return {"changes": True, "sync": str(wanted)}


REFUSED_AT_STOP: Final[dict[type, Callable[[Requests, Any, Client], Reply]]] = {
    messages.Own: lambda self, request, client: self._batches.assign(request),
    messages.SetWork: lambda self, request, client: self._batches.set_work(request),
    messages.Load: lambda self, request, client: {"answer": self._loading.ask(request)},
    messages.Checkpoint: Requests._checkpoint,
    messages.Discard: Requests._discard,
    messages.Reload: Requests._reload,
    messages.SetOptimizer: Requests._set_optimizer,
    messages.SetSync: Requests._set_sync,
}
"""Those that a job refuses once its stop has begun."""
HANDLERS: Final[dict[type, Callable[[Requests, Any, Client], Reply]]] = REFUSED_AT_STOP | {
    messages.Status: lambda self, request, client: self.report(),
    messages.Offer: lambda self, request, client: self._admission.offer(client, request),
    messages.Attach: lambda self, request, client: self._admission.attach(client, request),
    messages.FirstBatch: lambda self, request, client: self._admission.first_batch(client, request),
    messages.Launch: lambda self, request, client: self._reserved.reserve(
        client.pid, request, self.roster.rows
    ),
    messages.Detach: Requests._detach,
    messages.Measured: Requests._measured,
    messages.Reported: Requests._reported,
    messages.LeaveOut: Requests._leave_out,
    messages.StopJob: Requests._stop,
    messages.Copy: Requests._copy,
}


def job_status(memory: JobMemory) -> dict[str, Any]:
    """Return what the segments of a job say of it; counters only ever grow.

    Other processes write there: each word is read once, and may have any value.
    """
    control = memory.words
    state = memory.state_words if memory.state is not None else None
    optimizer = script.report(memory.config, memory.script, memory.changes, memory.model)
    in_force, wanted = sync_change.in_force(memory.control), sync_change.requested(memory.control)
    attached = [_learner(control, state, row, ring) for row, ring in sorted(memory.rings.items())]
    learners = [one for one in attached if one["name"] != layout.REPLICA.decode()]
    following = int(control["next"])
    report = {
        "job": memory.config.name,
        "job_id": memory.job_id.hex(),
        "phase": _name(Phase, control["phase"]),
        "sync": sync_change.text(memory.control, in_force),
        "sync_wanted": sync_change.text(memory.control, wanted) if wanted != in_force else None,
        "optimizer": optimizer["kind"],
        "settings": optimizer,
        "history": str(memory.config.history_file()) if memory.config.history else None,
        "settings_pending": not memory.is_settled,
        "when_idle": memory.config.when_idle,
        **totals.of_job(control, state),
        "failovers": int(control["lease_generation"]) - 1,
        "learners_attached": len(learners),
        "work": {
            "state": _name(Work, control["work"]),
            "batches": int(control["batches"]),
            "epochs": int(control["epochs"]),
            "seed": int(control["seed"]),
            "epoch": following >> 32,
            "next": following & 0xFFFFFFFF,
            "epochs_done": int(control["epochs_done"]),
            "waits": owned.waits(control),
        },
        "learners": learners,
        "replicas": [one for one in attached if one not in learners],
        "model": _model(memory),
        "watchdog_pid": _pid(control["watchdog_pid"]),
        "server_pid": _pid(control["lease_pid"]),
        "fork_server_pid": _pid(control["fork_server_pid"]),
        "shared_bytes": sum(
            part.size
            for part in (memory.control, memory.weights, memory.state, *memory.rings.values())
            if part is not None
        ),
    }
    _limit(report)
    return report


def _limit(report: dict[str, Any]) -> None:
    """Replace values of metrics that no reply may have."""
    learners = (*report["learners"], *report["replicas"])
    for table, rows in ((metrics.JOB, (report,)), (metrics.LEARNER, learners)):
        for one in table:
            for row in rows:
                if one.name in row:
                    row[one.name] = one.possible(row[one.name])


def _name(kind: type[IntEnum], word: Any) -> str:
    """Return the name of a code in memory, or the code itself if it has none."""
    code = int(word)
    return kind(code).name.lower() if code in [*kind] else str(code)


def _pid(word: Any) -> int:
    """Return a pid in memory, or 0 if it is not one."""
    return max(0, int(word))


def _model(memory: JobMemory) -> dict[str, int] | None:
    if memory.model is None:
        return None
    return {
        "tensors": len(memory.model.tensors),
        "values": memory.model.values,
        "bytes": memory.model.elements * 4,
    }


def _learner(control: np.void, state: np.void | None, row: int, segment: Segment) -> dict[str, Any]:
    entry, ring = totals.row(control, state, row), segment.view(layout.RING)
    published, queue = totals.in_ring(ring, int(control["shards"]))
    applied = int(entry["applied"])
    return {
        "row": row,
        "generation": int(entry["generation"]),
        "name": entry["name"].decode(errors="replace"),
        "pid": _pid(entry["pid"]),
        "leaving": int(entry["wanted"]) != int(entry["generation"]),
        "published": published,
        **totals.of_learner(entry),
        "refused_because": layout.REASON_TEXT.get(int(entry["reason"]), ""),
        "gradient_norm": float(entry["norm"]) if applied else None,
        "loss": float(entry["loss"]) if applied else None,
        "queue": queue,
        "staleness_mean": int(entry["staleness_sum"]) / applied if applied else 0.0,
        "staleness_histogram": [int(count) for count in entry["histogram"]],
        "outstanding": int((entry["outstanding"] != layout.NO_BATCH).sum()),
        "paused": bool(int(ring["wants"]) & layout.WANTS_PAUSE),
        "others_stand_still": int(entry["exclusive"]) != 0,
    }
