"""The systemd units of a job, and where `gadei-ps install-unit` puts them.

Templates: gadei-ps@demo.service is the watchdog of the job in demo.toml, and gadei-ps-end@demo
ends what a dead watchdog has left. The files in systemd/ of the sources are texts() for the system;
change them here, then write those files again.
"""

from __future__ import annotations

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
from pathlib import Path
from string import Template
from typing import Any

import platformdirs

from gadei_ps.errors import UsageError
from gadei_ps.storage import files

NAME = "gadei-ps@.service"
END_NAME = "gadei-ps-end@.service"
SERVICE_USER = "gadei-ps"
HIDDEN = ("/tmp", "/var/tmp")
SYSTEM_PROGRAM = "/usr/local/bin/gadei-ps"  # pip's place for all users
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}", re.IGNORECASE)
# systemd interprets quotes, backslashes and dollars in a command line, and allows no line breaks.
UNFIT = re.compile(r"[\x00-\x1f\x7f\"'\\$]")


class Scope(StrEnum):
    """The service manager that runs the job."""

    SYSTEM = "system"
    USER = "user"


class Found(StrEnum):
    """The file that install() found at the unit's path."""

    NOTHING = "nothing"
    SAME = "the same"
    ANOTHER = "another"


TEMPLATE = """\
# A gadei-ps job for each instance: gadei-ps@demo.service serves the job demo of the file
# $jobs/demo.toml. The name of a job is that of its file: leave `name` out of the file.
# Letters, digits, '-' and '_' stand for themselves in an instance's name, so that no job's name
# needs systemd-escape; %i is used everywhere, because %I would read '-' as '/'.
#
# Written by `gadei-ps install-unit --$scope`. Put your own changes into a drop-in:
# `systemctl$flag edit gadei-ps@` for all jobs, `systemctl$flag edit gadei-ps@demo` for one.

[Unit]
Description=gadei-ps job %i
# Creates the device files of GPUs; the processes of this unit have no right to do that.
After=nvidia-persistenced.service
# Ends what is left of the job when this unit is inactive, and keeps its /tmp until then.
Wants=gadei-ps-end@%i.service
After=gadei-ps-end@%i.service
JoinsNamespaceOf=gadei-ps-end@%i.service
StartLimitIntervalSec=120
StartLimitBurst=10

[Service]
# Ready when learners can attach. The first start of an installation compiles for half a minute or
# longer; while it makes progress, it asks systemd for more time than this.
Type=notify
NotifyAccess=main
TimeoutStartSec=210
WatchdogSec=30
ExecStart=$program serve --json-log --name %i %E/gadei-ps/%i.toml
ExecReload=$program checkpoint %i

# A stop lets learners finish, applies what they have published, and writes a checkpoint. The
# watchdog limits each of these steps; this time is more than the sum.
TimeoutStopSec=90
SuccessExitStatus=143
Restart=on-failure
RestartSec=500ms
# Exit code 2 is a mistake in the job file, or memory that was made with another one or by another
# build of gadei-ps: another start would fail as well.
RestartPreventExitStatus=2

# Signals go to the watchdog only. It ends the servers and the learners that it has started. If it
# dies itself, they continue, and the next start adopts them with all their work. systemd then
# reports left-over processes, which is intended.
KillMode=process
OOMPolicy=continue

$limits

$places

$hardening

[Install]
WantedBy=$target
"""

END_TEMPLATE = """\
# Ends what gadei-ps@%i.service leaves if its watchdog is dead: servers, learners, and gradients
# that no checkpoint has. While systemd starts the watchdog again, they go on and this unit does
# nothing. When that unit is inactive, because it was stopped meanwhile or its starts have failed,
# systemd stops this one: all that was published is applied, and the last checkpoint is made.
#
# Written by `gadei-ps install-unit --$scope`. It is started and stopped with the other unit.

[Unit]
Description=end of gadei-ps job %i
StopWhenUnneeded=yes

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=$program serve --finish --json-log --name %i %E/gadei-ps/%i.toml
# While it makes progress, it asks systemd for more time than this.
NotifyAccess=exec
TimeoutStopSec=210

$limits

$places

$hardening
"""

LIMITS = """\
# Enough for the threads, files and sockets of 256 learners, and for segments pinned for GPUs.
TasksMax=32768
LimitNOFILE=65536
LimitMEMLOCK=infinity"""

SYSTEM_PLACES = """\
# Learners must run as this user or as root. To see a job's status: `sudo -u $user env
# GADEI_PS_RUNTIME_DIR=/run/gadei-ps gadei-ps status demo`. logind does not remove the shared
# memory of a system user.
User=$user
UMask=0077
# All jobs share the directories, so the end of one must not remove them.
RuntimeDirectory=gadei-ps
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
Environment=GADEI_PS_RUNTIME_DIR=%t/gadei-ps
# Checkpoints.
StateDirectory=gadei-ps
StateDirectoryMode=0700
Environment=GADEI_PS_STATE_DIR=%S/gadei-ps
# Compiled kernels, in the directory gadei-ps below this one.
CacheDirectory=gadei-ps
CacheDirectoryMode=0700
Environment=NUMBA_CACHE_DIR=%C"""

USER_PLACES = """\
# The same runtime directory as in a shell, so that commands find the job. Checkpoints and compiled
# kernels need no setting: they lie where commands look for them.
RuntimeDirectory=gadei-ps
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
Environment=GADEI_PS_RUNTIME_DIR=%t/gadei-ps"""

# These settings need no privilege: seccomp and prctl.
COMMON_HARDENING = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM"""

SYSTEM_HARDENING = f"""\
# Learners and servers inherit all of this. Do not change these:
#   MemoryDenyWriteExecute  Numba compiles the kernels when it loads them.
#   PrivateDevices, DevicePolicy, DeviceAllow, ProtectClock  would hide the GPUs
#                           (ProtectClock because it implies a DeviceAllow).
#   PrivateIPC, PrivateUsers, ProtectProc, ProcSubset  learners outside of this unit attach:
#                           they need the segments, and the watchdog needs to see them.
#   RemoveIPC               would remove the segments of servers that still run.
# /dev/shm stays writable under ProtectSystem. If a job's learners write to other directories than
# those above, name these in a drop-in: ReadWritePaths=/srv/models.
RemoveIPC=no
PrivateIPC=no
PrivateDevices=no
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
CapabilityBoundingSet=
AmbientCapabilities=
{COMMON_HARDENING}"""

USER_HARDENING = f"""\
# Only settings that need no privilege. File system protection would put the job into a user
# namespace of its own, where it cannot watch learners outside. Do not set MemoryDenyWriteExecute:
# Numba compiles the kernels when it loads them.
{COMMON_HARDENING}"""


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
    """What install() found and did. next: commands that start a job with the units."""

    scope: Scope
    units: tuple[File, ...]
    next: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "scope": self.scope.value,
            "units": [one.as_dict() for one in self.units],
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


def texts(scope: Scope, command: str, user: str = SERVICE_USER) -> dict[str, str]:
    """The units by their names; `command` as from program()."""
    system = scope == Scope.SYSTEM
    given = {
        "scope": scope.value,
        "flag": "" if system else " --user",
        "jobs": "/etc/gadei-ps" if system else "~/.config/gadei-ps",
        "program": command,
        "limits": LIMITS,
        "places": Template(SYSTEM_PLACES).substitute(user=user) if system else USER_PLACES,
        "hardening": SYSTEM_HARDENING if system else USER_HARDENING,
        "target": "multi-user.target" if system else "default.target",
    }
    made = {NAME: TEMPLATE, END_NAME: END_TEMPLATE}
    return {name: Template(one).substitute(given) for name, one in made.items()}


def directory(scope: Scope) -> Path:
    """Where the manager looks for units of this machine, or of this user."""
    if scope == Scope.SYSTEM:
        return Path("/etc/systemd/system")
    return platformdirs.user_config_path() / "systemd/user"


def install(
    scope: Scope,
    *,
    user: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    where: Path | None = None,
) -> Installed:
    """Writes the units into `where`, by default directory(scope).

    Raises UsageError, and changes nothing, if they could not work, or if another one is there and
    `force` is not given.
    """
    if user is not None and scope == Scope.USER:
        raise UsageError("--run-as needs --system: jobs of --user run as yourself")
    user = user or SERVICE_USER
    if not USER_NAME.fullmatch(user):
        raise UsageError(f"--run-as: {user!r} is not a valid name of a user")
    if scope == Scope.SYSTEM and not dry_run and where is None and os.geteuid():
        raise UsageError("--system needs root: sudo gadei-ps install-unit --system, or use --user")
    if scope == Scope.SYSTEM and not dry_run:
        check_reach(user, places())
    units = []
    for name, unit in texts(scope, program(), user).items():
        path = (where or directory(scope)) / name
        found = _look(path, unit)
        if found == Found.ANOTHER and not force and not dry_run:
            raise UsageError(
                f"{path} exists and differs: --print shows the new unit, --force replaces the old "
                "one; put your own changes into a drop-in (systemctl edit gadei-ps@)"
            )
        units.append(File(path, found, found != Found.SAME and not dry_run, unit))
    for one in units:
        if one.written:
            _write(one.path, one.text)
    return Installed(scope, tuple(units), tuple(_next(scope, user)))


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


def _next(scope: Scope, user: str) -> Sequence[str]:
    """Commands that start a job with the unit."""
    if scope == Scope.USER:
        jobs = shlex.quote(str(platformdirs.user_config_path("gadei-ps")))
        return (
            f"mkdir -p {jobs} && touch {jobs}/demo.toml",
            "systemctl --user daemon-reload",
            "systemctl --user enable --now gadei-ps@demo",
            "loginctl enable-linger  # or the job and its memory end with your last session",
        )
    commands = [
        "mkdir -p /etc/gadei-ps && touch /etc/gadei-ps/demo.toml",
        "systemctl daemon-reload",
        "systemctl enable --now gadei-ps@demo",
    ]
    try:
        pwd.getpwnam(user)
    except KeyError:
        commands.insert(
            0,
            "useradd --system --user-group --home-dir /var/lib/gadei-ps "
            f"--shell /usr/sbin/nologin {user}",
        )
    return commands
