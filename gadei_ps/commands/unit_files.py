"""Copy the files of systemd/ to where systemd reads them, and remove these copies.

gadei-ps@demo.service is the watchdog of the job in demo.toml, gadei-ps-end@demo ends what a dead
watchdog has left, and gadei-ps-learner@demo is a learner. A copy starts this installation as the
user of the jobs. Its last line has a digest, which shows whether the copy was edited.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import re
import shlex
import stat
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path

import platformdirs

from gadei_ps import homes
from gadei_ps.commands import service_manager
from gadei_ps.commands.doctor import lingers, system_uid_max
from gadei_ps.commands.service_manager import Scope
from gadei_ps.errors import UsageError
from gadei_ps.job import config, paths
from gadei_ps.memory import presence
from gadei_ps.memory.shm import check_job_name
from gadei_ps.show import plain
from gadei_ps.storage import files

NAME = "gadei-ps@.service"
END_NAME = "gadei-ps-end@.service"
LEARNER_NAME = "gadei-ps-learner@.service"
DIRECTORIES = "tmpfiles.d/gadei-ps.conf"
USERS = "sysusers.d/gadei-ps.conf"
SERVICE_USER = "gadei-ps"
PROGRAM = "gadei-ps"  # in the shipped files: systemd looks in /usr/local/bin, then in /usr/bin
EXAMPLE = "demo"  # job of the shipped job file
ROOT = Path("/")
SHIPPED = resources.files("gadei_ps.systemd")
HIDDEN = ("/tmp", "/var/tmp")  # by PrivateTmp
MARK = "# Written by gadei-ps install-unit. SHA-256 of the lines above: "
EARLIER = "gadei-ps install-unit"  # stands in the files of releases without MARK
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}", re.IGNORECASE | re.ASCII)
SETS_USER = re.compile(r"^[ \t]*User[ \t]*=[ \t]*(\S*)[ \t]*$", re.MULTILINE)
EXEC_LINE = re.compile(r"^Exec\w+=.*$", re.MULTILINE)
RUNS_US = re.compile(rf"(?<=[= ]){PROGRAM} (?=serve |reload |run )")
# systemd interprets quotes, backslashes and dollars in a command line. It accepts neither control
# characters nor text that is not UTF-8.
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\"'\\\\$\ud800-\udfff]")


class Found(StrEnum):
    """The file that install() found at the path of a unit."""

    NOTHING = "nothing"
    SAME = "the same"
    UNEDITED = "unedited"  # a copy of another release, or for another program or user
    ANOTHER = "another"


@dataclass(frozen=True)
class File:
    """One file: what was found at its path, whether it was written, and its new text."""

    path: str
    found: Found
    written: bool
    unit: str


@dataclass(frozen=True)
class Installed:
    """Result of install(). user: of the system's jobs. next: commands that start the job."""

    scope: Scope
    user: str | None
    job: str
    units: tuple[File, ...]
    job_file: File | None
    next: tuple[str, ...]


@dataclass(frozen=True)
class Removed:
    """Result of uninstall(). left: what it did not remove, each with the reason."""

    scope: Scope
    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    next: tuple[str, ...]


# -- texts ----------------------------------------------------------------------------------------


def texts(
    scope: Scope, command: str, user: str = SERVICE_USER, group: str = SERVICE_USER
) -> dict[str, str]:
    """Return the texts of the files that install() writes, by name.

    A name with a slash is relative to /etc; the others are units. command: beginning of a command
    line that runs gadei-ps, quoted for systemd. group: primary group of the user.
    """
    names = [NAME, END_NAME, LEARNER_NAME]
    if scope == Scope.SYSTEM:
        names += [DIRECTORIES, USERS] if user == SERVICE_USER else [DIRECTORIES]
    found = {}
    for name in names:
        text = (SHIPPED / (name if "/" in name else f"{scope.value}/{name}")).read_text()
        text = EXEC_LINE.sub(lambda line: RUNS_US.sub(lambda _: f"{command} ", line[0]), text)
        text = text.replace(f"User={SERVICE_USER}\n", f"User={user}\n")
        text = text.replace(f"sudo -u {SERVICE_USER} ", f"sudo -u {user} ")
        text = text.replace(f" 0700 {SERVICE_USER} {SERVICE_USER} ", f" 0700 {user} {group} ")
        found[name] = signed(text)
    return found


def signed(text: str) -> str:
    """The text with a last line by which an edited file is recognized."""
    return f"{text}{MARK}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_unedited(text: str) -> bool:
    """Return whether install() has written this text, in any release since MARK."""
    above, mark, _ = text.rpartition(MARK)
    return bool(mark) and text == signed(above)


def program() -> list[str]:
    """Beginning of a command line that runs this installation."""
    found = [Path(sys.argv[0]).absolute(), Path(sysconfig.get_path("scripts")) / "gadei-ps"]
    for path in found:
        if path.name == "gadei-ps" and path.is_file() and os.access(path, os.X_OK):
            return [str(path)]
    return [sys.executable, *shlex.split("-P -m gadei_ps")]


def unit_program() -> str:
    """program(), quoted for systemd."""
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


# -- places and users -----------------------------------------------------------------------------


def directory(scope: Scope) -> Path:
    """Directory of the units: of the administrator, or of this user."""
    if scope == Scope.SYSTEM:
        return Path("/etc/systemd/system")
    return platformdirs.user_config_path() / "systemd/user"


def job_directory(scope: Scope) -> Path:
    """Directory of the units' job files."""
    if scope == Scope.SYSTEM:
        return homes.JOBS
    return platformdirs.user_config_path("gadei-ps")


def _systemctl(scope: Scope) -> str:
    return "systemctl" if scope == Scope.SYSTEM else "systemctl --user"


def place(scope: Scope, name: str, where: Path | None) -> Path:
    """Path of a file of texts()."""
    return ((where or Path("/etc")) if "/" in name else (where or directory(scope))) / name


def user_of(path: Path) -> str | None:
    """User that the system's unit at this path names; None without such a unit."""
    if path.is_symlink() or not path.is_file():
        return None
    found = SETS_USER.findall(path.read_text(errors="replace"))
    return found[-1] or "root" if found else None


def _entry(user: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _group(user: str) -> str:
    """Primary group of the user; its name is that of a user who does not exist yet."""
    entry = _entry(user)
    try:
        return user if entry is None else grp.getgrgid(entry.pw_gid).gr_name
    except KeyError:
        return user


def places() -> tuple[Path, ...]:
    """Return the files that a start needs: the code, the interpreter, and the target of a link."""
    interpreter = Path(sys.executable)
    return Path(__file__), interpreter, interpreter.resolve()


def check_reach(user: str, needed: Sequence[Path]) -> None:
    """Raise UsageError if the system's unit could not run this installation."""
    remedy = "install gadei-ps for all users, for instance in /opt"
    for path in needed:
        if any(path.is_relative_to(hidden) for hidden in HIDDEN):
            raise UsageError(f"{path} is hidden from the unit by PrivateTmp; {remedy}")
        for folder in path.parents:
            if not _may_enter(folder.stat(), user):
                raise UsageError(
                    f"{path} cannot be reached by the user {user} ({folder} is closed); "
                    f"{remedy}, or give --run-as"
                )


def _may_enter(folder: os.stat_result, user: str) -> bool:
    entry = _entry(user)
    if folder.st_mode & stat.S_IXOTH or (entry is not None and entry.pw_uid == 0):
        return True
    if entry is None:
        return False
    if folder.st_uid == entry.pw_uid:
        return bool(folder.st_mode & stat.S_IXUSR)
    groups = os.getgrouplist(user, entry.pw_gid)
    return folder.st_gid in groups and bool(folder.st_mode & stat.S_IXGRP)


def _memory(user: str, jobs: Path) -> list[str]:
    """Return the units' jobs of which this user has memory, whether they run or not."""
    entry = _entry(user)
    uid = None if entry is None else entry.pw_uid
    there = {one.job for one in presence.find() if not one.foreign and one.uid == uid}
    return sorted(one for one in there if (jobs / f"{one}.toml").is_file())


# -- install --------------------------------------------------------------------------------------


def install(
    scope: Scope,
    *,
    user: str | None = None,
    job: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    where: Path | None = None,
) -> Installed:
    """Write the files of texts(), and a file for the job unless it has one.

    Without `job`, the job is EXAMPLE if there is no job file at all. Without `user`, units of the
    system keep the user that they have. where: directory to write below instead. Raises UsageError,
    and changes nothing, if the units could not work, or if a file was edited and `force` is not
    given.
    """
    if user is not None and scope == Scope.USER:
        raise UsageError("--run-as needs --system: jobs of --user run as yourself")
    if job is not None:
        check_job_name(job)
    before = None if scope == Scope.USER else user_of(place(scope, NAME, where))
    user = (before or SERVICE_USER) if user is None else user
    if not USER_NAME.fullmatch(user):
        raise UsageError(f"{user!r} is not a valid user name: give --run-as USER")
    former = None if before in (None, user) else before
    jobs = where / "gadei-ps" if where else job_directory(scope)
    if not dry_run:
        _check_start(scope, user, former, jobs, root=where is None)
    made = texts(scope, unit_program(), user, _group(user))
    found = [_file(place(scope, name, where), text, dry_run) for name, text in made.items()]
    edited = [one.path for one in found if one.found == Found.ANOTHER]
    if edited and not force and not dry_run:
        raise UsageError(
            f"{', '.join(edited)}: edited, or not written by this command; put your own settings "
            f"into a drop-in ({_systemctl(scope)} edit gadei-ps@), then replace it with --force"
        )
    file = None
    if job is not None or not any(jobs.glob("*.toml")):
        path, text = jobs / f"{job or EXAMPLE}.toml", (SHIPPED / f"{EXAMPLE}.toml").read_text()
        file = _file(path, text, dry_run or path.exists() or path.is_symlink())
    for one in (*found, *((file,) if file else ())):
        if one.written:
            _write(Path(one.path), one.unit)
    job = job or EXAMPLE
    commands = tuple(_next(scope, user, job, former))
    return Installed(
        scope, None if scope == Scope.USER else user, job, tuple(found), file, commands
    )


def _check_start(scope: Scope, user: str, former: str | None, jobs: Path, *, root: bool) -> None:
    """Raise UsageError if jobs could not run with the new units. root: whether they are for /."""
    if scope == Scope.SYSTEM and root and os.geteuid():
        raise UsageError("--system needs root: sudo gadei-ps install-unit --system, or use --user")
    if old := service_manager.too_old():
        raise UsageError(f"{old}; start the job with `gadei-ps serve` instead")
    if scope == Scope.SYSTEM:
        check_reach(user, places())
    if former is not None and (left := _memory(former, jobs)):
        raise UsageError(
            f"job {left[0]} of user {former} is in memory, and user {user} could not continue it: "
            f"stop it (systemctl stop gadei-ps@{left[0]}); if it has stopped, save or discard its "
            f"memory as {former} (gadei-ps serve --finish, gadei-ps gc)"
        )


def _file(path: Path, text: str, keep: bool) -> File:
    """keep: whether the file at this path stays as it is."""
    there = path.read_text(errors="replace") if path.is_file() else None
    if path.is_symlink():  # masked, or a link to another file, which must not be followed
        found = Found.ANOTHER
    elif there is None:
        found = Found.NOTHING
    elif there == text:
        found = Found.SAME
    else:
        found = Found.UNEDITED if is_unedited(there) else Found.ANOTHER
    return File(str(path), found, found != Found.SAME and not keep, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text.encode())


def _next(scope: Scope, user: str, job: str, former: str | None) -> list[str]:
    """Return the commands that start the job. former: user whose files the jobs' new user needs."""
    systemctl = _systemctl(scope)
    commands = []
    if scope == Scope.SYSTEM and _entry(user) is None:
        commands.append(
            "systemd-sysusers gadei-ps.conf"
            if user == SERVICE_USER
            else f"useradd --system --user-group --home-dir {homes.STATE} "
            f"--shell /usr/sbin/nologin {user}"
        )
    if former is not None:
        # Compiled kernels are pickles: a user's jobs must not load those of another one.
        commands += [
            f"chown -hR --from={shlex.quote(former)} {user}: {homes.STATE}",
            f"rm -rf {homes.CACHE} {homes.RUNTIME}",
        ]
    if scope == Scope.SYSTEM:
        commands.append("systemd-tmpfiles --create gadei-ps.conf")
    login = paths.user(os.getuid()) if scope == Scope.USER else user
    entry = _entry(login)
    ordinary = entry is not None and entry.pw_uid > system_uid_max(ROOT)
    if (scope == Scope.USER or ordinary) and not lingers(ROOT, login):
        end = "or logind ends the jobs, or removes their memory, after your last session"
        commands.append(f"loginctl enable-linger {login}  # {end}")
    start = f"{systemctl} enable --now gadei-ps@{job}"
    return [*commands, f"{systemctl} daemon-reload", start]


# -- uninstall ------------------------------------------------------------------------------------


def uninstall(
    scope: Scope, *, force: bool = False, dry_run: bool = False, where: Path | None = None
) -> Removed:
    """Remove the files that install() has written and nobody has edited.

    Waits until what stopped jobs have left has ended. Raises UsageError, and changes nothing, if a
    unit is enabled or runs, unless `force` is given.
    """
    if scope == Scope.SYSTEM and not dry_run and where is None and os.geteuid():
        raise UsageError(
            "--system needs root: sudo gadei-ps uninstall-unit --system, or use --user"
        )
    systemctl = _systemctl(scope)
    base = where or directory(scope)
    links = base.glob("*.wants/gadei-ps*@*.service")
    enabled = sorted(one for one in links if service_manager.INSTANCE.fullmatch(one.name))
    running = service_manager.instances(scope).used if where is None else ()
    used = sorted({*(path.name for path in enabled), *running})
    if used and not force:
        raise UsageError(
            f"{used[0]} is enabled or running; first: {systemctl} disable --now {shlex.join(used)}"
        )
    if where is None and not force and not dry_run:
        service_manager.wait_for_ends(scope, lambda text: plain.print_text(f"gadei-ps: {text}"))
    ours = {place(scope, name, where) for name in texts(scope, PROGRAM)}
    removed = sorted(path for path in ours if _is_ours(path, force))
    left = _left(scope, where, ours.union(base.glob("gadei-ps*@*")).difference(removed))
    for path in removed if not dry_run else ():
        path.unlink()
    commands = [f"{systemctl} stop {shlex.join(running)}"] if running else []
    commands += [f"rm {shlex.join(map(str, enabled))}"] if enabled else []
    commands.append(f"{systemctl} daemon-reload")
    return Removed(scope, tuple(map(str, removed)), tuple(left), tuple(commands))


def _is_ours(path: Path, force: bool) -> bool:
    """Return whether install() has written this file, and nobody has edited it.

    force: accept files of an earlier release, which have no digest.
    """
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_text(errors="replace")
    return is_unedited(text) or (force and EARLIER in text and MARK not in text)


def _left(scope: Scope, where: Path | None, others: set[Path]) -> list[tuple[str, str]]:
    """List files, directories and memory that stay, each with the reason. others: of units."""
    there = sorted(path for path in others if path.exists() or path.is_symlink())
    found = [(str(path), "edited, or not written by install-unit") for path in there]
    jobs = where / "gadei-ps" if where else job_directory(scope)
    state = homes.STATE if scope == Scope.SYSTEM else config.state_directory()
    data = ((jobs, "job files"), (state, "checkpoints and histories of jobs"))
    found += [(str(path), why) for path, why in data if path.is_dir()]
    user = user_of(place(scope, NAME, where)) or SERVICE_USER
    user = user if scope == Scope.SYSTEM else paths.user(os.getuid())
    return found + [
        (f"memory of job {job}", f"user {user} has to save or discard it (serve --finish, gc)")
        for job in _memory(user, jobs)
    ]
