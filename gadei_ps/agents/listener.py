"""The listening socket of an agent: lets in those that are awaited, and stays open for others.

Each call is answered in a thread of its own, with a deadline; at most CALLS at once. What a call is
for decides who judges it and who gets its connection.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gadei_ps.agents import handshake, tls
from gadei_ps.agents.handshake import Hello, Identity, Link, Verdict
from gadei_ps.errors import AgentError, CallRefused, UsageError, in_words

CALLS = 32
PATIENCE_S = 5.0
"""For a whole handshake."""
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Host:
    """Who takes connections of one link. take: returns False if it has no place for one."""

    judge: Callable[[Hello], Verdict]
    take: Callable[[Hello, socket.socket], bool]


class Listener:
    """Listens until `close`. `address` is where it can be reached, with the port that it got."""

    def __init__(
        self, address: Address, identity: Identity, contexts: tls.Contexts | None = None
    ) -> None:
        """Raises UsageError if it cannot listen there."""
        self.identity = identity
        self.contexts = contexts
        self.refused: collections.deque[str] = collections.deque(maxlen=100)
        """The last calls that were refused, one line each."""
        self._hosts: dict[Link, Host] = {}
        self._lock = threading.Lock()
        self._calls: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        try:
            self._socket = socket.create_server(address, backlog=128)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise UsageError(f"cannot listen at {where}: {in_words(error)}") from None
        self.address: Address = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="agent-listener", daemon=True)
        self._thread.start()

    def serve(self, link: Link, host: Host | None) -> None:
        """Gives calls for this link to the host; None: nobody awaits them any more."""
        with self._lock:
            if host is None:
                self._hosts.pop(link, None)
            else:
                self._hosts[link] = host

    def close(self) -> None:
        """Ends all threads and calls; connections that a host has taken are the host's."""
        with self._lock:
            self._closed = True
            calls = dict(self._calls)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for connection in calls.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for thread in calls:
            thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, where = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no descriptors left, say: they come back
                continue
            with self._lock:
                if self._closed or len(self._calls) >= CALLS:
                    self.refused.append(f"{where[0]}:{where[1]}: too many calls at once")
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._answer, args=(connection, where), name="agent-call", daemon=True
                )
                self._calls[thread] = connection
            thread.start()

    def _answer(self, connection: socket.socket, where: Address) -> None:
        try:
            connection = self._let_in(connection)
        except (AgentError, OSError) as error:
            self.refused.append(f"{where[0]}:{where[1]}: {in_words(error)}")
            connection.close()
        finally:
            with self._lock:
                self._calls.pop(threading.current_thread(), None)

    def _let_in(self, connection: socket.socket) -> socket.socket:
        until = time.monotonic() + PATIENCE_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.contexts is not None:
            connection = tls.tunnel(connection, self.contexts, None, until)
        try:
            hello = handshake.answer(connection, self.identity, self._judge, until)
            handshake.welcome(connection)
            with self._lock:
                host = None if self._closed else self._hosts.get(hello.link)
            if host is None or not host.take(hello, connection):
                raise CallRefused("came when nobody awaited it any more", Verdict.NOT_AWAITED)
        except BaseException:
            connection.close()
            raise
        return connection

    def _judge(self, hello: Hello) -> Verdict:
        with self._lock:
            host = self._hosts.get(hello.link)
        return Verdict.NOT_AWAITED if host is None else host.judge(hello)


def call(
    address: Address,
    hello: Hello,
    identity: Identity,
    contexts: tls.Contexts | None,
    until: float,
) -> socket.socket:
    """A connection that the other side has welcomed. Raises CallRefused and OSError."""
    connection = socket.create_connection(address, max(0.001, until - time.monotonic()))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if contexts is not None:
            connection = tls.tunnel(connection, contexts, address[0], until)
        handshake.call(connection, hello, identity, until)
    except BaseException:
        connection.close()
        raise
    return connection
