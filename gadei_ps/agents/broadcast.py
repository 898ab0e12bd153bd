"""Sends a group's newest model to neighbouring groups, waiting for none of them.

A model that is overtaken by a newer one while it is sent is dropped: its receiver begins with the
newer one. Each neighbour has a thread and room for one piece; the model is held once for all. A
neighbour says which model it holds whole: after a lost connection it gets what it still lacks.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import frames, listener, tls
from gadei_ps.agents.frames import MODEL, Header
from gadei_ps.agents.handshake import Hello, Identity, Link
from gadei_ps.agents.listener import Address
from gadei_ps.agents.plan import PIECE_VALUES, Floats
from gadei_ps.errors import AgentError, UsageError, in_words

_FIRST_REST_S, _MOST_REST_S = 0.05, 2.0


class Broadcast:
    """The sending side, until `close`."""

    def __init__(
        self,
        group: int,
        values: int,
        identity: Identity,
        contexts: tls.Contexts | None = None,
        *,
        piece_s: float = 5.0,
    ) -> None:
        """group: this one's number. piece_s: patience for a piece, then the call is repeated."""
        self.group, self.values = group, values
        self.identity, self.contexts = identity, contexts
        self.piece_s = piece_s
        self.lock = threading.Lock()
        self.model = np.empty(values, np.float32)
        self.version = 0
        self._neighbours: dict[int, _Neighbour] = {}

    def add(self, neighbour: int, address: Address) -> None:
        """From now on this group gets the newest model, at this address instead of an older one."""
        self.remove(neighbour)
        self._neighbours[neighbour] = _Neighbour(self, neighbour, address)

    def remove(self, neighbour: int) -> None:
        """Sends this group nothing more."""
        old = self._neighbours.pop(neighbour, None)
        if old is not None:
            old.close()

    def offer(self, version: int, values: Floats) -> None:
        """Makes this the newest model. Copies it, and waits for no neighbour. UsageError."""
        fits = values.dtype == np.float32 and values.shape == (self.values,)
        if not fits or not self.version < version < 1 << 64:
            raise UsageError(
                f"version {version} of {values.size} values of {values.dtype}: use more than "
                f"{self.version}, and {self.values} values of float32"
            )
        with self.lock:
            np.copyto(self.model, values)
            self.version = version
        for one in list(self._neighbours.values()):
            one.look()

    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent to each neighbour."""
        return {number: one.sent_bytes for number, one in self._neighbours.items()}

    def overtaken(self) -> dict[int, int]:
        """Models that each neighbour did not get whole, because a newer one came."""
        return {number: one.overtaken for number, one in self._neighbours.items()}

    def troubles(self) -> dict[int, str]:
        """Why a neighbour cannot be reached, one line for each that cannot."""
        return {n: one.trouble for n, one in self._neighbours.items() if one.trouble is not None}

    def close(self) -> None:
        """Ends all threads and connections."""
        for number in list(self._neighbours):
            self.remove(number)


class _Neighbour:
    """One neighbour's thread."""

    def __init__(self, owner: Broadcast, number: int, address: Address) -> None:
        self.sent_bytes = 0
        self.overtaken = 0
        self.trouble: str | None = None
        self._owner, self._number, self._address = owner, number, address
        self._sent = self._whole = 0
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = threading.Event()
        self._connection: socket.socket | None = None
        self._room = memoryview(bytearray(4 * PIECE_VALUES))
        self._thread = threading.Thread(target=self._run, name="agent-broadcast", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There is something new."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._closed.set()
        self.look()
        with self._owner.lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        os.close(self._bell)

    def _run(self) -> None:
        rest_s = _FIRST_REST_S
        while not self._closed.is_set():
            try:
                self._send_models()
            except (AgentError, OSError) as error:
                where = f"{self._address[0]}:{self._address[1]}"
                text = f"group {self._number} at {where}: {in_words(error)}"
                if self.trouble is None:
                    rest_s = _FIRST_REST_S
                self.trouble = text
                self._closed.wait(rest_s)
                rest_s = min(2 * rest_s, _MOST_REST_S)

    def _send_models(self) -> None:
        """Sends one model after another on one connection."""
        owner = self._owner
        hello = Hello(Link.MODELS, 0, owner.group, self._number, owner.values)
        until = time.monotonic() + owner.piece_s
        with listener.call(
            self._address, hello, owner.identity, owner.contexts, until
        ) as connection:
            with owner.lock:
                self._connection = connection
            self.trouble = None
            self._sent = self._whole
            try:
                while (version := self._next(connection)) is not None:
                    if self._send(connection, version):
                        self._sent = version
                    else:
                        self.overtaken += 1
            finally:
                with owner.lock:
                    self._connection = None

    def _next(self, connection: socket.socket) -> int | None:
        """The newest version, once it is newer than what was sent; None: closed."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(connection, select.POLLIN)
        while not self._closed.is_set():
            ready = [fd for fd, _ in poll.poll(0 if self._owner.version > self._sent else None)]
            if connection.fileno() in ready:
                until = time.monotonic() + self._owner.piece_s
                data = frames.receive_bytes(connection, frames.HEADER_BYTES, until)
                self._whole = frames.unpack(data, (MODEL,), 0).round
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if self._owner.version > self._sent:
                return self._owner.version
        return None

    def _send(self, connection: socket.socket, version: int) -> bool:
        """Sends a model; returns False if it was overtaken."""
        owner = self._owner
        for piece, start in enumerate(range(0, owner.values, PIECE_VALUES)):
            with owner.lock:
                if owner.version != version or self._closed.is_set():
                    return False
                part = owner.model[start : start + PIECE_VALUES]
                payload = self._room[: part.nbytes]
                np.copyto(np.frombuffer(payload, np.float32), part)
            header = Header(
                *(MODEL, 0, version, owner.values),
                piece=piece,
                length=payload.nbytes,
                sender=owner.group,
                payload_sum=_mesh.checksum(payload),
            )
            until = time.monotonic() + owner.piece_s
            self.sent_bytes += frames.send(connection, [header.pack(), payload], until)
        return True
