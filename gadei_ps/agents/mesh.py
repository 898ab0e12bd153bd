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
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents import plan, telling
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.beats import Beats
from gadei_ps.agents.handshake import Link
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.members import Members
from gadei_ps.agents.plan import Floats, Parts, Plan
from gadei_ps.agents.round_state import MOST_SAID, RoundState
from gadei_ps.agents.telling import Failed
from gadei_ps.errors import AgentError, MemberLost, UsageError
from gadei_ps.groups.parts import cut

SILENCE_S = 1.0
PIECE_S = 5.0
JOIN_S = 10.0
IN_FLIGHT_BYTES = 1 << 19
"""Socket buffers of a member, each way, for all others together; Linux takes twice as much. With
more, what is received has left the cores' caches."""

_REASONS = {
    _mesh.MESH_CLOSED: telling.CLOSED,
    _mesh.MESH_SILENT: telling.LATE,
    _mesh.MESH_ABSENT: telling.ABSENT,
    _mesh.MESH_BAD_HEADER: "sends a damaged header",
    _mesh.MESH_OTHER_ROUND: "is in another round or generation",
    _mesh.MESH_UNEXPECTED: "sends a frame that nobody awaits",
    _mesh.MESH_BAD_PAYLOAD: "sends damaged values",
}


@dataclass
class _Held:
    """What this member holds of a round's result, and by which parts it was summed.

    said: what each member of that generation has said of the round, in their order.
    """

    round: int
    generation: int
    parts: Parts
    out: Floats
    whole: int = 0
    said: Sequence[bytes] = ()


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
    def said(self) -> Sequence[bytes]:
        """What was said by the members whose values are in the last result, in their order."""
        return self._held.said if self._held is not None else ()

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
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Forms a group with these members and nobody else. Ends what is left of an older one.

        values: of the model. What this member holds of the last round stays. given_up: is asked now
        and then whether this generation is not wanted any more. Raises AgentError then, or if
        one does not come within timeout_s; CallRefused if one refuses; UsageError.
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
        links = self._members.connect(generation, members, values, until, given_up)
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
        said: bytes | None = None,
        start_s: float | None = None,
    ) -> None:
        """Writes the mean of all members' values into `out`, weighted by samples.

        values, out: as many float32 values as join was told, contiguous, in different memory.
        `values` is only read. `out` holds the result, or on an error anything; leave it as it is
        until the next round begins, for other members may need it. samples: if all members' are 0,
        the mean is the plain one. said: what this member says of its values, at most MOST_SAID
        bytes; all members say something, or none does. start_s: how long the others may take until
        they begin the round; None: as long as they live.

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
        if said is not None:
            if len(said) > MOST_SAID:
                raise UsageError(
                    f"{len(said)} bytes are said of a round: at most {MOST_SAID} may be"
                )
            held.said = [said]
        if len(self._order) == 1:
            np.copyto(out, values)
            held.whole = 1
            return
        if said is not None:
            # Nobody sums before it has heard all: who holds a part knows what belongs to it.
            states = self._exchange_states(held, start_s)
            for place, state in enumerate(states):
                if (state.round, state.generation, len(state.said)) != (
                    *(round_number, self._generation),
                    1,
                ):
                    raise self._lose(place, _REASONS[_mesh.MESH_OTHER_ROUND])
            held.said = [state.said[0] for state in states]
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
            of_it = (s.said for s in states if (s.round, s.generation) == (newest, generation))
            said = next((one for one in of_it if len(one) == count), ())
            held = _Held(round_number, generation, parts, out, said=said)
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
            what = "be reached" if asked.culprit >= 0 else "wait for the others"
            why = _REASONS.get(result) or f"cannot {what}: {os.strerror(asked.error)}"
            raise self._loss_of(asked.culprit, why, result == _mesh.MESH_CLOSED)
        self._broken = None

    def _loss_of(self, place: int, why: str, closed: bool) -> MemberLost:
        """The error of a loss. A member may close a connection because it has lost another one: it
        has said so before.

        place: -1: of this member, unless it knows of another one.
        """
        assert self._beats is not None
        told = self._beats.wait_for_loss(self._silence_s) if closed or place < 0 else None
        me = self._order.index(self.number)
        return self._lose(*(told or (me if place < 0 else place, why)))

    def _lose(self, place: int, why: str) -> MemberLost:
        assert self._beats is not None
        error = self._error(self._beats.lose(place, why))
        self._broken = f"has lost member {error.member}: join the next generation"
        return error

    def _exchange_states(self, held: _Held, start_s: float | None) -> list[RoundState]:
        """The states of all members, in order."""
        assert self._beats is not None
        me = self._order.index(self.number)
        told = RoundState(held.round, held.generation, len(held.parts), held.whole, held.said)
        try:
            heard = telling.tell_all(
                *(self._data, told),
                generation=self._generation,
                me=me,
                wake=self._beats.wake,
                piece_s=self._piece_s,
                start_s=start_s,
            )
        except Failed as failed:
            if failed.place is None:
                raise self._loss_of(-1, "", True) from None
            if failed.closed:
                raise self._loss_of(failed.place, failed.why, True) from None
            raise self._lose(failed.place, failed.why) from None
        heard[me] = told
        return [heard[place] for place in range(len(self._order))]


def _all(parts: int) -> int:
    return (1 << parts) - 1
