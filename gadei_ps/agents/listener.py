"""The listening socket of an agent: lets in those that are awaited, and stays open for others.

Each call is answered in a thread of its own, with a deadline; at most CALLS at once, and
CALLS_OF_HOST of one host. What a call is for decides who judges it and who gets its connection.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gadei_ps.agents import addresses, handshake, threads, tls
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.handshake import Hello, Identity, Link, Verdict
from gadei_ps.errors import AgentError, CallRefused, UsageError, in_words
from gadei_ps.sync.parameters import short_repr

CALLS = 32
CALLS_OF_HOST = 16
"""At once from one host, so that none keeps all others out."""
PATIENCE_S = 5.0
"""For a whole handshake."""


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
        self._calls: dict[threading.Thread, tuple[str, socket.socket]] = {}
        self._closed = False
        try:
            self._socket = addresses.listening(address, 128)
        except OSError as error:
            where = addresses.written(*address)
            raise UsageError(f"cannot listen at {where}: {in_words(error)}") from None
        self.address: Address = self._socket.getsockname()[:2]
        self._thread = threads.start("agent-listener", self._listen)

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
        for _, connection in calls.values():
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
            if not self._begin(connection, where):
                connection.close()

    def _begin(self, connection: socket.socket, where: Address) -> bool:
        """Has a call answered; returns whether that is possible."""
        with self._lock:
            of_host = sum(host == where[0] for host, _ in self._calls.values())
            if self._closed or len(self._calls) >= CALLS or of_host >= CALLS_OF_HOST:
                self.refused.append(f"{where[0]}:{where[1]}: too many calls at once")
                return False
            try:
                thread = threads.start("agent-call", self._answer, connection, where)
            except AgentError as error:
                self.refused.append(f"{where[0]}:{where[1]}: {error}")
                return False
            self._calls[thread] = where[0], connection
        return True

    def _answer(self, connection: socket.socket, where: Address) -> None:
        try:
            connection = self._let_in(connection)
        except (AgentError, OSError, MemoryError) as error:
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
    unheard_s: float | None = None,
) -> socket.socket:
    """A connection that the other side has welcomed. Raises CallRefused and OSError; AgentError.

    unheard_s: the connection ends once the other host has not acknowledged for so long what was
    sent. Otherwise the kernel tries for a quarter of an hour, with pauses of up to two minutes.
    """
    try:
        connection = socket.create_connection(address, max(0.001, until - time.monotonic()))
    except ValueError:  # UnicodeError, of a label that is empty, say
        raise AgentError(f"{short_repr(address[0])} is no name of a host") from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if unheard_s is not None:
            unheard_ms = max(1, int(unheard_s * 1000))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)
        if contexts is not None:
            connection = tls.tunnel(connection, contexts, address[0], until)
        handshake.call(connection, hello, identity, until)
    except BaseException:
        connection.close()
        raise
    return connection
