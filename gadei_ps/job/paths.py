"""Paths of a job's control socket and lock file."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pwd
import re
import shlex
import stat
from pathlib import Path

from gadei_ps.errors import ControlError, DirectoryMistake, NotOurs, is_lasting
from gadei_ps.machine import ownership, process

# A socket's name while it is made: the kernel shows this one for good.
PASSING = re.compile(r"\.(?P<job>[A-Za-z0-9_-]+)\.sock\.(?P<pid>\d+)")
ROOTS = Path("/run/gadei-ps-root")  # of root: unlike in /tmp, no other user can make it
TEMPORARY = Path("/tmp")
PLAIN = re.compile(r"[\w./+@-]+", re.ASCII)  # nothing in it means more than itself to a shell


def directory(*, make: bool = False) -> Path:
    """The directory for sockets, mode 0700. make: if there is none.

    $GADEI_PS_RUNTIME_DIR, else $XDG_RUNTIME_DIR/gadei-ps, else /tmp/gadei-ps-UID; for root, in
    place of the last, ROOTS if it can be made. Only GADEI_PS_RUNTIME_DIR may lead root to another
    user's. Raises ControlError if other users can write there: they could pose as the watchdog.
    """
    given = os.environ.get("GADEI_PS_RUNTIME_DIR")
    if given and not Path(given).is_absolute():
        raise DirectoryMistake(
            f"GADEI_PS_RUNTIME_DIR={given}: each command would look elsewhere; give a path that "
            "starts with /"
        )
    path = Path(given) if given else _default(make)
    try:
        if not path.exists():
            _check_before_making(path)
            if not make:
                return path
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise (DirectoryMistake if is_lasting(error) else ControlError)(
            f"{path}: {error.strerror}; set GADEI_PS_RUNTIME_DIR to a directory you may write"
        ) from None
    named = bool(given)
    uid = os.getuid()
    strange = status.st_uid != uid and not (named and uid == 0)
    if (
        not stat.S_ISDIR(status.st_mode)
        or strange
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise DirectoryMistake(
            f"{path} is not a directory that only you may write (owner {user(status.st_uid)}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}): {_advice(path, status, named=named)}"
        )
    return path


def _default(make: bool) -> Path:
    """The directory if none is named. Raises DirectoryMistake."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    uid = os.getuid()
    if Path(session).is_absolute():  # the specification has others ignored
        with contextlib.suppress(OSError):  # reported where the directory is looked for
            whose = Path(session).stat().st_uid
            if whose not in (0, uid):  # as after su: our files would be in that user's way
                raise DirectoryMistake(
                    f"XDG_RUNTIME_DIR={session} belongs to user {user(whose)}: unset it, or, to "
                    f"see that user's jobs, set {variable(Path(session) / 'gadei-ps')}"
                )
        return Path(session) / "gadei-ps"
    if uid == 0:
        if not make and not ROOTS.exists() and os.access(ROOTS.parent, os.W_OK):
            return ROOTS
        with contextlib.suppress(OSError):
            if make:
                ROOTS.mkdir(mode=0o700, exist_ok=True)
        # In a user namespace or a container, /run may be another's, or not writable.
        with contextlib.suppress(OSError):
            if ROOTS.lstat().st_uid == uid:
                return ROOTS
    return TEMPORARY / f"gadei-ps-{uid}"


def _check_before_making(path: Path) -> None:
    """Raise DirectoryMistake for root where another user's first job is to make the directory.

    NotADirectoryError where nobody can make it.
    """
    there = next(one for one in path.parents if one.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    whose = there.stat().st_uid
    if os.getuid() == 0 and whose != 0:
        raise DirectoryMistake(
            f"{path}: there is no such directory, so user {user(whose)} has no job there; look at "
            "GADEI_PS_RUNTIME_DIR"
        )


def _advice(path: Path, status: os.stat_result, *, named: bool) -> str:
    """Advise on a directory that is not used."""
    other = "set GADEI_PS_RUNTIME_DIR to a directory of your own"
    if not stat.S_ISDIR(status.st_mode):
        return f"remove it, or {other}"
    if status.st_uid == os.getuid() or (named and os.getuid() == 0):
        return f"make it private (chmod go-w {shlex.quote(str(path))}), or {other}"
    if named:
        return f"run the command as its owner, or {other}"
    if os.getuid() == 0:
        return f"{other}, or to this one to see the jobs of user {user(status.st_uid)}"
    return other


def owner() -> int:
    """Return the user whose jobs are visible: this one; for root, the runtime directory's owner."""
    here = directory()
    return os.getuid() or (here.stat().st_uid if here.exists() else 0)


def check_own() -> None:
    """Raise DirectoryMistake for root in another user's directory: it would leave files there."""
    if owner() != os.getuid():
        name = user(owner())
        raise DirectoryMistake(
            f"{directory()} belongs to user {name}: run the command as that user "
            f"({as_owner('...')})"
        )


def as_owner(arguments: str) -> str:
    """The command line by which root runs a command as the runtime directory's owner."""
    where = f"GADEI_PS_RUNTIME_DIR={shlex.quote(str(directory()))}"
    return f"sudo -u {shlex.quote(user(owner()))} env {where} gadei-ps {arguments}"


def variable(where: Path | None) -> str:
    """Return the shell assignment that names this runtime directory; `...` if it is not shown.

    Another user may have chosen the name: root is shown no name that is more than letters to a
    shell, and no user one that is more to a terminal.
    """
    text = "" if where is None else str(where)
    is_shown = PLAIN.fullmatch(text) or (os.geteuid() != 0 and text and text.isprintable())
    return f"GADEI_PS_RUNTIME_DIR={shlex.quote(text) if is_shown else '...'}"


@functools.cache  # a look-up may ask a server
def user(uid: int) -> str:
    """Name of a user, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def of_watchdog(job: str, pid: int) -> Path | None:
    """Return the runtime directory in which the watchdog `pid` listens; None if it is unknown.

    The kernel shows it to the watchdog's user and to root.
    """
    listens = set()
    try:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was just closed
                listens.add(str(one.readlink()))
        lines = os.fsdecode(Path(f"/proc/{pid}/net/unix").read_bytes()).split("\n")
    except OSError:
        return None
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and f"socket:[{fields[6]}]" in listens:
            path = Path(fields[7])
            match = PASSING.fullmatch(path.name)
            ours = match and match["job"] == job and path.is_absolute()
            if ours and _is_of(path.parent, pid):
                return path.parent
    return None


def _is_of(path: Path, pid: int) -> bool:
    """Return whether the process' user owns this directory, or it is missing.

    The name of another user's socket may look like more lines.
    """
    try:
        return path.lstat().st_uid == process.owner(pid)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def socket_path(job: str) -> Path:
    """The job's control socket."""
    return directory() / f"{job}.sock"


def lock_path(job: str) -> Path:
    """The file that the job's watchdog keeps locked while it lives."""
    return directory() / f"{job}.lock"


def foreign(job: str) -> list[str]:
    """Explain which files with the name of the job's lock or socket are invalid, one line each."""
    lines = []
    for path, kind in ((lock_path(job), stat.S_IFREG), (socket_path(job), stat.S_IFSOCK)):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        why = ownership.foreign(status, owner())
        if kind == stat.S_IFSOCK:
            regular = "it is a regular file" if stat.S_ISREG(status.st_mode) else why
            why = "" if stat.S_ISSOCK(status.st_mode) else regular
        what = "lock file" if kind == stat.S_IFREG else "socket"
        if why:
            lines.append(f"{path}: {why}; no {what} can be there: remove it")
    return lines


def check_socket(job: str) -> None:
    """Raise DirectoryMistake where a directory has the name of the job's socket.

    Anything else that has it is replaced.
    """
    if socket_path(job).is_dir() and not socket_path(job).is_symlink():
        raise DirectoryMistake(*foreign(job)[-1:])


def open_lock(path: Path, *, create: bool) -> int:
    """Open a lock file; return the descriptor. create: also the directory, if there is none.

    Raises FileNotFoundError, or ControlError if something else has its name.
    """
    if create:
        directory(make=True)
    try:
        return ownership.open_file(path, os.O_RDWR | (os.O_CREAT if create else 0), owner=owner())
    except NotOurs as error:
        raise ControlError(f"{error}; no lock file can be there: remove it") from None
