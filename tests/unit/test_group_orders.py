"""What `group join` and `group leave --dead` do where something is slow, or comes in between."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gadei_ps.errors import ClusterError, UsageError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from gadei_ps.cluster import conductor, driver, lease, machines, placing
from gadei_ps.show.groups import left

Said = Callable[[float], Any]
"""What an actor answers within so many seconds."""


class Method:
    """Of an actor of the tests. A call that is sent is noted at once, as `remote` does it."""

    def __init__(self, calls: list[str], name: str, said: Said) -> None:
        self._calls, self._name, self._said = calls, name, said

    def remote(self, *args: Any, **how: Any) -> Said:
        self._calls.append(self._name)
        return self._said


class Actor:
    """Of a machine: answers, by the names of its methods; what is no function is said at once."""

    def __init__(self, **said: Any) -> None:
        self.calls: list[str] = []
        self._said = said

    def __getattr__(self, name: str) -> Method:
        said = self._said.get(name)
        return Method(self.calls, name, said if callable(said) else lambda wait_s: said)


class World:
    """The clock, and what was done with actors."""

    def __init__(self) -> None:
        self.now = 0.0
        self.killed: list[Any] = []
        self.told: dict[int, dict[str, Any]] = {}
        """How machines have ended, as the command hears it that looks after the run."""

    def get(self, said: Said, timeout: float) -> Any:
        return said(timeout)

    def kill(self, one: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(one)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def late(self, seconds: float, said: Any) -> Said:
        """An answer that takes so long."""

        def answer(wait_s: float) -> Any:
            if seconds > wait_s:
                self.now += wait_s
                raise GetTimeoutError
            return said

        return answer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(ray, "get", made.get)
    monkeypatch.setattr(ray, "kill", made.kill)
    monkeypatch.setattr(machines.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(machines.time, "sleep", made.sleep)
    monkeypatch.setattr(lease, "missed", lambda run: ())
    monkeypatch.setattr(lease, "tell", lambda run, ended: made.told.update(ended))
    return made


def test_actors_that_hang_are_waited_for_together(world: World) -> None:
    hung = {
        one: Actor(status=world.late(1000.0, None), clear=world.late(1000.0, None))
        for one in range(5)
    }
    rows = machines.statuses(hung)  # type: ignore[arg-type]
    assert world.now == machines.ANSWER_S and {row["state"] for row in rows} == {"away"}
    machines.kill(hung)  # type: ignore[arg-type]
    assert world.now == 2 * machines.ANSWER_S and world.killed == list(hung.values())


# -- join -----------------------------------------------------------------------------------------

HERE = {"machine": 0, "state": "training", "host": "h", "node": "n", "group": 0, "ended": None}
PLACE = {"host": "g", "port": 7, "mistake": None, "taken": None}
PLAN: dict[str, Any] = {"run": "a", "number": 0, "group": 0, "port": 0, "directory": "/"}
PLAN |= {"program": None}
PLAN["agent"] = {"agents": {"0": "h:1"}, "group_number": 0, "number": 0, "listen": "h:1"}


class Joining:
    """A join to a run of one machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **said: Any) -> None:
        self.there = Actor(plan=PLAN, status=HERE)
        self.new = Actor(**{"prepare": PLACE} | said)
        monkeypatch.setattr(placing, "beside", lambda *_: self.new)
        monkeypatch.setattr(placing, "check", lambda *_: None)

    def __call__(self, is_over: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        return machines.join({0: self.there}, "a", 0, None, is_over)  # type: ignore[dict-item]


def test_a_machine_joins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take its time to begin."""
    made = Joining(monkeypatch, start=world.late(0.0, None))
    assert made() == {"run": "a", "machine": 1, "group": 0, "host": "g"}
    assert made.there.calls[-1] == "ask" and not world.killed
    made = Joining(monkeypatch, start=world.late(1000.0, None))
    with pytest.raises(GetTimeoutError):
        made()
    assert world.now >= placing.ANSWER_S and world.killed == [made.new]


def test_two_joins_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both choose the same number. Nothing of the other one is ended."""
    made = Joining(monkeypatch)

    def beside(*_: Any) -> Any:
        raise ValueError("The name a.1 is already taken")

    monkeypatch.setattr(placing, "beside", beside)
    with pytest.raises(ClusterError, match=r"^run a: another join has just taken the number 1: tr"):
        made()
    assert not world.killed


@pytest.mark.parametrize("where", ["status", "prepare", "start"])
def test_a_join_that_is_interrupted(
    where: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left, wherever that is, also where the machine has begun just now."""
    asked: list[str] = []

    def answer(said: Any) -> Said:
        def get(wait_s: float) -> Any:
            asked.append("")
            return said

        return get

    answers = {"status": HERE, "prepare": PLACE, "start": None}
    made = Joining(monkeypatch, **answers | {where: answer(answers[where])})
    if where == "status":
        made.there = Actor(plan=PLAN, status=answer(HERE))
    with pytest.raises(ClusterError, match=r"^interrupted: "):
        made(lambda: bool(asked))
    assert world.killed == ([] if where == "status" else [made.new])
    assert ("abandon" in made.new.calls) == (where == "start")
    left = {1: {"exit_code": 0, "asked": "leave"}}  # the run was not stopped
    assert world.told == ({} if where == "status" else left)
    assert "ask" not in made.there.calls


@pytest.mark.parametrize("late", [True, False])
def test_a_machine_that_cannot_be_taken_back_is_named(
    late: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor stays: it goes on ending the machine, and `leave` finds it."""

    def died(wait_s: float) -> None:
        raise ActorDiedError

    slow = world.late(1000.0, None)
    made = Joining(monkeypatch, start=slow, abandon=slow if late else died)
    told = r"^interrupted; machine 1 may have begun: end it \(gadei-ps group leave a 1\)$"
    with pytest.raises(ClusterError, match=told):
        made(lambda: world.now > 5)
    assert not world.killed and not world.told


def test_who_was_first_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has begun, or it is interrupted: a request that comes meanwhile waits for that."""
    interrupted: list[bool] = []
    for comes_first in (True, False):
        requests = driver.Requests(interrupts=True)

        def interrupt(requests: driver.Requests = requests) -> None:
            interrupted.append(requests._deciding.acquire(blocking=False))

        monkeypatch.setattr(driver._thread, "interrupt_main", interrupt)
        if not comes_first:
            requests.let_go()
        requests._put({"signal": 2})
        requests._put({"killed": True})  # what is taken back already is not interrupted
        assert requests.is_asked() and requests.next() == {"signal": 2}
        requests.let_go()
    assert interrupted == [False]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_command_says_that_it_has_begun_once_it_takes_nothing_back(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one kills the driver of one that was killed, if that has said so."""
    calls: list[str] = []

    class Conductor:
        def __init__(self, *_: Any) -> None: ...

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_: calls.append(name) or ()

    def let_go(self: driver.Requests) -> None:
        calls.append("let_go")
        if is_interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(conductor, "Conductor", Conductor)
    monkeypatch.setattr(driver.Requests, "start", lambda self: None)
    monkeypatch.setattr(driver.Requests, "let_go", let_go)
    monkeypatch.setattr(driver.rays, "unnote", lambda *_: None)
    run = {"name": "a", "every": 1, "groups": [{"machines": 1}]}
    order = {"run": run, "where": "test", "command": [], "directory": "/", "address": "h:1"}
    given: Any = (order, "h:1", lambda **_: None)
    with pytest.raises(ClusterError) if is_interrupted else contextlib.nullcontext():
        driver.run(*given)
    rest = ["abandon"] if is_interrupted else ["has_begun", "watch", "summary"]
    assert calls == ["begin", "let_go", *rest]


# -- leave --dead ---------------------------------------------------------------------------------


def row(number: int, group: int = 0, /, **agent: Any) -> dict[str, Any]:
    """A machine that answers."""
    facts = {"hears": [], "doubts": [], "waits": []} | agent
    there = {"machine": number, "state": "training", "host": "h", "lives": 1, "ended": None}
    return there | {"group": group, "agent": facts}


def lost(wait_s: float) -> None:
    raise ActorDiedError


def one_by_one(*said: Any) -> Said:
    """These answers, the last one again and again."""
    rest = list(said)
    return lambda wait_s: rest.pop(0) if len(rest) > 1 else rest[0]


def give_up(found: Mapping[int, Actor], number: int) -> dict[str, Any]:
    return machines.give_up(dict(found), "a", number)  # type: ignore[arg-type]


def test_the_others_go_on_without_a_machine_that_is_given_up(world: World) -> None:
    """They are told again after a while, for an order may be lost; not each time somebody looks."""
    doubts = [row(1, doubts=[0])] * int(2 * machines.AGAIN_S / machines.POLL_S)
    other = Actor(status=one_by_one(*doubts, row(1)))
    gone = Actor(status=lost)
    assert give_up({0: gone, 1: other}, 0) == {"run": "a", "machine": 0, "untold": []}
    assert world.killed == [gone] and "clear" not in gone.calls
    assert other.calls.count("ask") == 2
    with pytest.raises(ClusterError, match=r"^run a: machine 1 could not be told: try again$"):
        give_up({0: gone, 1: Actor(status=row(1, doubts=[0]))}, 0)


def test_a_machine_that_is_heard_again_meanwhile_is_not_given_up(world: World) -> None:
    """Nor is its actor ended, by which its machine is looked after."""
    other = Actor(status=one_by_one(row(1, doubts=[0]), row(1, hears=[0])))
    with pytest.raises(UsageError, match=r"^machine 0 of a is not dead: it is heard by 1; end its"):
        give_up({0: Actor(status=lost), 1: other}, 0)
    assert "ask" in other.calls and not world.killed


def test_a_machine_whose_actor_is_slow_is_not_dead(world: World) -> None:
    """Alone in its group, nobody else could tell."""
    slow = Actor(status=world.late(machines.ANSWER_S - 1, row(0)))
    with pytest.raises(UsageError, match=r"^machine 0 of a is not dead: its host h answers"):
        give_up({0: slow}, 0)
    assert not world.killed


def test_nothing_is_left_of_a_machine_that_has_ended(world: World) -> None:
    ended = Actor(status=row(0) | {"ended": {"exit_code": -9}})
    assert give_up({0: ended}, 0)["untold"] == []
    assert ended.calls[-1] == "clear" and world.killed == [ended]


def test_machines_that_were_not_told_are_named(world: World) -> None:
    """They do not answer, or Ray does not know them; others are of another group."""
    silent = {"machine": 4, "state": "silent", "host": "h", "ended": None}
    agents = {"group": 1, "agent": {"agents": {"4": "h:4", "5": "h:5"}}}
    found = {
        0: Actor(status=lost),
        1: Actor(status=one_by_one(row(1, doubts=[0], hears=[3]), row(1, hears=[3])), plan=None),
        2: Actor(status=lost),
        4: Actor(status=silent, plan=agents),
        5: Actor(status=lost),
        6: Actor(status=row(6, 1, hears=[7]), plan=agents),
        8: Actor(status=one_by_one(row(8), silent | {"machine": 8}), plan=None),
    }
    told = give_up(found, 0)
    assert told["untold"] == [2, 3, 8]
    assert left(told, 0, dead=True) == (
        "machine 0 of a is marked dead for those that answer. Not notified: machines 2, 3, 8, "
        "which do not answer: if `group status` shows later that they wait for 0, repeat the "
        "command"
    )
    assert left(told | {"untold": []}, 0, dead=True).endswith("its group continues without it")
