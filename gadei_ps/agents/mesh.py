"""A group of machines that sum their models, and agree on the result.

`aggregate` by linear partition: each of m members sums one m-th of the model, in the members'
order, and sends it to all. Each sends 2(m-1)/m models a round.

What is promised when members die: a member takes a result only when every member of its generation
holds all of it. After a death the survivors form the next generation and call `settle`: either all
of them get the result of the round, from what they hold, or none has taken it and none will. More
is not possible: a member can never know whether the last message that it sent has arrived.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import frames, plan
from gadei_ps.agents.beats import Beats
from gadei_ps.agents.frames import HEADER_BYTES, STATE, Header
from gadei_ps.agents.handshake import Link
from gadei_ps.agents.listener import Address, Listener
from gadei_ps.agents.members import Members
from gadei_ps.agents.plan import Floats, Parts, Plan
from gadei_ps.errors import AgentError, MemberLost, UsageError, in_words
from gadei_ps.groups.parts import cut

SILENCE_S = 1.0
PIECE_S = 5.0
JOIN_S = 10.0
IN_FLIGHT_BYTES = 1 << 19
"""Socket buffers of a member, each way, for all others together; Linux takes twice as much. With
more, what is received has left the cores' caches."""
_STATE = struct.Struct("<QQ")

_REASONS = {
    _mesh.MESH_CLOSED: "has closed its connection",
    _mesh.MESH_SILENT: "has not sent in time what is due",
    _mesh.MESH_ABSENT: "has not come to the round in time",
    _mesh.MESH_BAD_HEADER: "sends a damaged header",
    _mesh.MESH_OTHER_ROUND: "is in another round or generation",
    _mesh.MESH_UNEXPECTED: "sends a frame that nobody awaits",
    _mesh.MESH_BAD_PAYLOAD: "sends damaged values",
}


@dataclass
class _Held:
    """What this member holds of a round's result, and by which parts it was summed."""

    round: int
    generation: int
    parts: Parts
    out: Floats
    whole: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """What a member says of its round: the generation that began it, and the parts it holds."""

    round: int
    generation: int
    parts: int
    whole: int


class Mesh:
    """One member of a group, from its first generation to `close`. For one thread at a time."""

    def __init__(
        self,
        listener: Listener,
        number: int,
        *,
        silence_s: float = SILENCE_S,
        piece_s: float = PIECE_S,
    ) -> None:
        """number: of this machine, among all of the job.

        silence_s: how long a member may be silent until it counts as lost. piece_s: how long a
        piece may take that is due.
        """
        self.number = number
        self._silence_s, self._piece_s = silence_s, piece_s
        self._members = Members(listener, number)
        self._order: list[int] = []
        self._generation = 0
        self._values = 0
        self._data: dict[int, socket.socket] = {}
        self._beats: Beats | None = None
        self._scratch = plan.Scratch()
        self._running: Plan | None = None
        self._held: _Held | None = None
        self._broken: str | None = "has joined no group yet: call join"
        self.sent_bytes = 0
        self.received_bytes = 0
        self.calls = 0
        """System calls of all exchanges."""

    @property
    def members(self) -> Sequence[int]:
        """The numbers of the generation's members, in the order of their sums."""
        return tuple(self._order)

    @property
    def lost(self) -> MemberLost | None:
        """The first member that was lost, if one was; the next exchange would raise the same."""
        loss = self._beats.loss if self._beats is not None else None
        return None if loss is None else self._error(loss)

    def join(
        self,
        generation: int,
        members: Mapping[int, Address],
        values: int,
        timeout_s: float = JOIN_S,
    ) -> None:
        """Forms a group with these members and nobody else. Ends what is left of an older one.

        values: of the model. What this member holds of the last round stays. Raises AgentError if
        one does not come within timeout_s, CallRefused if one refuses, UsageError.
        """
        if not 1 <= len(members) <= plan.MOST_MEMBERS or self.number not in members:
            raise UsageError(
                f"a group has 1 to {plan.MOST_MEMBERS} members, and this one ({self.number}) is "
                f"among them; given are {sorted(members)}"
            )
        if generation <= self._generation:
            raise UsageError(
                f"generation {generation} does not follow {self._generation}: use a larger one"
            )
        self._part("forms its group: wait for join")
        self._generation, self._values = generation, values
        self._order = sorted(members)
        until = time.monotonic() + timeout_s
        links = self._members.connect(generation, members, values, until)
        place_of = {number: place for place, number in enumerate(self._order)}
        self._data = {place_of[n]: s for (n, link), s in links.items() if link == Link.DATA}
        for connection in self._data.values():
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, IN_FLIGHT_BYTES // len(self._data))
        signs = {place_of[n]: s for (n, link), s in links.items() if link == Link.BEATS}
        self._beats = Beats(
            *(generation, place_of[self.number], signs, self._silence_s),
            *(self._moved, self._alive),
        )
        missing = self._beats.wait_for_all(until)
        loss = self._beats.loss
        if missing or loss is not None:
            self._part("could not form its group: join again")
            if loss is not None:
                raise self._error(loss)
            numbers = ", ".join(str(self._order[place]) for place in missing)
            raise AgentError(f"no sign of life from member {numbers}: look whether its agent runs")
        self._broken = None

    def aggregate(
        self,
        round_number: int,
        values: Floats,
        out: Floats,
        *,
        samples: int = 1,
        start_s: float | None = None,
    ) -> None:
        """Writes the mean of all members' values into `out`, weighted by samples.

        values, out: as many float32 values as join was told, contiguous, in different memory.
        `values` is only read. `out` holds the result, or on an error anything; leave it as it is
        until the next round begins, for other members may need it. samples: if all members' are 0,
        the mean is the plain one. start_s: how long the others may take until they begin the
        round; None: as long as they live.

        Raises MemberLost, on every survivor; then join the next generation and settle. UsageError
        for arrays that do not fit.
        """
        self._check(out)
        self._check(values)
        if np.may_share_memory(values, out):
            raise UsageError("values and out are the same memory: give the result its own array")
        if not 0 <= samples < 1 << 53:
            raise UsageError(f"{samples} samples: use 0 or more, below 2**53")
        self._ready()
        parts = cut(self._values, len(self._order))
        held = self._held = _Held(round_number, self._generation, parts, out)
        if len(self._order) == 1:
            np.copyto(out, values)
            held.whole = 1
            return
        asked = self._plan(round_number, parts, out, start_s)
        plan.to_aggregate(asked, values, samples, self._scratch)
        self._exchange(asked, held)

    def settle(self, round_number: int, out: Floats, *, start_s: float | None = None) -> bool:
        """Finds out with all members of a new generation whether a round has a result.

        round_number: the round that this member has begun and not finished, or the next one if it
        has begun none. True: the result is whole in `out`; take it. False: nobody has taken one;
        aggregate again. Give `out` of the last aggregate. Raises MemberLost: join and settle again.
        """
        self._check(out)
        self._ready()
        held = self._held
        if held is None or held.round != round_number:
            held = _Held(round_number, 0, [], out)
        elif held.out.ctypes.data != out.ctypes.data:
            np.copyto(out, held.out)
            held.out = out
        states = self._exchange_states(held, start_s)
        newest = max(state.round for state in states)
        if round_number < newest:
            # A member has begun the next round: it had taken this one, so all members held it.
            if held.whole != _all(len(held.parts)) or not held.parts:
                raise AgentError(
                    f"the group is in round {newest} and this member in {round_number}, of which "
                    "it holds no result: let it join as a newcomer"
                )
            return True
        generation = max(state.generation for state in states)
        of_last = [
            state.whole if (state.round, state.generation) == (newest, generation) else 0
            for state in states
        ]
        count = max((s.parts for s in states if s.generation == generation), default=0)
        if not count or not generation:
            return False
        parts = cut(self._values, count)
        if all(whole == _all(count) for whole in of_last):
            return True
        asked = self._plan(round_number, parts, out, start_s)
        if not plan.to_hand_over(asked, of_last):
            return False
        if held.generation != generation:
            held = _Held(round_number, generation, parts, out)
        self._held = held
        self._exchange(asked, held)
        return True

    def close(self) -> None:
        """Leaves the group and closes all connections. The listener is the caller's."""
        self._part("is closed: make a new one")
        self._members.close()

    def _check(self, array: Floats) -> None:
        fits = array.dtype == np.float32 and array.flags.c_contiguous
        if not fits or array.size != self._values:
            raise UsageError(
                f"{array.size} values of {array.dtype}: the group's model is {self._values} "
                "contiguous values of float32"
            )

    def _ready(self) -> None:
        if self._broken is not None:
            raise AgentError(f"member {self.number} {self._broken}")
        lost = self.lost
        if lost is not None:
            self._broken = f"has lost member {lost.member}: join the next generation"
            raise lost

    def _part(self, why: str) -> None:
        """Closes all connections of the generation."""
        self._broken = why
        if self._beats is not None:
            self._beats.close()
            self._beats = None
        for connection in self._data.values():
            connection.close()
        self._data = {}

    def _moved(self) -> int:
        running = self._running
        return self.sent_bytes + self.received_bytes + (running.moved if running else 0)

    def _alive(self, place: int) -> None:
        running = self._running
        if running is not None:
            running.alive_ns[place] = time.monotonic_ns()

    def _error(self, loss: tuple[int, str]) -> MemberLost:
        return MemberLost(self._order[loss[0]], loss[1])

    def _plan(self, round_number: int, parts: Parts, out: Floats, start_s: float | None) -> Plan:
        assert self._beats is not None
        return plan.make(
            generation=self._generation,
            round_number=round_number,
            me=self._order.index(self.number),
            members=len(self._order),
            parts=parts,
            fds={place: one.fileno() for place, one in self._data.items()},
            wake=self._beats.wake,
            out=out,
            piece_s=self._piece_s,
            start_s=start_s,
        )

    def _exchange(self, asked: Plan, held: _Held) -> None:
        """Runs a plan. Raises MemberLost; then the generation is over."""
        self._broken = "was interrupted in an exchange: join the next generation"
        self._running = asked
        try:
            result = _mesh.exchange(asked)
        finally:
            self._running = None
            held.whole = asked.held
            self.sent_bytes += asked.sent
            self.received_bytes += asked.received
            self.calls += asked.calls
        if result != _mesh.MESH_FINISHED:
            why = _REASONS.get(result) or f"cannot be reached: {os.strerror(asked.error)}"
            raise self._loss_of(asked.culprit, why, result == _mesh.MESH_CLOSED)
        self._broken = None

    def _loss_of(self, place: int, why: str, closed: bool) -> MemberLost:
        """The error of a loss. Who closes a connection may do so because it has lost another one:
        it has said so before.
        """
        assert self._beats is not None
        told = self._beats.wait_for_loss(self._silence_s) if closed or place < 0 else None
        return self._lose(*(told or (place, why)))

    def _lose(self, place: int, why: str) -> MemberLost:
        assert self._beats is not None
        error = self._error(self._beats.lose(place, why))
        self._broken = f"has lost member {error.member}: join the next generation"
        return error

    def _exchange_states(self, held: _Held, start_s: float | None) -> list[_State]:
        """The states of all members, in order."""
        me = self._order.index(self.number)
        told = _State(held.round, held.generation, len(held.parts), held.whole)
        payload = _STATE.pack(held.generation, len(held.parts))
        header = Header(
            *(STATE, self._generation, held.round, held.whole),
            length=len(payload),
            sender=me,
            payload_sum=_mesh.checksum(payload),
        )
        states = {me: told}
        until = time.monotonic() + self._piece_s
        for place, connection in self._data.items():
            try:
                frames.send(connection, [header.pack(), payload], until)
            except OSError as error:
                raise self._loss_of(place, f"cannot be reached: {in_words(error)}", True) from None
        self._for_each(start_s, lambda place: states.update({place: self._read_state(place)}))
        return [states[place] for place in range(len(self._order))]

    def _for_each(self, start_s: float | None, read: Callable[[int], None]) -> None:
        """Reads from each member as soon as something comes from it."""
        assert self._beats is not None
        poll = select.poll()
        places = {one.fileno(): place for place, one in self._data.items()}
        for fd in (*places, self._beats.wake):
            poll.register(fd, select.POLLIN)
        until = None if start_s is None else time.monotonic() + start_s
        while places:
            left = None if until is None else max(0.0, until - time.monotonic()) * 1000
            ready = [fd for fd, _ in poll.poll(left)]
            if self._beats.wake in ready:
                raise self._loss_of(-1, "", True)
            if not ready:
                raise self._lose(min(places.values()), _REASONS[_mesh.MESH_ABSENT])
            for fd in ready:
                poll.unregister(fd)
                read(places.pop(fd))

    def _read_state(self, place: int) -> _State:
        connection = self._data[place]
        until = time.monotonic() + self._piece_s
        try:
            data = frames.receive_bytes(connection, HEADER_BYTES, until)
            header = frames.unpack(data, (STATE,), _STATE.size)
            payload = frames.receive_bytes(connection, header.length, until)
        except OSError:
            raise self._loss_of(place, _REASONS[_mesh.MESH_CLOSED], True) from None
        except AgentError as error:
            raise self._lose(place, str(error)) from None
        right = header.length == _STATE.size and header.payload_sum == _mesh.checksum(payload)
        if not right or (header.generation, header.sender) != (self._generation, place):
            raise self._lose(place, "sends a state that is none")
        generation, parts = _STATE.unpack(payload)
        if parts > plan.MOST_MEMBERS or header.value > _all(parts):
            raise self._lose(place, "sends a state that is none")
        return _State(header.round, generation, parts, header.value)


def _all(parts: int) -> int:
    return (1 << parts) - 1
