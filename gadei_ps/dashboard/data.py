"""Jobs as they are now, with rates since the last look, and the processes of each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from gadei_ps.errors import GadeiError
from gadei_ps.job import paths
from gadei_ps.job.diagnosis import has_lost_socket
from gadei_ps.job.faults import Role
from gadei_ps.monitoring.reading import Job, Reader, State
from gadei_ps.show.counts import counted, rate
from gadei_ps.show.status import checkpoints, counters
from gadei_ps.show.tables import age, size, when

RATE_S = 0.9  # shortest time over which a rate is taken
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Process:
    """A process of a job. row: a learner's, else None."""

    role: Role
    pid: int
    row: int | None = None
    cpu_percent: float | None = None
    """Share of one core since the last look; None if it is unknown."""
    memory_bytes: int | None = None
    """Resident memory, shared memory included; None if it is unknown."""

    @property
    def name(self) -> str:
        return self.role.value if self.row is None else f"learner {self.row}"


@dataclass(frozen=True)
class View:
    """A job as it is now.

    speed: samples/s, or gradients/s if no samples are reported. rates: the same of each learner, by
    row. loss: mean of the gradients applied since the last look. staleness: theirs. Each is None or
    absent until two looks have been taken. is_elsewhere: whether it has another runtime directory.
    """

    job: Job
    unit: str
    speed: float | None = None
    loss: float | None = None
    staleness: float | None = None
    rates: Mapping[int, float] | None = None
    processes: Sequence[Process] = ()
    is_elsewhere: bool = False

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def state(self) -> str:
        """State of the job; as in `ls`, a job of another runtime directory is `elsewhere`."""
        return "elsewhere" if self.is_elsewhere else self.job.state.value

    @property
    def queue(self) -> int:
        """Gradients in all rings."""
        return sum(int(one.metrics["queue"] or 0) for one in self.job.learners)

    @property
    def histogram(self) -> list[int]:
        """Gradients by bins of staleness; empty without learners."""
        found = [one.staleness_histogram for one in self.job.learners]
        return [sum(column) for column in zip(*found, strict=True)]

    @property
    def speed_text(self) -> str:
        """Speed with its unit; empty if it is unknown."""
        return f"{rate(self.speed)} {self.unit}" if self.speed is not None else ""

    def cells(self) -> dict[str, str]:
        """Describe the job by the columns of a table."""
        job, values = self.job, self.job.metrics
        return {
            "job": job.name,
            "user": paths.user(job.uid),
            "state": self.state,
            "model": size(job.model.bytes) if job.model else "",
            "learners": str(len(job.learners)),
            "speed": self.speed_text,
            "loss": f"{self.loss:.4g}" if self.loss is not None else "",
            "queue": str(self.queue),
            "failovers": str(values.get("failovers", "")),
            "age": age(started) if (started := values.get("started")) else "",
        }

    def process_cells(self, one: Process) -> dict[str, str]:
        """Describe a process by the columns of a table."""
        cells = {
            "process": one.name,
            "pid": str(one.pid),
            "CPU": f"{one.cpu_percent:.0f}%" if one.cpu_percent is not None else "",
            "memory": size(one.memory_bytes),
        }
        if one.row is None:
            return cells
        values = next(each.metrics for each in self.job.learners if each.row == one.row)
        speed, queue, loss = (self.rates or {}).get(one.row), values["queue"], values["loss"]
        return cells | {
            "speed": rate(speed) if speed is not None else "",
            "applied": f"{values['applied']:,}",
            "queue": str(queue) if queue is not None else "",
            "staleness": f"{values['staleness_mean']:.1f}",
            "loss": f"{loss:.4g}" if loss is not None else "",
        }

    def facts(self) -> dict[str, str]:
        """Describe the job in lines, by their names."""
        job, values = self.job, self.job.metrics
        if job.problem:
            return {"problem": job.problem}
        lines = counters({name: value for name, value in values.items() if value is not None})
        model, work = job.model, job.work
        settings = ", ".join(f"{name} {value:g}" for name, value in job.hyperparameters.items())
        hint = f": run or serve continues it, gadei-ps gc {job.name} removes it"
        rows = {
            "state": self.state + (hint if job.state is State.DEAD else ""),
            "synchronization": job.sync
            + (f" (changing to {job.sync_wanted})" if job.sync_wanted else ""),
            "optimizer": f"{job.optimizer}, {settings}" if settings else job.optimizer,
            "model": f"{counted(model.values, 'value')}, {size(model.bytes)}" if model else "",
            "speed": self.speed_text,
            "loss": f"{self.loss:.6g}" if self.loss is not None else "",
            "samples": f"{values['samples']:,}" if values["samples"] else "",
            "version": f"{values['version']:,}",
            "epochs": f"{work['epochs_done']} of {work['epochs']}" if work else "",
            "started": f"{when(values['started'] or 0)}, {age(values['started'] or 0)} ago",
            "memory": f"{size(int(values['shared_bytes'] or 0))} shared",
            **lines,
            "checkpoints": checkpoints(values),
        }
        return {name: text for name, text in rows.items() if text}


class Watcher:
    """Looks at jobs again and again; for one thread at a time."""

    def __init__(self, uid: int | None = None) -> None:
        """uid: whose jobs; by default ours, and for root those of all users."""
        self._reader = Reader(uid)
        self._known: dict[tuple[str, int], tuple[float, Job, View]] = {}
        """Time (s), state and view of each job when its rates were taken."""
        self._processes: dict[int, psutil.Process] = {}
        self._elsewhere: dict[int, bool] = {}
        """Whether a watchdog has another runtime directory, by its pid: it stays where it is."""

    def look(self, only: str | None = None, chosen: tuple[str, int] = ("", -1)) -> list[View]:
        """Look at all jobs, by name, or at the one of this name.

        Of all jobs, processes are measured only of the one that is chosen, by name and user.
        """
        views = [
            self._view(job, only is not None or (job.name, job.uid) == chosen)
            for job in self._reader.jobs(only)
        ]
        there = {(view.name, view.job.uid) for view in views}
        pids = {one.pid for view in views for one in view.processes}
        self._known = {key: one for key, one in self._known.items() if key in there}
        self._processes = {pid: one for pid, one in self._processes.items() if pid in pids}
        self._elsewhere = {pid: one for pid, one in self._elsewhere.items() if pid in pids}
        return views

    def look_at(self, job: str) -> View | None:
        """Look at one job; None if there is no memory of it."""
        return next(iter(self.look(job)), None)

    def _view(self, job: Job, measured: bool) -> View:
        key, now = (job.name, job.uid), time.monotonic()
        if job.state is State.UNREADABLE:
            return View(job, "")
        counter = "samples" if job.metrics["samples"] else "gradients_applied"
        view = View(job, "samples/s" if counter == "samples" else "gradients/s")
        at, before, last = self._known.get(key, (now, job, view))
        if before.job_id != job.job_id:
            at, before, last = now, job, view
        if now - at >= RATE_S:
            last = _with_rates(view, before, now - at, counter)
            at, before = now, job
        self._known[key] = at, before, last
        processes = _processes(job)
        if measured:
            processes = [self._measured(one) for one in processes]
        pid = job.watchdog_pid
        if pid is not None and pid not in self._elsewhere:
            self._elsewhere[pid] = _is_elsewhere(job)
        is_elsewhere = pid is not None and self._elsewhere[pid]
        return replace(last, job=job, processes=processes, is_elsewhere=is_elsewhere)

    def _measured(self, one: Process) -> Process:
        """Add processor time and memory; a process that has ended has none."""
        with contextlib.suppress(psutil.Error):
            known = self._processes.get(one.pid)
            is_new = known is None or not known.is_running()
            if known is None or is_new:
                known = self._processes[one.pid] = psutil.Process(one.pid)
            cpu = known.cpu_percent()  # the first call begins to measure
            memory = known.memory_info().rss
            return replace(one, cpu_percent=None if is_new else cpu, memory_bytes=memory)
        return one


def _is_elsewhere(job: Job) -> bool:
    """Return whether a job of this user has its watchdog in another runtime directory."""
    with contextlib.suppress(GadeiError, OSError):
        files = paths.lock_path(job.name), paths.socket_path(job.name)
        if job.uid == paths.owner() and not any(map(os.path.lexists, files)):
            return not has_lost_socket(job.name, job.uid)
    return False


def _with_rates(view: View, before: Job, took: float, counter: str) -> View:
    """Add what has happened in the time since the job was `before`."""
    now = view.job.metrics
    losses = _grown(before.metrics, now, "loss_count")
    loss = _grown(before.metrics, now, "loss_sum") / losses if losses > 0 else None
    name = "samples" if counter == "samples" else "applied"
    known = {(one.row, one.generation): one.metrics for one in before.learners}
    rates, stale, applied = {}, 0.0, 0.0
    for one in view.job.learners:
        past = known.get((one.row, one.generation), {})
        rates[one.row] = _grown(past, one.metrics, name) / took
        applied += _grown(past, one.metrics, "applied")
        stale += _staleness(one.metrics) - _staleness(past)
    return replace(
        view,
        speed=_grown(before.metrics, now, counter) / took,
        loss=loss,
        staleness=max(0.0, stale) / applied if applied > 0 else None,
        rates=rates,
    )


def _grown(before: Values, now: Values, name: str) -> float:
    return float(now.get(name) or 0) - float(before.get(name) or 0)


def _staleness(learner: Values) -> float:
    """Return the sum over the gradients of a learner."""
    return float(learner.get("staleness_mean") or 0) * float(learner.get("applied") or 0)


def _processes(job: Job) -> list[Process]:
    """List the processes of a job, in the order in which they are shown."""
    roles = {
        Role.WATCHDOG: job.watchdog_pid,
        Role.SERVER: job.server_pid,
        Role.STANDBY: job.standby_pid,
        Role.FORK_SERVER: job.fork_server_pid,
    }
    found = [Process(role, pid) for role, pid in roles.items() if pid]
    found += [Process(Role.LEARNER, one.pid, one.row) for one in job.learners if not one.leaving]
    return found
