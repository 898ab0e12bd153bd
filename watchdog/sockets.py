"""The control socket's server side: never waits for a client, keeps bounded buffers for each."""

from __future__ import annotations

import array
import contextlib
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gadei_ps.errors import ControlError, GadeiError, in_words
from gadei_ps.job import control
from gadei_ps.machine import log
from gadei_ps.memory import reserve
from gadei_ps.watchdog.durations import LAST_REPLIES_S

MAX_CLIENTS = 512
MAX_CLIENTS_OF_ONE = 128  # of one process, so that it cannot take all places
LEAST_FILES = 64  # with 48, a job with one learner fails at its start
RESERVED = 24  # descriptors that clients leave to the watchdog, to start its own processes
OPERATORS = 4  # that learners leave besides, so that a status or a stop is still received
MAX_UNSENT = 4 << 20
READ = 1 << 16  # bytes at a time
MAX_FDS = 4
MESSAGE_TIMEOUT_S = 10.0  # from a message's first byte to its last


def remove_dead(path: Path) -> None:
    """Remove what dead watchdogs have left of a job's socket. The caller holds the job's lock."""
    path.unlink(missing_ok=True)
    _remove_passing(path)


def _remove_passing(path: Path) -> None:
    """Remove sockets of watchdogs that died while they made them."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


@dataclass(eq=False)
class Client:
    """One connection. `pid`: of the process that connected, from the kernel."""

    socket: socket.socket
    pid: int
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    since: float = 0.0
    waiting: bool = False  # its reply comes later

    def drop_fds(self) -> None:
        while self.fds:
            reserve.close_later(self.fds.pop())


Reply = Mapping[str, object] | None
"""Reply to a request; None if it comes later."""
Handler = Callable[[Client, control.Request], Reply]


class ControlServer:
    """Accepts clients, reads requests, sends what `handler` returns; None: a reply comes later."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        handler: Handler,
        closed: Callable[[Client], None],
    ) -> None:
        """closed: called when a connection has ended, unless this server itself ends."""
        self.path = path
        self._closed = closed
        self._selector = selector
        self._handler = handler
        self._clients: set[Client] = set()
        self._listening = True
        self._listener, self._file = _listen(path)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def is_named(self) -> bool:
        """Return whether the socket's name still leads to it."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self.path.lstat(), self._file)
        return False

    def renew(self) -> None:
        """Listen again at the same path, where the socket was removed or replaced.

        The caller holds the job's lock. Clients that are connected stay. Raises ControlError.
        """
        listener, self._file = _listen(self.path)
        if self._listening:
            self._accept(0)  # who came before the name was lost
        if self._listening:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._listening = listener, True
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        while True:
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                # No descriptor is free. As long as a client waits to be accepted, select() would
                # return at once. expire() listens again.
                self._listening = False
                self._selector.unregister(self._listener)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        pid, uid, _gid = control.UCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, control.UCRED.size)
        )
        if uid not in (os.getuid(), 0):
            connection.close()
        # The kernel gives the lowest number that is free: so many descriptors are open.
        elif connection.fileno() >= _files() - RESERVED:
            self._refuse(connection, _no_descriptor())
        elif len(self._clients) >= MAX_CLIENTS:
            self._refuse(connection, f"the watchdog has {MAX_CLIENTS} clients, which is the limit")
        elif sum(client.pid == pid for client in self._clients) >= MAX_CLIENTS_OF_ONE:
            self._refuse(
                connection,
                f"process {pid} has {MAX_CLIENTS_OF_ONE} connections to the watchdog, which is the "
                "limit",
            )
        else:
            client = Client(connection, pid)
            self._clients.add(client)
            self._selector.register(
                connection, selectors.EVENT_READ, lambda mask, c=client: self._ready(c, mask)
            )

    def _refuse(self, connection: socket.socket, why: str) -> None:
        """Answer before a request, and close."""
        with contextlib.suppress(OSError):
            connection.send(
                control.pack({"v": control.PROTOCOL} | failure(ControlError(why))),
                socket.MSG_DONTWAIT,
            )
        connection.close()

    def _ready(self, client: Client, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(client)
            if _has_request(client):
                self._serve(client)
            elif mask & selectors.EVENT_READ:
                self._read(client)
        except (OSError, ValueError, GadeiError):
            self.close(client)

    def _read(self, client: Client) -> None:
        data, ancillary, _flags, _address = client.socket.recvmsg(
            READ if client.waiting else min(READ, _missing(client.received)),
            socket.CMSG_SPACE(MAX_FDS * 4),
            socket.MSG_CMSG_CLOEXEC,
        )
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                client.fds.extend(fds)
        if len(client.fds) > MAX_FDS:
            raise ValueError("too many descriptors")
        if not data:
            self.close(client)
            return
        if not client.received:
            client.since = time.monotonic()
        client.received += data
        self._serve(client)

    def _serve(self, client: Client) -> None:
        """Serve one request, if it has come. Others that came with it wait for their turns."""
        if not client.waiting and len(client.received) >= control.LENGTH.size:
            (length,) = control.LENGTH.unpack_from(client.received)
            if length > control.MAX_REQUEST:
                # Where the next message begins is unknown: the connection ends with the reply.
                self.reply(client, failure(ControlError(f"message of {length} bytes")))
                raise ValueError("message too long")
            end = control.LENGTH.size + length
            if len(client.received) < end:
                return
            raw = bytes(client.received[control.LENGTH.size : end])
            del client.received[:end]
            client.since = time.monotonic()
            try:
                answer = self._handler(client, control.parse_request(raw))
            except GadeiError as error:
                answer = failure(error)
            except OSError as error:  # no memory or descriptor is free, say
                log.get().error("a request failed", reason=in_words(error))
                answer = failure(ControlError(f"the watchdog could not do it: {in_words(error)}"))
            except Exception as error:  # one bad request must not end the job
                log.get().exception("a request failed", request=raw[:200])
                answer = failure(ControlError(f"the watchdog could not do it: {error}"))
            finally:
                client.drop_fds()
            if answer is None:
                client.waiting = True
            else:
                self.reply(client, answer)
        # A client that sends requests while its reply is pending may not fill our memory.
        if client.waiting and len(client.received) > control.MAX_REQUEST:
            raise ValueError("requests sent without waiting for the reply")

    def check_room(self, client: Client) -> None:
        """Check that a client can become a learner. Raises ControlError without descriptors."""
        # It is to have one more: its pidfd.
        if client.socket.fileno() + 1 >= _files() - RESERVED - OPERATORS:
            raise ControlError(_no_descriptor())

    def reply(self, client: Client, message: Mapping[str, object]) -> None:
        """Queue a reply; a client that does not read them is dropped."""
        client.waiting = False
        client.since = time.monotonic()  # of what came while it waited
        self.note(client, message)

    def note(self, client: Client, message: Mapping[str, object]) -> None:
        """Queue a message to a client that continues to wait for its reply."""
        if client not in self._clients:
            return
        client.unsent += control.pack({"v": control.PROTOCOL, "ok": True, **message})
        if len(client.unsent) > MAX_UNSENT:
            self.close(client)
            return
        try:
            self._flush(client)
        except OSError:
            self.close(client)

    def _flush(self, client: Client) -> None:
        if client.unsent:
            try:
                sent = client.socket.send(client.unsent)
                del client.unsent[:sent]
            except BlockingIOError:
                pass
        # A request that came while the client waited is served when the socket can take its reply.
        writes = client.unsent or _has_request(client)
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        key = self._selector.get_key(client.socket)
        if key.events != mask:
            self._selector.modify(client.socket, mask, key.data)

    def __contains__(self, client: Client) -> bool:
        """Return whether it is still connected."""
        return client in self._clients

    def expire(self) -> None:
        """Drop clients that have begun a message and do not end it; listen again if possible."""
        if not self._listening:
            self._listening = True
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        now = time.monotonic()
        for client in list(self._clients):
            late = now - client.since > MESSAGE_TIMEOUT_S
            if client.received and not client.waiting and late:
                self.close(client)

    def close(self, client: Client) -> None:
        if client in self._clients:
            self._clients.discard(client)
            self._selector.unregister(client.socket)
            client.socket.close()
            client.drop_fds()
            self._closed(client)

    def shut_down(self) -> None:
        """Close everything and remove the socket, if it is still ours."""
        self._closed = lambda _: None
        until = time.monotonic() + LAST_REPLIES_S
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.socket.settimeout(max(0.001, until - time.monotonic()))
                client.socket.sendall(client.unsent)
            self.close(client)
        if self._listening:
            self._selector.unregister(self._listener)
        self._listener.close()
        if self.is_named():
            with contextlib.suppress(OSError):  # the job's memory is still to be removed
                self.path.unlink()


def _listen(path: Path) -> tuple[socket.socket, os.stat_result]:
    """A socket that listens at `path`, and its file's status. Raises ControlError."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ControlError(f"cannot listen at {path}: {error.strerror or error}") from None
    # Bound under a passing name and then renamed: no client sees the socket with another mode, and
    # the socket of a dead watchdog is replaced.
    passing = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _remove_passing(path)
        listener.bind(str(passing))
        passing.chmod(0o600)
        listener.listen(MAX_CLIENTS)
        status = passing.lstat()
        passing.rename(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            passing.unlink(missing_ok=True)
        raise ControlError(f"cannot listen at {path}: {error.strerror or error}") from None
    return listener, status


def _has_request(client: Client) -> bool:
    """Return whether a whole request is there, or one too long, that may be served now."""
    return not client.waiting and _missing(client.received) <= 0


def _missing(received: bytearray) -> int:
    """Return the bytes to the end of the message that has begun.

    No more are read at once: each client has one request served in its turn, even if it sends many.
    """
    if len(received) < control.LENGTH.size:
        return control.LENGTH.size - len(received)
    length: int = control.LENGTH.unpack_from(received)[0]
    if length > control.MAX_REQUEST:
        return 0
    return control.LENGTH.size + length - len(received)


def _files() -> int:
    """Return the number of descriptors that this process may have open."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def check_files() -> None:
    """Raise GadeiError if this process may open too few files to serve a job."""
    if _files() < LEAST_FILES:
        raise GadeiError(
            f"the watchdog may open {_files()} files, and needs {LEAST_FILES} for a job with one "
            "learner: raise the limit (ulimit -n, LimitNOFILE)"
        )


def _no_descriptor() -> str:
    return (
        f"the watchdog may open {_files()} files, and no more are free: raise the limit "
        f"(ulimit -n, LimitNOFILE) and serve the job again; kill -TERM {os.getpid()} stops it"
    )


def failure(error: GadeiError) -> dict[str, object]:
    """Return the reply with an error for a client."""
    return {"ok": False, "error": str(error), "kind": type(error).__name__}
