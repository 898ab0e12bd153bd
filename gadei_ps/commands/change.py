"""Changes of a job that runs: its synchronization model, its hyperparameters, its job file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps import sync
from gadei_ps.commands.jobs import plain, status
from gadei_ps.errors import ControlError, UsageError
from gadei_ps.job import changes, control
from gadei_ps.job.config import JobConfig
from gadei_ps.job.control import Reload, SetOptimizer, SetSync
from gadei_ps.show import optimizer_line

CHANGE_POLL_S = 0.02
RELOAD_TIMEOUT_S = 60.0  # until a server has the hyperparameters of a changed job file


def set_job(job: str, settings: Sequence[str], timeout_s: float) -> tuple[dict[str, Any], str]:
    """Change hyperparameters, or the synchronization model; return the result, and its text.

    settings: `lr=0.01 momentum=0.9`, or `sync=bsp` alone. Raises as the functions below.
    """
    models = [one.removeprefix("sync=") for one in settings if one.startswith("sync=")]
    if not models:
        result = set_optimizer(job, changes.parse(settings), timeout_s)
        return result, optimizer_line.changed(result)
    if len(settings) > 1:
        raise UsageError("sync is changed at a barrier, the rest at once: give sync=MODEL alone")
    result = set_sync(job, models[0], timeout_s)
    before = f"{result['before']} ->" if result["changed"] else "already has"
    return result, f"{before} {result['sync']}"


def set_sync(job: str, spec: str, timeout_s: float) -> dict[str, Any]:
    """Change the synchronization model and wait for the barrier at which it takes effect.

    Raises UsageError if `spec` is not a model, ControlError if the job refuses it or does not reach
    a barrier in time. After a time-out the change still takes effect at the next barrier.
    """
    try:
        wanted = str(sync.parse(spec))
    except sync.SpecError as error:
        raise UsageError(f"sync: {error}") from None
    before = status(job)["sync"]
    reply = plain(control.ask(job, SetSync(sync=wanted)))
    until = time.monotonic() + timeout_s
    while reply["changes"]:
        report = status(job)
        if report["sync_wanted"] is None:
            break
        if time.monotonic() > until:
            raise ControlError(
                f"job {job!r} has not reached a barrier within {timeout_s:g} s; it will change to "
                f"{reply['sync']} once every learner has pushed what it is computing"
            )
        time.sleep(CHANGE_POLL_S)
    return {"job": job, "sync": reply["sync"], "before": before, "changed": reply["changes"]}


def set_optimizer(job: str, values: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Change numbers of the optimizer and wait until they are in force.

    `changed` has what each was and is, by field; `version`: gradients applied before the first with
    the new ones. Raises UsageError for what the job's optimizer cannot have, ControlError if no
    server takes them in time; they are taken later then.
    """
    reply = plain(control.ask(job, SetOptimizer(values=dict(values))))
    version = _await_numbers(job, timeout_s)
    return {"job": job, "changed": reply["changed"], "version": version}


def _await_numbers(job: str, timeout_s: float) -> int:
    """Return the version from which on the hyperparameters are in force."""
    until = time.monotonic() + timeout_s
    while (report := status(job))["settings_pending"]:
        if time.monotonic() > until:
            raise ControlError(
                f"job {job!r} has not taken the hyperparameters within {timeout_s:g} s; it "
                "takes them as soon as its server applies gradients"
            )
        time.sleep(CHANGE_POLL_S)
    return int(report["settings_version"])


def reload(job: JobConfig) -> dict[str, Any]:
    """Apply a job's changed file to the running job; return the fields that have changed.

    Raises UsageError or ControlError, and changes nothing, if a field may not change; JobNotFound.
    """
    reply = plain(control.ask(job.name, Reload(config=job.model_dump(mode="json"))))
    _await_numbers(job.name, RELOAD_TIMEOUT_S)
    return {"job": job.name, "changed": reply["changed"]}
