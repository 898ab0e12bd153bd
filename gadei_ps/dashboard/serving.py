"""The dashboard's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gadei_ps.dashboard.access import Access
from gadei_ps.dashboard.live import Live
from gadei_ps.dashboard.pages import Dashboard
from gadei_ps.errors import UsageError
from gadei_ps.machine import listening

REQUEST_S = 10.0  # for a whole request, from its first byte; actions are short
KEEP_S = 30  # that a connection waits for its next request
MOST_CONNECTIONS = 256
MOST_HEADER = 16 << 10  # bytes
END_S = 3  # for what is under way when the server stops


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

    def __init__(self, config: uvicorn.Config, live: Live) -> None:
        super().__init__(config)
        self._live = live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then everything else."""
        self._live.end()
        await super().shutdown(sockets)

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


def access(
    host: str, port: int, *, read_only: bool, token: bool, allow_hosts: Iterable[str]
) -> Access:
    """Return the conditions for requests. Raises UsageError if strangers would meet them.

    token: whether one is needed. allow_hosts: further names in the Host header.
    """
    is_local = listening.is_loopback(host)
    if not token and not is_local:
        raise UsageError(
            f"--no-token: at {host} everyone who reaches this machine could see your jobs; "
            "leave out the option, or listen at 127.0.0.1"
        )
    names = {*listening.LOCAL, host, *allow_hosts}
    if not is_local:
        names |= {socket.gethostname(), socket.getfqdn()}
    return Access(
        hosts=frozenset(one.lower() for one in names if one),
        any_address=not is_local,
        token=secrets.token_urlsafe(24) if token else None,
        # Other users of this machine reach the loopback address, too.
        read_only=read_only or not token,
        cookie=f"gadei_ps_{port}",
    )


def link(host: str, port: int, token: str | None) -> str:
    """Return the link to the dashboard, as a browser of this machine opens it."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{listening.shown(host, port)}/" + (f"?token={token}" if token else "")


def serve(address: str, started: Callable[[str, Access], None], **how: Any) -> None:
    """Serve the dashboard at HOST:PORT until a signal. Raises UsageError.

    started: called with the link. how: see access().
    """
    host, there = listening.listen(address)
    with there:
        port = int(there.getsockname()[1])
        allowed = access(host, port, **how)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # no line for each bad request
        dashboard = Dashboard(allowed)
        config = uvicorn.Config(
            dashboard.application(),
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
        started(link(host, port, allowed.token), allowed)
        Server(config, dashboard.live).run([there])
