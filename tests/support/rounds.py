"""Machines in the rounds of their group: real processes that train nothing of worth."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gadei_ps.agents.driver import Driver
from gadei_ps.agents.hearing import Standing
from gadei_ps.agents.letters import Entry
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.neighbours import Group
from gadei_ps.groups import reading
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.membership import Member, View
from support.agents import IDENTITY, digest
from support.processes import Child
from support.waiting import eventually

VALUES = 200_000
RULE = "outer:0.7:0.9"
CALM_S = 4.0
"""So long a machine may be silent where none hangs: on a busy host each may be late."""


class Trained:
    """Weights that move by a step of their own in each round, and tell the test what is written."""

    buffers: Mapping[str, slice] = MappingProxyType({})
    look_s = 5.0

    def __init__(
        self, pipe: Any, me: Member, first_s: float, bad: Collection[int], values: int
    ) -> None:
        self.pipe, self.number, self.first_s = pipe, int(me.machine), first_s
        self.bad, self.values = bad, values
        self.weights = np.full(values, self.number, np.float32)
        self.taken: Callable[[], int] = int
        self._telling = threading.Lock()

    def copy(self, number: int, into: np.ndarray) -> int:
        time.sleep(0.02 if number else self.first_s)
        if number:
            self.weights += np.random.default_rng([number, self.number]).random(
                self.values, np.float32
            )
        into[:] = self.weights
        if number in self.bad:
            into[self.number :: 1000] = np.nan
            return 0
        return 1 + self.number

    def write(self, rounds: int, weights: np.ndarray, constants: Sequence[str]) -> None:
        self.weights[:] = weights
        self.tell(rounds, f"{digest(weights)} {self.taken()}")

    def check(self) -> None:
        pass

    def tell(self, what: int | str, said: Any) -> None:
        with self._telling:
            self.pipe.send((what, said))


def _agent(
    pipe: Any,
    me: Member,
    first_s: float,
    rule: str,
    rule_s: float,
    silence_s: float,
    bad: Collection[int],
    values: int,
) -> None:
    door = Listener(("127.0.0.1", 0), IDENTITY)
    pipe.send(door.address)
    view, book, group, wire = pipe.recv()
    trained = Trained(pipe, me, first_s, bad, values)
    made = reading.parse(rule)
    end_round = made.end_round

    def slowly(*args: Any) -> None:
        time.sleep(rule_s)
        end_round(*args)

    made.end_round = slowly  # type: ignore[method-assign]
    driver = Driver(
        *(door, me, door.address, trained, made, view),
        group=group,
        wire=wire,
        silence_s=silence_s,
        told=lambda standing: trained.tell("standing", standing),
    )

    def taken() -> int:
        return max((driver.state.taken.get(one, 0) for one in group.sources), default=0)

    trained.taken = taken
    signal.signal(signal.SIGTERM, lambda *_: driver.leave())
    driver.post.learn(book)
    if view is None:
        driver.join([Member(str(number), 0) for number in book])
    threading.Thread(target=_obey, args=(driver, pipe), daemon=True).start()
    trained.tell("ended", driver.run())


def _obey(driver: Driver, pipe: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            driver.obey(pipe.recv())


class Agent:
    """A process, and the rounds that it has written.

    first_s: how long it takes to begin. rule_s: what its rule takes longer than those of others.
    silence_s: after which it takes others for lost. bad: rounds whose copies are not finite.
    values: of its model.
    """

    def __init__(
        self,
        number: int,
        incarnation: int = 0,
        *,
        first_s: float = 0,
        rule: str = RULE,
        rule_s: float = 0,
        silence_s: float = CALM_S,
        bad: Collection[int] = (),
        values: int = VALUES,
    ) -> None:
        self.me = Member(str(number), incarnation)
        self.child = Child(_agent, self.me, first_s, rule, rule_s, silence_s, bad, values)
        self.taken = 0
        """The newest version of another group's model that is in its weights."""
        self.entry = Entry(incarnation, *self.child.receive())
        self.written: dict[int, str] = {}
        self.standing = Standing()

    def hear(self) -> None:
        while self.child.has_sent:
            rounds, said = self.child.receive()
            if rounds == "standing":
                self.standing = said
                continue
            assert rounds != "ended", said
            self.taken = int(said.split()[1])
            assert rounds not in self.written, f"round {rounds} is written twice"
            self.written[rounds] = said


def last_words(agent: Agent) -> str:
    """Why it has ended."""
    while True:
        rounds, said = agent.child.receive()
        if rounds == "ended":
            assert isinstance(said, str)
            return said
        if isinstance(rounds, int):
            agent.written[rounds] = said


def begin(
    agents: list[Agent], group: Group | None = None, wire: Wire = Wire.FLOAT32
) -> list[Agent]:
    """These machines begin a group together."""
    view = View(0, tuple(one.me for one in agents))
    for one in agents:
        one.child.send((view, book_of(agents), group or Group(), wire))
    return agents


def join(
    agent: Agent, members: list[Agent], group: Group | None = None, wire: Wire = Wire.FLOAT32
) -> None:
    """The machine is to join the group of these."""
    agent.child.send((None, book_of(members), group or Group(), wire))


def book_of(agents: list[Agent]) -> dict[int, Entry]:
    return {int(one.me.machine): one.entry for one in agents}


def go_on(agents: list[Agent], rounds: int = 3) -> None:
    """All write this many rounds more."""
    until = max([0, *itertools.chain.from_iterable(one.written for one in agents)]) + rounds

    def far() -> bool:
        for one in agents:
            one.hear()
        return all(max(one.written, default=0) >= until for one in agents)

    eventually(far, what=lambda: [max(one.written, default=0) for one in agents])


def alike(agents: list[Agent]) -> None:
    """Whoever has written a round, the dead among them, has written the same."""
    results: dict[int, str] = {}
    for one in agents:
        for rounds, hash_ in one.written.items():
            assert results.setdefault(rounds, hash_) == hash_, f"round {rounds} differs"
