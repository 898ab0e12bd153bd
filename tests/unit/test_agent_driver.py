"""Rounds of real processes: all have the same bits, whoever dies, and none is taken twice."""

from __future__ import annotations

import contextlib
import random
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from support import eventually
from support.rounds import CALM_S, Agent, alike, begin, go_on, join, last_words
from support.waiting import spin

from gadei_ps.agents.events import EXPELLED, GIVEN_UP, LEFT, GiveUp, GoOn, Mistake
from gadei_ps.agents.hearing import Lookout, Standing
from gadei_ps.agents.neighbours import Group
from gadei_ps.agents.state import NOT_FINITE
from gadei_ps.groups.membership import Member, View

HANGS_S = 2.0  # one that is silent for so long, where one hangs


def machines(count: int, silence_s: float = CALM_S) -> list[Agent]:
    return [Agent(number, silence_s=silence_s) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_machines_train_together(count: int) -> None:
    agents = begin(machines(count))
    go_on(agents, 5)
    alike(agents)
    for one in agents:
        assert sorted(one.written) == list(range(1, len(one.written) + 1))
        one.child.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on_and_the_machine_comes_back(victim: int, how: signal.Signals) -> None:
    silence_s = HANGS_S if how is signal.SIGSTOP else CALM_S
    agents = begin(machines(3, silence_s))
    go_on(agents)
    lost = agents.pop(victim)
    lost.child.signal(how)
    go_on(agents)
    back = Agent(victim, 1, silence_s=silence_s)
    join(back, agents)
    agents.append(back)
    go_on(agents)
    alike([*agents, lost])
    for one in (*agents, lost):
        one.child.kill()


def test_kills_at_random_instants() -> None:
    """In all phases of a round, also while models of another group are chosen: each survivor writes
    each round once, the same as the others."""
    chance = random.Random(7)
    agents, (source,) = machines(3), begin([Agent(9)], Group(1))
    group = Group(0, sources={1: {9: (source.entry.host, source.entry.port)}})
    everyone = list(begin(agents, group))
    go_on(agents)
    for life in range(1, 9):
        spin(chance, 0.08)
        lost = agents.pop(chance.randrange(3))
        lost.child.signal(signal.SIGKILL)
        go_on(agents, 2)
        with contextlib.suppress(EOFError):
            lost.hear()
        back = Agent(int(lost.me.machine), life)
        join(back, agents, group)
        agents.append(back)
        everyone.append(back)
        go_on(agents, 2)
    before = max(one.taken for one in agents)
    eventually(lambda: go_on([source, *agents], 1) or all(one.taken > before for one in agents))
    alike(everyone)
    for one in (source, *everyone):
        one.child.kill()


def test_of_two_machines_one_goes_on_when_the_other_is_certainly_dead() -> None:
    """One that was silent is known to be dead as soon as its process has ended."""
    one, other = begin(machines(2))
    go_on([one, other])
    other.child.signal(signal.SIGSTOP)
    other.child.kill()
    go_on([one])
    one.child.kill()


def test_one_of_three_waits_for_the_word_when_the_others_die_at_once() -> None:
    agents = begin(machines(3))
    go_on(agents)
    *lost, last = agents
    for one in lost:
        one.child.signal(signal.SIGSTOP)
    for one in lost:
        one.child.kill()
    rounds = max(last.written)

    def stands_or_goes_on() -> bool:
        """It goes on where it has noticed one death long before the other."""
        last.hear()
        return last.standing.stands or max(last.written) > rounds + 3

    eventually(stands_or_goes_on)
    if last.standing.stands:
        assert last.standing.waits == (0, 1) and last.standing.view is not None
        last.child.send(GoOn(last.standing.view))
    go_on([last])
    back = Agent(0, 1)
    join(back, [last])
    go_on([back, last])
    eventually(lambda: last.hear() or not last.standing.waits)
    alike([*agents, back])
    for one in (back, last):
        one.child.kill()


def test_a_machine_that_hung_hears_that_the_group_goes_on_without_it() -> None:
    agents = begin(machines(3, HANGS_S))
    go_on(agents)
    lost = agents.pop()
    lost.child.signal(signal.SIGSTOP)
    go_on(agents)
    lost.child.signal(signal.SIGCONT)
    assert last_words(lost) == EXPELLED
    go_on(agents)
    for one in (*agents, lost):
        one.child.kill()


def test_a_machine_that_waits_tells_why_one_that_lives_is_not_heard() -> None:
    told: list[Standing] = []
    lookout = Lookout(-1.0, told.append)
    view = View(3, (Member("0", 0), Member("1", 0), Member("2", 0)))
    facts: dict[str, Any] = {"view": view, "stands": False, "hears": (), "doubts": ()}
    waits = SimpleNamespace(missing=view.members[1:], **facts)
    refusals = {0: "it does not wait for this one", 2: "its certificate"}
    lookout.look(waits, refusals)  # type: ignore[arg-type]
    lookout.look(waits, {})  # type: ignore[arg-type]
    lookout.look(SimpleNamespace(missing=(), **facts), refusals)  # type: ignore[arg-type]
    known = [(one.waits, one.refused) for one in told]
    assert known == [((1, 2), "its certificate"), ((1, 2), ""), ((), "")]


def test_a_machine_that_was_given_up_and_lives_joins_again() -> None:
    """Of one that is heard, nobody can say that it is dead."""
    other, one = begin(machines(2, HANGS_S))
    one.child.send(GiveUp(0))
    go_on([one, other])
    other.child.signal(signal.SIGSTOP)
    eventually(lambda: one.hear() or one.standing.waits)
    assert one.standing.waits == one.standing.doubts == (0,) and not one.standing.hears
    one.child.send(GiveUp(0))
    go_on([one])
    other.child.signal(signal.SIGCONT)
    assert last_words(other) == GIVEN_UP
    back = Agent(0, 1, silence_s=HANGS_S)
    join(back, [one])
    go_on([one, back])
    alike([one, other, back])
    for agent in (one, other, back):
        agent.child.kill()


def test_a_rule_that_takes_longer_than_the_silence_expels_nobody() -> None:
    """A large model: the machine is heard while its rule works."""
    late_s = (0, 0, 1.5 * HANGS_S)
    agents = begin([Agent(n, rule_s=s, silence_s=HANGS_S) for n, s in enumerate(late_s)])
    go_on(agents, 3)
    alike(agents)
    for one in agents:
        one.child.kill()


def test_weights_that_are_not_finite_do_not_count() -> None:
    """Whoever has them continues with those of the others. Without any others, all end alike."""
    agents = begin([Agent(0, bad=[3, 5]), Agent(1, bad=[0, 2, 5]), Agent(2, bad=[2, 5])])
    for one in agents:
        assert last_words(one) == NOT_FINITE
        assert sorted(one.written) == [1, 2, 3, 4, 5]
    alike(agents)
    for one in agents:
        one.child.kill()


def test_machines_with_other_settings_do_not_begin_or_join() -> None:
    """Who trains goes on."""
    alone = Agent(0)
    begin([alone])
    go_on([alone])
    for wrong, group in ((Agent(1, 5, rule="replace"), Group()), (Agent(2, 5), Group(7))):
        join(wrong, [alone], group)
        assert "give all machines of a group the same" in last_words(wrong)
        wrong.child.kill()
    go_on([alone])
    alone.child.kill()


def test_a_machine_with_a_model_of_another_size_ends_and_no_other_one() -> None:
    """Its next life would end as well. It does not matter which of the two calls."""
    agents = begin([Agent(1), Agent(2)])
    go_on(agents)
    for number in (0, 3):
        wrong = Agent(number, 5, values=7)
        join(wrong, agents)
        said = last_words(wrong)
        assert isinstance(said, Mistake) and said.startswith("machine "), said
        assert "of another size, and this machine's has 7 values: use the same model" in said
        wrong.child.kill()
        go_on(agents)
    for one in agents:
        one.child.kill()


def test_machines_with_models_of_two_sizes_begin_no_group() -> None:
    agents = begin([Agent(0, values=7), Agent(1)])
    said = last_words(agents[1])
    assert isinstance(said, Mistake) and said.startswith("member 0 at 127.0.0.1:"), said
    for one in agents:
        one.child.kill()


def test_machines_come_before_the_first_round_and_leave() -> None:
    """A newcomer to a group that has no state yet finds none, and needs none."""
    slow = Agent(0, first_s=0.5)
    new = Agent(1, 5)
    begin([slow])
    join(new, [slow])
    agents = [slow, new]
    go_on(agents)
    alike(agents)
    slow.child.signal(signal.SIGTERM)
    assert last_words(slow) == LEFT
    go_on([new])
    new.child.signal(signal.SIGTERM)
    assert last_words(new) == LEFT
    for one in agents:
        one.child.kill()
