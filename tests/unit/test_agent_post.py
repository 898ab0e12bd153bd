"""Letters between agents: what arrives, what is refused, and when a death is certain."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import eventually
from support.agents import IDENTITY, no_threads, nothing_of_agents_left
from support.processes import Child

from gadei_ps.agents import letters, troubles
from gadei_ps.agents import post as posts
from gadei_ps.agents.handshake import Identity
from gadei_ps.agents.letters import Entry, Letter
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.post import Post
from gadei_ps.errors import AgentError
from gadei_ps.groups.membership import Answer, Member, View
from gadei_ps.groups.messages import (
    Accept,
    Accepted,
    Aim,
    Ballot,
    Choice,
    Join,
    Leave,
    Message,
    Model,
    Notice,
    Offer,
    Prepare,
    Promise,
    Ready,
    Refused,
)

HOST = ("127.0.0.1", 0)
COUNTS = st.integers(0, 2**40)
MEMBERS = st.builds(Member, st.integers(0, 2**32 - 1).map(str), COUNTS)
VIEWS = st.builds(
    View,
    COUNTS,
    st.lists(MEMBERS, min_size=1, max_size=3).map(tuple),
    COUNTS,
    st.frozensets(MEMBERS, max_size=2),
    st.lists(st.tuples(MEMBERS, MEMBERS), max_size=2).map(tuple),
    st.lists(MEMBERS, max_size=2).map(tuple),
)
BALLOTS = st.builds(Ballot, COUNTS, COUNTS)
ANSWERS = st.builds(Answer, st.none() | COUNTS, st.booleans())
MODELS = st.lists(st.builds(Model, COUNTS, COUNTS), max_size=3).map(tuple)
BODIES = st.one_of(
    st.builds(Prepare, BALLOTS),
    st.builds(Promise, BALLOTS, ANSWERS, st.none() | st.tuples(BALLOTS, VIEWS)),
    st.builds(Refused, BALLOTS),
    st.builds(Accept, BALLOTS, VIEWS),
    st.builds(Accepted, BALLOTS),
    st.builds(Ready, st.integers(-1, 2**40)),
    st.builds(Join, MEMBERS),
    st.builds(Leave, MEMBERS),
    st.builds(Notice, st.booleans()),
    st.builds(Offer, MODELS, st.none() | COUNTS),
    st.builds(Choice, MODELS, COUNTS),
    st.builds(Aim, MODELS),
)
ENTRIES = st.builds(Entry, COUNTS, st.just("127.0.0.1"), st.integers(1, 65535))
BOOKS = st.dictionaries(st.integers(0, 2**31), ENTRIES, max_size=3)
MESSAGES = st.builds(Message, MEMBERS, st.none() | VIEWS, BODIES)
LETTERS = st.builds(Letter, MESSAGES, BOOKS, st.text(max_size=20))


@pytest.mark.parametrize(
    "machine", ["x", "07", "4294967296", "9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_machines_in_letters_have_numbers(machine: str) -> None:
    """Also those of which a body speaks: the driver makes numbers of them."""
    one, good = Member(machine, 0), Member("1", 0)
    view = View(0, (good, one))
    for message in (
        *(Message(one, None, Notice()), Message(good, view, Notice())),
        *(Message(good, None, Join(one)), Message(good, None, Accept(Ballot(1, 0), view))),
    ):
        with pytest.raises(AgentError, match="have no numbers"):
            letters.decode(letters.encode(Letter(message, {})))


@pytest.mark.parametrize(
    "body", [Aim((Model(1, 2**64),)), Offer((Model(-1, 1),)), Prepare(Ballot(2**70, 0)), Ready(-2)]
)
def test_numbers_in_letters_have_room_in_frames(body: Any) -> None:
    with pytest.raises(AgentError, match="an impossible number"):
        letters.decode(letters.encode(Letter(Message(Member("1", 0), None, body), {})))


@given(LETTERS)
def test_a_letter_is_read_as_it_was_written(letter: Letter) -> None:
    assert letters.decode(letters.encode(letter)) == letter


@given(LETTERS, st.data())
def test_what_is_no_letter_is_refused_in_one_line(letter: Letter, data: st.DataObject) -> None:
    raw = bytearray(letters.encode(letter))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(1, 9))] = data.draw(st.binary(max_size=3))
    try:
        letters.decode(bytes(raw))
    except AgentError as error:
        assert "\n" not in str(error)


class End:
    """One agent's post in this process, and what it has been told."""

    def __init__(self, number: int, incarnation: int = 0, *, founding: str = "") -> None:
        self.me = Member(str(number), incarnation)
        self.door = Listener(HOST, replace(IDENTITY, founding=founding))
        self.heard: list[Letter] = []
        self.ended: list[Member] = []
        self.post = Post(
            *(self.door, self.me, self.door.address, self.heard.append, self.ended.append)
        )

    def say(self, to: Member, rounds: int) -> None:
        self.post.send(to, Message(self.me, None, Ready(rounds)))

    def close(self) -> None:
        self.post.close()
        self.door.close()


@pytest.fixture
def end() -> Iterator[End]:
    with nothing_of_agents_left():
        made = End(0)
        yield made
        made.close()


def _other(pipe: Any, incarnation: int, port: int) -> None:
    """Agent 1 in a process of its own; tells what it hears."""
    me = Member("1", incarnation)
    door = Listener(("127.0.0.1", port), IDENTITY)
    post = Post(door, me, door.address, lambda letter: pipe.send(letter.message.body), print)
    pipe.send(door.address)
    while True:
        book = pipe.recv()
        post.learn(book)
        post.send(Member("0", 0), Message(me, None, Ready(incarnation)))


def other(incarnation: int, port: int = 0) -> tuple[Child, Entry]:
    child = Child(_other, incarnation, port)
    return child, Entry(incarnation, *child.receive())


def reach(end: End, child: Child, to: Member, rounds: int) -> None:
    """Letters may be lost: says it until it is heard."""

    def heard() -> bool:
        end.say(to, rounds)
        return child.has_sent

    eventually(heard)
    assert child.receive() == Ready(rounds)


def test_letters_arrive_both_ways_with_the_book(end: End) -> None:
    child, entry = other(7)
    end.post.learn({1: entry, 5: Entry(0, "127.0.0.1", 9)})
    reach(end, child, Member("1", 7), 3)
    child.send(end.post.book)
    eventually(lambda: end.heard)
    assert end.heard[0].message == Message(Member("1", 7), None, Ready(7))
    assert end.heard[0].book == end.post.book
    assert not end.ended
    child.kill()


@pytest.mark.parametrize("unread", [False, True], ids=["idle", "with letters unread"])
def test_a_killed_process_is_certainly_dead(end: End, unread: bool) -> None:
    child, entry = other(7)
    end.post.learn({1: entry})
    reach(end, child, Member("1", 7), 3)
    if unread:  # its kernel resets the connection then
        child.signal(signal.SIGSTOP)
        for _ in range(20):
            end.say(Member("1", 7), 4)
    child.kill()
    eventually(lambda: end.ended == [Member("1", 7)], what=lambda: end.post.troubles)
    again, entry = other(8, entry.port)
    end.post.learn({1: entry})
    reach(end, again, Member("1", 8), 5)
    assert end.ended == [Member("1", 7)]
    again.kill()


def test_what_a_life_has_said_is_heard_before_its_death(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stood still, and reads all of it at once, must not take itself for alone."""
    monkeypatch.setattr(posts, "_READ_S", 60.0)
    reads, goes_on = threading.Event(), threading.Event()
    order: list[str] = []

    def hear(letter: Letter) -> None:
        reads.set()
        goes_on.wait(60)
        order.append("letter")

    def learn(life: Member) -> None:
        order.append("death")
        end.ended.append(life)

    end.post._heard, end.post.ended = hear, learn
    child, entry = other(7)
    end.post.learn({1: entry})
    reach(end, child, Member("1", 7), 3)
    child.send(end.post.book)
    assert reads.wait(60)
    child.kill()
    way = end.post._ways[1]
    eventually(lambda: way._life is None)  # the end of its stream has been seen
    goes_on.set()
    eventually(lambda: end.ended)
    assert order == ["letter", "death"]


def test_a_reset_connection_alone_is_no_death(end: End) -> None:
    """What lies between agents may end connections; the life that is reached again lives."""
    child, entry = other(7)
    gate = socket.create_server(HOST)
    end.post.learn({1: Entry(7, *gate.getsockname()[:2])})
    end.say(Member("1", 7), 1)
    pairs = []
    for rounds in (1, 2):
        near, _ = gate.accept()
        far = socket.create_connection((entry.host, entry.port))
        pairs += [near, far]
        _carry(near, far, child, rounds)
        if rounds == 1:
            linger = b"\1\0\0\0\0\0\0\0"
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            near.close()  # resets it
            eventually(lambda: 1 in end.post.troubles)
            end.say(Member("1", 7), 2)
    assert not end.ended
    pairs[2].close()  # the end of a stream is certain, though nobody can be called to ask
    eventually(lambda: end.ended == [Member("1", 7)])
    for one in (*pairs, gate):
        one.close()
    child.kill()


def _carry(near: socket.socket, far: socket.socket, child: Child, rounds: int) -> None:
    """Carries bytes both ways until the child has heard this letter."""
    near.settimeout(0.01)
    far.settimeout(0.01)
    while not child.has_sent:
        for one, to in ((near, far), (far, near)):
            with contextlib.suppress(TimeoutError):
                to.sendall(one.recv(1 << 16))
    assert child.receive() == Ready(rounds)


def test_the_last_letters_of_a_life_arrive(end: End) -> None:
    """A machine that leaves tells the others of the view without it, and ends."""
    child, entry = other(7)
    leaving = End(2)
    leaving.post.learn({1: entry})
    reach(leaving, child, Member("1", 7), 3)
    for rounds in range(4, 9):
        leaving.say(Member("1", 7), rounds)
    leaving.close()
    eventually(lambda: child.has_sent)
    last = child.receive()
    while last != Ready(8):
        last = child.receive()
    child.kill()


def test_a_life_of_the_group_before_is_not_heard(end: End) -> None:
    before = End(1, founding="before")
    before.post.learn(end.post.book)
    end.post.learn(before.post.book)
    before.say(end.me, 1)
    end.say(before.me, 1)
    for one, other in ((before, end), (end, before)):
        eventually(lambda one=one, other=other: other.post.number in one.post.troubles)
        assert "does not await" in one.post.troubles[other.post.number]
    assert not end.heard and not before.heard
    before.close()


def test_a_connection_that_gets_no_thread_comes_again(end: End) -> None:
    child, entry = other(7)
    end.post.learn({1: entry})
    with no_threads("agent-letters"):
        child.send(end.post.book)
        eventually(lambda: any("thread" in one for one in end.door.refused))
    with no_threads("agent-post"):
        end.say(Member("1", 7), 3)
        assert "thread" in end.post.troubles[1]

    def heard() -> bool:
        child.send(end.post.book)
        return bool(end.heard)

    eventually(heard)
    reach(end, child, Member("1", 7), 3)
    child.kill()


def test_one_that_lives_and_refuses_is_told_apart_from_one_that_is_gone(end: End) -> None:
    """Until it is reached, or gone."""
    stranger = Listener(HOST, Identity("job", b"another token 16"))
    for entry, refuses in (
        (Entry(7, *stranger.address), True),
        (Entry(8, "127.0.0.1", 9), False),
        (Entry(9, *stranger.address), True),
    ):
        end.post.learn({1: entry})

        def is_told(refuses: bool = refuses) -> bool:
            end.say(Member("1", 7), 1)
            return (1 in end.post.refusals) == refuses

        eventually(is_told)
    assert "has another token" in end.post.refusals[1]
    stranger.close()
    child, entry = other(10)
    end.post.learn({1: entry})
    reach(end, child, Member("1", 10), 3)
    assert not end.post.refusals and not end.post.troubles
    child.kill()


def test_a_trouble_is_told_once_it_has_lasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody has tried for a while it begins anew: a machine that comes back is not there at
    once."""
    now = [0.0]
    monkeypatch.setattr(troubles, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = troubles.Troubles(10.0, pause_s=15.0)
    for now[0], line in ((0.0, "gone"), (60.0, "ends"), (69.0, "ends"), (70.0, "is gone")):
        made.note(1, line)
    assert capsys.readouterr().err == "gadei-ps: is gone\n"
    made.note(1, "is gone")
    made.over(1)
    made.note(1, "ends")
    assert not capsys.readouterr().err and made == {1: "ends"}


def test_an_address_that_is_none_is_told(end: End) -> None:
    end.post.learn({1: Entry(7, "a..b", 9)})
    end.say(Member("1", 7), 1)
    eventually(lambda: end.post.troubles)
    assert "'a..b' is no name of a host" in end.post.troubles[1]


def test_a_letter_to_several_is_encoded_once(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    others, made = [End(1), End(2)], []
    encode = letters.encode

    def encoded(letter: Letter) -> bytes:
        made.append(letter)
        return encode(letter)

    monkeypatch.setattr(letters, "encode", encoded)
    for one in others:
        end.post.learn(one.post.book)
    for rounds in (1, 2):
        for one in others:
            end.say(one.me, rounds)
        for one in others:
            eventually(lambda one=one, rounds=rounds: len(one.heard) == rounds)
    end.post.learn({5: Entry(0, "127.0.0.1", 9)})
    end.say(others[0].me, 2)
    eventually(lambda: len(others[0].heard) == 3)
    assert others[0].heard == made and others[1].heard == made[:2]
    assert 5 in made[2].book and 5 not in made[1].book
    for one in others:
        one.close()


def test_a_stranger_in_another_name_is_not_heard(end: End) -> None:
    liar = End(1, 3)
    liar.post.learn(end.post.book)
    liar.post.send(end.me, Message(Member("2", 3), None, Ready(1)))
    eventually(lambda: 1 in end.post.troubles)
    assert "in the name of another agent" in end.post.troubles[1]
    assert not end.heard and not liar.ended
    liar.close()
