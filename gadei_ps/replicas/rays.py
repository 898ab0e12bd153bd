"""Connections to a cluster of Ray, and a cluster of this host's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gadei_ps.errors import ClusterError, NotOurs, UsageError, in_words
from gadei_ps.job import paths
from gadei_ps.machine import interrupts, process
from gadei_ps.machine import ownership as owned
from gadei_ps.machine.addresses import parse
from gadei_ps.storage import files

CONNECT_S = 5.0
"""Time limit of a host to accept a connection (s)."""
GONE_S, AGAIN_S = 5.0, 0.1
"""Time limit until the processes of a lost cluster end; time between tries to remove files (s)."""
ADDRESS_VARIABLE, TOKEN_VARIABLE = "RAY_ADDRESS", "RAY_AUTH_TOKEN"
_MODE = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
_TRIES = {
    "RAY_NUM_REDIS_GET_RETRIES": "3",  # the cluster may reject the token
    "RAY_py_gcs_connect_timeout_s": "5",  # another program may listen at its address
    "RAY_gcs_server_request_timeout_seconds": "20",  # it may have no node on this host
}
"""Settings of a client, so that an error does not take minutes."""
_MOST_NOTE = 1 << 16  # bytes
_INSTALL = "pip install 'gadei-ps[cluster]'"
_OTHER = "but another program listens"
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A frame of HTTP/2: settings without any (RFC 9113, 3.4 and 6.5)."""


class Note(BaseModel):
    """The cluster of a run: of an own one, also its token, and the directory of its files."""

    address: str
    token: str | None = None
    files: str | None = None


def note_path(run: str) -> Path:
    """Return the file in which commands of this host find the cluster of a run."""
    return paths.directory() / f"{run}.groups.json"


def lock_path(run: str) -> Path:
    """Return the file that is locked while a command has a cluster of this host for a run."""
    return paths.directory() / f"{run}.groups.lock"


def noted(run: str) -> Note | None:
    """Return the note on the cluster of a run.

    Only a note of this user counts: a cluster runs what it is sent, and `files` are removed.
    """
    try:
        fd = owned.open_file(note_path(run), os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            return Note.model_validate_json(file.read(_MOST_NOTE))
    except (FileNotFoundError, NotOurs, ValueError):  # pydantic's error is one, too
        return None


def own_address(run: str) -> str | None:
    """Return the address of this host's own cluster that is noted for a run, or None."""
    found = noted(run)
    return found.address if found is not None and found.token else None


def nearby() -> str | None:
    """Return the address of the cluster of which `ray start` has made this host a node, or None."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    noted = Path(place) / "ray" / "ray_current_cluster"
    found = [os.environ.get(ADDRESS_VARIABLE, "")]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found.append(noted.read_text().strip())
    for one in found:
        with contextlib.suppress(ValueError):  # "auto", say
            parse(one)
            return one
    return None


def note(run: str, address: str, token: str | None, directory: str | None = None) -> None:
    """Note the cluster of a run, for this user alone. directory: of the files of an own one."""
    paths.directory(make=True)
    made = Note(address=address, token=token, files=directory)
    with files.replacing(note_path(run), 0o600) as stream:
        stream.write(made.model_dump_json().encode())


def forget(run: str, address: str | None = None) -> None:
    """Remove the note on a cluster that has ended, and the files of an own one.

    All processes that could have removed them may have been killed. address: of this cluster only.
    """
    found = noted(run)
    if address is not None and (found is None or found.address != address):
        return
    if found is not None and found.files:
        _remove(Path(found.files))
    note_path(run).unlink(missing_ok=True)


def loaded() -> Any:
    """Load Ray. Raises UsageError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise UsageError(f"there is no Ray here: {_INSTALL}") from None
    return ray


def connect(address: str, token: str | None = None) -> Any:
    """Connect Ray to the cluster at HOST:PORT. Raises UsageError, or ClusterError."""
    try:
        parse(address)
    except ValueError:
        wanted = "write HOST:PORT, as `ray start --head` prints it"
        raise UsageError(f"--address {address}: {wanted}") from None
    if not answers(address):
        raise ClusterError(f"no Ray cluster answers at {address}: start one (ray start --head)")
    if not (_uses_tls() or _is_grpc(address)):  # Ray would try for a minute
        raise ClusterError(f"no Ray cluster answers at {address}, {_OTHER}")
    os.environ.update(_MODE | _TRIES | ({} if token is None else {TOKEN_VARIABLE: token}))
    ray = loaded()
    try:
        with _silenced():
            ray.init(
                address=address, namespace="gadei-ps", log_to_driver=False, logging_level="ERROR"
            )
    except Exception as error:  # Ray raises RuntimeError, ConnectionError and others
        raise _explained(error, address) from None
    return ray


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drop what Ray's library prints to standard error meanwhile: its errors are raised, too."""
    if os.environ.get("GADEI_PS_TRACEBACK") == "1":
        yield
        return
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def answers(address: str) -> bool:
    """Return whether a process listens there."""
    try:
        with socket.create_connection(parse(address), CONNECT_S):
            return True
    except OSError:
        return False


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _is_grpc(address: str) -> bool:
    """Return whether a server of gRPC listens there: it sends the settings of HTTP/2 first."""
    try:
        with socket.create_connection(parse(address), CONNECT_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            header = connection.recv(len(_SETTINGS), socket.MSG_WAITALL)
            return header[3:5] == _SETTINGS[3:5]
    except OSError:
        return False


def _explained(error: BaseException, address: str) -> ClusterError:
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    text = " ".join(" ".join(map(str, causes)).split())
    lower = text.lower()
    if "version mismatch" in lower:
        return ClusterMistake(
            f"the cluster at {address} has another version of Ray or Python: {text[:300]}"
        )
    if "no node info found" in lower:
        return ClusterMistake(
            f"this host is not a node of the Ray cluster at {address}: start Ray here (ray start "
            f"--address={address}); if it runs, it is of another cluster: ray stop first"
        )
    if "token" in lower or "unauthenticated" in lower:
        return ClusterMistake(
            f"the cluster at {address} lets nobody in without its token: set {TOKEN_VARIABLE} to "
            "that with which its nodes were started, or copy their ~/.ray/auth_token"
        )
    if "failed to connect to gcs" in lower:
        return ClusterError(f"no Ray cluster answers at {address}, {_OTHER}")
    return ClusterError(f"the Ray cluster at {address} cannot be used: {text[:300]}")


class ClusterMistake(ClusterError):
    """An error that another try would repeat."""

    exit_code = 2


def _remove(directory: Path) -> None:
    """Remove a directory, even if processes that are just ending write there."""
    until = time.monotonic() + GONE_S
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists() or time.monotonic() > until:
            return
        time.sleep(AGAIN_S)


@contextlib.contextmanager
def own(replicas: int) -> Iterator[Note]:
    """Start a cluster of this host, with a CPU for each replica, until the end of the block.

    Raises UsageError without Ray, or ClusterError.
    """
    token = secrets.token_hex(32)
    os.environ.update(_MODE | {TOKEN_VARIABLE: token})
    with contextlib.ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="gps-ray-", dir="/tmp")  # short: sockets lie there
        stack.callback(_remove, Path(directory))
        child = process.spawn(
            process.module_command("gadei_ps.replicas.own_cluster", str(replicas), directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            how=None,  # it sees the end of its input, and ends the cluster
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            loaded()  # while it starts
            line = child.stdout.readline().decode().strip()
            try:
                parse(line)
            except ValueError:
                why = line or "its process has ended"
                raise ClusterError(f"Ray cannot be started on this host: {why}") from None
            yield Note(address=line, token=token, files=directory)
        finally:
            with interrupts.held():
                child.stdin.close()
                child.stdout.close()
                child.wait()


def described(error: BaseException) -> str:
    """Return an error of Ray in one line: its last line, which describes the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else in_words(error))[:300]
