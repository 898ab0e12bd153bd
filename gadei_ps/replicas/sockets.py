"""Requests between processes of one host: a Unix socket in the runtime directory.

A replica's process listens at NAME-NUMBER.replica.sock, and keeps a lock while it lives. Its actor
listens at NAME-NUMBER.ray.sock. Only processes of the same user can open that directory.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from gadei_ps.errors import ControlError, GadeiError, JobInUse, JobNotFound, NoAnswer, in_words
from gadei_ps.job import paths
from gadei_ps.job.lock_file import LockFile
from gadei_ps.replicas.config import job_name

ANSWER_S = 5.0
PART_S = 5
"""Time limit of a process for each part of a message (s)."""
FULL_S = 0.1
"""Time until a server that has no free file accepts connections again (s)."""
MOST_WAITING = 64

JsonObject = dict[str, Any]


def replica_path(run: str, number: int) -> Path:
    """Return the socket of the process of a replica."""
    return paths.directory() / f"{job_name(run, number)}.replica.sock"


def actor_path(run: str, number: int) -> Path:
    """Return the socket of the actor of a replica."""
    return paths.directory() / f"{job_name(run, number)}.ray.sock"


def replica_lock(run: str, number: int, *, create: bool = True) -> LockFile:
    """Lock a replica for this process. Raises JobInUse if another one has it."""
    path = paths.directory() / f"{job_name(run, number)}.replica.lock"
    try:
        return LockFile(path, create=create)
    except BlockingIOError:
        taken = f"replica {job_name(run, number)} has a process on this host already"
        raise JobInUse(taken) from None


def request(path: Path, what: str, timeout_s: float | None = ANSWER_S, **how: Any) -> Any:
    """Return the answer of the process that listens at `path`.

    Raises JobNotFound if no process listens there, NoAnswer, or ControlError.
    """
    name = path.name
    try:
        with _connected(path) as connection:
            connection.send((what, how))
            if not connection.poll(timeout_s):
                raise BlockingIOError
            answer, error = connection.recv()
    except BlockingIOError:  # of a connection, a send, a poll or a receipt
        raise NoAnswer(f"{name}: no answer in time: kill its process") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise JobNotFound(f"no process listens at {name}") from None
    except (EOFError, OSError) as error:
        raise ControlError(f"{name}: its process has ended") from error
    if error is not None:
        raise ControlError(error)
    return answer


def _connected(path: Path) -> Connection:
    """Connect, with a time limit for each part of a message that is sent or received."""
    with socket.socket(socket.AF_UNIX) as made:
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # the kernel's: also of a connect
            made.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(PART_S), 0))
        made.connect(str(path))
        return Connection(made.detach())


def ask(run: str, number: int, what: str, timeout_s: float | None = ANSWER_S, **how: Any) -> Any:
    """Return the answer of a replica's process. Raises as request()."""
    return request(replica_path(run, number), what, timeout_s, **how)


def lives(run: str, number: int) -> bool:
    """Return whether a process has this replica here."""
    try:
        replica_lock(run, number, create=False).close()
        return False
    except JobInUse:
        return True
    except FileNotFoundError:
        return False


def _numbers(run: str) -> list[int]:
    """Return the numbers of the replicas that have, or have left, a lock on this host."""
    locks = paths.directory().glob(f"{run}-*.replica.lock")
    found = [one.name.removeprefix(f"{run}-").removesuffix(".replica.lock") for one in locks]
    return sorted(int(one) for one in found if one.isdecimal())


def here(run: str) -> list[int]:
    """Return the numbers of the replicas on this host whose processes live."""
    return [number for number in _numbers(run) if lives(run, number)]


def clear(run: str, number: int | None = None) -> None:
    """Remove files that killed processes of replicas have left here. number: None: of all."""
    for one in _numbers(run) if number is None else [number]:
        with contextlib.suppress(JobInUse, FileNotFoundError, ControlError):
            lock = replica_lock(run, one, create=False)
            replica_path(run, one).unlink(missing_ok=True)
            actor_path(run, one).unlink(missing_ok=True)
            lock.release()


class Server:
    """A server of requests, with a connection and a thread for each."""

    def __init__(self, path: Path, answer: Callable[..., Any]) -> None:
        """Listen at `path`. answer: is called with the name of the request and its arguments."""
        path.unlink(missing_ok=True)
        self._path, self._answer = path, answer
        self._listener = Listener(str(path), "AF_UNIX", MOST_WAITING)
        self._is_closed = False
        threading.Thread(target=self._accept, name="requests", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
                serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                serve.start()
            except (OSError, EOFError, RuntimeError):  # too many files, or threads
                time.sleep(FULL_S)

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            what, how = connection.recv()
            answered: tuple[Any, str | None]
            try:
                answered = self._answer(what, **how), None
            except GadeiError as error:
                answered = None, in_words(error)
            except Exception as error:  # the process continues after any request
                answered = None, f"{type(error).__name__}: {error}"[:300]
            connection.send(answered)

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.close()
