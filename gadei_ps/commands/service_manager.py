"""The service manager (systemd) of this machine: its version, and which units of jobs run."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from gadei_ps.errors import UsageError

OLDEST = 248  # of systemd: ProtectProc= is of 247, PrivateIPC= of 248
# Also of names that no job can have: such a unit can be enabled, and fail.
INSTANCE = re.compile(r"gadei-ps(?P<kind>-end|-learner)?@(?P<job>[^/\s]+)\.service")
UNITS_END_S = 120.0  # how long units that end are waited for
UNITS_POLL_S = 0.2


class Scope(StrEnum):
    """The service manager that runs the job."""

    SYSTEM = "system"
    USER = "user"


@dataclass(frozen=True)
class Instances:
    """Units of jobs. used: of jobs that run, without their ends. ending: what a job has left."""

    used: tuple[str, ...]
    ending: tuple[str, ...]


def _ask(*arguments: str) -> str:
    """Return the output of systemctl; empty if this machine runs no systemd."""
    try:
        done = subprocess.run(
            ["systemctl", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def version() -> int | None:
    """Return the version of systemd; None without systemd."""
    found = re.match(r"systemd (\d+)", _ask("--version"))
    return int(found[1]) if found else None


def too_old() -> str | None:
    """Return one line if the units need a newer systemd."""
    found = version()
    if found is None or found >= OLDEST:
        return None
    return f"systemd is {found}, and the units of gadei-ps need {OLDEST} or newer"


def instances(scope: Scope) -> Instances:
    """Those that are there now; none if this machine has no systemd to be asked."""
    states = {}
    asked = (f"--{scope}", "list-units", "--plain", "--no-legend", "gadei-ps*@*")
    for line in _ask(*asked).splitlines():
        name, _, state, *_ = line.split()
        if (found := INSTANCE.fullmatch(name)) and state not in ("inactive", "failed"):
            states[name] = (found["kind"], found["job"], state)
    jobs = {job for kind, job, state in states.values() if kind is None and state != "deactivating"}
    used = [name for name, (kind, job, _) in states.items() if job in jobs and kind != "-end"]
    ending = [name for name, (_, job, _) in states.items() if job not in jobs]
    return Instances(tuple(sorted(used)), tuple(sorted(ending)))


def wait_for_ends(scope: Scope, report: Callable[[str], None]) -> None:
    """Wait until the units of stopped jobs have ended. report: receives their names, once.

    Raises UsageError after UNITS_END_S.
    """
    until, printed = time.monotonic() + UNITS_END_S, False
    while ending := instances(scope).ending:
        if time.monotonic() > until:
            raise UsageError(
                f"{ending[0]} has not ended within {UNITS_END_S:.0f} s, and nothing was changed; "
                "try again when it is inactive"
            )
        if not printed:
            report(f"waiting for {' '.join(ending)} to end, at most {UNITS_END_S:.0f} s")
            printed = True
        time.sleep(UNITS_POLL_S)
