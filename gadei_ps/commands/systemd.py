"""Where install-unit puts the files of units.py, and how uninstall-unit removes them."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import platformdirs

from gadei_ps.commands import manager, units
from gadei_ps.commands.manager import INSTANCE
from gadei_ps.commands.units import SERVICE_USER, Scope
from gadei_ps.errors import UsageError
from gadei_ps.memory.segment import check_job_name
from gadei_ps.storage import files

HIDDEN = ("/tmp", "/var/tmp")
MARK = "gadei-ps install-unit"  # stands in all that install() writes
EXAMPLE = "demo"
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}", re.IGNORECASE)
# systemd interprets quotes, backslashes and dollars in a command line, and allows no line breaks.
UNFIT = re.compile(r"[\x00-\x1f\x7f\"'\\$]")


class Found(StrEnum):
    """The file that install() found at the unit's path."""

    NOTHING = "nothing"
    SAME = "the same"
    ANOTHER = "another"


@dataclass(frozen=True)
class File:
    """One unit: what was found at its path, and whether it was written."""

    path: Path
    found: Found
    written: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "found": self.found.value,
            "written": self.written,
            "unit": self.text,
        }


@dataclass(frozen=True)
class Installed:
    """What install() found and did.

    user: that the jobs run as, None for one's own. kept: it is not the usual one, but that of the
    units that were there. job_file: the job's, which is never replaced. next: commands that start
    the job with the units.
    """

    scope: Scope
    job: str
    units: tuple[File, ...]
    job_file: File | None
    next: tuple[str, ...]
    user: str | None
    kept: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "scope": self.scope.value,
            "user": self.user,
            "job": self.job,
            "units": [one.as_dict() for one in self.units],
            "job_file": None if self.job_file is None else self.job_file.as_dict(),
            "next": list(self.next),
        }


@dataclass(frozen=True)
class Removed:
    """What uninstall() removed, and what it left: files that are not its own, with the reason."""

    scope: Scope
    removed: tuple[Path, ...]
    left: tuple[tuple[Path, str], ...]
    next: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "scope": self.scope.value,
            "removed": [str(path) for path in self.removed],
            "left": [{"path": str(path), "why": why} for path, why in self.left],
            "next": list(self.next),
        }


def program() -> str:
    """The beginning of a command line that runs this installation, quoted for systemd."""
    found = [Path(sys.argv[0]).absolute(), Path(sysconfig.get_path("scripts")) / "gadei-ps"]
    for path in found:
        if path.name == "gadei-ps" and path.is_file() and os.access(path, os.X_OK):
            return quoted(str(path))
    return f"{quoted(sys.executable)} -P -m gadei_ps"


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


def job_directory(scope: Scope) -> Path:
    """Where the units look for job files."""
    if scope == Scope.SYSTEM:
        return Path("/etc/gadei-ps")
    return platformdirs.user_config_path("gadei-ps")


def _place(scope: Scope, name: str, where: Path | None) -> Path:
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
    kept = None if user or scope == Scope.USER else _user(_place(scope, units.NAME, where))
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
    for name, text in units.texts(scope, program(), user, _group(user)).items():
        path = _place(scope, name, where)
        there = _look(path, text)
        if there == Found.ANOTHER and not force and not dry_run:
            raise UsageError(
                f"{path} exists and differs: --print shows the new unit, --force replaces the old "
                "one; put your own changes into a drop-in (systemctl edit gadei-ps@)"
            )
        found.append(File(path, there, there != Found.SAME and not dry_run, text))
    jobs = where / "gadei-ps" if where else job_directory(scope)
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
    told = tuple(_next(scope, user, name))
    kept = None if kept == SERVICE_USER else kept
    return Installed(scope, name, tuple(found), file, told, who, kept is not None)


def uninstall(
    scope: Scope, *, force: bool = False, dry_run: bool = False, where: Path | None = None
) -> Removed:
    """Removes what install() has written. Job files, checkpoints and drop-ins stay.

    Waits until what stopped jobs have left has ended. Raises UsageError, and changes nothing, if a
    unit is enabled or runs, unless `force` is given.
    """
    if scope == Scope.SYSTEM and not dry_run and where is None and os.geteuid():
        raise UsageError(
            "--system needs root: sudo gadei-ps uninstall-unit --system, or use --user"
        )
    flag = "" if scope == Scope.SYSTEM else " --user"
    base = where or directory(scope)
    asks = where is None and not force
    used = sorted({*_enabled(base), *(manager.instances(scope).used if asks else ())})
    if used and not force:
        raise UsageError(
            f"{used[0]} is enabled or running; first: systemctl{flag} disable --now "
            + " ".join(used)
        )
    if asks and not dry_run:
        manager.wait_for_ends(scope, _say)
    user = _user(_place(scope, units.NAME, where)) or SERVICE_USER
    ours, left = [], []
    for name in units.texts(scope, ""):
        path = _place(scope, name, where)
        if path.is_symlink():
            left.append((path, "it is a link: masked, or somebody else's"))
        elif path.is_file():
            if MARK in path.read_text(errors="replace"):
                ours.append(path)
            else:
                left.append((path, "gadei-ps has not written it"))
    left += [(path, "it holds your own changes") for path in sorted(base.glob("gadei-ps*.d"))]
    jobs = where / "gadei-ps" if where else job_directory(scope)
    if jobs.is_dir():
        left.append((jobs, "it holds job files"))
    if not dry_run:
        for path in ours:
            path.unlink()
    told = [f"systemctl{flag} daemon-reload"]
    if scope == Scope.SYSTEM:
        told += [
            "rm -r /var/lib/gadei-ps  # the checkpoints of all jobs, for ever",
            "rm -r /run/gadei-ps /var/cache/gadei-ps",
            *([f"userdel {SERVICE_USER}"] if user == SERVICE_USER else []),
        ]
    return Removed(scope, tuple(ours), tuple(left), tuple(told))


def _enabled(base: Path) -> Iterator[str]:
    """Instances that are started by another unit."""
    for path in base.glob("*.wants/gadei-ps*@*.service"):
        if path.is_symlink() and INSTANCE.fullmatch(path.name):
            yield path.name


def _user(path: Path) -> str | None:
    """That of the system's unit at this path; None if there is no such unit."""
    if path.is_symlink() or not path.is_file():
        return None
    found = re.search(r"^User=(\S+)$", path.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None


def _group(user: str) -> str:
    """The user's own, which may be still to be made."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return user


def _say(text: str) -> None:
    print(f"gadei-ps: {text}", file=sys.stderr, flush=True)


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


def _next(scope: Scope, user: str, job: str) -> Sequence[str]:
    """Commands that start the job with the unit."""
    if scope == Scope.USER:
        return (
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now gadei-ps@{job}",
            "loginctl enable-linger  # or the job and its memory end with your last session",
        )
    commands = [
        "systemd-tmpfiles --create gadei-ps.conf",
        "systemctl daemon-reload",
        f"systemctl enable --now gadei-ps@{job}",
    ]
    try:
        pwd.getpwnam(user)
    except KeyError:
        commands.insert(
            0,
            "systemd-sysusers gadei-ps.conf"
            if user == SERVICE_USER
            else "useradd --system --user-group --home-dir /var/lib/gadei-ps "
            f"--shell /usr/sbin/nologin {user}",
        )
    return commands
