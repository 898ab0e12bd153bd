"""Children that are forks of a process that has imported what they need.

    launcher --request--> loaded process --fork--> child
             <--answer---

Requests are JSON objects over a pair of sockets, of which the loaded process has one as its
standard input: `command` and `environment` of a child, answered by its pid, 0 if it cannot be
forked, or the `pid` of one that has ended, answered by its exit code, negative for a signal.
Children die with the loaded process, which dies with its launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps.machine import interrupts, process

IMPORT_S, ANSWER_S = 300.0, 30.0
"""Times after which a loaded process that does not answer is killed: at first, and later (s)."""
MOST_BYTES = 1 << 16
"""Size of a request (bytes)."""
ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
"""Variables of the loaded process: no other thread may run where a process is forked."""


class Fork:
    """A child of a loaded process, with the part of Popen that launchers use.

    Unlike a Popen, poll() reaps it.
    """

    def __init__(self, loaded: Loaded, pid: int) -> None:
        """Open a child by its pid. Raises OSError."""
        self.pid = pid
        self.returncode: int | None = None
        self.lost = False
        """Whether it has died with the loaded process."""
        self._loaded = loaded
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the child runs."""
        if self.returncode is None and not process.gone(self._pidfd, 0.0):
            return None
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the child, and return its exit code."""
        if self.returncode is None:
            code = self._loaded.ask(pid=self.pid)
            self.lost = code is None
            self.returncode = -signal.SIGKILL if code is None else code
            os.close(self._pidfd)
        return self.returncode


class Loaded:
    """A process that runs serve()."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process; its output goes to standard error. Raises OSError."""
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = process.spawn(
                command, env=os.environ | ENVIRONMENT, stdin=theirs.fileno(), stdout=2
            )
        self._end.settimeout(IMPORT_S)

    def close(self) -> None:
        """Kill the process."""
        with interrupts.held():
            process.end_group(self._child)
            self._end.close()

    def spawn(self, command: Sequence[str], *, env: Mapping[str, str], **how: Any) -> Any:
        """Fork a child, or start a program as process.spawn does if that fails. Raises OSError."""
        changed = dict(env.items() - os.environ.items())
        if pid := self.ask(command=command, environment=changed):
            try:
                return Fork(self, pid)
            except OSError:  # they have died, or no descriptor is left to watch this one
                self.close()
        return process.spawn(command, env=env, **how)

    def ask(self, **request: Any) -> int | None:
        """Return the answer; None if the process has ended, and its children with it."""
        try:
            self._end.send(json.dumps(request).encode())
            answer = self._end.recv(MOST_BYTES)
            self._end.settimeout(ANSWER_S)
        except OSError:
            answer = b""
        except BaseException:  # a signal: the next request would get this one's answer
            self.close()
            raise
        if not answer:
            self.close()
            return None
        return int(answer)


def serve() -> list[str]:
    """Fork children for a launcher; return in each child, with its command.

    No other threads may run.
    """
    end = socket.socket(fileno=0)
    while request := end.recv(MOST_BYTES):
        wanted = json.loads(request)
        if "pid" in wanted:
            answer = os.waitstatus_to_exitcode(os.waitpid(wanted["pid"], 0)[1])
        else:
            parent = os.getpid()
            try:
                answer = os.fork()
            except OSError:
                end.send(b"0")
                continue
            if not answer:
                process.die_with_parent(parent)
                with open(os.devnull) as nothing:
                    os.dup2(nothing.fileno(), end.detach())
                os.environ.update(wanted["environment"])
                return list(wanted["command"])
            os.setpgid(answer, answer)
        end.send(str(answer).encode())
    os._exit(0)
