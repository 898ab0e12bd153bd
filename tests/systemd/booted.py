"""A real systemd as PID 1 in namespaces of its own, with a root file system that it cannot change.

It sees this machine's files read-only. What it may write is in memory and goes with it: /run, /tmp,
/var, /etc and /dev/shm. Of the units of this machine it has only those in UNITS, so that nothing is
cleaned up, mounted or configured that is not its own. With a folder to keep /var, /etc and /dev/shm
in, it can be booted again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

from support import eventually

from gadei_ps.commands import unit_files

UNITS = (
    "basic.target dbus.service dbus.socket final.target kill.target shutdown.target "
    "slices.target sockets.target sysinit.target system.slice "
    "systemd-journald-dev-log.socket systemd-journald.service systemd-journald.socket "
    "timers.target paths.target umount.target multi-user.target exit.target "
    "systemd-exit.service systemd-logind.service user.slice user@.service user-runtime-dir@.service"
)
ROOT = Path(__file__).resolve().parents[2]
LIBRARY = next(
    (
        path
        for path in map(Path, ("/usr/lib/systemd", "/lib/systemd"))
        if (path / "systemd").exists()
    ),
    Path("/usr/lib/systemd"),
)

SCRIPT = """\
set -eu
mount --make-rprivate /
mount -t proc proc /proc
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/own/units /run/own/etc /run/own/work /run/systemd/system /run/dbus
for name in $UNITS; do
    if [ -f "$LIBRARY/system/$name" ]; then cp -L "$LIBRARY/system/$name" /run/own/units/; fi
done
mount --bind /run/own/units "$LIBRARY/system"
mount -t tmpfs tmpfs "$LIBRARY/system-generators"
if [ -n "$KEPT" ]; then
    mkdir -p "$KEPT/etc" "$KEPT/work" "$KEPT/units" "$KEPT/var" "$KEPT/shm"
    chmod 1777 "$KEPT/shm"
    mount -t overlay overlay -o "lowerdir=/etc,upperdir=$KEPT/etc,workdir=$KEPT/work" /etc
    mount --bind "$KEPT/units" /etc/systemd/system
    mount --bind "$KEPT/var" /var
    mount --bind "$KEPT/shm" /dev/shm
else
    mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/own/etc,workdir=/run/own/work /etc
    mount -t tmpfs tmpfs /etc/systemd/system
    mount -t tmpfs tmpfs /var
    mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm
fi
if [ -n "$CLOSED" ]; then
    mkdir -p /run/own/open /run/own/open-work
    mount -t overlay overlay \\
        -o "lowerdir=$CLOSED,upperdir=/run/own/open,workdir=/run/own/open-work" "$CLOSED"
    chmod a+x "$CLOSED"
fi
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p /var/lib /var/cache /var/log /var/tmp
[ -e /var/cache/gadei-ps ] || cp -r "$KERNELS" /var/cache/gadei-ps
[ -e /var/run ] || ln -s /run /var/run
mkdir /run/systemd/system/multi-user.target.d
printf '[Unit]\\nWants=%s %s\\n' "dbus.socket systemd-logind.service" \\
    "systemd-journald.socket systemd-journald-dev-log.socket" \\
    > /run/systemd/system/multi-user.target.d/own.conf
mount -o remount,bind,ro /
export container=gadei-ps-test
exec "$LIBRARY/systemd" --system --unit=multi-user.target --log-target=journal --show-status=0
"""


def impossible() -> str:
    """Return why no systemd can be booted here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("unshare", "nsenter", "dbus-daemon"):
        if not shutil.which(program):
            return f"there is no program {program}: install util-linux and dbus"
    if not (LIBRARY / "systemd").exists():
        return "there is no systemd: install the package systemd"
    if ROOT.is_relative_to("/tmp") or ROOT.is_relative_to("/var"):
        return f"{ROOT} is hidden from a service that has a /tmp of its own: take another place"
    if (closed := _closed()) and ROOT.is_relative_to(closed):
        return f"{ROOT} cannot be reached by other users ({closed} is closed): take another place"
    return "" if _cgroups() else "no cgroup2 file system is mounted"


def _closed() -> Path | None:
    """The folder that keeps others from this interpreter, such as /root; inside it is open."""
    folders = {folder for place in unit_files.places() for folder in place.parents}
    closed = [one for one in sorted(folders) if not one.stat().st_mode & stat.S_IXOTH]
    return closed[0] if closed else None


def _cgroups() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


class Booted:
    """A running systemd; `with` ends it and everything in it."""

    def __init__(self, kernels: Path, kept: Path | None = None) -> None:
        """kernels: compiled ones, so that the first start inside need not compile.

        kept: a folder of a tmpfs for what is on the disk and in /dev/shm, for boot() after halt().
        """
        self._kernels = str(kernels)
        self._kept = kept
        self._started: list[subprocess.Popen[str]] = []
        found = _cgroups()
        assert found is not None
        self._cgroup = found / f"gadei-ps-test-{os.getpid()}"

    def __enter__(self) -> Booted:
        self._cgroup.mkdir()
        into = shlex.quote(str(self._cgroup / "cgroup.procs"))
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'echo $$ > {into} && exec "$@"', "boot", "unshare"),
                *("--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc"),
                *("bash", "-c", SCRIPT),
            ],
            env=os.environ
            | {"UNITS": UNITS, "LIBRARY": str(LIBRARY), "KERNELS": self._kernels}
            | {"KEPT": str(self._kept or ""), "CLOSED": str(_closed() or "")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            eventually(self._is_up, what=self._said)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            eventually(lambda folder=folder: _removed(Path(folder)), what=f"{folder} is not empty")

    def halt(self, *, orderly: bool) -> None:
        """Halt until `with` or boot(). orderly: stop the units first; else the power fails."""
        if orderly:
            self.run("systemctl", "exit")
            eventually(self._is_down, what=self._said)
        self.__exit__()

    def _is_down(self) -> bool:
        # A shutdown stops processes before it kills them, and nsenter stops with its own.
        for one in self._started:
            one.send_signal(signal.SIGCONT)
        return self._process.poll() is not None

    def boot(self) -> None:
        """Again, with what was kept."""
        self.__enter__()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._said()
        with contextlib.suppress(AssertionError, IndexError, subprocess.TimeoutExpired):
            return self.run("systemctl", "is-system-running").stdout.strip() in (
                "running",
                "degraded",
            )
        return False

    def _said(self) -> str:
        if self._process.poll() is not None and self._process.stderr is not None:
            return self._process.stderr.read()
        return self.run("systemctl", "list-jobs").stdout

    @property
    def pid(self) -> int:
        """Return the pid of systemd, here."""
        path = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int(path.read_text().split()[0])

    def _inside(self, arguments: tuple[object, ...]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-a", *map(str, arguments)]

    def run(self, *arguments: object, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
        """A command inside, as root."""
        return subprocess.run(
            self._inside(arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            self._inside(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._started.append(started)
        return started

    def do(self, *arguments: object) -> str:
        """Run a command that succeeds; return its output."""
        done = self.run(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.do("systemctl", "show", unit, "--property", name, "--value").strip()

    def journal(self, unit: str) -> str:
        return self.do("journalctl", "--no-pager", "-o", "cat", "-u", unit)

    def write(self, path: str, text: str) -> None:
        done = subprocess.run(
            self._inside(("bash", "-c", 'mkdir -p "${0%/*}" && cat > "$0"', path)),
            input=text,
            text=True,
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
        return True
    time.sleep(0.01)
    return not folder.exists()
