"""All members of a generation tell each other what they have of a round, at the same time.

Nobody sends all that it says before it reads: what all say may be more than connections hold, and
then each would wait for the others. And a member that is not there yet may leave what it is told
unread for as long as it lives: it trains.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Mapping

from gadei_ps import _mesh
from gadei_ps.agents import frames, round_state
from gadei_ps.agents.frames import HEADER_BYTES, STATE, Header
from gadei_ps.agents.round_state import RoundState
from gadei_ps.errors import AgentError, in_words

CLOSED = "has closed its connection"
LATE = "has not sent in time what is due"
ABSENT = "has not come to the round in time"


class Failed(Exception):
    """A member was not heard. place: of that one; None: the loss of another one is known.

    closed: whether it may have closed the connection because it has lost another member.
    """

    def __init__(self, place: int | None, why: str = "", *, closed: bool = False) -> None:
        super().__init__(why)
        self.place, self.why, self.closed = place, why, closed


class _Talk:
    """With one member: what is still to be sent, and what has come."""

    def __init__(self, place: int, connection: socket.socket, frame: bytes, piece_s: float) -> None:
        connection.setblocking(False)
        self.place, self._connection, self._piece_s = place, connection, piece_s
        self.state: RoundState | None = None
        self.until = math.inf
        """By when it is to be over; known once something has come."""
        self._left = memoryview(frame)
        self._header: Header | None = None
        self._room, self._have = bytearray(HEADER_BYTES), 0

    @property
    def wants(self) -> int:
        """What to wait for; 0: it is over."""
        return (select.POLLOUT if self._left else 0) | (0 if self.state else select.POLLIN)

    def move(self, generation: int) -> None:
        """Moves what can be moved now. Raises Failed."""
        try:
            self._receive(generation)
        except BlockingIOError:
            pass
        except OSError:
            raise Failed(self.place, CLOSED, closed=True) from None
        except AgentError as error:
            raise Failed(self.place, str(error)) from None
        try:
            while self._left:
                self._left = self._left[self._connection.send(self._left, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError as error:
            why = f"cannot be reached: {in_words(error)}"
            raise Failed(self.place, why, closed=True) from None

    def _receive(self, generation: int) -> None:
        """What follows the state is left where it is."""
        while self.state is None:
            count = self._connection.recv_into(memoryview(self._room)[self._have :])
            if not count:
                raise ConnectionResetError
            if self.until == math.inf:
                self.until = time.monotonic() + self._piece_s
            self._have += count
            if self._have < len(self._room):
                continue
            if self._header is None:
                header = frames.unpack(bytes(self._room), (STATE,), round_state.MOST_BYTES)
                if (header.generation, header.sender) != (generation, self.place):
                    raise AgentError("sends the state of another generation or member")
                if not header.length:
                    raise AgentError("sends a state that is none")
                self._header = header
                self._room, self._have = bytearray(header.length), 0
            else:
                payload = bytes(self._room)
                if self._header.payload_sum != _mesh.checksum(payload):
                    raise AgentError("sends a damaged state")
                self.state = round_state.unpack(self._header.round, self._header.value, payload)
                if self.state is None:
                    raise AgentError("sends a state that is none")


def tell_all(
    connections: Mapping[int, socket.socket],
    told: RoundState,
    *,
    generation: int,
    me: int,
    wake: int,
    piece_s: float,
    start_s: float | None,
) -> dict[int, RoundState]:
    """The states of the other members, by their places. Raises Failed.

    connections: to the members at these places. me: the place of this one. wake: a descriptor that
    is readable once a member is lost. piece_s: how long a member's state may take once it has
    begun. start_s: until the others begin; None: as long as they live.
    """
    payload = told.pack()
    header = Header(
        *(STATE, generation, told.round, told.whole),
        length=len(payload),
        sender=me,
        payload_sum=_mesh.checksum(payload),
    )
    frame = header.pack() + payload
    talks = {one.fileno(): _Talk(place, one, frame, piece_s) for place, one in connections.items()}
    heard: dict[int, RoundState] = {}
    start = math.inf if start_s is None else time.monotonic() + start_s
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    for fd, talk in talks.items():
        poll.register(fd, talk.wants)
    while talks:
        due = min(start if one.until == math.inf else one.until for one in talks.values())
        left = None if due == math.inf else max(0.0, due - time.monotonic()) * 1000
        ready = [fd for fd, _ in poll.poll(left)]
        if wake in ready:
            raise Failed(None)
        for fd in ready:
            talk = talks[fd]
            talk.move(generation)
            if talk.state is None or talk.wants:
                poll.modify(fd, talk.wants)
                continue
            heard[talk.place] = talk.state
            poll.unregister(fd)
            del talks[fd]
        if ready or due > time.monotonic():
            continue  # what has come counts, however late this process looks
        late = [one.place for one in talks.values() if one.until == due]
        absent = [one.place for one in talks.values() if one.until == math.inf]
        raise Failed(min(late), LATE) if late else Failed(min(absent), ABSENT)
    return heard
