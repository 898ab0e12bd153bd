"""`gadei-ps doctor`: is this machine fit for jobs, and if not, what to do about it."""

from __future__ import annotations

import configparser
import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import gadei_ps
from gadei_ps.errors import GadeiError

SHM = Path("/dev/shm")
LITTLE_SHM = 256 << 20  # bytes free; the sentence classifier with two learners takes about 50 MiB
FEW_FILES = 1024  # a watchdog needs three descriptors for each of at most 256 learners
LONGEST_SOCKET_PATH = 107  # of sockaddr_un, without its closing zero
SOCKET_NAME_BYTES = len("/..sock.") + 7  # in the directory, without the job's name; 7: a pid
LONGEST_JOB_NAME = 48
SYSTEM_UID_MAX = 999
SYS_FUTEX_WAITV = 449


class Level(StrEnum):
    """How a check ended. A job cannot run where there is an error."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """One thing looked at; `remedy` is empty where there is nothing to do."""

    name: str
    level: Level
    finding: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Check]:
    """All checks. They change nothing, but may make the runtime directory."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[], tuple[Level, str, str]]) -> Check:
    try:
        return Check(name, *check())
    except (OSError, GadeiError) as error:
        return Check(name, Level.ERROR, str(error))


def _python() -> tuple[Level, str, str]:
    found = f"Python {platform.python_version()}, gadei-ps {gadei_ps.__version__}"
    if sys.platform != "linux":
        return Level.ERROR, f"{found} on {sys.platform}", "use Linux"
    return Level.OK, found, ""


def _native() -> tuple[Level, str, str]:
    try:
        from gadei_ps import _native, layout
    except ImportError as error:
        return Level.ERROR, f"cannot be loaded: {error}", "install again: pip install gadei-ps"
    made = _native.layout()
    if any(made[name][0] != layout.STRUCTS[name].itemsize for name in made):
        return Level.ERROR, "is of another version than the package", "install gadei-ps again"
    return Level.OK, Path(_native.__file__ or "").name, ""


def _numba() -> tuple[Level, str, str]:
    try:
        from gadei_ps.kernels import cache
    except ImportError as error:
        return Level.ERROR, f"Numba cannot be loaded: {error}", "pip install gadei-ps again"
    where = cache.directory()
    if not os.access(where, os.W_OK | os.X_OK):
        return (
            Level.WARNING,
            f"{where} cannot be written: every start compiles for about half a minute",
            "set NUMBA_CACHE_DIR to a directory you may write",
        )
    if next(where.rglob("shard.serve-*.nbi"), None) is None:
        return Level.OK, f"{where}, empty: the first start compiles for about half a minute", ""
    return Level.OK, f"{where}, filled", ""


def _shm() -> tuple[Level, str, str]:
    if not SHM.is_dir():
        return Level.ERROR, f"{SHM} is missing", f"mount -t tmpfs tmpfs {SHM}"
    if not os.access(SHM, os.W_OK | os.X_OK):
        return Level.ERROR, f"{SHM} is not writable for you", f"chmod 1777 {SHM}"
    space = os.statvfs(SHM)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB free"
    if free < LITTLE_SHM:
        return (
            Level.WARNING,
            found,
            f"enlarge it (mount -o remount,size=2G {SHM}; docker run --shm-size=2g) or free some",
        )
    return Level.OK, found, ""


def _cores() -> tuple[Level, str, str]:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {present} usable"
    if usable < 2:
        return Level.WARNING, found, "learners and the server share one core; give two or more"
    return Level.OK, found, ""


def _futex_waitv() -> tuple[Level, str, str]:
    libc = ctypes.CDLL(None, use_errno=True)
    # No futexes to wait for: a kernel that knows the call refuses that as invalid.
    libc.syscall(SYS_FUTEX_WAITV, None, 0, 0, None, 0)
    if ctypes.get_errno() == errno.EINVAL:
        return Level.OK, f"kernel {platform.release()}", ""
    return (
        Level.WARNING,
        f"kernel {platform.release()} lacks it or forbids it: an idle server wakes by a timer",
        "use Linux 5.16 or newer",
    )


def _pidfd() -> tuple[Level, str, str]:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            Level.ERROR,
            f"{error.strerror}: the death of a learner cannot be told",
            "use Linux 5.3 or newer, and a sandbox that allows it",
        )
    return Level.OK, "works", ""


def _files() -> tuple[Level, str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Level.WARNING, f"{soft} (hard {hard})", f"ulimit -n {FEW_FILES}"
    return Level.OK, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}", ""


def _runtime_directory() -> tuple[Level, str, str]:
    from gadei_ps import runtime

    path = runtime.directory()
    room = LONGEST_SOCKET_PATH - len(os.fsencode(path)) - SOCKET_NAME_BYTES
    if room < 1:
        return (
            Level.ERROR,
            f"{path}: too long for the path of a socket",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    if room < LONGEST_JOB_NAME:
        return (
            Level.WARNING,
            f"{path}: leaves {room} characters for the name of a job",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    return Level.OK, str(path), ""


def _remove_ipc() -> tuple[Level, str, str]:
    uid = os.getuid()
    if not Path("/run/systemd/seats").exists() and not Path("/run/systemd/sessions").exists():
        return Level.OK, "no logind here", ""
    if uid <= SYSTEM_UID_MAX:
        return Level.OK, f"logind leaves the segments of a system user (uid {uid})", ""
    if not removes_ipc(Path("/")):
        return Level.OK, "RemoveIPC=no", ""
    return (
        Level.WARNING,
        "logind removes your segments when your last session ends, also under a running job",
        "RemoveIPC=no in /etc/systemd/logind.conf, or loginctl enable-linger, or a system user",
    )


def removes_ipc(root: Path) -> bool:
    """What logind's files below `root` say of RemoveIPC; its default is yes."""
    files = {
        path.name: path
        for place in ("usr/lib", "usr/local/lib", "run", "etc")  # a later one hides an earlier's
        for path in (root / place / "systemd/logind.conf.d").glob("*.conf")
    }
    main = next(
        (
            path
            for place in ("etc", "run", "usr/local/lib", "usr/lib")
            if (path := root / place / "systemd/logind.conf").exists()
        ),
        None,
    )
    said = "yes"
    for path in ([main] if main else []) + [files[name] for name in sorted(files)]:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        # An empty value is the default again.
        said = parser.get("Login", "RemoveIPC", fallback=said) or "yes"
    return said.lower() not in ("no", "false", "off", "0", "n", "f")


def _torch() -> tuple[Level, str, str]:
    if importlib.util.find_spec("torch") is None:
        return (
            Level.WARNING,
            "not installed; train, predict and gadei_ps.learners.torch need it",
            "pip install 'gadei-ps[torch]'",
        )
    return Level.OK, importlib.metadata.version("torch"), ""


def _gpu() -> tuple[Level, str, str]:
    cards = sum(1 for _ in _gpus())
    cupy = importlib.util.find_spec("cupy") is not None
    found = f"{cards} NVIDIA GPU{'' if cards == 1 else 's'}" if cards else "none found"
    found += f", CuPy {'installed' if cupy else 'not installed'}"
    return Level.OK, f"{found}; not used: this release computes on the CPU", ""


def _gpus() -> Iterator[Path]:
    return Path("/proc/driver/nvidia/gpus").glob("*")


def _litter() -> tuple[Level, str, str]:
    from gadei_ps import jobs

    left = jobs.collect(dry_run=True)
    if not left:
        return Level.OK, "nothing", ""
    names = sorted({one.job for one in left})
    size = sum(one.bytes for one in left)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        Level.WARNING,
        f"{len(left)} segments, sockets and locks ({size / 2**20:,.1f} MiB) of dead jobs: {shown}",
        "gadei-ps gc",
    )


CHECKS: dict[str, Callable[[], tuple[Level, str, str]]] = {
    "Python": _python,
    "native module": _native,
    "Numba's cache": _numba,
    "/dev/shm": _shm,
    "cores": _cores,
    "futex_waitv": _futex_waitv,
    "pidfd_open": _pidfd,
    "open files": _files,
    "runtime directory": _runtime_directory,
    "RemoveIPC": _remove_ipc,
    "PyTorch": _torch,
    "GPU": _gpu,
    "left by dead jobs": _litter,
}
