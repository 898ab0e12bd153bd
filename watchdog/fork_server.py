"""Start of a fork server: early, so that it loads while the watchdog imports its own modules."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from dataclasses import dataclass

from gadei_ps.machine import process
from gadei_ps.memory import build

ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of servers: NumPy's own threads would delay the kernel's transfer of the leases."""
TITLE = {"SPT_NOENV": "1"}
"""Variable that keeps /proc/PID/environ of a fork: there is room for its command line."""
ROOM = " " * 256


@dataclass(frozen=True)
class ForkServer:
    """A fork server. end: the watchdog's end of the socket. files: of its build at its start."""

    child: subprocess.Popen[bytes]
    pidfd: int
    end: socket.socket
    files: frozenset[tuple[str, int, int]]

    def kill(self) -> None:
        process.send_signal(self.child, signal.SIGKILL)

    def exit_code(self, timeout_s: float = 0.0) -> int:
        """Wait for its end, and return the exit code; SIGKILL's if the kernel still blocks it."""
        ended = process.gone(self.pidfd, timeout_s)
        os.close(self.pidfd)
        return self.child.wait() if ended else -signal.SIGKILL


def start() -> ForkServer:
    """Start a fork server, which dies with this process. Raises OSError."""
    files = build.files()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = str(theirs.fileno()), f"{build.of_server():x}", ROOM
    try:
        with theirs:
            child = process.spawn(
                process.module_command("gadei_ps.server.fork_server", *words),
                env=os.environ | ENVIRONMENT | TITLE,
                stdout=2,  # the log goes to stderr: stdout belongs to the command's result
                pass_fds=[theirs.fileno()],
            )
        pidfd, _ = watched(child)
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return ForkServer(child, pidfd, ours, files)


def watched(child: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Return a child's pidfd and start time. Raises OSError; then the child is killed."""
    with contextlib.ExitStack() as failed:
        failed.callback(process.end_group, child)
        pidfd = os.pidfd_open(child.pid)
        failed.callback(os.close, pidfd)
        ticks = process.start_ticks(child.pid)
        failed.pop_all()
    return pidfd, ticks


def start_early() -> ForkServer | None:
    """The same at the start of a watchdog; None where it fails: the watchdog tries again."""
    try:
        return start()
    except OSError:
        return None
