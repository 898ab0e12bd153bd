"""Signs of life between the members of a group, and what they tell of one another.

One thread, with a connection of its own to each member. A member that is killed shows at once,
because its connection is closed; one that hangs, or whose network is silent, when nothing has come
for `silence_s`. A member that gives up an exchange tells all others which member it has lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

from gadei_ps.agents import frames, threads
from gadei_ps.agents.frames import ABORT, BEAT, HEADER_BYTES, Header
from gadei_ps.errors import AgentError

A_SILENCE = 4
"""Signs of life in the time after which a silent member counts as lost."""


class Beats:
    """The signs of life of one generation. Members are named by their places in its order."""

    def __init__(
        self,
        generation: int,
        me: int,
        connections: Mapping[int, socket.socket],
        silence_s: float,
        moved: Callable[[], int],
        alive: Callable[[int], None],
    ) -> None:
        """Takes the connections over.

        moved: a count of bytes that grows while this member's exchange goes on. alive: is called
        for a member whose count has grown.
        """
        self._generation, self._me = generation, me
        self._connections = dict(connections)
        self._silence_s = silence_s
        self._moved, self._alive = moved, alive
        self._parts = dict.fromkeys(connections, b"")
        self._counts = dict.fromkeys(connections, 0)
        self._heard: dict[int, float] = {}
        self._changed = threading.Condition()
        self._loss: tuple[int, str] | None = None
        self._ended = False
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a member is lost."""
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._thread = threads.start("agent-beats", self._run)
        except AgentError:
            os.close(self.wake)
            os.close(self._stop)
            raise

    @property
    def loss(self) -> tuple[int, str] | None:
        """The first member that was lost, and what was seen of it."""
        with self._changed:
            return self._loss

    def wait_for_all(self, until: float) -> list[int]:
        """Waits for a first sign of life of all. Returns the members that gave none in time."""
        with self._changed:
            while len(self._heard) < len(self._connections) and self._loss is None:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return sorted(self._connections.keys() - self._heard.keys())

    def wait_for_loss(self, timeout_s: float) -> tuple[int, str] | None:
        """The loss, once it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, timeout_s)
            return self._loss

    def lose(self, place: int, why: str) -> tuple[int, str]:
        """Records that a member is lost, and tells all others. Returns the loss that counts."""
        with self._changed:
            first = self._loss is None
            if self._loss is None:
                self._loss = (place, why)
            loss = self._loss
            self._changed.notify_all()
        os.eventfd_write(self.wake, 1)
        if first:
            header = Header(ABORT, self._generation, 0, loss[0], sender=self._me)
            self._send(header.pack())
        return loss

    def close(self) -> None:
        """Ends the thread and the connections."""
        if self._ended:
            return
        self._ended = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for connection in self._connections.values():
            connection.close()
        os.close(self._stop)
        os.close(self.wake)

    def _send(self, data: bytes) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # its end is seen where it is read
                connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        places = {}
        for place, connection in self._connections.items():
            connection.setblocking(False)
            poll.register(connection, select.POLLIN)
            places[connection.fileno()] = place
        next_one = 0.0
        while True:
            now = time.monotonic()
            if now >= next_one:
                next_one = now + self._silence_s / A_SILENCE
                self._send(Header(BEAT, self._generation, 0, self._moved(), sender=self._me).pack())
            for fd, _ in poll.poll(max(1, (next_one - now) * 1000)):
                if fd == self._stop:
                    return
                if not self._read(places[fd]):
                    poll.unregister(fd)
            self._look_for_silence(now)

    def _look_for_silence(self, now: float) -> None:
        """now: from before the last look at the connections. A process that stood still since then
        has read nothing, and blames nobody.
        """
        if self._loss is None:
            for place, heard in self._heard.items():
                if now - heard > self._silence_s:
                    self.lose(place, f"has been silent for {self._silence_s:g} s")

    def _read(self, place: int) -> bool:
        """Takes what has come from a member. Returns whether its connection goes on."""
        try:
            data = self._connections[place].recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.lose(place, "has closed its connection")
            return False
        data = self._parts[place] + data
        try:
            while len(data) >= HEADER_BYTES:
                self._take(place, frames.unpack(data[:HEADER_BYTES], (BEAT, ABORT), 0))
                data = data[HEADER_BYTES:]
        except AgentError as error:
            self.lose(place, str(error))
            return False
        self._parts[place] = data
        return True

    def _take(self, place: int, header: Header) -> None:
        if header.generation != self._generation or header.sender != place:
            raise AgentError("sends signs of life of another generation or member")
        if header.kind == ABORT:
            lost = header.value
            if lost == self._me or lost not in self._connections:  # it has lost its way to us
                self.lose(place, "has given up the exchange")
            else:
                self.lose(lost, "is lost, says another member")
            return
        if header.value != self._counts[place]:
            self._counts[place] = header.value
            self._alive(place)
        with self._changed:
            self._heard[place] = time.monotonic()
            self._changed.notify_all()
