"""The newest whole model of each neighbouring group; see broadcast.py.

Each group has two buffers: one holds its newest whole model, the other one takes the next. While a
reader still holds the one that is to be written, its sender is held back.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import frames
from gadei_ps.agents.frames import HEADER_BYTES, MODEL, Header
from gadei_ps.agents.handshake import Hello, Link, Verdict
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.agents.plan import PIECE_VALUES, Floats
from gadei_ps.errors import AgentError, in_words


class Inbox:
    """The receiving side, until `close`."""

    def __init__(
        self,
        door: Listener,
        group: int,
        sources: Iterable[int],
        values: int,
        *,
        piece_s: float = 5.0,
    ) -> None:
        """group: this one's number. sources: the neighbours' numbers. values: of the model."""
        self._door, self._group, self._values = door, group, values
        self._sources = {number: _Source(number, values, piece_s) for number in sources}
        door.serve(Link.MODELS, Host(self._judge, self._take))

    @contextlib.contextmanager
    def newest(self, source: int) -> Iterator[tuple[int, Floats] | None]:
        """The newest whole model of a group and its version; None if none has come yet.

        The array, float32 of shape (values,), is read-only and stays as it is within the block.
        """
        with self._sources[source].newest() as found:
            yield found

    def version(self, source: int) -> int:
        """The version of the newest whole model of a group; 0: none has come."""
        return self._sources[source].version

    def troubles(self) -> dict[int, str]:
        """What went wrong last with each group's connection."""
        return {n: one.trouble for n, one in self._sources.items() if one.trouble is not None}

    def close(self) -> None:
        """Ends all threads and connections."""
        self._door.serve(Link.MODELS, None)
        for one in self._sources.values():
            one.close()

    def _judge(self, hello: Hello) -> Verdict:
        if hello.called != self._group or hello.caller not in self._sources:
            return Verdict.NOT_AWAITED
        return Verdict.WELCOME if hello.values == self._values else Verdict.SIZE

    def _take(self, hello: Hello, connection: socket.socket) -> bool:
        return self._sources[hello.caller].take(connection)


class _Source:
    """One neighbour: its two buffers, and the thread of its connection."""

    def __init__(self, number: int, values: int, piece_s: float) -> None:
        self.version = 0
        self.trouble: str | None = None
        self._number, self._values, self._piece_s = number, values, piece_s
        self._buffers = [np.empty(values, np.float32) for _ in range(2)]
        self._readers = [0, 0]
        self._front = 0
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def newest(self) -> Iterator[tuple[int, Floats] | None]:
        with self._changed:
            version, front = self.version, self._front
            self._readers[front] += 1
        try:
            model = self._buffers[front].view()
            model.flags.writeable = False
            yield (version, model) if version else None
        finally:
            with self._changed:
                self._readers[front] -= 1
                self._changed.notify_all()

    def take(self, connection: socket.socket) -> bool:
        """A connection in place of the last one: its sender has started anew."""
        with self._changed:
            if self._closed:
                return False
            before, old = self._connection, self._thread
            self._connection = connection
            self._thread = threading.Thread(
                target=self._run, args=(connection, old), name="agent-inbox", daemon=True
            )
            if before is not None:
                with contextlib.suppress(OSError):
                    before.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
            self._thread.start()
        return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        if thread is not None:
            thread.join()

    def _run(self, connection: socket.socket, before: threading.Thread | None) -> None:
        """Receives until the connection ends; alone, for the buffers have one writer."""
        if before is not None:
            before.join()
        with connection:
            try:
                version = 0
                while self._is_current(connection):
                    version = self._receive(connection, version)
            except (AgentError, OSError) as error:
                self.trouble = f"group {self._number}: {in_words(error)}"
        with self._changed:
            if self._connection is connection:
                self._connection = None

    def _is_current(self, connection: socket.socket) -> bool:
        with self._changed:
            return self._connection is connection and not self._closed

    def _receive(self, connection: socket.socket, version: int) -> int:
        """Receives one model. version: of the one whose pieces came last. Returns its version.

        A sender that has a newer one begins with that instead, at any piece.
        """
        back = None
        piece, pieces = 0, max(1, -(-self._values // PIECE_VALUES))
        while piece < pieces:
            data = frames.receive_bytes(connection, HEADER_BYTES, math.inf)
            header = frames.unpack(data, (MODEL,), 4 * PIECE_VALUES)
            if header.round != version or not piece:
                if header.round <= version:
                    raise AgentError(f"sends version {header.round} after {version}")
                version, piece = header.round, 0
            start = piece * PIECE_VALUES
            if back is None:
                back = self._free(connection)
            part = self._buffers[back][start : start + PIECE_VALUES]
            expected = self._number, self._values, piece, part.nbytes
            if (header.sender, header.value, header.piece, header.length) != expected:
                raise AgentError("sends a piece that nobody awaits")
            into = part.data.cast("B")
            frames.receive(connection, into, time.monotonic() + self._piece_s)
            if _mesh.checksum(part.data) != header.payload_sum:
                raise AgentError("sends damaged values")
            piece += 1
        with self._changed:
            if version > self.version:
                assert back is not None
                self.version, self._front = version, back
        told = Header(MODEL, 0, version, sender=self._number).pack()
        frames.send(connection, [told], time.monotonic() + self._piece_s)
        return version

    def _free(self, connection: socket.socket) -> int:
        """The buffer that does not hold the newest model, once nobody reads it."""
        with self._changed:
            back = 1 - self._front
            self._changed.wait_for(
                lambda: (
                    not self._readers[back] or self._closed or self._connection is not connection
                )
            )
            if self._readers[back]:
                raise AgentError("is replaced")
            return back
