"""The state of a group after a round: given to a machine that lacks it, whole or not at all."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import eventually
from support.agents import IDENTITY, model, no_threads, nothing_of_agents_left

from gadei_ps.agents import listener
from gadei_ps.agents import state as states
from gadei_ps.agents.handshake import Hello, Link, Verdict
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.agents.plan import PIECE_VALUES
from gadei_ps.agents.state import Call, Fetched, Giving, State
from gadei_ps.errors import AgentError, CallRefused, UsageError
from gadei_ps.groups import compress, reading
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.messages import Model

VALUES = 2 * PIECE_VALUES + 7
RULE = "outer:0.7:0.9:2"


def after(rounds: int, rule: str = RULE) -> State:
    """A state after this many rounds."""
    made = State(reading.parse(rule), VALUES)
    for number in range(rounds):
        made.advance(model(number, VALUES))
    return made


@pytest.fixture
def door() -> Iterator[Listener]:
    with nothing_of_agents_left():
        made = Listener(("127.0.0.1", 0), IDENTITY)
        yield made
        made.close()


@pytest.fixture
def given(door: Listener) -> Iterator[State]:
    """That of machine 3, after three rounds."""
    state = after(3)
    giving = Giving(door, 3, state)
    yield state
    giving.close()


def ask(door: Listener, **others: Any) -> Fetched:
    asked: dict[str, Any] = {"me": 1, "source": 3, "rounds": 3}
    asked |= {"like": after(0), "identity": IDENTITY} | others
    return states.fetch(door.address, **asked)


def test_a_newcomer_continues_as_the_others_do(door: Listener, given: State) -> None:
    newcomer = State(reading.parse(RULE), VALUES)
    newcomer.take(ask(door))
    for number in range(3, 6):
        assert newcomer.rounds == given.rounds == number
        np.testing.assert_array_equal(newcomer.weights, given.weights)
        for one in (newcomer, given):
            one.advance(model(number, VALUES), [model(9, VALUES)])
    np.testing.assert_array_equal(newcomer.weights, given.weights)


@pytest.mark.parametrize("rule", ["replace", "outer:0.7:0.9"])
@pytest.mark.parametrize("wire", list(Wire))
def test_a_newcomer_tells_other_groups_what_the_others_do(
    rule: str, wire: Wire, door: Listener
) -> None:
    """Also what rounding has left out goes on; and which models are in the weights is known."""
    old, new = (State(reading.parse(rule), VALUES, wire) for _ in range(2))
    for number in range(3):
        assert old.told is None or number > 1  # the first round makes nothing of its own
        old.advance(model(number, VALUES))
    old.advance(model(3, VALUES), [model(9, VALUES)], [Model(7, 5)])
    giving = Giving(door, 3, old)
    new.take(ask(door, rounds=4, like=new))
    giving.close()
    assert new.taken == old.taken == {7: 5} and new.told is None
    for one in (old, new):
        one.advance(model(4, VALUES))
    assert old.told is not None and new.told is not None
    np.testing.assert_array_equal(new.told, old.told)
    told = np.empty(VALUES, np.float32)
    compress.decode(old.told, wire, told)
    wanted = old.weights if old.rule.sends_result else model(4, VALUES)
    np.testing.assert_allclose(told, wanted, atol=0.1)
    bad = model(5, VALUES)
    bad[7] = np.nan
    if rule == "replace":  # continues with what has arrived, and gives nothing
        old.advance(bad, [model(9, VALUES)], [Model(7, 6)])
        assert old.told is None
    with pytest.raises(AgentError, match="hold a NaN or an infinity"):
        old.advance(bad)
    assert old.rounds == -1  # nobody can fetch it


def test_the_first_round_brings_the_weights_themselves() -> None:
    first = model(0, VALUES)
    np.testing.assert_array_equal(after(1).weights, first)
    np.testing.assert_array_equal(after(1).rule.state()[0]["common"], first)


BUFFERS = {"mask": slice(0, 64), "mean": slice(64, 128)}


def with_buffers(rule: str = RULE) -> State:
    return State(reading.parse(rule), VALUES, buffers=BUFFERS)


def test_constants_are_those_of_the_first_round_and_a_newcomer_has_the_same(
    door: Listener,
) -> None:
    """Whatever later models hold there, no infinity comes into the rule."""
    first = model(0, VALUES)
    first[3] = -np.inf
    old, new = with_buffers(), with_buffers()
    old.advance(first)
    assert old.constants == ("mask",)
    assert not old.weights[:64].any()
    np.testing.assert_array_equal(old.weights[64:], first[64:])
    giving = Giving(door, 3, old)
    new.take(ask(door, rounds=1, like=new))
    giving.close()
    assert new.constants == old.constants
    for one in (old, new):
        later = model(1, VALUES)
        later[:64] = 0
        one.advance(later)
        assert one.constants == ("mask",)
    np.testing.assert_array_equal(new.weights, old.weights)
    assert not old.weights[:64].any()
    later[100] = np.inf  # it has diverged
    with pytest.raises(AgentError, match="hold a NaN or an infinity"):
        old.advance(later)


def test_the_rule_knows_where_buffers_are() -> None:
    state = State(reading.parse("outer:0.7:0.9"), VALUES, buffers={"mean": slice(99, VALUES)})
    for value in (1, 0.01):
        state.advance(np.full(VALUES, value, np.float32))
    assert state.weights[98] < 0 and (state.weights[99:] == np.float32(0.01)).all()


def test_a_model_without_the_groups_constants_is_refused(door: Listener) -> None:
    first = model(0, VALUES)
    first[70] = np.inf
    old = with_buffers()
    old.advance(first)
    giving = Giving(door, 3, old)
    with pytest.raises(UsageError, match="has the buffer 'mean', and the model of this machine"):
        ask(door, rounds=1)
    giving.close()


def test_what_does_not_fit_is_refused(door: Listener, given: State) -> None:
    for other, verdict in (
        ({"rounds": 4}, Verdict.OLD),
        ({"rounds": 2}, Verdict.OLD),
        ({"like": State(reading.parse(RULE), VALUES + 1)}, Verdict.SIZE),
        ({"source": 2}, Verdict.NOT_AWAITED),
    ):
        with pytest.raises(CallRefused) as refused:
            ask(door, **other)
        assert refused.value.verdict == verdict
    with pytest.raises(UsageError, match=r"the rule outer:0.7:0.9:2 in float32, this machine repl"):
        ask(door, like=after(0, "replace"))
    with pytest.raises(UsageError, match=r"in float32, this machine outer:0.7:0.9:2 in int8"):
        ask(door, like=State(reading.parse(RULE), VALUES, Wire.INT8))


def test_a_machine_that_cannot_give_it_now_gives_it_later(
    door: Listener, given: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_threads("agent-state"), pytest.raises(OSError):
        ask(door)
    monkeypatch.setattr(states, "MOST_CALLS", 1)
    with given.lock, contextlib.ExitStack() as stack:  # it gives nothing meanwhile
        hello = Hello(Link.STATE, 3, 1, 3, VALUES)
        until = time.monotonic() + 30
        stack.enter_context(listener.call(door.address, hello, IDENTITY, None, until))
        with pytest.raises(CallRefused) as refused:
            eventually(lambda: listener.call(door.address, hello, IDENTITY, None, until).close())
        assert refused.value.verdict == Verdict.BUSY
    eventually(lambda: _is_there(door))


def _is_there(door: Listener) -> bool:
    try:
        return ask(door).rounds == 3
    except CallRefused:
        return False


def test_a_state_that_changes_meanwhile_does_not_arrive(
    door: Listener, given: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Giving, "_frame", _slowly(Giving._frame, given))
    with pytest.raises((AgentError, OSError)):
        ask(door)


def test_a_fetch_can_be_given_up(door: Listener) -> None:
    """From a machine that lets it in, and then hangs; also before it is connected."""
    taken: list[socket.socket] = []
    early, late = Call(), Call()
    early.give_up()

    def take(_: Hello, connection: socket.socket) -> bool:
        taken.append(connection)
        late.give_up()
        return True

    door.serve(Link.STATE, Host(lambda _: Verdict.WELCOME, take))
    for call in (early, late):
        with pytest.raises(OSError, match="closed by the other side"):
            ask(door, call=call)
    for one in taken:
        one.close()


def _slowly(frame: Any, state: State) -> Any:
    """Ends a round when the second frame is made, before it is sent."""
    made = []

    def framed(self: Giving, *args: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            state.advance(model(3, VALUES))
        return frame(self, *args)

    return framed
