"""Models for neighbouring groups: whole ones, in all formats, and nobody waits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import eventually
from support.agents import HANDSHAKE_BYTES, IDENTITY, Proxy, nothing_of_agents_left

from gadei_ps.agents import frames
from gadei_ps.agents.broadcast import SLOTS, Broadcast
from gadei_ps.agents.inbox import Goal, Inbox
from gadei_ps.agents.letters import MOST_AGENTS, Book, Entry
from gadei_ps.agents.listener import Address, Listener
from gadei_ps.agents.plan import PIECE_VALUES
from gadei_ps.errors import AgentError
from gadei_ps.groups import compress
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.messages import Model

VALUES = 2 * PIECE_VALUES + 1000
OURS, THEIRS = 1, 2


def model(version: int) -> np.ndarray:
    return np.full(VALUES, version, np.float32)


class Sender:
    """A machine of group OURS. `others`: where it says that machines of its group are."""

    def __init__(self, number: int, others: dict[int, Address] | None = None) -> None:
        self.constants = 0
        self.door = Listener(("127.0.0.1", 0), IDENTITY)
        self.told: list[tuple[int, Book]] = []
        book = {one: Entry(0, *where) for one, where in (others or {}).items()}
        self.broadcast = Broadcast(
            *(self.door, number, OURS, VALUES, Wire.FLOAT32, lambda: book),
            lambda _: contextlib.nullcontext(),
            lambda group, book: self.told.append((group, book)),
            constants=lambda: self.constants,
        )

    def offer(self, version: int) -> None:
        self.broadcast.stage(version, model(version).view(np.uint8))
        self.broadcast.publish(version)

    def close(self) -> None:
        self.broadcast.close()
        self.door.close()


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[contextlib.ExitStack]:
    with nothing_of_agents_left(), contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def sender(all_closed: contextlib.ExitStack) -> Sender:
    made = Sender(0)
    all_closed.callback(made.close)
    return made


def get(stack: contextlib.ExitStack, *senders: Sender, piece_s: float = 5.0) -> Inbox:
    """The inbox of machine 9, which begins to get models."""
    door = Listener(("127.0.0.1", 0), IDENTITY)
    stack.callback(door.close)
    sources = {OURS: {number: one.door.address for number, one in enumerate(senders)}}
    inbox = Inbox(door, 9, sources, VALUES, lambda _: None, piece_s=piece_s)
    stack.callback(inbox.close)
    inbox.seek({OURS: Goal(0)})
    for one in senders[:1]:
        eventually(lambda one=one: bool(one.broadcast._callers), what=inbox.troubles)
    return inbox


def newest(inbox: Inbox) -> int:
    """The newest model; and none that is here is mixed of several."""
    for one in inbox.held():
        with inbox.weights(one) as values:
            if values is not None:
                assert (values == one.version).all()
                assert not values.flags.writeable
    found = max((one.version for one in inbox.held()), default=0)
    inbox.seek({OURS: Goal(found)})
    return found


def test_models_come_whole_and_the_newest_comes(
    sender: Sender, all_closed: contextlib.ExitStack
) -> None:
    inbox = get(all_closed, sender)
    for version in range(1, 60):
        sender.offer(version)
        newest(inbox)
    sender.offer(60)
    eventually(lambda: newest(inbox) == sender.broadcast.version, what=inbox.troubles)
    assert sender.broadcast.version == 60 or sender.broadcast.left_out
    assert len(inbox.held()) <= SLOTS


def test_a_model_of_a_group_with_other_constants_is_not_taken(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    """It has zeros where this group has values."""
    inbox = get(all_closed, sender)
    sender.constants = 5
    sender.offer(1)
    eventually(lambda: "has other constants" in inbox.troubles().get(OURS, ""))
    assert not inbox.held()
    sender.constants = 0
    sender.offer(2)
    eventually(lambda: newest(inbox) == 2, what=inbox.troubles)


def test_a_model_that_is_not_finite_is_not_taken(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    inbox = get(all_closed, sender)
    sender.broadcast.stage(1, (model(1) * np.float32("inf")).view(np.uint8))
    sender.broadcast.publish(1)
    eventually(lambda: "not finite" in inbox.troubles().get(OURS, ""), what=inbox.troubles)
    assert not inbox.held()

    def comes() -> bool:
        sender.offer(sender.broadcast.version + 1)
        return newest(inbox) > 1

    eventually(comes, what=inbox.troubles)


def test_what_has_been_begun_is_finished(
    all_closed: contextlib.ExitStack, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the network: with each piece that is sent, a round ends here."""
    inbox = get(all_closed, sender)
    cut_out = compress.cut_out

    def cut(*args: Any) -> list[compress.Bytes]:
        sender.offer(sender.broadcast.version + 1)
        return cut_out(*args)

    monkeypatch.setattr(compress, "cut_out", cut)
    sender.offer(1)
    eventually(lambda: newest(inbox) > 1, what=inbox.troubles)


def test_a_pinned_model_stays_and_a_certain_one_can_be_had(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    inbox = get(all_closed, sender)
    sender.offer(1)
    eventually(lambda: newest(inbox) == 1)
    inbox.pin([Model(OURS, 1)])
    for version in range(2, 9):
        sender.offer(version)
        eventually(lambda version=version: newest(inbox) == version, what=inbox.troubles)
    assert Model(OURS, 1) in inbox.held()
    inbox.seek({OURS: Goal(7, exactly=True)})
    eventually(lambda: Model(OURS, 7) in inbox.held())
    inbox.pin([])
    sender.offer(9)
    inbox.seek({OURS: Goal(8)})
    eventually(lambda: Model(OURS, 9) in inbox.held())
    assert Model(OURS, 1) not in inbox.held()


def test_a_model_may_be_read_for_longer_than_the_inbox_is_there(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    inbox = get(all_closed, sender)
    sender.offer(1)
    eventually(lambda: newest(inbox) == 1)
    with inbox.weights(Model(OURS, 1)):
        inbox.close()


def test_addresses_of_a_neighbour_are_bounded(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    inbox = get(all_closed, sender)
    for begin in (0, MOST_AGENTS):
        inbox.learn(OURS, {begin + one: Entry(0, "here", 1) for one in range(MOST_AGENTS)})
    inbox.learn(OURS, {7: Entry(0, "there", 1)})
    known = inbox._sources[OURS]._machines
    assert len(known) == MOST_AGENTS and known[7] == ("there", 1)


def test_another_machine_is_asked_when_one_is_gone(all_closed: contextlib.ExitStack) -> None:
    """Also one of which only the other machines of its group have said where it is."""
    late = Sender(1)
    all_closed.callback(late.close)
    first = Sender(0, {1: late.door.address})
    inbox = get(all_closed, first)
    first.offer(1)
    eventually(lambda: newest(inbox) == 1, what=inbox.troubles)
    first.close()
    eventually(lambda: newest(inbox) and bool(late.broadcast._callers), what=inbox.troubles)
    late.offer(2)
    eventually(lambda: newest(inbox) == 2, what=inbox.troubles)


def test_another_machine_is_asked_when_one_has_nothing_new(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    """It may have lost its group, and not know it."""
    other = Sender(1)
    all_closed.callback(other.close)
    inbox = get(all_closed, sender, other, piece_s=0.1)
    eventually(lambda: other.offer(other.broadcast.version + 1) or newest(inbox))


def test_who_drips_is_left_for_another_machine(
    all_closed: contextlib.ExitStack, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece comes in its time, and all together too slowly."""
    monkeypatch.setattr(frames, "LEAST_RATE", 1 << 24, raising=False)
    cut_out, other = compress.cut_out, Sender(1)
    all_closed.callback(other.close)

    def slowly(*args: Any) -> list[compress.Bytes]:
        if threading.current_thread() in sender.broadcast._threads:
            time.sleep(0.3)
        return cut_out(*args)

    monkeypatch.setattr(compress, "cut_out", slowly)
    inbox = get(all_closed, sender, other, piece_s=0.5)
    sender.offer(100)
    eventually(
        lambda: other.offer(other.broadcast.version + 1) or newest(inbox), what=inbox.troubles
    )
    assert newest(inbox) < 100


def test_who_reads_in_drips_keeps_no_model(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LEAST_RATE", 1 << 24, raising=False)
    monkeypatch.setattr(sender.broadcast, "_piece_s", 0.5)
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)

    def read() -> None:
        while far.recv(1 << 16, socket.MSG_WAITALL):
            time.sleep(0.08)

    reader = threading.Thread(target=read)
    reader.start()
    with near, far:
        data = model(1).view(np.uint8)
        with pytest.raises((AgentError, TimeoutError)):
            sender.broadcast._send_model(near, Model(OURS, 1), Wire.FLOAT32, data)
        near.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_a_damaged_piece_ends_the_connection_and_the_model_comes_again(
    all_closed: contextlib.ExitStack, sender: Sender
) -> None:
    # The sender's bytes go the other way through a proxy, so the request is damaged here.
    harmed: list[int] = []

    def once(at: int, data: bytes) -> bytes:
        if at + len(data) > HANDSHAKE_BYTES and not harmed:
            harmed.append(at)
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    proxy = all_closed.enter_context(Proxy(sender.door.address, once))
    door = Listener(("127.0.0.1", 0), IDENTITY)
    all_closed.callback(door.close)
    inbox = Inbox(door, 9, {OURS: {0: proxy.address}}, VALUES, lambda _: None)
    all_closed.callback(inbox.close)
    inbox.seek({OURS: Goal(0)})
    eventually(lambda: bool(harmed))

    def comes() -> bool:
        sender.offer(sender.broadcast.version + 1)  # nothing is kept before a first call
        return newest(inbox) > 0

    eventually(comes, what=inbox.troubles)
