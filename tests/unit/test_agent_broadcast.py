"""Models for neighbouring groups: the newest whole one, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support import eventually
from support.agents import IDENTITY, Proxy, nothing_of_agents_left

from gadei_ps.agents.broadcast import Broadcast
from gadei_ps.agents.inbox import Inbox
from gadei_ps.agents.listener import Listener
from gadei_ps.errors import UsageError

VALUES = 200_000  # four pieces
OURS, THEIRS = 1, 2


def model(version: int) -> np.ndarray:
    return np.full(VALUES, version, np.float32)


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    with nothing_of_agents_left():
        yield


@pytest.fixture
def door() -> Iterator[Listener]:
    made = Listener(("127.0.0.1", 0), IDENTITY)
    yield made
    made.close()


@pytest.fixture
def inbox(door: Listener) -> Iterator[Inbox]:
    made = Inbox(door, THEIRS, [OURS], VALUES)
    yield made
    made.close()


@pytest.fixture
def sender() -> Iterator[Broadcast]:
    made = Broadcast(OURS, VALUES, IDENTITY)
    yield made
    made.close()


def newest(inbox: Inbox) -> int:
    """The version of the newest model; fails if the model is mixed of several."""
    with inbox.newest(OURS) as found:
        if found is None:
            return 0
        version, values = found
        assert (values == version).all()
        assert not values.flags.writeable
        return version


def test_the_newest_model_comes_whole(door: Listener, inbox: Inbox, sender: Broadcast) -> None:
    assert newest(inbox) == 0
    sender.add(THEIRS, door.address)
    for version in range(1, 60):
        sender.offer(version, model(version))
        newest(inbox)
    eventually(lambda: newest(inbox) == 59, what=lambda: (sender.troubles(), inbox.troubles()))
    assert sender.overtaken()[THEIRS] < 59
    assert sender.sent_bytes()[THEIRS] > 4 * VALUES
    with pytest.raises(UsageError, match="use more than 59"):
        sender.offer(59, model(59))
    with pytest.raises(UsageError, match="values of float64"):
        sender.offer(60, model(60).astype(np.float64))


def test_a_model_that_is_read_stays_and_holds_nobody_up(
    door: Listener, inbox: Inbox, sender: Broadcast
) -> None:
    sender.add(THEIRS, door.address)
    sender.offer(1, model(1))
    eventually(lambda: inbox.version(OURS) == 1)
    with inbox.newest(OURS) as found:
        assert found is not None
        sender.offer(2, model(2))
        eventually(lambda: inbox.version(OURS) == 2)
        for version in range(3, 20):  # has no buffer left to go to, and does not wait for one
            sender.offer(version, model(version))
        assert inbox.version(OURS) == 2
        assert (found[1] == 1).all()
    eventually(lambda: newest(inbox) == 19)


def test_a_neighbour_may_start_late_end_and_come_again(sender: Broadcast) -> None:
    """Also damaged pieces only end the connection, and the model is sent again."""
    door = Listener(("127.0.0.1", 0), IDENTITY)
    sender.add(THEIRS, door.address)
    sender.offer(1, model(1))
    eventually(lambda: "does not await" in sender.troubles().get(THEIRS, ""))
    inbox = Inbox(door, THEIRS, [OURS], VALUES)
    eventually(lambda: newest(inbox) == 1, what=lambda: sender.troubles())
    inbox.close()
    door.close()
    other = Listener(("127.0.0.1", 0), IDENTITY)
    inbox = Inbox(other, THEIRS, [OURS], VALUES)
    with pytest.raises(UsageError):
        Listener(other.address, IDENTITY)
    harmed: list[int] = []

    def once(at: int, data: bytes) -> bytes:
        if at > 10_000 and not harmed:
            harmed.append(at)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    with Proxy(other.address, once) as proxy:
        sender.add(THEIRS, proxy.address)
        sender.offer(2, model(2))
        eventually(lambda: newest(inbox) == 2 and harmed)
    sender.remove(THEIRS)
    inbox.close()
    other.close()
