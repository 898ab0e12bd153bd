"""Where install-unit puts the files of units.py, and what is next for a job.

What jobs have besides these files is in belongings.py.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import platformdirs

from gadei_ps import homes
from gadei_ps.commands import differences, hand_over, manager, units
from gadei_ps.commands.belongings import Belongings
from gadei_ps.commands.doctor.memory import lingers
from gadei_ps.commands.units import SERVICE_USER, Scope
from gadei_ps.errors import UsageError
from gadei_ps.job import paths
from gadei_ps.memory.shm import JOB_NAME, check_job_name
from gadei_ps.show import plain
from gadei_ps.storage import files

HIDDEN = ("/tmp", "/var/tmp")
MARK = "gadei-ps install-unit"  # stands in all that install() writes
EXAMPLE = "demo"
ROOT = Path("/")
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}", re.IGNORECASE)
SETS_USER = re.compile(r"^[ \t]*User[ \t]*=[ \t]*(\S*)[ \t]*$", re.MULTILINE)
# systemd interprets quotes, backslashes and dollars in a command line, and allows no line breaks.
UNFIT = re.compile(r"[\x00-\x1f\x7f\"'\\$]")


class Found(StrEnum):
    """The file that install() found at the unit's path."""

    NOTHING = "nothing"
    SAME = "the same"
    ANOTHER = "another"


@dataclass(frozen=True)
class File:
    """One unit: what was found at its path, and whether it was written.

    differs: what of the file that was found is not as in `text`; empty unless it is another.
    """

    path: Path
    found: Found
    written: bool
    text: str
    differs: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "found": self.found.value,
            "written": self.written,
            "differs": self.differs,
            "unit": self.text,
        }


@dataclass(frozen=True)
class Installed:
    """What install() found and did.

    user: that the jobs run as, None for one's own. kept: it is not the usual one, but that of the
    units that were there. job_file: the job's, which is never replaced. next: commands that start
    the job with the units. notes: what is wrong with files that are there, a line for each.
    ends_at_failure: whether those of `next` after one that fails would do harm.
    """

    scope: Scope
    job: str
    units: tuple[File, ...]
    job_file: File | None
    next: tuple[str, ...]
    user: str | None
    kept: bool
    notes: tuple[str, ...] = ()
    ends_at_failure: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "scope": self.scope.value,
            "user": self.user,
            "job": self.job,
            "units": [one.as_dict() for one in self.units],
            "job_file": None if self.job_file is None else self.job_file.as_dict(),
            "next": list(self.next),
            "notes": list(self.notes),
        }


def program() -> list[str]:
    """The beginning of a command line that runs this installation."""
    found = [Path(sys.argv[0]).absolute(), Path(sysconfig.get_path("scripts")) / "gadei-ps"]
    for path in found:
        if path.name == "gadei-ps" and path.is_file() and os.access(path, os.X_OK):
            return [str(path)]
    return [sys.executable, *shlex.split("-P -m gadei_ps")]


def unit_program() -> str:
    """The same, quoted for systemd."""
    path, *words = program()
    return " ".join([quoted(path), *words])


def quoted(path: str) -> str:
    """One word of a command line. Raises UsageError if systemd cannot express the path."""
    if UNFIT.search(path):
        raise UsageError(
            f"{path!r}: systemd cannot start a program with this path; install gadei-ps under a "
            "path without quotes, backslashes, dollars and control characters"
        )
    path = path.replace("%", "%%")
    return f'"{path}"' if re.search(r"\s|^[-@:+!|;]", path) else path


def directory(scope: Scope) -> Path:
    """Where the manager looks for units of this machine, or of this user."""
    if scope == Scope.SYSTEM:
        return Path("/etc/systemd/system")
    return platformdirs.user_config_path() / "systemd/user"


def _bases(where: Path | None) -> list[Path]:
    """Where the system's manager looks for drop-ins, the most important one first."""
    root = where or ROOT
    others = [root / one for one in ("run/systemd/system", "usr/lib/systemd/system")]
    return [where or directory(Scope.SYSTEM), *others]


def job_directory(scope: Scope) -> Path:
    """Where the units look for job files."""
    if scope == Scope.SYSTEM:
        return homes.JOBS
    return platformdirs.user_config_path("gadei-ps")


def place(scope: Scope, name: str, where: Path | None) -> Path:
    """The path of a file of units.texts()."""
    return ((where or Path("/etc")) if "/" in name else (where or directory(scope))) / name


def install(
    scope: Scope,
    *,
    user: str | None = None,
    job: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    where: Path | None = None,
) -> Installed:
    """Writes all files of units.texts() to their places, or below `where`.

    Also writes a file for the job, unless it has one; without `job`, one for EXAMPLE if there is no
    job file at all. Without `user`, units of the system keep the user that they have. Raises
    UsageError, and changes nothing, if the units could not work, or if another one is there and
    `force` is not given.
    """
    if user is not None and scope == Scope.USER:
        raise UsageError("--run-as needs --system: jobs of --user run as yourself")
    before = None if scope == Scope.USER else user_of(place(scope, units.NAME, where))
    asked, kept = user, None if user else before
    user = user or kept or SERVICE_USER
    if not USER_NAME.fullmatch(user):
        raise UsageError(f"--run-as: {user!r} is not a valid name of a user")
    if job is not None:
        check_job_name(job)
    if scope == Scope.SYSTEM and not dry_run and where is None and os.geteuid():
        raise UsageError("--system needs root: sudo gadei-ps install-unit --system, or use --user")
    if not dry_run and (old := manager.too_old()):
        raise UsageError(f"{old}; start the job with `gadei-ps serve` instead")
    if scope == Scope.SYSTEM and not dry_run:
        check_reach(user, places())
    found = []
    for name, text in units.texts(scope, unit_program(), user, _group(user)).items():
        path = place(scope, name, where)
        there = _look(path, text)
        differs = differences.of(path, text) if there == Found.ANOTHER else ""
        found.append(File(path, there, there != Found.SAME and not dry_run, text, differs))
    if not force and not dry_run:
        _check_same(found)
    jobs = where / "gadei-ps" if where else job_directory(scope)
    theirs = Belongings.of(scope, jobs, where, before or user)
    handed: list[str] = []
    notes = list(_notes(jobs))
    bases = _bases(where)
    set_by = _set_by(bases, user) if scope == Scope.SYSTEM else None
    if scope == Scope.SYSTEM:
        notes += _notes_of_jobs(bases, set_by[1] if set_by else user)
    if set_by is not None:  # then the directories are that user's, and stay so
        says = f"{set_by[0]} makes jobs run as {set_by[1]}"
        if asked is not None and asked != before:
            raise UsageError(f"{says}, whatever --run-as says: change it there")
        notes.append(f"{says}, and not as {user}: systemd gives it the directories at a start")
    elif scope == Scope.SYSTEM:
        if not dry_run:
            _check_nobody_runs(theirs, user, before, asks=where is None)
        plan = hand_over.plan(theirs, user)
        handed = [*_settled(theirs, user, before), *plan.commands]
        notes += plan.notes
    file = None
    if job is not None or not any(jobs.glob("*.toml")):
        path, text = jobs / f"{job or EXAMPLE}.toml", units.job_file(scope)
        there = _look(path, text)
        file = File(path, there, there == Found.NOTHING and not dry_run, text)
    for one in (*found, *((file,) if file else ())):
        if one.written:
            _write(one.path, one.text)
    name = job or EXAMPLE
    who = user if scope == Scope.SYSTEM else None
    told = tuple(_next(scope, user, name, handed))
    kept = None if kept == SERVICE_USER else kept
    return Installed(
        scope, name, tuple(found), file, told, who, kept is not None, tuple(notes), bool(handed)
    )


def _check_same(found: Sequence[File]) -> None:
    """Raises UsageError if one of the files that are there differs."""
    another = [one for one in found if one.found == Found.ANOTHER]
    if another:
        told = "; ".join(f"{one.path} exists and differs: {one.differs}" for one in another)
        raise UsageError(
            f"{told}. --print shows the new units, --force replaces the old ones; put your own "
            "changes into a drop-in (systemctl edit gadei-ps@)"
        )


def _check_nobody_runs(theirs: Belongings, user: str, before: str | None, *, asks: bool) -> None:
    """Raises UsageError if a job runs that another user is about to get. asks: systemd, too.

    A job that has just been stopped is waited for.
    """
    former = before or theirs.owner()
    if former in (None, user):
        return
    running = list(manager.instances(Scope.SYSTEM).used) if asks else []
    if not running and asks:
        manager.wait_for_ends(Scope.SYSTEM, say)
    living = [one for one in theirs.memory([former or user]) if one.living and one.user != user]
    if running:
        what, stop = f"{running[0]} runs", f"systemctl stop {shlex.join(running)}"
    elif living:
        job = living[0].job
        what, stop = f"job {job!r} of user {living[0].user} runs", theirs.stop(program(), living[0])
    else:
        return
    raise UsageError(
        f"{what}, and user {user} could not go on with what is user {former}'s: stop it first "
        f"({stop}), then install the units for user {user}"
    )


def _settled(theirs: Belongings, user: str, before: str | None) -> list[str]:
    """Commands after which no other user has memory of jobs that have ended."""
    users = [one for one in (before,) if one is not None]
    memory = [one for one in theirs.memory(users) if one.user != user and not one.living]
    return theirs.settle(program(), memory)


def _notes(jobs: Path) -> Iterator[str]:
    """What is wrong with the names of files in the directory of job files."""
    rule = "1 to 48 letters, digits, '-' and '_', beginning with a letter or digit"
    for path in sorted(one for one in jobs.glob("*") if one.suffix in (".toml", ".learner")):
        if not JOB_NAME.fullmatch(path.stem):
            yield f"{str(path)!r}: no job can be called {path.stem!r}: rename the file ({rule})"
        elif path.suffix == ".learner" and not path.with_suffix(".toml").exists():
            yield f"{path}: there is no job file {path.stem}.toml beside it"


def user_of(path: Path) -> str | None:
    """That of the system's unit at this path; None if there is no such unit."""
    if path.is_symlink() or not path.is_file():
        return None
    found = SETS_USER.findall(path.read_text(errors="replace"))
    return found[-1] or "root" if found else None


def _set_by(bases: Sequence[Path], user: str, job: str = "") -> tuple[Path, str] | None:
    """The drop-in that decides who runs all jobs, or this one, and that user.

    None if no drop-in makes it another than `user`. Of files with one name, the first directory's
    is read; of settings, the last file's counts.
    """
    read: dict[str, Path] = {}
    for base in bases:
        for path in base.glob(f"gadei-ps@{job}.service.d/*.conf"):
            read.setdefault(path.name, path)
    decides = None
    for _, path in sorted(read.items()):
        text = path.read_text(errors="replace") if path.is_file() else ""
        for value in SETS_USER.findall(text):
            decides = path, value or "root"
    return None if decides is None or decides[1] == user else decides


def _notes_of_jobs(bases: Sequence[Path], user: str) -> Iterator[str]:
    """Of drop-ins for one job that set another user."""
    found = (path.name for base in bases for path in base.glob("gadei-ps@?*.service.d"))
    jobs = {name.removeprefix("gadei-ps@").removesuffix(".service.d") for name in found}
    for job in sorted(jobs - {""}):
        if (set_by := _set_by(bases, user, job)) is not None:
            path, other = set_by
            yield (
                f"{path} makes job {job} run as {other}, and not as {user}: all jobs share their "
                "directories, so give them all one user (install-unit --run-as)"
            )


def _group(user: str) -> str:
    """The user's own, which may be still to be made."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return user


def say(text: str) -> None:
    plain.say(f"gadei-ps: {text}")


def _look(path: Path, unit: str) -> Found:
    if path.is_symlink():  # masked, or another file's link, which must not be followed
        return Found.ANOTHER
    try:
        there = path.read_text(errors="replace")
    except FileNotFoundError:
        return Found.NOTHING
    return Found.SAME if there == unit else Found.ANOTHER


def _write(path: Path, unit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(unit.encode())


def places() -> tuple[Path, ...]:
    """Files that a start needs: the code, the interpreter, and the target if that is a link."""
    interpreter = Path(sys.executable)
    return Path(__file__), interpreter, interpreter.resolve()


def check_reach(user: str, needed: Sequence[Path]) -> None:
    """Raises UsageError if the system's unit could not run this installation."""
    remedy = "install gadei-ps for all users, for instance in /opt"
    for place in needed:
        if any(place.is_relative_to(hidden) for hidden in HIDDEN):
            raise UsageError(f"{place} is hidden from the unit by PrivateTmp; {remedy}")
        for folder in place.parents:
            status = folder.stat()
            if not status.st_mode & stat.S_IXOTH and not _belongs(status, user):
                raise UsageError(
                    f"{place} cannot be reached by the user {user} ({folder} is closed); "
                    f"{remedy}, or give --run-as"
                )


def _belongs(status: os.stat_result, user: str) -> bool:
    """Whether the user may enter the folder as its owner or through a group."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return False
    if entry.pw_uid == 0:
        return True
    if status.st_uid == entry.pw_uid:
        return bool(status.st_mode & stat.S_IXUSR)
    groups = os.getgrouplist(user, entry.pw_gid)
    return status.st_gid in groups and bool(status.st_mode & stat.S_IXGRP)


def _next(scope: Scope, user: str, job: str, handed: Sequence[str]) -> Sequence[str]:
    """Commands that start the job with the unit. handed: those that go before."""
    if scope == Scope.USER:
        commands = [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now gadei-ps@{job}",
        ]
        if not lingers(ROOT, paths.user(os.getuid())):
            end = "or the job and its memory end with your last session"
            commands.append(f"loginctl enable-linger  # {end}")
        return commands
    make = []
    if not exists(user):
        make = [
            "systemd-sysusers gadei-ps.conf"
            if user == SERVICE_USER
            else f"useradd --system --user-group --home-dir {homes.STATE} "
            f"--shell /usr/sbin/nologin {user}"
        ]
    return [
        *make,
        *handed,
        "systemd-tmpfiles --create gadei-ps.conf",
        "systemctl daemon-reload",
        f"systemctl enable --now gadei-ps@{job}",
    ]


def exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
