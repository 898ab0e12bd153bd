"""How one talks to the process of a machine: a socket in the runtime directory, lines of JSON.

A machine's process holds a lock while it lives. So there is one for each machine of a run on each
host, and what has the name of the socket of a dead one may be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gadei_ps.cluster import locks
from gadei_ps.cluster.config import job_name
from gadei_ps.errors import ControlError, JobInUse, JobNotFound, NoAnswer, in_words
from gadei_ps.job import paths
from gadei_ps.job.control import UCRED
from gadei_ps.machine import process

ANSWER_S = 5.0
MOST_BYTES = 1 << 20  # of a request or an answer
_NAME = re.compile(r"(?P<run>[A-Za-z0-9_-]+)-(?P<number>\d+)\.machine\.sock")

Facts = dict[str, Any]
_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)


def socket_path(run: str, number: int) -> Path:
    """Where the process of the machine listens."""
    return paths.directory() / f"{job_name(run, number)}.machine.sock"


def lock_path(run: str, number: int) -> Path:
    """The file that it keeps locked."""
    return paths.directory() / f"{job_name(run, number)}.machine.lock"


def here(run: str | None = None) -> list[tuple[str, int]]:
    """Machines on this host whose processes live: names of runs, and numbers."""
    found = []
    for path in paths.directory().glob("*.machine.sock"):
        match = _NAME.fullmatch(path.name)
        if match and run in (None, match["run"]) and lives(match["run"], int(match["number"])):
            found.append((match["run"], int(match["number"])))
    return sorted(found)


def sweep(run: str) -> None:
    """Removes what killed processes of the run's machines have left on this host."""
    for path in paths.directory().glob(f"{run}-*.machine.*"):
        match = _NAME.fullmatch(path.with_suffix(".sock").name)
        if match and match["run"] == run:
            clear(run, int(match["number"]))


def lives(run: str, number: int) -> bool:
    """Whether a process has this machine."""
    try:
        with _connected(run, number):
            return True
    except JobNotFound:
        return False
    except ControlError:
        return True


def ask(run: str, number: int, what: str, timeout_s: float | None = ANSWER_S, **how: Any) -> Facts:
    """The answer to a request. Raises JobNotFound if nobody has the machine, and ControlError."""
    job = job_name(run, number)
    with _connected(run, number) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"do": what, **how}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(MOST_BYTES)
        except TimeoutError:
            raise NoAnswer(f"machine {job} does not answer: kill its process") from None
        except OSError as error:
            raise ControlError(f"machine {job}: {in_words(error)}") from None
    if not line.endswith(b"\n"):
        raise ControlError(f"machine {job} has ended meanwhile")
    try:
        answer = _FACTS.validate_json(line)
    except ValidationError:
        raise ControlError(
            f"machine {job}: the reply is not one of its process; another program answers"
        ) from None
    if "error" in answer:
        raise ControlError(f"machine {job}: {answer['error']}")
    return answer


def wait_for_end(pid: int) -> None:
    """Waits until the process of a machine, which is ending, has ended; at most ANSWER_S."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        process.gone(pidfd, ANSWER_S)
    finally:
        os.close(pidfd)


def _connected(run: str, number: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(str(socket_path(run, number)))
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        raise JobNotFound(f"no process has machine {job_name(run, number)} here") from None
    except OSError as error:
        connection.close()
        raise ControlError(f"machine {job_name(run, number)}: {in_words(error)}") from None
    if UCRED.unpack(raw)[1] != os.geteuid():
        connection.close()
        raise ControlError(
            f"machine {job_name(run, number)}: a program of another user answers at "
            f"{socket_path(run, number)}: run the command as that user"
        )
    return connection


def clear(run: str, number: int) -> None:
    """Removes what a process that was killed has left; a living one keeps it."""
    with contextlib.suppress(JobInUse, FileNotFoundError, ControlError):
        Lock(run, number, create=False).release()


class Lock(locks.Lock):
    """The lock of a machine. Raises JobInUse if another process has it."""

    def __init__(self, run: str, number: int, *, create: bool = True) -> None:
        self._socket = socket_path(run, number)
        taken = f"machine {job_name(run, number)} has a process on this host already"
        super().__init__(lock_path(run, number), taken, create=create)

    def release(self) -> None:
        """Also removes socket and file."""
        self._socket.unlink(missing_ok=True)
        super().release()


class Door(socketserver.ThreadingUnixStreamServer):
    """Answers requests, each in a thread of its own. The caller holds the machine's lock."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, run: str, number: int, answer: Callable[[Facts], Facts]) -> None:
        path = socket_path(run, number)
        path.unlink(missing_ok=True)
        self.answer = answer
        super().__init__(str(path), _Request)


class _Request(socketserver.StreamRequestHandler):
    server: Door
    timeout = ANSWER_S

    def handle(self) -> None:
        try:
            answer = self.server.answer(json.loads(self.rfile.readline(MOST_BYTES)))
        except Exception as error:  # the machine goes on, whatever was asked
            answer = {"error": in_words(error)}
        with contextlib.suppress(OSError):  # who has asked may be gone
            self.wfile.write(json.dumps(answer).encode() + b"\n")
