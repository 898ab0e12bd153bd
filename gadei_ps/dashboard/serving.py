"""The dashboard's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gadei_ps.dashboard.access import Access, is_address
from gadei_ps.dashboard.pages import Dashboard
from gadei_ps.errors import UsageError

REQUEST_S = 10.0  # for a whole request, from its first byte; actions are short
KEEP_S = 30  # that a connection waits for its next request
MOST_CONNECTIONS = 256
MOST_HEADER = 16 << 10  # bytes
END_S = 3  # for what is under way when the server stops
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Protocol(H11Protocol):
    """HTTP/1.1 that ends connections whose requests do not become complete."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the time if the request is complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._late)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()


class Server(uvicorn.Server):
    """A server that stops also at SIGHUP, when the terminal is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; what they do otherwise is done once the server has stopped."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before != signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)


@dataclass(frozen=True)
class Options:
    """Options of the command line. allow_hosts: further names in the Host header."""

    host: str
    port: int
    read_only: bool = False
    token: bool = True
    allow_hosts: Sequence[str] = ()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen at {host}:{port}: {why}; --port gives another port"
        ) from None
    made.set_inheritable(False)
    return made


def access(options: Options, port: int) -> Access:
    """Return the conditions for requests. Raises UsageError if strangers would meet them."""
    is_local = options.host in LOOPBACK
    if not options.token and not is_local:
        raise UsageError(
            f"--no-token: at {options.host} everyone who reaches this machine could see your jobs; "
            "leave out the option, or listen at 127.0.0.1"
        )
    names = {*LOOPBACK, *(one.lower() for one in options.allow_hosts)}
    if not is_local:
        names |= {options.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return Access(
        hosts=frozenset(names),
        any_address=not is_local,
        token=secrets.token_urlsafe(24) if options.token else None,
        # Other users of this machine reach the loopback address, too.
        read_only=options.read_only or not options.token,
        cookie=f"gadei_ps_{port}",
    )


def link(options: Options, port: int, token: str | None) -> str:
    """Return the link to the dashboard, as a browser of this machine opens it."""
    host = options.host
    if is_address(host) and ":" in host:
        host = f"[{host}]"
    if host in ("0.0.0.0", "[::]"):
        host = socket.gethostname()
    return f"http://{host}:{port}/" + (f"?token={token}" if token else "")


def serve(options: Options, started: Callable[[str, Access], None]) -> None:
    """Serve the dashboard until a signal. started: called with the link."""
    with listen(options.host, options.port) as there:
        port = int(there.getsockname()[1])
        allowed = access(options, port)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # no line for each bad request
        config = uvicorn.Config(
            Dashboard(allowed).application(),
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=KEEP_S,
            timeout_graceful_shutdown=END_S,
            h11_max_incomplete_event_size=MOST_HEADER,
        )
        there.listen(128)
        started(link(options, port, allowed.token), allowed)
        Server(config).run([there])
