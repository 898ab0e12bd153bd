"""Machines that others hear though Ray does not know them: nothing is decided without them."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

from ray.exceptions import RayActorError

from gadei_ps.cluster import conductor, config, needs, strays, waits
from gadei_ps.cluster.strays import Strays
from gadei_ps.errors import ClusterError

NEW = {"machine": 1, "state": "starting", "lives": 0, "ended": None}


def row(number: int, view: int | None = 7, group: int = 0, **agent: Any) -> dict[str, Any]:
    facts = {"view": view, "hears": [], "waits": [], "stands": False, "state": "member"}
    there = {"machine": number, "group": group, "state": "training", "lives": 1, "ended": None}
    return there | {"agent": facts | agent}


def test_a_group_does_not_begin_anew_while_a_machine_of_it_may_live() -> None:
    """Ray does not know it, and all others of the group have died."""
    known = Strays("a")
    known.look([row(0, group=1), row(1, hears=[2])])
    assert not known.rows(1)
    known.look([row(0, group=1), NEW])
    assert needs.is_lost([NEW]) and needs.need([NEW, *known.rows(0)]) is None
    known.look([row(1, hears=[])])
    assert not known.rows(0), "its group tells that it has ended"
    known.look([row(1, hears=[2])])
    known.look([row(1, None), row(2, hears=[1])])
    assert not known.rows(0), "Ray knows it again"


def test_machines_are_adopted_once_they_have_been_heard_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[set[int], set[int]]] = []
    now = [0.0]
    monkeypatch.setattr(strays.time, "monotonic", lambda: now[0])
    known = Strays("a")
    monkeypatch.setattr(known, "adopt", lambda have, of: asked.append((set(have), set(of))))
    for at in (0.0, 2.9, 3.1, 4.0, 33.0, 34.0):
        now[0] = at
        known.look([row(0, group=1), row(1, hears=[2])])
    assert asked == [({0, 1}, {0}), ({0, 1}, {0})]


class Actor:
    """Of Ray; what it is asked, with the answer that the test has for it."""

    def __init__(self) -> None:
        self.adopt = SimpleNamespace(remote=lambda: None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Machines that live on nodes of a cluster, by hosts; one of those at `full` has no place."""
    hosts: dict[str, list[int]] = {}

    def beside(run: str, number: int, used: set[str], host: str) -> Actor:
        if host == "full":
            raise ClusterError("its node has a machine already")
        hosts["adopted"].append(number)
        return Actor()

    def living(run: str, *, all_hosts: bool) -> dict[int, tuple[str, int]]:
        there = {name: numbers for name, numbers in hosts.items() if name != "adopted"}
        return {one: (name, one // 10) for name, numbers in there.items() for one in numbers}

    hosts["adopted"] = []
    monkeypatch.setattr(strays.placing, "beside", beside)
    monkeypatch.setattr(strays.placing, "living", living)
    monkeypatch.setattr(strays, "actors", lambda run: {1: None})
    monkeypatch.setattr(strays, "statuses", lambda found: [])
    monkeypatch.setattr(strays, "ray", SimpleNamespace(get=lambda *_, **__: None))
    return hosts


def test_one_that_cannot_be_adopted_does_not_keep_others_away(
    cluster: dict[str, list[int]],
) -> None:
    cluster |= {"full": [2], "x": [1, 3], "y": [13]}
    assert Strays("a").adopt({1}, [0]) and cluster["adopted"] == [3]
    cluster["adopted"].clear()
    assert not Strays("a").adopt({1, 3}, [0]) and not cluster["adopted"]


def test_a_stop_reaches_machines_that_ray_does_not_know(cluster: dict[str, list[int]]) -> None:
    cluster |= {"full": [2], "x": [1, 3], "y": [13]}
    assert strays.gather("a") == {1: "x", 2: "full", 3: "x", 13: "y"}
    assert cluster["adopted"] == [3, 13]


class Lease:
    """As `group run` has it; another command has ended machines."""

    def __init__(self) -> None:
        self.ended: dict[int, dict[str, Any]] = {}
        self.missed: set[int] = set()
        self.has_begun = False

    def told(self) -> dict[int, dict[str, Any]]:
        told, self.ended = self.ended, {}
        return told

    def miss(self, machines: set[int]) -> None:
        self.missed = set(machines)

    def begun(self) -> None:
        self.has_begun = True


class Run(conductor.Conductor):
    """Of one group, and what it says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lease, self.helped = Lease(), list[needs.Kind]()
        wanted = {"name": "a", "every": 1, "groups": [{"machines": 1}, {"machines": 2}]}
        super().__init__(
            config.from_mapping(wanted, "test"), [], "/", lambda say: self.said.append(say)
        )
        self._lease = self.lease  # type: ignore[assignment]

    def _help(self, group: int, need: needs.Need, rows: list[dict[str, Any]]) -> None:
        self.helped.append(need.kind)


def test_a_group_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, list[int]]
) -> None:
    """All machines of it have died but one, which Ray does not know and which may live."""
    now = [0.0]
    for module in (needs, strays, waits):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = Run()

    def see(*rows: dict[str, Any]) -> None:
        run._learn_of_others({one["machine"]: None for one in rows})
        run._strays.look(rows)
        run._look_after(list(rows))

    see(row(1, hears=[2]))
    for now[0] in (1.0, 60.0, 120.0):
        see(NEW)
    assert run.said == [
        "group 0 waits for machine 2, which Ray does not know and which may live: bring back its "
        "host, or `gadei-ps group leave a 2 --dead`"
    ]
    assert run.lease.missed == {2} and not run.helped
    run.lease.ended[2] = {"exit_code": 0, "asked": "dead"}
    for now[0] in (121.0, 130.0, 140.0):
        see(NEW)
    assert run.helped == [needs.Kind.MACHINES] and len(run.said) == 1 and not run.lease.missed


def test_a_run_waits_for_machines_that_it_can_reach(cluster: dict[str, list[int]]) -> None:
    """All that Ray knows have ended. If another command has stopped the run, none is taken up."""
    run = Run()
    run._strays.look([row(1, hears=[2])])
    run._groups[1] = 0
    assert not run._has_more({1: None})
    assert run.said.pop() == "machine 2 is not known to Ray any more, and may train on"
    assert run.summary()["machines"] == [{"machine": 2, "host": None, **conductor.LOST}]
    cluster["x"] = [2]
    assert run._has_more({1: None}) and cluster["adopted"] == [2]
    run.lease.ended[1] = {"exit_code": 0, "asked": "stop"}
    run._learn_of_others({1: None})
    assert not run._has_more({1: None}) and cluster["adopted"] == [2]


@pytest.mark.parametrize("own", [True, False])
def test_a_stop_that_has_not_been_told_yet_is_seen(
    own: bool, cluster: dict[str, list[int]]
) -> None:
    """The command that stops a run tells it at its end. If `group run` itself ends all machines,
    it takes up others, and ends them, too."""
    run = Run()
    if own:
        run.stop()
    run._strays.look([row(1, hears=[2])])
    run._groups[1], cluster["x"] = 0, [2]
    run._hear(row(1) | {"ended": {"exit_code": 0, "asked": "stop"}})
    assert run._has_more({1: None}) == own and cluster["adopted"] == [2] * own


def test_each_wait_of_a_group_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one for the same machine. No machine can be given up that others hear."""
    now = [0.0]
    for module in (needs, waits):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[str] = []
    made = waits.Waits("a", 1.0, said.append)
    for at, strays_, count in (
        *((0.0, [2], 0), (10.0, [2], 1), (20.0, [2], 1), (30.0, [2], 1)),
        *((40.0, [], 1), (50.0, [2], 2), (60.0, [2], 2), (70.0, [2], 2)),
    ):
        now[0] = at
        made.group(0, [NEW], strays_)
        assert len(said) == count, at
    stands = row(1, hears=[2], stands=True)
    for now[0] in (80.0, 90.0):
        made.group(0, [stands], [2, 3])
    for now[0] in (100.0, 110.0):
        made.group(0, [stands], [2])
    told = "group 0 waits for machine {}, which Ray does not know and which may live: bring back "
    told += "its host{}"
    dead = ", or `gadei-ps group leave a {} --dead`"
    assert said[1:] == [
        told.format("2", dead.format(2)),
        told.format("2, 3", dead.format(3)),
        told.format("2", ""),
    ]


def test_a_run_says_whom_it_waits_for_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[str] = []
    made = waits.Waits("a", 1.0, said.append)
    away = {"machine": 2, "state": "away", "ended": None}
    ended = row(1) | {"ended": {"exit_code": 0}}
    for now[0], rows, count in (
        *((0.0, [row(1), away], 0), (30.0, [row(1), away], 0), (31.0, [ended, away], 0)),
        *((50.0, [ended, away], 0), (52.0, [ended, away], 1), (90.0, [ended, away], 1)),
        *((91.0, [ended, row(2)], 1), (92.0, [ended, away], 1), (113.0, [ended, away], 2)),
        *((114.0, [ended], 2), (140.0, [ended], 2), (170.0, [], 2)),
    ):
        made.end(rows)
        assert len(said) == count, now[0]
    assert (
        said[0]
        == said[1]
        == (
            "the run waits for machine 2, which Ray does not reach: bring back its host, or "
            "`gadei-ps group leave a 2 --dead`"
        )
    )


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_run_is_taken_over_though_one_of_its_machines_does_not_answer(
    is_away: bool, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command before was killed while a host was gone, and all of group 1 was dead: the state
    of that group may be on the machine that does not answer."""
    run = Run()
    rows = [row(0), row(1), {"machine": 2, "state": "away", "ended": None}][: 2 + is_away]
    plan = {"group": 0, "agent": {"token": "t", "agents": {"0": "h:1"}}}
    places: dict[int, Any] = {0: {"host": "h", "port": 1}, 1: {"host": "h", "port": 2}}
    places[0] |= {"plan": plan} if trains else {}
    prepared: list[list[int]] = []
    begun: list[int] = []

    def prepare(found: dict[int, Any]) -> dict[int, Any]:
        prepared.append(sorted(found))
        return places

    monkeypatch.setattr(conductor.lease, "take", lambda *_: None)
    monkeypatch.setattr(conductor, "actors", lambda _: {one["machine"]: None for one in rows})
    monkeypatch.setattr(conductor, "statuses", lambda found, *_: rows)
    monkeypatch.setattr(run, "_prepare", prepare)
    monkeypatch.setattr(run, "_check_program", lambda _: None)
    monkeypatch.setattr(run, "_begin_group", lambda group, _: begun.append(group))
    refused = is_away and not trains
    with pytest.raises(ClusterError, match="trains answers") if refused else nullcontext():
        run.begin()
    assert prepared == [[0, 1]]
    assert begun == ([] if refused else [0] if is_away else [0, 1])
    wait = "waiting for machine 2, which does not answer yet"
    line = "machine 2 does not answer: the others are taken over without it"
    assert run.said[1:] == [wait, line] * is_away


def test_a_machine_whose_actor_is_only_beginning_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else would begin it: the command that has made the actor was killed."""
    run, waited = Run(), list[float]()

    def statuses(found: dict[int, Any], wait_s: float = 10.0) -> list[dict[str, Any]]:
        waited.append(wait_s)
        away = {"machine": 2, "state": "away", "ended": None}
        rows = [row(0), row(1), away if wait_s < conductor.placing.ANSWER_S else NEW]
        return [one for one in rows if one["machine"] in found]

    monkeypatch.setattr(conductor, "statuses", statuses)
    assert run._away(dict.fromkeys(range(3))) == set()
    assert waited == [10.0, conductor.placing.ANSWER_S]
    assert run.said == ["waiting for machine 2, which does not answer yet"]


@pytest.mark.parametrize("gone", [(), (2,), (1, 2)])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_machine_that_is_ended_while_its_run_is_taken_over(
    gone: tuple[int, ...], is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `group leave --dead`, say, between two calls of its actor."""
    run = Run()
    run._is_new, run._found = is_new, dict.fromkeys(range(3))

    def get(number: int, timeout: float) -> str:
        if number in gone:
            raise RayActorError(None, "The actor is dead because it was killed by `ray.kill`.")
        return f"of {number}"

    monkeypatch.setattr(conductor.ray, "get", get)
    asked = {number: number for number in range(3)}
    if is_new and gone:
        with pytest.raises(ClusterError, match=f"machine {gone[0]}: The actor is dead"):
            run._answers(asked)
        return
    there = sorted({0, 1, 2}.difference(gone))
    assert run._answers(asked) == {number: f"of {number}" for number in there}
    assert sorted(run._found) == there
    assert [line.split(":")[0] for line in run.said] == [f"machine {one}" for one in gone]


def test_what_has_begun_may_be_taken_back_until_the_command_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next command kills nobody who takes machines back."""
    run = Run()
    monkeypatch.setattr(conductor.lease, "take", lambda *_: run.lease)
    monkeypatch.setattr(conductor, "actors", lambda _: {})
    monkeypatch.setattr(conductor.placing, "place", lambda _: {0: None})
    place = {"host": "h", "port": 1, "taken": None}
    monkeypatch.setattr(run, "_prepare", lambda _: {0: place})
    monkeypatch.setattr(run, "_begin_group", lambda *_: None)
    run.begin()
    assert not run.lease.has_begun
    run.has_begun()
    assert run.lease.has_begun


def test_a_run_is_taken_over_while_a_machine_that_joined_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its actor knows its group, and begins it again."""
    run = Run()
    plan = {"group": 0, "agent": {"token": "t", "agents": {"0": "h:1"}}}
    places = {0: {"host": "h", "port": 1, "plan": plan}, 3: {"host": "h", "port": 2}}
    begun: list[list[int]] = []
    monkeypatch.setattr(conductor.lease, "take", lambda *_: None)
    monkeypatch.setattr(conductor, "actors", lambda _: dict.fromkeys(places))
    monkeypatch.setattr(conductor, "statuses", lambda found: [row(0), row(3)])
    monkeypatch.setattr(run, "_prepare", lambda _: places)
    monkeypatch.setattr(run, "_check_program", lambda _: None)
    monkeypatch.setattr(run, "_begin_group", lambda _, members: begun.append(sorted(members)))
    run.begin()
    assert begun == [[0], []]
