"""`gadei-ps doctor`: can jobs run on this machine, and if not, what is to be done?"""

from __future__ import annotations

import configparser
import contextlib
import ctypes
import errno
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import pwd
import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import gadei_ps
from gadei_ps import _native, homes
from gadei_ps.commands import service_manager
from gadei_ps.errors import DeviceError, GadeiError
from gadei_ps.machine import gpus
from gadei_ps.machine.cuda import has_cupy


class Level(StrEnum):
    """Severity of a check's result. A job cannot run if there is an error."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Found(NamedTuple):
    """Result of a check; `remedy` is empty if there is nothing to do."""

    level: Level
    finding: str
    remedy: str = ""


ok, warning, failure = (functools.partial(Found, level) for level in Level)


@dataclass(frozen=True)
class Check:
    """A check and its result."""

    name: str
    level: Level
    finding: str
    remedy: str


def python() -> Found:
    found = f"Python {platform.python_version()}, gadei-ps {gadei_ps.__version__}"
    if sys.platform != "linux":
        return failure(f"{found} on {sys.platform}", "use Linux")
    return ok(found)


def native() -> Found:
    try:
        from gadei_ps import _native
        from gadei_ps.memory import layout
    except ImportError as error:
        return failure(f"cannot be loaded: {error}", "install again: pip install gadei-ps")
    made = _native.layout()
    if any(made[name][0] != layout.STRUCTS[name].itemsize for name in made):
        return failure("is of another version than the package", "install gadei-ps again")
    return ok(Path(_native.__file__ or "").name)


def numba() -> Found:
    try:
        from gadei_ps.kernels import cache, half  # noqa: F401 (whether it can be imported)
        from gadei_ps.kernels.optimizers import Kind
        from gadei_ps.server import code
        from gadei_ps.server.units import units as of_server
    except ImportError as error:
        return failure(f"Numba cannot be loaded: {error}", "pip install gadei-ps again")
    writable = "set NUMBA_CACHE_DIR to a directory you may write"
    if not cache.is_lasting():
        return warning(
            f"{cache.home()} cannot be written: what is compiled is kept in {code.spare_home()}, "
            "until the end of the session or of the machine",
            writable,
        )
    where = cache.directory()
    if not os.access(where, os.W_OK | os.X_OK):
        return warning(
            f"{where} cannot be written: every start compiles for up to half a minute", writable
        )
    kept = all(unit.is_kept() for unit in of_server([Kind.SGD]))
    filled = "filled" if kept else "not filled: the next start compiles for up to half a minute"
    units = ""
    if homes.of_the_system() and where.parent != homes.CACHE:  # as root sees it
        units = f"; the units use {homes.CACHE}"
    return ok(f"{where}, {filled}{units}")


def torch() -> Found:
    if importlib.util.find_spec("torch") is None:
        return warning(
            "not installed; gadei_ps.learners.torch, and train with --model cnn or GPUs, need it",
            "pip install 'gadei-ps[torch]'",
        )
    return ok(importlib.metadata.version("torch"))


def systemd() -> Found:
    found = service_manager.version()
    if found is None:
        return ok("no systemd here")
    if old := service_manager.too_old():
        return warning(old, "start jobs with gadei-ps serve")
    return ok(f"systemd {found}")


SHM = Path("/dev/shm")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
LITTLE_SHM = 256 << 20  # bytes free; the sentence classifier with two learners takes about 50 MiB
SYSTEM_UID_MAX = 999  # where /etc/login.defs does not say


def shm() -> Found:
    if not SHM.is_dir():
        return failure(f"{SHM} is missing", f"mount -t tmpfs tmpfs {SHM}")
    if not os.access(SHM, os.W_OK | os.X_OK):
        return failure(f"{SHM} is not writable for you", f"chmod 1777 {SHM}")
    space = os.statvfs(SHM)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB free"
    if free < LITTLE_SHM:
        return warning(
            found,
            f"enlarge it (mount -o remount,size=2G {SHM}; docker run --shm-size=2g) or free some",
        )
    return ok(found)


def large_pages() -> Found:
    try:
        setting = SHMEM_ENABLED.read_text()
    except OSError:
        return ok("the kernel has none for shared memory")
    # For tmpfs, the setting only overrides the option that each mount has.
    if "[deny]" in setting:
        return ok(f"none: {SHMEM_ENABLED} is deny")
    where = str(SHM.resolve())
    mounts = [one.opts for one in psutil.disk_partitions(all=True) if one.mountpoint == where]
    found = re.search(r"\bhuge=(\w+)", mounts[-1]) if mounts else None  # the last one hides others
    chosen = "force" if "[force]" in setting else found[1] if found else "never"
    if chosen == "never":
        # A hint, not a fault: it is the kernel's default, and matters to large models only.
        return ok(f"none in {SHM}; large models gain: mount -o remount,huge=advise {SHM}")
    return ok(f"{chosen}, in {SHM}")


def remove_ipc() -> Found:
    return logind(Path("/"), os.getuid())


def logind(root: Path, uid: int) -> Found:
    """Check whether logind of the system below `root` removes this user's segments."""
    if not (root / "run/systemd/system").is_dir() or not (root / "run/systemd/seats").is_dir():
        return ok("no logind here")
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    if uid <= system_uid_max(root):
        return ok(f"logind leaves the segments of system users ({name}) alone")
    if not removes_ipc(root):
        return ok("RemoveIPC=no")
    if lingers(root, name):
        return ok(f"{name} lingers: logind leaves the segments alone")
    return warning(
        "logind removes your segments when your last session ends, also under a running job",
        f"loginctl enable-linger {name}; or RemoveIPC=no in /etc/systemd/logind.conf and "
        "systemctl restart systemd-logind; or run jobs as a system user",
    )


def lingers(root: Path, user: str) -> bool:
    """Return whether the user's manager starts at boot and outlives the user's sessions."""
    return (root / "var/lib/systemd/linger" / user).exists()


def system_uid_max(root: Path) -> int:
    """The highest uid of a system user, whose segments logind never removes."""
    try:
        text = (root / "etc/login.defs").read_text(errors="replace")
    except OSError:
        return SYSTEM_UID_MAX
    limits = dict(re.findall(r"^[ \t]*(SYS_UID_MAX|UID_MIN)[ \t]+([0-9]+)", text, re.MULTILINE))
    if "SYS_UID_MAX" in limits:
        return int(limits["SYS_UID_MAX"])
    return int(limits["UID_MIN"]) - 1 if "UID_MIN" in limits else SYSTEM_UID_MAX


def removes_ipc(root: Path) -> bool:
    """Read RemoveIPC from logind's files below `root`; its default is yes."""
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
    value = "yes"
    for path in ([main] if main else []) + [files[name] for name in sorted(files)]:
        parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        # An empty value is the default again.
        value = parser.get("Login", "RemoveIPC", fallback=value) or "yes"
    return value.lower() not in ("no", "false", "off", "0", "n", "f")


def litter() -> Found:
    from gadei_ps.commands import jobs

    left = jobs.collect(dry_run=True)
    if not left:
        return ok("nothing")
    names = sorted({one.job for one in left})
    size = sum(one.bytes for one in left)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return warning(
        f"segments, sockets and locks of dead jobs: {len(left)} ({size / 2**20:,.1f} MiB): {shown}",
        "gadei-ps gc",
    )


# A watchdog holds for each learner a pidfd, its ring and its connection, and for itself some more.
FILES_OF_A_LEARNER = 3
FILES_OF_THE_JOB = 64
MOST_LEARNERS = 256
LONGEST_SOCKET_PATH = 107  # of sockaddr_un, without its closing zero
SOCKET_NAME_BYTES = len("/..sock.") + 7  # in the directory, without the job's name; 7: a pid
LONGEST_JOB_NAME = 48
SYS_FUTEX_WAITV = 449
DIED = 1  # what lease_take() returns to the next owner
OWNER_DIES_WITHIN_NS = 1_000_000_000


def cores() -> Found:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {present} usable"
    if usable < 2:
        return warning(found, "learners and the server share one core; give two or more")
    return ok(found)


def futex_waitv() -> Found:
    libc = ctypes.CDLL(None, use_errno=True)
    # No futexes to wait for: a kernel that knows the call refuses that as invalid.
    libc.syscall(SYS_FUTEX_WAITV, None, 0, 0, None, 0)
    if ctypes.get_errno() == errno.EINVAL:
        return ok(f"kernel {platform.release()}")
    return warning(
        f"kernel {platform.release()} lacks it or forbids it: an idle server wakes by a timer",
        "use Linux 5.16 or newer",
    )


def pidfd() -> Found:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return failure(
            f"{error.strerror}: the death of a learner cannot be detected",
            "use Linux 5.3 or newer, and a sandbox that allows it",
        )
    return ok("works")


def robust_mutex() -> Found:
    """Check that the next thread gets the lease, and the news, of a thread that ended with it."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    lease = _native.address(memory)
    try:
        _native.lease_make(lease)
        owner = threading.Thread(target=_native.lease_take, args=(lease, 0))
        owner.start()
        owner.join()
        # Python's join does not wait for the kernel's end of the thread.
        found = _native.lease_take(lease, OWNER_DIES_WITHIN_NS)
        if found != _native.PS_TIMEOUT:
            _native.lease_release(lease)  # before its memory is unmapped
        reason = "" if found == DIED else "no news of it"
    except OSError as error:
        reason = str(error.strerror)
    if not reason:
        return ok("work")
    return failure(
        f"do not work ({reason}): the death of a server cannot be detected",
        "use an ordinary Linux kernel, and a sandbox that allows set_robust_list",
    )


def files() -> Found:
    from gadei_ps.watchdog.sockets import LEAST_FILES

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        return failure(f"{hard}: no job can be served", f"ulimit -n {LEAST_FILES} by root, or more")
    learners = max(0, (soft - FILES_OF_THE_JOB) // FILES_OF_A_LEARNER)
    if learners >= MOST_LEARNERS:
        return ok(f"{soft}")
    needed = FILES_OF_THE_JOB + FILES_OF_A_LEARNER * MOST_LEARNERS
    beyond = hard != resource.RLIM_INFINITY and hard < needed
    return warning(
        f"{soft}, enough for {learners} of {MOST_LEARNERS} learners",
        f"ulimit -n {needed}" + (f" by root: your hard limit is {hard}" if beyond else ""),
    )


def runtime_directory() -> Found:
    from gadei_ps.job import paths

    path = paths.directory()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK):
        return failure(
            f"{path}: you cannot write in {there}",
            "set GADEI_PS_RUNTIME_DIR to a directory you may write",
        )
    room = LONGEST_SOCKET_PATH - len(os.fsencode(path)) - SOCKET_NAME_BYTES
    if room < 1:
        return failure(
            f"{path}: too long for the path of a socket",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    if room < LONGEST_JOB_NAME:
        return warning(
            f"{path}: leaves {room} characters for the name of a job",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    return ok(str(path))


# The first drivers that run CUDA 13 and CUDA 12 (CUDA Compatibility, minor version compatibility).
DRIVER_OF_EXTRA = {"cuda13": 580, "cuda12": 525}
BROKEN_GPU = "see nvidia-smi and dmesg; until then, --device host does not use the GPU"


def driver_shows() -> Found:
    return gpu(gpus.LIST_TIMEOUT_S)


def gpu(timeout_s: float) -> Found:
    """Check the GPUs that the driver shows."""
    try:
        found = gpus.listed(timeout_s)
    except DeviceError as error:
        return warning(f"{error}; learners compute on the host", BROKEN_GPU)
    if not found:
        return ok("none found; learners compute on the host")
    names = [one.name for one in found]
    text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if version := gpus.driver():
        text += f", driver {version}"
    if (hidden := os.environ.get(gpus.VISIBLE)) is not None:
        text += f"; {gpus.VISIBLE}={hidden}"
    return ok(text)


def cupy_works() -> Found:
    if not has_cupy():
        return without_cupy(gpus.LIST_TIMEOUT_S)
    return cuda(gpus.PROBE, gpus.PROBE_TIMEOUT_S)


def without_cupy(timeout_s: float) -> Found:
    """A hint for machines with a GPU."""
    try:
        found = bool(gpus.listed(timeout_s))
    except DeviceError:
        found = False  # the check of the GPU reports it
    if not found:
        return ok("CuPy not installed; only learners on a GPU need it")
    return warning("CuPy not installed: learners compute on the host", cupy_for(gpus.driver()))


def cupy_for(driver: str) -> str:
    """Return the command that installs CuPy for a driver of this version; empty if unknown."""
    if not driver.partition(".")[0].isdecimal():
        return "pip install 'gadei-ps[cuda13]', or [cuda12] for a driver before 580"
    major = int(driver.partition(".")[0])
    for extra, first in DRIVER_OF_EXTRA.items():
        if major >= first:
            return f"pip install 'gadei-ps[{extra}]'"
    return f"update the NVIDIA driver to {first} or newer, then pip install 'gadei-ps[{extra}]'"


def cuda(command: Sequence[str], timeout_s: float) -> Found:
    """Check CuPy and the speed of memory by the probe that `command` starts."""
    try:
        found = gpus.probe(command, timeout_s, os.environ | gpus.order())
    except DeviceError as error:
        return warning(str(error), BROKEN_GPU)
    if not found["cupy"]:
        return warning(
            f"CuPy cannot be loaded: {found['errors']['cupy']}",
            f"{cupy_for(gpus.driver())}, and no other CuPy beside it",
        )
    parts = [f"CuPy {found['cupy']}"]
    if found["runtime"]:
        parts[0] += f" with CUDA {found['runtime']}"
    if found["driver"]:
        parts[0] += f", driver for CUDA {found['driver']}"
    parts += [_transfers(one) for one in found["devices"]]
    if found["missing"]:
        try:
            level = Level.WARNING if gpus.listed() else Level.OK
        except DeviceError:
            level = Level.OK  # the check of the GPU reports it
        why = str(found["missing"]).removesuffix("; run gadei-ps doctor for details")
        parts.append(f"learners compute on the host: {why}")
        return Found(level, "; ".join(parts), _remedy(found) if level != Level.OK else "")
    parts += [f"{name} fails: {why}" for name, why in found["errors"].items()]
    parts.append(_pinned())
    failed = found["errors"] or any(one["errors"] for one in found["devices"])
    return warning("; ".join(parts), BROKEN_GPU) if failed else ok("; ".join(parts))


def _remedy(found: Mapping[str, Any]) -> str:
    """Advise on GPUs that CuPy cannot use: often it is made for a newer driver."""
    version = gpus.driver()
    first = DRIVER_OF_EXTRA.get(f"cuda{str(found['runtime']).partition('.')[0]}", 0)
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < first:
        return f"the driver is {version}, this CuPy wants {first}: {cupy_for(version)}"
    return BROKEN_GPU


def _transfers(device: Mapping[str, Any]) -> str:
    """One GPU's part of the finding."""
    parts = [f"GPU {device['index']}:"]
    if "both_ways" in device:
        parts.append(
            f"{device['to_device']:.1f} GB/s to it, {device['to_host']:.1f} from it, "
            f"{device['both_ways']:.1f} both ways"
        )
    if "memory_free" in device and "memory_total" in device:
        free, total = (device[name] / 2**30 for name in ("memory_free", "memory_total"))
        parts.append(f"({free:,.1f} of {total:,.1f} GiB free)")
    if not device.get("registers_read_only", True):
        parts.append("(pins no read-only memory)")
    if device.get("peers"):
        parts.append(f"(reaches GPU {', '.join(map(str, device['peers']))})")
    parts += [f"{name} fails: {why}" for name, why in device["errors"].items()]
    return " ".join(parts)


def _pinned() -> str:
    """Describe the memory that learners on a GPU pin, and the limit that some set-ups apply."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"
    return f"{to_pin(SHM) / 2**20:,.1f} MiB in {SHM} to pin for running jobs (ulimit -l: {shown})"


def to_pin(directory: Path) -> int:
    """Return the size of the weights and rings in this directory (bytes)."""
    from gadei_ps.memory import shm

    sizes = []
    for path in directory.iterdir():
        match = shm.SEGMENT_NAME.fullmatch(path.name)
        if match and match["part"].startswith(("weights", "ring")):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.lstat().st_size)
    return sum(sizes)


CHECKS: dict[str, Callable[[], Found]] = {
    "Python": python,
    "native module": native,
    "Numba's cache": numba,
    "/dev/shm": shm,
    "large pages": large_pages,
    "cores": cores,
    "futex_waitv": futex_waitv,
    "pidfd_open": pidfd,
    "robust mutexes": robust_mutex,
    "open files": files,
    "runtime directory": runtime_directory,
    "systemd": systemd,
    "RemoveIPC": remove_ipc,
    "PyTorch": torch,
    "GPU": driver_shows,
    "CUDA": cupy_works,
    "left by dead jobs": litter,
}


def examine() -> list[Check]:
    """All checks. They change nothing, but may make the runtime directory."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[], Found]) -> Check:
    try:
        return Check(name, *check())
    except (OSError, GadeiError) as error:
        return Check(name, *failure(str(error)))
