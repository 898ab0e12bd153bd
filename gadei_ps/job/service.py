"""Whether a unit of systemd serves a job, and the commands that fit: for advice in messages."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gadei_ps import homes
from gadei_ps.errors import ControlError
from gadei_ps.job import paths

VARIABLE = "GADEI_PS_UNIT"  # set by the units
SYSTEM_JOBS = Path("/etc/gadei-ps")


@dataclass(frozen=True)
class Service:
    """The units of a job. system: those of the system, and not of a user."""

    job: str
    system: bool

    @property
    def unit(self) -> str:
        """Of the watchdog."""
        return f"gadei-ps@{self.job}"

    @property
    def end(self) -> str:
        """Of what ends the job when its watchdog is dead."""
        return f"gadei-ps-end@{self.job}"

    def systemctl(self, verb: str, *units: str) -> str:
        """A command line; units: by default the watchdog's."""
        user = "" if self.system else " --user"
        return f"systemctl{user} {verb} {' '.join(units or (self.unit,))}"


def here(job: str) -> Service:
    """The service that a job of this runtime directory has, if it has one."""
    return Service(job, _is_system())


def of(job: str) -> Service | None:
    """The job's service: this process runs in a unit of it, or it has the job's file."""
    found = here(job)
    if runs_in(job):
        return found
    jobs = SYSTEM_JOBS if found.system else platformdirs.user_config_path("gadei-ps")
    try:
        return found if (jobs / f"{job}.toml").is_file() else None
    except OSError:
        return None


def runs_in(job: str, *, watchdog: bool = False) -> bool:
    """Whether this process is in one of the job's units. watchdog: only in that of the watchdog."""
    kinds = ("",) if watchdog else ("", "-end", "-learner")
    unit = os.environ.get(VARIABLE, "")
    return unit in [f"gadei-ps{kind}@{job}.service" for kind in kinds]


def _is_system() -> bool:
    try:
        return paths.directory() == homes.RUNTIME
    except (ControlError, OSError):
        return False


def serve(job: str) -> str:
    """The command that serves the job, or serves it again."""
    found = of(job)
    return "gadei-ps serve" if found is None else found.systemctl("start")


def command(job: str, arguments: str) -> str:
    """A command for the job's user; in full where the reader is perhaps another one.

    Raises nothing: advice must not end a watchdog whose runtime directory cannot be used any more.
    """
    with contextlib.suppress(ControlError, OSError):
        if paths.owner() != os.getuid() or (_is_system() and runs_in(job)):
            return paths.as_owner(arguments)
    return f"gadei-ps {arguments}"


def way_on(job: str) -> str:
    """What becomes of the memory of a job that has failed."""
    if runs_in(job, watchdog=True):
        return f"systemd starts the job again, or {here(job).end} ends it"
    return f"continue with {serve(job)}, or drop it with {command(job, f'gc {job}')}"
