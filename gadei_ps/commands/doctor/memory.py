"""Checks of shared memory, and of what takes segments away or leaves them behind."""

from __future__ import annotations

import configparser
import os
import pwd
import re
from pathlib import Path

from gadei_ps.commands.doctor.result import Found, Level

SHM = Path("/dev/shm")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
LITTLE_SHM = 256 << 20  # bytes free; the sentence classifier with two learners takes about 50 MiB
SYSTEM_UID_MAX = 999  # where /etc/login.defs does not say


def shm() -> Found:
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


def large_pages() -> Found:
    try:
        found = SHMEM_ENABLED.read_text()
    except OSError:
        return Level.OK, "the kernel has none for shared memory", ""
    chosen = found.partition("[")[2].partition("]")[0]
    if chosen in ("never", "deny"):
        # A hint, not a fault: it is the kernel's default, and matters to large models only.
        return (
            Level.OK,
            f"none for shared memory; large models gain: echo advise > {SHMEM_ENABLED}",
            "",
        )
    return Level.OK, f"{chosen}, for shared memory", ""


def remove_ipc() -> Found:
    return logind(Path("/"), os.getuid())


def logind(root: Path, uid: int) -> Found:
    """Check whether logind of the system below `root` removes this user's segments."""
    if not (root / "run/systemd/system").is_dir() or not (root / "run/systemd/seats").is_dir():
        return Level.OK, "no logind here", ""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    if uid <= system_uid_max(root):
        return Level.OK, f"logind leaves the segments of system users ({name}) alone", ""
    if not removes_ipc(root):
        return Level.OK, "RemoveIPC=no", ""
    if lingers(root, name):
        return Level.OK, f"{name} lingers: logind leaves the segments alone", ""
    return (
        Level.WARNING,
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
    said = dict(re.findall(r"^[ \t]*(SYS_UID_MAX|UID_MIN)[ \t]+([0-9]+)", text, re.MULTILINE))
    if "SYS_UID_MAX" in said:
        return int(said["SYS_UID_MAX"])
    return int(said["UID_MIN"]) - 1 if "UID_MIN" in said else SYSTEM_UID_MAX


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


def litter() -> Found:
    from gadei_ps.commands import jobs

    left = jobs.collect(dry_run=True)
    if not left:
        return Level.OK, "nothing", ""
    names = sorted({one.job for one in left})
    size = sum(one.bytes for one in left)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        Level.WARNING,
        f"segments, sockets and locks of dead jobs: {len(left)} ({size / 2**20:,.1f} MiB): {shown}",
        "gadei-ps gc",
    )
