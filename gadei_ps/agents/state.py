"""What all members of a group have alike after a round, and how one that lacks it gets it.

The state after n rounds is the group's weights, which buffers are constants, the state of its rule
of exchange, which models of other groups are in it, and what rounding has left out of the models
that it has sent. It changes at one place, `State`. A state that changes while it is sent does not
arrive: the connection ends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gadei_ps import _mesh
from gadei_ps.agents import addresses, constants, frames, listener, threads, tls
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.constants import Buffers
from gadei_ps.agents.frames import HEADER_BYTES, SNAPSHOT, Header
from gadei_ps.agents.handshake import Hello, Identity, Link, Verdict
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.agents.plan import PIECE_VALUES, Floats
from gadei_ps.agents.said import decode
from gadei_ps.errors import AgentError, CallRefused, UsageError
from gadei_ps.groups.choice import newest
from gadei_ps.groups.compress import Bytes, Feedback, Wire, size
from gadei_ps.groups.messages import Model
from gadei_ps.groups.parts import is_finite
from gadei_ps.groups.rules import Rule
from gadei_ps.groups.shares import Shares

RESIDUAL = "residual"
NOT_FINITE = (
    "the weights of the group hold a NaN or an infinity: lower the learning rate, or that of the "
    "rule of exchange"
)
MOST_ARRAYS = 8
MOST_CALLS = 64
"""That are answered at once."""
_MOST_TEXT = 1 << 20


class _Contents(BaseModel):
    """The first frame's payload: what follows. arrays: their names, the weights not among them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    rule: str = Field(max_length=200)
    arrays: list[str] = Field(max_length=MOST_ARRAYS)
    counts: dict[str, int]
    wire: Wire
    taken: dict[int, int]
    constants: list[str]
    shares: dict[str, Any] | None = None


@dataclass(frozen=True)
class Fetched:
    """A state that has come from another machine."""

    rounds: int
    weights: Floats
    arrays: dict[str, Floats]
    counts: dict[str, int]
    taken: dict[int, int]
    shares: Shares | None = None
    constants: tuple[str, ...] = ()


class State:
    """One machine's copy. `rounds` is 0 and there are no weights until the first round has ended.

    One thread changes it; others read it under `lock`.
    """

    def __init__(
        self,
        rule: Rule,
        values: int,
        wire: Wire = Wire.FLOAT32,
        shares: Shares | None = None,
        buffers: Buffers = MappingProxyType({}),
    ) -> None:
        """wire: of the models for other groups. shares: of a group that divides the batches."""
        self.rule, self.values, self.wire, self.shares = rule, values, wire, shares
        self.buffers = buffers
        rule.buffers_at = min((one.start for one in buffers.values()), default=None)
        self.constants: tuple[str, ...] = ()
        """Buffers that are not exchanged, from the first round on: the weights have zeros there."""
        self.rounds = 0
        self.weights: Floats = np.zeros(values, np.float32)
        self.taken: dict[int, int] = {}
        """Of each other group the version of its newest model that is in the weights."""
        self.told: Bytes | None = None
        """What other groups get of the last round, encoded; None: nothing. Until the next round,
        and as long as the aggregate stays as it is."""
        self.lock = threading.Lock()
        self._feedback = None if wire is Wire.FLOAT32 else Feedback(values, wire)
        self._encoded = np.empty(0 if self._feedback is None else size(values, wire), np.uint8)

    def advance(
        self,
        aggregate: Floats,
        arrived: Sequence[Floats] = (),
        models: Sequence[Model] = (),
        said: Sequence[bytes] = (),
    ) -> None:
        """Ends a round. `aggregate` is only read: other machines may still need parts of it.

        arrived: models of other groups, the same on all machines of the group; `models` says which
        they are. said: by the machines whose copies are in the aggregate. The first round only
        brings the weights with which the group begins, and so its constants. Raises AgentError, on
        all machines of the group, if the weights are not finite then; the state is of no round any
        more.
        """
        with self.lock, np.errstate(over="ignore", invalid="ignore"):
            np.copyto(self.weights, aggregate)
            if self.rounds:
                self.rule.end_round(self.weights, arrived)
            else:
                self.constants = constants.found(self.weights, self.buffers)
                constants.take_out(self.weights, self.constants, self.buffers)
                self.rule.begin(self.weights)
            if not is_finite(self.weights):
                self.rounds = -1
                raise AgentError(NOT_FINITE)
            if self.rounds:
                self.told = self._encode(self.weights if self.rule.sends_result else aggregate)
            self.rounds += 1
            self.taken |= newest(models)
            if self.shares is not None:
                self.shares.after([one for one in map(decode, said) if one is not None])

    def _encode(self, values: Floats) -> Bytes | None:
        """All machines make the same of the same values, also those that send it to nobody.

        Values that are not finite are told to nobody: others would get such, too.
        """
        if not is_finite(values):
            return None
        if self._feedback is None:
            return values.view(np.uint8)
        self._feedback.encode(values, self._encoded)
        return self._encoded

    def arrays(self) -> dict[str, Floats]:
        """What a newcomer needs besides the weights, not copied."""
        rest = {} if self._feedback is None else {RESIDUAL: self._feedback.residual}
        return self.rule.state()[0] | rest

    def take(self, fetched: Fetched) -> None:
        """Goes on from another machine's state. Raises AgentError if it is of another rule."""
        arrays = dict(fetched.arrays)
        with self.lock:
            residual = arrays.pop(RESIDUAL, None)
            try:
                self.rule.restore(arrays, fetched.counts)
            except ValueError as error:
                raise AgentError(f"sends a state that does not fit: {error}") from None
            if self._feedback is not None and residual is not None:
                np.copyto(self._feedback.residual, residual)
            np.copyto(self.weights, fetched.weights)
            self.taken, self.told = dict(fetched.taken), None
            self.shares, self.constants = fetched.shares, fetched.constants
            self.rounds = fetched.rounds


class Giving:
    """Gives the state to machines that ask for it, until `close`."""

    def __init__(self, door: Listener, number: int, state: State, *, piece_s: float = 5.0) -> None:
        """number: of this machine. piece_s: patience for a piece."""
        self._door, self._number, self._state, self._piece_s = door, number, state, piece_s
        self._lock = threading.Lock()
        self._calls: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        door.serve(Link.STATE, Host(self._judge, self._take))

    def close(self) -> None:
        """Ends all threads and connections."""
        self._door.serve(Link.STATE, None)
        with self._lock:
            self._closed = True
            calls = dict(self._calls)
        for connection in calls.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in calls:
            thread.join()

    def _judge(self, hello: Hello) -> Verdict:
        """A call's `generation` is the number of rounds whose state is wanted."""
        if hello.called != self._number:
            return Verdict.NOT_AWAITED
        if hello.values != self._state.values:
            return Verdict.SIZE
        if hello.generation != self._state.rounds:
            return Verdict.OLD
        with self._lock:
            return Verdict.WELCOME if len(self._calls) < MOST_CALLS else Verdict.BUSY

    def _take(self, hello: Hello, connection: socket.socket) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._calls[threads.start("agent-state", self._give, hello.generation, connection)] = (
                connection
            )
        return True

    def _give(self, rounds: int, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, MemoryError):  # it asks again
                for header, payload in self._frames(rounds):
                    until = time.monotonic() + self._piece_s
                    frames.send(connection, [header.pack(), payload], until)
        finally:
            with self._lock:
                self._calls.pop(threading.current_thread(), None)

    def _frames(self, rounds: int) -> Iterator[tuple[Header, bytes]]:
        """Ends early if the state has changed: then what has been sent is of no use."""
        state = self._state
        with state.lock:
            if state.rounds != rounds:
                return
            contents = _Contents(
                rule=str(state.rule),
                arrays=list(state.arrays()),
                counts=state.rule.state()[1],
                wire=state.wire,
                taken=state.taken,
                constants=list(state.constants),
                shares=None if state.shares is None else state.shares.told(),
            )
        yield self._frame(rounds, 0, 0, contents.model_dump_json().encode())
        for number in range(1 + len(contents.arrays)):
            for piece, start in enumerate(range(0, state.values, PIECE_VALUES)):
                with state.lock:
                    if state.rounds != rounds:
                        return
                    array = [state.weights, *state.arrays().values()][number]
                    payload = array[start : start + PIECE_VALUES].tobytes()
                yield self._frame(rounds, number, piece, payload)

    def _frame(self, rounds: int, part: int, piece: int, payload: bytes) -> tuple[Header, bytes]:
        header = Header(
            *(SNAPSHOT, 0, rounds, self._state.values),
            part=part,
            piece=piece,
            length=len(payload),
            sender=self._number,
            payload_sum=_mesh.checksum(payload),
        )
        return header, payload


class Call:
    """The connection of a fetch, which another thread may give up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_over = False

    def connected(self, connection: socket.socket) -> None:
        """For the thread that fetches."""
        with self._lock:
            self._connection = connection
        if self._is_over:
            self.give_up()

    def give_up(self) -> None:
        """The fetch ends soon, with an error; if it has ended, nothing happens."""
        with self._lock:
            self._is_over = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # closed
                    self._connection.shutdown(socket.SHUT_RDWR)


def fetch(
    address: Address,
    *,
    me: int,
    source: int,
    rounds: int,
    like: State,
    identity: Identity,
    contexts: tls.Contexts | None = None,
    piece_s: float = 5.0,
    call: Call | None = None,
) -> Fetched:
    """The state after this many rounds from machine `source`. Raises AgentError and OSError;
    UsageError if the other machine has another rule or format.

    call: by which it can be given up. like: the state that is to go on from it. me: the number of
    the machine that asks. CallRefused, with OLD: the other one is not there yet.
    """
    values = like.values
    hello = Hello(Link.STATE, rounds, me, source, values)
    until = time.monotonic() + piece_s
    try:
        connection = listener.call(address, hello, identity, contexts, until)
    except CallRefused as error:
        where = f"machine {source} at {addresses.written(*address)}"
        raise CallRefused(f"{where} {error}", error.verdict) from None
    with connection:
        (call or Call()).connected(connection)

        def receive(part: int, piece: int, most: int) -> bytes:
            until = time.monotonic() + piece_s
            data = frames.receive_bytes(connection, HEADER_BYTES, until)
            header = frames.unpack(data, (SNAPSHOT,), most)
            told = header.round, header.value, header.part, header.piece, header.sender
            if told != (rounds, values, part, piece, source):
                raise AgentError("sends a piece of a state that nobody awaits")
            payload = frames.receive_bytes(connection, header.length, until)
            if _mesh.checksum(payload) != header.payload_sum:
                raise AgentError("sends a damaged state")
            return payload

        try:
            contents = _Contents.model_validate_json(receive(0, 0, _MOST_TEXT))
        except ValidationError:
            raise AgentError("sends a state that cannot be read") from None
        theirs, ours = f"{contents.rule} in {contents.wire}", f"{like.rule} in {like.wire}"
        if theirs != ours or contents.arrays != list(like.arrays()):
            raise UsageError(
                f"machine {source} has the rule {theirs}, this machine {ours}: give all machines "
                "the same"
            )
        if strange := [one for one in contents.constants if one not in like.buffers]:
            raise UsageError(
                f"machine {source} has the buffer {strange[0]!r}, and the model of this machine "
                "has none of that name: give all machines the same model"
            )
        try:
            shares = None if contents.shares is None else Shares.heard(contents.shares)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise AgentError("sends a state that cannot be read") from None
        arrays = [np.empty(values, np.float32) for _ in range(1 + len(contents.arrays))]
        for number, array in enumerate(arrays):
            for piece, start in enumerate(range(0, values, PIECE_VALUES)):
                part = array[start : start + PIECE_VALUES]
                payload = receive(number, piece, part.nbytes)
                if len(payload) != part.nbytes:
                    raise AgentError("sends a piece of a state that is too short")
                part[:] = np.frombuffer(payload, np.float32)
    named = dict(zip(contents.arrays, arrays[1:], strict=True))
    return Fetched(
        *(rounds, arrays[0], named, contents.counts, contents.taken, shares),
        constants=tuple(contents.constants),
    )
