"""A small HTTP server for metrics, which no client can block: one thread, GET only, no bodies."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import Final

from gadei_ps.errors import GadeiError
from gadei_ps.machine import listening

REQUEST_S: Final = 5.0  # for a whole request and its answer
MOST_HEAD: Final = 8192  # bytes of a request
MOST_CONNECTIONS: Final = 32
PLAIN: Final = "text/plain; charset=utf-8"
INDEX: Final = b"gadei-ps: metrics for Prometheus are at /metrics\n"
_REQUEST: Final = re.compile(rb"(?P<method>[A-Z]+) (?P<path>[!-~]+) HTTP/1\.[01]")

Text = Callable[[str], tuple[bytes, str]]
"""Makes an answer for an Accept header: its text and its content type."""


class Server:
    """Answers GET /metrics."""

    def __init__(self, text: Text, address: str) -> None:
        """Listen at HOST:PORT. Raises UsageError if that is not possible."""
        self._text = text
        self._open = 0
        self.host, self._socket = listening.listen(address)
        self.port: int = self._socket.getsockname()[1]
        is_local = listening.is_loopback(self.host)
        self._hosts = {*listening.LOCAL, self.host.lower()} if is_local else None

    def close(self) -> None:
        """Listen no more, if serve() was not called."""
        self._socket.close()

    async def serve(self, until: asyncio.Event) -> None:
        """Answer requests until the event is set."""
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=MOST_HEAD)
        await until.wait()
        server.close()  # and wait for no client: the end of asyncio.run() cancels their tasks

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MOST_CONNECTIONS:
                return
            async with asyncio.timeout(REQUEST_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    writer.write(_response(431, b"the request is too long\n"))
                else:
                    writer.write(self._respond(head))
                await writer.drain()
                writer.write_eof()
                while await reader.read(MOST_HEAD):  # closing at once could lose the answer
                    pass
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._open -= 1
            writer.transport.abort()

    def _respond(self, head: bytes) -> bytes:
        try:
            return self.response(head)
        except Exception as error:  # one job that cannot be shown must not hide the cause
            return _response(500, f"{type(error).__name__}: {error}\n".encode(errors="replace"))

    def response(self, head: bytes) -> bytes:
        """Answer a request. head: its first lines, up to the empty one."""
        first, _, rest = head.partition(b"\r\n")
        request = _REQUEST.fullmatch(first)
        try:
            headers = parse_headers(io.BytesIO(rest))
        except HTTPException:
            return _response(431, b"there are too many headers\n")
        if request is None or headers.defects:
            return _response(400, b"not a request\n")
        hosts = [listening.host_of(one.strip()) for one in headers.get_all("host", [])]
        if self._hosts is not None and (len(hosts) != 1 or hosts[0] not in self._hosts):
            return _response(403, b"the Host header is not that of this server\n")
        if request["method"] != b"GET":
            return _response(405, b"GET only\n", more="Allow: GET\r\n")
        path = request["path"].partition(b"?")[0]
        if path == b"/metrics":
            text, kind = self._text(",".join(headers.get_all("accept", [])))
            return _response(200, text, kind)
        return _response(200, INDEX) if path == b"/" else _response(404, b"not found\n")


def _response(code: int, text: bytes, kind: str = PLAIN, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(text)}\r\nX-Content-Type-Options: nosniff\r\n{more}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + text


async def until_signal(server: Server) -> None:
    """Serve until SIGINT or SIGTERM."""
    # The loop's own handlers: an exception of Python's could end one request instead of all.
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    await server.serve(over)


async def _while_input_lasts(server: Server) -> None:
    over = asyncio.Event()

    def look() -> None:
        if not os.read(0, 4096):
            over.set()

    asyncio.get_running_loop().add_reader(0, look)
    await server.serve(over)


def main() -> None:
    """`python -m gadei_ps.monitoring.web JOB HOST:PORT`: started by the job's watchdog.

    It ends with its standard input. It prints one line if it cannot listen.
    """
    from gadei_ps.monitoring.exporter import Exporter

    job, listen = sys.argv[1:]
    try:
        server = Server(Exporter(job).text, listen)
    except GadeiError as error:
        print(error, flush=True)
        sys.exit(1)
    asyncio.run(_while_input_lasts(server))


if __name__ == "__main__":
    main()
