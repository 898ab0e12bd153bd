"""Gives a group's newest model to machines of neighbouring groups, waiting for none of them.

A machine that takes models calls, and asks for one after the other: for the newest one, once it is
newer than the one that it has, or for a certain version, so that all machines of its group get the
same. It may also ask a machine of its own group for what that one has got from a neighbour. What
has been begun is sent to its end; then the newest is next. So a slow receiver gets fewer models,
but whole ones. One that is slower than frames.LEAST_RATE gets none.

There is room for SLOTS models. While all older ones are still being sent, a new one finds no room
and is left out.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import frames, letters, threads
from gadei_ps.agents.frames import BOOK, GONE, HEADER_BYTES, MODEL, WANT, Header
from gadei_ps.agents.handshake import Hello, Link, Verdict
from gadei_ps.agents.letters import Book
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.agents.plan import PIECE_VALUES, Floats
from gadei_ps.errors import AgentError
from gadei_ps.groups import compress
from gadei_ps.groups.compress import Bytes, Wire
from gadei_ps.groups.messages import Model

SLOTS = 3
MOST_CALLERS = 256
CODES = tuple(Wire)
"""A format's place is its number in frames."""
EXACTLY = 1
"""In a frame of kind WANT, as `part`: this very version; else any that is newer."""


@dataclass
class _Slot:
    """A model of this group, encoded. version 0: none. readers: threads that send it."""

    version: int = 0
    data: Bytes | None = None
    readers: int = 0


class Broadcast:
    """The sending side of one machine, until `close`."""

    def __init__(
        self,
        door: Listener,
        number: int,
        group: int,
        values: int,
        wire: Wire,
        book: Callable[[], Book],
        got: Callable[[Model], contextlib.AbstractContextManager[Floats | None]],
        told: Callable[[int, Book], None],
        *,
        constants: Callable[[], int] = int,
        piece_s: float = 5.0,
    ) -> None:
        """number: of this machine. book: where the machines of its group can be reached. constants:
        a checksum of those of its group, which goes with each model.

        got: a model of another group, read-only within the block; None if it is not here. told: is
        called in a thread of this object with where a caller's group can be reached.
        """
        self._door, self._number, self._group = door, number, group
        self._values, self._wire, self._book, self._got = values, wire, book, got
        self._told, self._constants = told, constants
        self._piece_s = piece_s
        self._slots = [_Slot() for _ in range(SLOTS)]
        self._staged: tuple[int, _Slot] | None = None
        self._settled = 0
        self._newest = self._slots[0]
        self._changed = threading.Condition()
        self._callers: dict[int, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._is_called = self._closed = False
        self.left_out = 0
        """Models for which there was no room."""
        self.sent_bytes = 0
        """To all together; exact once nothing is being sent."""
        door.serve(Link.MODELS, Host(self._judge, self._take))

    @property
    def version(self) -> int:
        """Of the newest model that is given to others; 0: there is none yet."""
        return self._newest.version

    def stage(self, version: int, data: Bytes) -> None:
        """Copies an encoded model, to be given to others once `publish` is called for its version.

        Nothing is copied before the first machine has called. For one thread.
        """
        with self._changed:
            self._staged = None
            free = [one for one in self._slots if not one.readers and one is not self._newest]
            if not self._is_called or self._closed:
                return
            if not free:
                self.left_out += 1
                return
            slot = min(free, key=lambda one: one.version)
            slot.version = 0
        if slot.data is None:
            slot.data = np.empty(len(data), np.uint8)
        np.copyto(slot.data, data)
        with self._changed:
            self._staged = version, slot
            self._give()

    def publish(self, version: int) -> None:
        """Others may have models up to this version, now or once they are staged."""
        with self._changed:
            self._settled = version
            self._give()

    def _give(self) -> None:
        """With the lock."""
        if self._staged is not None and self._staged[0] <= self._settled:
            (version, slot), self._staged = self._staged, None
            slot.version, self._newest = version, slot
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all threads and connections."""
        self._door.serve(Link.MODELS, None)
        with self._changed:
            self._closed = True
            threads = list(self._threads)
            for connection in self._callers.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        for thread in threads:
            thread.join()

    # -- callers ----------------------------------------------------------------------------------

    def _judge(self, hello: Hello) -> Verdict:
        if hello.called != self._number:
            return Verdict.NOT_AWAITED
        if hello.values != self._values:
            return Verdict.SIZE
        with self._changed:
            known = hello.caller in self._callers
            return Verdict.WELCOME if known or len(self._callers) < MOST_CALLERS else Verdict.BUSY

    def _take(self, hello: Hello, connection: socket.socket) -> bool:
        """A machine has one connection: a new one takes the place of the last."""
        with self._changed:
            if self._closed:
                return False
            thread = threads.start("agent-broadcast", self._serve, hello.caller, connection)
            self._threads.add(thread)
            before = self._callers.get(hello.caller)
            self._callers[hello.caller] = connection
            self._is_called = True
            if before is not None:
                with contextlib.suppress(OSError):
                    before.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        return True

    def _serve(self, caller: int, connection: socket.socket) -> None:
        try:
            while True:
                self._send(connection, BOOK, letters.pack_book(self._book()))
                data = frames.receive_bytes(connection, HEADER_BYTES, math.inf)
                wanted = frames.unpack(data, (WANT, BOOK), letters.MOST_BYTES)
                if wanted.kind == WANT:
                    self._answer(caller, connection, wanted)
                else:
                    self._learn(connection, wanted)
        except (AgentError, OSError, MemoryError):
            pass  # it calls again, if it lives
        finally:
            with self._changed:
                if self._callers.get(caller) is connection:
                    del self._callers[caller]
                self._threads.discard(threading.current_thread())
            connection.close()

    def _learn(self, connection: socket.socket, header: Header) -> None:
        """The caller says where its own group's machines are: it may have begun anew elsewhere."""
        until = time.monotonic() + self._piece_s
        payload = frames.receive_bytes(connection, header.length, until)
        if _mesh.checksum(payload) != header.payload_sum:
            raise AgentError("sends damaged addresses")
        self._told(header.value, letters.unpack_book(payload))

    def _answer(self, caller: int, connection: socket.socket, wanted: Header) -> None:
        """Sends the model that is wanted, or says that it is not here."""
        model = Model(wanted.value, wanted.round)
        if model.group != self._group:
            with self._got(model) as values:
                if values is None:
                    self._send(connection, GONE)
                else:
                    self._send_model(connection, model, Wire.FLOAT32, values.view(np.uint8))
            return
        with self._slot(caller, connection, model.version, wanted.part == EXACTLY) as slot:
            if slot is None:
                self._send(connection, GONE)
            else:
                assert slot.data is not None
                sent = Model(self._group, slot.version)
                self._send_model(connection, sent, self._wire, slot.data)

    @contextlib.contextmanager
    def _slot(
        self, caller: int, connection: socket.socket, version: int, exactly: bool
    ) -> Iterator[_Slot | None]:
        """The slot with this version, or, once there is one, with a newer one."""
        with self._changed:
            if exactly:
                found = next((one for one in self._slots if one.version == version > 0), None)
            else:
                self._changed.wait_for(
                    lambda: (
                        self._newest.version > version
                        or self._closed
                        or self._callers.get(caller) is not connection
                    )
                )
                found = self._newest if self._newest.version > version else None
            if found is not None:
                found.readers += 1
        try:
            yield found
        finally:
            if found is not None:
                with self._changed:
                    found.readers -= 1

    def _send_model(self, connection: socket.socket, model: Model, wire: Wire, data: Bytes) -> None:
        """data: the whole model, encoded."""
        room = np.empty(compress.size(PIECE_VALUES, wire), np.uint8)
        pace = frames.Pace(len(data), self._piece_s)
        for piece, start in enumerate(range(0, self._values, PIECE_VALUES)):
            here = slice(start, min(start + PIECE_VALUES, self._values))
            found = compress.cut_out(data, self._values, wire, here)
            payload = found[0]
            if len(found) > 1:  # of each piece its scales come first
                payload = np.concatenate(found, out=room[: sum(map(len, found))])
            header = Header(
                *(MODEL, self._constants(), model.version, model.group),
                part=CODES.index(wire),
                piece=piece,
                length=len(payload),
                sender=self._number,
                payload_sum=_mesh.checksum(payload.data),
            )
            sent = frames.send(connection, [header.pack(), payload.data], pace.until())
            with self._changed:
                self.sent_bytes += sent

    def _send(self, connection: socket.socket, kind: int, payload: bytes = b"") -> None:
        header = Header(
            *(kind, 0, 0),
            length=len(payload),
            sender=self._number,
            payload_sum=_mesh.checksum(payload),
        )
        frames.send(connection, [header.pack(), payload], time.monotonic() + self._piece_s)
