"""Actions of top and the dashboard on a job, each by the code of its command."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping

from gadei_ps.commands import change, jobs
from gadei_ps.errors import UsageError
from gadei_ps.job import faults
from gadei_ps.job.faults import Role
from gadei_ps.memory import shm
from gadei_ps.show import view

CHANGE_S = 10.0  # until new settings are in force
DRAIN_S = 30.0  # that learners have to finish their batches
ACTIONS = ("checkpoint", "set", "stop", "kill")
NUMBER = re.compile("[0-9]{1,10}")


def perform(job: str, action: str, values: Mapping[str, str]) -> str:
    """Do one of ACTIONS and describe the outcome in one line. Raises GadeiError.

    values: of `set`: settings, as on the command line. Of `stop`: drain. Of `kill`: role, pid, and
    row of a learner.
    """
    shm.check_job_name(job)
    match action:
        case "checkpoint":
            return view.checkpointed(jobs.checkpoint(job))
        case "set":
            return set_values(job, values.get("settings", ""))
        case "stop":
            drain = bool(values.get("drain"))
            return view.stopped(jobs.stop(job, drain=drain, timeout_s=DRAIN_S))
        case "kill":
            return kill(job, values.get("role", ""), values.get("row", ""), values.get("pid", ""))
    raise UsageError(f"there is no action {action!r}")


def set_values(job: str, text: str) -> str:
    """Change hyperparameters, or the synchronization model: `lr=0.01 momentum=0.9`, `sync=bsp`."""
    try:
        settings = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from None
    if not settings:
        raise UsageError("no setting is given; write FIELD=VALUE, such as lr=0.01")
    return change.set_job(job, settings, CHANGE_S)[1]


def kill(job: str, role: str, row: str, pid: str) -> str:
    """Kill a process of the job, if the role still belongs to this pid. Raises ControlError."""
    numbers = (pid, row) if role == Role.LEARNER else (pid,)
    if role not in list(Role) or not all(NUMBER.fullmatch(one) for one in numbers):
        raise UsageError("name a process by its role and pid, a learner also by its row")
    number = int(row) if role == Role.LEARNER else None
    return view.killed(faults.kill(job, Role(role), number, signal.SIGKILL, int(pid)))
