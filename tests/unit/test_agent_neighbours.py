"""Two groups of two machines: within a group all have the same bits, whatever arrives when."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from support import eventually
from support.agents import IDENTITY, nothing_of_agents_left
from support.rounds import Agent, alike, begin, go_on, join

from gadei_ps.agents.inbox import Goal, Inbox
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.neighbours import Group, Neighbours
from gadei_ps.agents.post import Post
from gadei_ps.agents.state import State
from gadei_ps.groups import reading
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Aim, Model


@pytest.mark.parametrize(
    ("rule", "wire"),
    [
        ("replace", Wire.FLOAT32),
        ("mix:0.5", Wire.BFLOAT16),
        ("outer:0.7:0.9", Wire.INT8),
    ],
)
def test_machines_of_a_group_take_the_same_models(rule: str, wire: Wire) -> None:
    """Also after deaths; a newcomer goes on as the others do; a dead group stops nobody, and its
    models are taken again when it has begun anew."""
    one, other = ([Agent(number, rule=rule) for number in pair] for pair in ((0, 1), (2, 3)))
    everyone = [*one, *other]
    for number, ours, theirs in ((0, one, other), (1, other, one)):
        sources = {int(it.me.machine): (it.entry.host, it.entry.port) for it in theirs}
        begin(ours, Group(number, sources={1 - number: sources}), wire)
    go_on_with_models(one, other)
    lost = other.pop(0)
    lost.child.signal(signal.SIGKILL)
    go_on_with_models(one, other)
    back = Agent(2, 1, rule=rule)
    everyone.append(back)
    sources = {int(it.me.machine): (it.entry.host, it.entry.port) for it in one}
    join(back, other, Group(1, sources={0: sources}), wire)
    other.append(back)
    go_on_with_models(one, other)
    for it in other:
        it.child.signal(signal.SIGKILL)
    go_on(one, 5)
    anew = [Agent(int(it.me.machine), rule=rule) for it in other]  # at other addresses
    everyone += anew
    begin(anew, Group(1, sources={0: sources}), wire)
    go_on_with_models(one, anew)
    alike(anew)
    with contextlib.suppress(EOFError):
        lost.hear()
    alike(one)
    alike([*other, lost])
    for it in everyone:
        it.child.kill()


def go_on_with_models(*groups: list[Agent]) -> None:
    """All write more rounds, and each has taken newer models than before."""
    before = {agent.me: agent.taken for group in groups for agent in group}
    for group in groups:
        go_on(group, 2)

    def taken() -> bool:
        for group in groups:
            go_on(group, 1)
        return all(agent.taken > before[agent.me] for group in groups for agent in group)

    eventually(taken, what=lambda: [it.taken for group in groups for it in group])


@pytest.fixture
def alone() -> Iterator[tuple[Neighbours, View]]:
    """A machine that is its whole group, and takes models of group 1."""
    with nothing_of_agents_left():
        me, door = Member("0", 0), Listener(("127.0.0.1", 0), IDENTITY)
        state = State(reading.parse("mix:0.5"), 100)
        post = Post(door, me, door.address, lambda _: None, lambda _: None)
        group = Group(0, sources={1: {5: door.address}})
        made = Neighbours(door, me, group, state, post, lambda _: None)
        yield made, View(0, (me,))
        made.close()
        post.close()
        door.close()


def test_a_model_that_goes_just_before_the_offer_is_not_offered(
    alone: tuple[Neighbours, View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the round could wait for it forever."""
    found = iter([[Model(1, 3)]])
    monkeypatch.setattr(Inbox, "held", lambda _: next(found, []))
    neighbours, view = alone
    neighbours.offer(view, 1)
    taken = neighbours.take(view, 1)
    assert taken is not None and not taken.models


@pytest.mark.parametrize("leads", [True, False])
def test_a_machine_without_a_state_seeks_no_models(
    alone: tuple[Neighbours, View], leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know yet which buffers are constants: it would refuse those of a good model."""
    sought: list[dict[int, Goal]] = []
    monkeypatch.setattr(Inbox, "seek", lambda _, goals: sought.append(goals))
    neighbours, view = alone
    if not leads:
        view = View(0, (Member("7", 0), *view.members))
        neighbours.hear(view, view.first, Aim((Model(1, 3),)))
    neighbours.look(view)
    assert sought and not any(sought)
    neighbours._state.advance(np.zeros(100, np.float32))
    neighbours.look(view)
    assert sought[-1][1].version == (0 if leads else 3)
