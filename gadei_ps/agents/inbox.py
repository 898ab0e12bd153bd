"""Gets models of neighbouring groups from their machines; see broadcast.py for the other side.

Of each group there are BUFFERS models: whole ones, and the one that comes. A whole one stays while
it is pinned or read, and the newest always stays. Where all others do, the next one waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import frames, letters, listener, threads
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.broadcast import CODES, EXACTLY
from gadei_ps.agents.frames import BOOK, GONE, HEADER_BYTES, MODEL, WANT, Header
from gadei_ps.agents.handshake import Hello, Link
from gadei_ps.agents.letters import Book
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.plan import PIECE_VALUES, Floats
from gadei_ps.agents.troubles import Troubles
from gadei_ps.errors import AgentError, in_words
from gadei_ps.groups import compress
from gadei_ps.groups.messages import Model
from gadei_ps.groups.parts import is_finite

BUFFERS = 3
_FIRST_REST_S, _MOST_REST_S = 0.05, 2.0
_CLOCK = itertools.count(1)
Addresses = Mapping[int, Address]


@dataclass(frozen=True)
class Goal:
    """What to get next of a group. version: the one that is wanted, if exactly; else any newer one.

    place: of this machine in its group, so that each machine of a group asks another one. helper: a
    machine of this group that has it, too.
    """

    version: int
    exactly: bool = False
    place: int = 0
    helper: tuple[int, Address] | None = None


class Inbox:
    """The receiving side of one machine, until `close`."""

    def __init__(
        self,
        door: Listener,
        number: int,
        sources: Mapping[int, Addresses],
        values: int,
        came: Callable[[Model], None],
        *,
        group: int = 0,
        book: Callable[[], Book] = dict,
        constants: Callable[[], int] = int,
        piece_s: float = 5.0,
    ) -> None:
        """number: of this machine, of this group. book: where its group's machines can be reached;
        told to those that are called. sources: for each group where its machines can be reached.
        constants: a checksum of those of this group; a group with others has no values for them.

        came: is called in a thread of this object when a model has come. piece_s: patience for a
        piece, and until another machine is asked for a newer model.
        """
        self._troubles, told = Troubles(), (group, book, constants)
        self._sources = {
            one: _Source(door, number, one, machines, values, came, piece_s, told, self._troubles)
            for one, machines in sources.items()
        }

    def learn(self, group: int, book: Book) -> None:
        """Where machines of a group can be reached; of one that is no source nothing is kept."""
        if group in self._sources:
            self._sources[group].learn(book)

    def held(self) -> list[Model]:
        """The whole models, from the one that came first to the one that came last."""
        found = [pair for one in self._sources.values() for pair in one.held()]
        return [model for _, model in sorted(found)]

    def seek(self, goals: Mapping[int, Goal]) -> None:
        """What to get from now on, for each group; nothing of groups that are not named."""
        for group, one in self._sources.items():
            one.seek(goals.get(group))

    def pin(self, models: Collection[Model]) -> None:
        """These stay, until the next call."""
        for group, one in self._sources.items():
            one.pin({model.version for model in models if model.group == group})

    @contextlib.contextmanager
    def weights(self, model: Model) -> Iterator[Floats | None]:
        """A whole model, float32 of shape (values,), read-only within the block; None: not here."""
        source = self._sources.get(model.group)
        with source.weights(model.version) if source else contextlib.nullcontext() as found:
            yield found

    def troubles(self) -> dict[int, str]:
        """Why nothing comes from a group, one line for each where that is so."""
        return dict(self._troubles)

    def close(self) -> None:
        """Ends all threads and connections."""
        for one in self._sources.values():
            one.close()


@dataclass
class _Buffer:
    """version 0: it is empty, or being filled. came: greater for what came later."""

    values: Floats
    version: int = 0
    came: int = 0
    readers: int = 0


class _Source:
    """One group: its buffers, and the thread that gets its models."""

    def __init__(
        self,
        door: Listener,
        number: int,
        group: int,
        machines: Addresses,
        values: int,
        came: Callable[[Model], None],
        piece_s: float,
        told: tuple[int, Callable[[], Book], Callable[[], int]],
        troubles: Troubles,
    ) -> None:
        self._door, self._number, self._group = door, number, group
        self._machines = dict(machines)
        self._told, self._troubles = told, troubles
        self._values, self._came, self._piece_s = values, came, piece_s
        self._buffers = [_Buffer(np.empty(values, np.float32)) for _ in range(BUFFERS)]
        self._pinned: set[int] = set()
        self._goal: Goal | None = None
        self._tries = 0
        self._helped = False
        self._changed = threading.Condition()
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._connection: socket.socket | None = None
        self._peer: tuple[int, Address] | None = None
        self._thread = threads.start("agent-inbox", self._run)

    def held(self) -> list[tuple[int, Model]]:
        with self._changed:
            return [
                (one.came, Model(self._group, one.version)) for one in self._buffers if one.version
            ]

    def learn(self, book: Book) -> None:
        with self._changed:
            found = dict(self._machines)  # another thread reads the old ones
            for number, entry in book.items():
                if number in found or len(found) < letters.MOST_AGENTS:
                    found[number] = entry.host, entry.port
            self._machines = found

    def seek(self, goal: Goal | None) -> None:
        with self._changed:
            if goal != self._goal:
                self._goal = goal
                self._ring()

    def pin(self, versions: set[int]) -> None:
        with self._changed:
            if versions != self._pinned:
                self._pinned = versions
                self._ring()

    @contextlib.contextmanager
    def weights(self, version: int) -> Iterator[Floats | None]:
        with self._changed:
            found = next((one for one in self._buffers if one.version == version > 0), None)
            if found is not None:
                found.readers += 1
        try:
            model = None
            if found is not None:
                model = found.values.view()
                model.flags.writeable = False
            yield model
        finally:
            if found is not None:
                with self._changed:
                    found.readers -= 1
                    self._ring()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._ring()
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._changed:  # a model may be read for longer
            os.close(self._bell)
            self._bell = -1

    def _ring(self) -> None:
        """With the lock: something has changed."""
        self._changed.notify_all()
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        rest_s = _FIRST_REST_S
        while (found := self._next()) is not None:
            goal, back = found
            try:
                if self._get(goal, back):
                    self._troubles.over(self._group)
                    rest_s = _FIRST_REST_S
                    self._tries += self._helped  # next time a machine of that group again
                    continue
            except (AgentError, OSError, MemoryError) as error:
                self._leave()
                self._troubles.note(self._group, f"group {self._group}: {in_words(error)}")
            self._tries += 1
            self._rest(goal, rest_s)
            rest_s = min(2 * rest_s, _MOST_REST_S)
        self._leave()

    def _rest(self, goal: Goal, rest_s: float) -> None:
        """Before another machine is asked for the same."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._is_wanted(goal), rest_s)

    def _next(self) -> tuple[Goal, _Buffer] | None:
        """What is wanted and not here, and a buffer for it, once there are both; None: closed."""
        with self._changed:
            while not self._closed:
                goal = self._goal
                versions = {one.version for one in self._buffers}
                if goal is not None and not (goal.exactly and goal.version in versions):
                    back = self._free()
                    if back is not None:
                        back.version = 0
                        return goal, back
                self._changed.wait()
            return None

    def _free(self) -> _Buffer | None:
        newest = max(one.version for one in self._buffers)
        free = [
            one
            for one in self._buffers
            if not one.readers
            and one.version not in self._pinned
            and (not one.version or one.version < newest)
        ]
        return min(free, key=lambda one: one.version, default=None)

    def _get(self, goal: Goal, back: _Buffer) -> bool:
        """Gets one model, or nothing. Returns False if it is not there, for now."""
        connection = self._connected(goal)
        wanted = Header(
            *(WANT, 0, goal.version if goal.exactly else self._least(goal), self._group),
            part=EXACTLY if goal.exactly else 0,
            sender=self._number,
            payload_sum=_mesh.checksum(b""),
        )
        until = time.monotonic() + self._piece_s
        frames.send(connection, [wanted.pack()], until)
        while True:
            if not self._comes(connection, goal, until):
                self._leave()  # its answer may come yet
                self._tries += self._is_wanted(goal)  # another one may have something new
                return True
            data = frames.receive_bytes(connection, HEADER_BYTES, until)
            header = frames.unpack(data, (MODEL, GONE, BOOK), letters.MOST_BYTES)
            if header.kind == BOOK:
                payload = frames.receive_bytes(connection, header.length, until)
                if _mesh.checksum(payload) != header.payload_sum:
                    raise AgentError("sends damaged addresses")
                self._learn(payload)
            elif header.kind == GONE:
                self._leave()
                return False
            else:
                break
        self._receive(connection, goal, header, back)
        return True

    def _is_wanted(self, goal: Goal) -> bool:
        """Whether what was asked for is what is sought now."""
        now = self._goal
        return now == goal or (now is not None and not now.exactly and not goal.exactly)

    def _least(self, goal: Goal) -> int:
        """The version that a newer one is to follow."""
        return max(goal.version, *(one.version for one in self._buffers))

    def _connected(self, goal: Goal) -> socket.socket:
        """A connection to the machine that is to be asked next."""
        peers = [(one, self._machines[one]) for one in sorted(self._machines)]
        tries = self._tries // 2 if goal.exactly else self._tries
        peer = peers[(goal.place + tries) % len(peers)] if peers else goal.helper
        self._helped = bool(goal.exactly and goal.helper is not None and self._tries % 2)
        if self._helped:
            peer = goal.helper
        if peer is None:
            raise AgentError("no machine of it is known")
        if self._connection is not None and self._peer == peer:
            return self._connection
        self._leave()
        hello = Hello(Link.MODELS, 0, self._number, peer[0], self._values)
        until = time.monotonic() + self._piece_s
        made = listener.call(peer[1], hello, self._door.identity, self._door.contexts, until)
        with self._changed:
            self._connection, self._peer = made, peer
            if self._closed:
                raise AgentError("is not awaited any more")
        group, book, _ = self._told
        payload = letters.pack_book(book())
        header = Header(
            *(BOOK, 0, 0, group),
            length=len(payload),
            sender=self._number,
            payload_sum=_mesh.checksum(payload),
        )
        frames.send(made, [header.pack(), payload], until)
        return made

    def _leave(self) -> None:
        with self._changed:
            connection, self._connection, self._peer = self._connection, None, None
        if connection is not None:
            connection.close()

    def _comes(self, connection: socket.socket, goal: Goal, until: float) -> bool:
        """Waits for an answer. False: none in time, or something else is wanted."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(connection, select.POLLIN)
        while True:
            left = until - time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0.0, left * 1000))]
            if connection.fileno() in ready:
                return True
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if left <= 0 or self._closed or not self._is_wanted(goal):
                return False

    def _learn(self, payload: bytes) -> None:
        """Where machines of that group can be reached now, if one of them says so."""
        book = letters.unpack_book(payload)
        if self._peer is not None and self._peer[0] in self._machines:
            self.learn(book)

    def _receive(
        self, connection: socket.socket, goal: Goal, header: Header, back: _Buffer
    ) -> None:
        """The pieces of one model. Raises AgentError, OSError."""
        version, code = header.round, header.part
        fits = version == goal.version if goal.exactly else version > self._least(goal)
        if not fits or code >= len(CODES):
            raise AgentError("sends a model that nobody awaits")
        if header.generation != self._told[2]():
            raise AgentError("has other constants: begin all groups with the same weights")
        wire = CODES[code]
        pace = frames.Pace(compress.size(self._values, wire), self._piece_s)
        for piece, start in enumerate(range(0, self._values, PIECE_VALUES)):
            until = pace.until()
            if piece:
                data = frames.receive_bytes(connection, HEADER_BYTES, until)
                header = frames.unpack(data, (MODEL,), 4 * PIECE_VALUES)
            part = back.values[start : start + PIECE_VALUES]
            told = header.round, header.value, header.part, header.piece, header.length
            if told != (version, self._group, code, piece, compress.size(len(part), wire)):
                raise AgentError("sends a piece that nobody awaits")
            payload = np.frombuffer(
                frames.receive_bytes(connection, header.length, until), np.uint8
            )
            if _mesh.checksum(payload.data) != header.payload_sum:
                raise AgentError("sends damaged values")
            compress.decode(payload, wire, part)
            if not is_finite(part):
                raise AgentError("sends a model whose values are not finite")
        with self._changed:
            back.version, back.came = version, next(_CLOCK)
        self._came(Model(self._group, version))
