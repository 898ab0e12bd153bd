"""Whether a unit of systemd serves a job, and the commands that fit: for advice in messages."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gadei_ps import homes
from gadei_ps.errors import ControlError
from gadei_ps.job import paths

VARIABLE = "GADEI_PS_UNIT"  # set by the units
MANAGER = Path("/run/systemd/system")  # sd_booted(3): there if systemd runs this machine
UNITS = tuple(
    map(Path, ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd"))
)


@dataclass(frozen=True)
class Service:
    """The units of a job. system: those of the system, and not of a user."""

    job: str
    system: bool

    @property
    def unit(self) -> str:
        """Unit of the watchdog."""
        return f"gadei-ps@{self.job}"

    @property
    def end_unit(self) -> str:
        """Unit that stops the job when its watchdog is dead."""
        return f"gadei-ps-end@{self.job}"

    def systemctl(self, verb: str, *units: str) -> str:
        """A command line; units: by default the watchdog's."""
        user = "" if self.system else " --user"
        return f"systemctl{user} {verb} {' '.join(units or (self.unit,))}"


def expected(job: str) -> Service:
    """The service that a job of this runtime directory has, if it has one."""
    return Service(job, _is_system())


def of(job: str) -> Service | None:
    """The job's service: this process runs in a unit of it, or the units have the job's file."""
    found = expected(job)
    return found if runs_in(job) or is_installed(job, system=found.system) else None


def is_installed(job: str, *, system: bool) -> bool:
    """Return whether systemd runs here, has the units, and they have the job's file.

    system: the system's units. A job file alone proves nothing: in a container, for example,
    `gadei-ps serve` reads the same one.
    """
    jobs = homes.JOBS if system else platformdirs.user_config_path("gadei-ps")
    places = [path / ("system" if system else "user") for path in UNITS]
    if not system:
        places.append(platformdirs.user_config_path("systemd") / "user")
    try:
        there = MANAGER.is_dir() and (jobs / f"{job}.toml").is_file()
        return there and any((path / "gadei-ps@.service").is_file() for path in places)
    except OSError:
        return False


def runs_in(job: str, *, watchdog: bool = False) -> bool:
    """Return whether this process is in one of the job's units. watchdog: only the watchdog's."""
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
    return "gadei-ps serve JOB.toml" if found is None else found.systemctl("start")


def command(job: str, arguments: str) -> str:
    """A command for the job's user; in full where the reader is perhaps another one.

    Raises nothing: advice must not end a watchdog whose runtime directory cannot be used any more.
    """
    with contextlib.suppress(ControlError, OSError):
        if paths.owner() != os.getuid() or (_is_system() and runs_in(job)):
            return paths.as_owner(arguments)
    return f"gadei-ps {arguments}"


def restore_commands(job: str, aside: Path) -> str:
    """Return the commands that resume the job from a checkpoint that was set aside."""
    if not runs_in(job, watchdog=True):
        restore = command(job, f"restore {shlex.quote(str(aside))} --job-file JOB.toml")
        return f"{command(job, f'stop {job}')}, then {restore}"
    unit = expected(job)  # restore would serve the job outside of it
    user = f"sudo -u {shlex.quote(paths.user(os.getuid()))} " if unit.system else ""
    name = aside.name.removeprefix("superseded-").partition(".")[0]
    move = shlex.join(("mv", "-nT", str(aside), str(aside.with_name(name))))
    return (
        f"{unit.systemctl('stop')}; {user}{move}; move away any checkpoint of a higher version; "
        f"{unit.systemctl('start')}"
    )


def next_steps(job: str) -> str:
    """Describe the fate of the memory of a job that has failed."""
    if runs_in(job, watchdog=True):
        return f"systemd starts the job again, or {expected(job).end_unit} ends it"
    return f"continue with {serve(job)}, or drop it with {command(job, f'gc {job}')}"
