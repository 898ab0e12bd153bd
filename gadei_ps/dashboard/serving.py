"""The dashboard's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gadei_ps.dashboard.access import Access
from gadei_ps.dashboard.live import Live
from gadei_ps.dashboard.pages import Dashboard

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
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


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


def serve(host: str, there: socket.socket, started: Callable[[Access], None], **how: Any) -> None:
    """Serve the dashboard until a signal, and close the socket. Raises UsageError.

    host, there: of listening.listen(). how: see Access.
    """
    with there:
        access = Access(host, int(there.getsockname()[1]), **how)
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # no line for each bad request
        dashboard = Dashboard(access)
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
        started(access)
        Server(config, dashboard.live).run([there])
