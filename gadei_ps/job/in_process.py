"""Jobs and learners of this process: the job of learners that name none, and the learners here.

Before a job that this process serves ends, its learners here leave it: their models keep the
weights, in memory of their own.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

from gadei_ps.errors import GadeiError, UsageError

JOB_VARIABLE = "GADEI_PS_JOB"
"""A job's name or socket; child processes have it, too."""


class Learner(Protocol):
    """A client of a job."""

    job: str

    @property
    def left(self) -> bool:
        """Whether it has detached."""

    def leave(self) -> None:
        """Detach, as what was made around it does."""


class _State:
    """Jobs and learners of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.learners: weakref.WeakSet[Learner] = weakref.WeakSet()
        self.jobs: list[str] = []  # sockets, the newest last
        self.outer: str | None = None  # the variable before the first of them


_here = _State()


def target_job(job: str | None) -> str:
    """The job that a learner is to join. Raises UsageError if none is named."""
    target = job or os.environ.get(JOB_VARIABLE)
    if not target and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "this process was started by torchrun, and has no job: start the script with gadei-ps "
            "run NAME --learners N -- python SCRIPT instead"
        )
    if not target:
        raise UsageError(
            "which job? give its name, or start the program with gadei-ps run or attach, or in a "
            f"process with a gadei_ps.serve() (they set {JOB_VARIABLE})"
        )
    return target


def register(learner: Learner) -> None:
    """It has attached."""
    if _here.pid != os.getpid():  # a fork's learners are its own
        _here.pid, _here.learners = os.getpid(), weakref.WeakSet()
    _here.learners.add(learner)


def detach_all(job: str) -> None:
    """All learners of this process leave the job. What keeps them from leaving well is dropped."""
    if _here.pid != os.getpid():
        return
    for one in [one for one in _here.learners if one.job == job and not one.left]:
        with contextlib.suppress(GadeiError):
            one.leave()


def set_default_job(socket: str) -> None:
    """Let learners that name no job join this one from now on."""
    if not _here.jobs:
        _here.outer = os.environ.get(JOB_VARIABLE)
    _here.jobs.append(socket)
    os.environ[JOB_VARIABLE] = socket


def unset_default_job(socket: str) -> None:
    """Let them join the job of the call before again, if it still exists."""
    if socket not in _here.jobs:
        return
    _here.jobs.remove(socket)
    now = _here.jobs[-1] if _here.jobs else _here.outer
    if now is None:
        os.environ.pop(JOB_VARIABLE, None)
    else:
        os.environ[JOB_VARIABLE] = now
