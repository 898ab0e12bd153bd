"""Where machines of a run are placed, and what keeps a node out."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gadei_ps
from gadei_ps.cluster import config, door, keeper, needs, rays
from gadei_ps.cluster.needs import Kind
from gadei_ps.errors import ClusterError, JobInUse, JobNotFound, UsageError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

import ray

from gadei_ps.cluster import actor, conductor, machines, placing, strays
from gadei_ps.cluster.placing import Seat

RUN = {"name": "a", "every": 1, "groups": [{"machines": 2}, {"nodes": ["x", "y"]}]}


def test_machines_that_live_stay_where_they_are() -> None:
    run = config.from_mapping(RUN, "test")
    one = {"CPU": 1}
    x, y, z = ({"CPU": 1, f"node:{name}": 0.001} for name in "xyz")
    fresh = placing.seats(run, {})
    assert fresh == [Seat(0, 0, one), Seat(1, 0, one), Seat(2, 1, x), Seat(3, 1, y)]
    # Machine 7 has joined after machine 0 had left, and machine 2 is on the other node.
    found = placing.seats(run, {7: ("z", 0), 2: ("y", 1)})
    assert found == [Seat(7, 0, z), Seat(0, 0, one), Seat(2, 1, y), Seat(3, 1, x)]
    # More than the file says have come together.
    found = placing.seats(run, {5: ("z", 0), 6: ("x", 0), 7: ("y", 0)})
    assert [seat.number for seat in found] == [5, 6, 7, 2, 3]


def test_a_stop_looks_at_each_host_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not keeps no other one away; a run begins only where all of them answer."""
    known = [{"NodeManagerAddress": one, "NodeID": one * 28, "Alive": True} for one in ("ab", "cd")]
    task = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(placing, "nodes", lambda: known)
    monkeypatch.setattr(placing.ray, "remote", lambda **_: lambda _: task)

    def look_at(host: str, *_: Any) -> dict[str, Any]:
        if host == "ab":
            raise ClusterError("node ab: it has just died")
        return {"living": [("a", 3, 1), ("b", 4, 0)]}

    monkeypatch.setattr(placing, "_look_at", look_at)
    assert strays.living("a") == {3: ("cd", 1)}
    with pytest.raises(ClusterError, match="just died"):
        placing.living("a")


def test_other_versions_are_named() -> None:
    same = {"gadei_ps": gadei_ps.__version__, "ray": ray.__version__}
    placing.check("h", same)
    with pytest.raises(ClusterError, match=r"^node h has gadei-ps 0\.1, this one .*: install the"):
        placing.check("h", same | {"gadei_ps": "0.1"})
    with pytest.raises(ClusterError, match=r"^node h has ray 2\.52\.0, this one "):
        placing.check("h", same | {"ray": "2.52.0"})
    error = ImportError("a\nModuleNotFoundError: No module named 'gadei_ps'")
    assert placing.told(error).startswith("gadei-ps is not installed there: pip install")


def test_what_a_host_lacks(runtime_dir: Path, tmp_path: Path) -> None:
    made = actor.MachineActor.__new__(actor.MachineActor)
    assert made._mistake({"memory": True}, str(tmp_path), None) is None
    said = made._mistake({"memory": False}, str(tmp_path), None) or ""
    assert said.startswith("there is no /dev/shm that can be written")
    said = made._mistake({"memory": True}, str(tmp_path / "none"), None) or ""
    assert said.endswith("put the script at the same place everywhere")


def test_a_machine_that_nobody_begins_can_be_stopped(runtime_dir: Path) -> None:
    """The command that was to begin it was killed; its run waits for its end."""
    made = actor.MachineActor.__new__(actor.MachineActor)
    made._run, made._number, made._plan, made._summary = "a", 0, None, None
    made._starting, made._over = threading.Lock(), threading.Event()
    assert made.ask("signal", signal=2) == {} and made._summary is None
    assert made.ask("leave") == {}
    assert made.end() == {"exit_code": 0, "asked": "leave"}
    made.start({}, True)  # too late


def test_no_note_on_a_cluster_is_left_on_another_host(runtime_dir: Path) -> None:
    """A run begins on one host, and is stopped on another one."""
    made = actor.MachineActor.__new__(actor.MachineActor)
    made._run, made._number = "a", 0
    for token, is_left in (("that of a cluster of this host's own", True), (None, False)):
        rays.note("a", "h:1", token)
        made.clear()
        assert rays.noted("a")
        made.clear(whole=True)
        assert rays.note_path("a").exists() == is_left


def test_a_machine_comes_to_a_host_where_none_has_been(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray places it there after the death of its host; nobody has prepared this one."""
    monkeypatch.setenv("GADEI_PS_STATE_DIR", str(tmp_path / "state" / "gadei-ps"))
    monkeypatch.setattr(actor, "_start", lambda plan: Path(plan["log"]).touch())
    made = actor.MachineActor.__new__(actor.MachineActor)
    made._run, made._number, made._plan, made._data, made._lives = "a", 0, None, None, 0
    made._is_abandoned, made._summary = False, None
    made._starting, made._over = threading.Lock(), threading.Event()
    monkeypatch.setattr(made, "_watch", lambda: None)
    made.start({"agent": {"agents": {}}, "program": None}, True)
    assert made.plan() is not None and made._lives == 1


def test_what_another_machine_is_told() -> None:
    agent = {"job": "a-0", "number": 0, "agents": {"0": "h:1", "3": "x:2"}, "listen": "h:1"}
    plan = {"run": "a", "number": 0, "group": 0, "agent": agent, "command": ["python"]}
    assert actor.of_machine(plan, 1) is None
    other = actor.of_machine(plan, 3)
    told = agent | {"job": "a-3", "number": 3, "listen": "x:2"}
    assert other == plan | {"number": 3, "agent": told}


def test_a_group_is_lost_with_its_last_machine() -> None:
    new = {"state": "starting", "lives": 0}
    assert needs.is_lost([new, new]) and not needs.is_lost([])
    for other in ({"state": "starting", "lives": 1}, {"state": "training", "lives": 1}):
        assert not needs.is_lost([new, other])
    assert not needs.is_lost([{"state": "away", "lives": 0}])


def row(number: int, view: int | None, /, **agent: object) -> dict[str, Any]:
    """A machine whose agent works under this view, or joins."""
    facts = {"state": "joining" if view is None else "member", "address": f"h:{number}"}
    facts |= {"view": view, "waits": [], "stands": False, "hears": [], "doubts": []}
    there = {"machine": number, "state": "training", "host": "h", "lives": 1, "ended": None}
    return there | {"agent": facts | agent}


AWAY = {"machine": 9, "state": "away", "ended": None}
STANDS = {"waits": [0, 1], "stands": True}


@pytest.mark.parametrize(
    ("rows", "kind", "numbers"),
    [
        ([row(0, 7), row(1, 7)], None, ()),
        ([row(0, None), row(1, None)], Kind.AGENTS, (0, 1)),
        ([row(0, None, address=None), row(1, None)], None, ()),
        ([row(0, None), row(1, None), AWAY], None, ()),
        ([row(0, None), row(1, 3)], None, ()),
        ([row(0, None), row(2, 7, **STANDS)], Kind.FEW, (2,)),
        # One that stands under an older view waits for those that have a later one.
        ([row(0, 8), row(2, 7, **STANDS)], Kind.BEHIND, (2,)),
        ([row(0, 8, state="joining"), row(2, 7, **STANDS)], None, ()),
        ([row(0, 8, waits=[1]), row(2, 7, **STANDS)], None, ()),
        ([row(0, 7), row(2, 7, **STANDS)], Kind.FEW, (0, 2)),
        # It may know of a later view.
        ([AWAY, row(2, 7, **STANDS)], None, ()),
        ([{"machine": 9, "state": "ending"}, row(2, 7, **STANDS)], Kind.FEW, (2,)),
    ],
)
def test_what_a_group_needs(rows: list[Any], kind: Kind | None, numbers: tuple[int, ...]) -> None:
    found = needs.need(rows)
    assert (found.kind, found.numbers) == (kind, numbers) if found else kind is None


def test_a_need_is_met_once_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(needs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    known = needs.Needs(silence_s=1.0)
    stands, joins = [row(2, 7, **STANDS)], [row(0, None)]
    for at, rows, due in (
        *((0.0, stands, False), (4.9, stands, False), (5.0, stands, True), (5.1, stands, False)),
        *((9.0, [], False), (10.2, joins, False), (12.0, stands, False), (16.0, joins, False)),
        *((20.0, joins, False), (21.0, joins, True)),
    ):
        now[0] = at
        assert (known.due(0, rows) is not None) == due, at


def test_a_node_whose_machine_has_ended_can_get_another_one() -> None:
    rows = [{"node": "x", "ended": None}, {"node": "y", "ended": {"exit_code": 1}}, AWAY]
    assert machines.used_nodes(rows) == {"x"}


def test_a_machine_that_only_others_know_is_away() -> None:
    """It was given up for dead, and has come back before Ray on its host has."""
    rows = machines.with_others([row(2, 7, hears=[3, 4]), row(3, 7, hears=[2, 4], doubts=[5])])
    assert [(one["machine"], one["state"]) for one in rows[2:]] == [(4, "away"), (5, "away")]
    assert rows[2]["ended"] is None and rows[2]["why"].startswith("Ray does not know it")
    assert machines.with_others([AWAY, row(2, 7, hears=[9])]) == [AWAY, row(2, 7, hears=[9])]


DOUBTS = row(2, 7, doubts=[9])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([DOUBTS, AWAY], ""),
        ([DOUBTS], ""),  # Ray does not know it any more
        ([row(2, 7), AWAY], ""),  # its group has gone on without it
        ([DOUBTS, row(9, None) | {"ended": {"exit_code": 1}}], ""),
        # Ray has made an actor elsewhere, which does not begin it while the old host is there.
        ([DOUBTS, row(9, None) | {"state": "starting", "lives": 0}], ""),
        ([row(2, 7), row(9, 7)], "9 of a is not dead: its host h answers; without --dead it"),
        ([DOUBTS, row(9, 7)], "9 of a is not dead: its host h answers"),
        ([DOUBTS, row(3, 7, hears=[9]), AWAY], "9 of a is not dead: it is heard by 3; end its"),
        ([row(2, 7), row(3, 7)], "run a has no machine 9: it has 2, 3"),
    ],
)
def test_who_can_be_given_up(rows: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) if why else contextlib.nullcontext():
        machines._check_gone("a", 9, rows, [3])


def test_a_machine_that_the_run_waits_for_can_be_given_up() -> None:
    """All others of its group have died, so that nobody else knows it."""
    machines._check_gone("a", 9, [row(2, 7)], [9])
    with pytest.raises(UsageError, match="is heard by 2"):
        machines._check_gone("a", 9, [row(2, 7, hears=[9])], [9])


WORDS = {
    "leave": "has left its group",
    "stop": "was stopped",
    "dead": "counts as dead",
    "lost": "is not known to Ray any more, and may train on",
}


@pytest.mark.parametrize(
    ("state", "is_last", "asked", "code"),
    [
        ("leaving", False, "leave", 0),
        ("starting", False, "leave", 0),
        ("training", False, "lost", 0),  # an actor that was begun beside others, for its node
        ("stopping", False, "stop", 4),
        ("training", True, "stop", 4),
        ("leaving", True, "leave", 0),
        ("away", False, "lost", 0),
        ("away", True, "lost", 0),
    ],
)
def test_how_machines_have_ended_that_another_command_has_ended(
    state: str, is_last: bool, asked: str, code: int
) -> None:
    """A run that one machine has left was not stopped."""
    made, said = watching(state)
    made._hear_no_more(1, is_last=is_last)
    made._hear_no_more(1, is_last=True)
    assert said[1:] == [f"machine 1 {WORDS[asked]}"]
    summary = made.summary()
    assert (summary["exit_code"], summary["stopped"]) == (code, asked == "stop")
    assert summary["machines"][0]["gradients_applied"] == 7


def watching(state: str) -> tuple[conductor.Conductor, list[str]]:
    """A conductor that has seen machine 1 in this state, and what it says."""
    said: list[str] = []
    run = config.from_mapping(RUN, "test")
    made = conductor.Conductor(run, [], "/", lambda say: said.append(say))
    job = {"gradients_applied": 7}
    made._hear({"machine": 1, "state": state, "ended": None, "job": job})
    return made, said


@pytest.mark.parametrize("state", ["away", "training", "leaving", "stopping"])
@pytest.mark.parametrize("asked", ["leave", "stop", "dead"])
def test_the_command_that_has_ended_a_machine_says_how(state: str, asked: str) -> None:
    """Whatever the machine was seen to do last: it may have been away meanwhile."""
    made, said = watching(state)
    told = [{1: {"exit_code": 0, "asked": asked}, 2: {"exit_code": 0, "asked": "leave"}}]
    made._lease = SimpleNamespace(told=told.pop, miss=lambda _: None)  # type: ignore[assignment]
    made._learn_of_others({1: None})
    assert told, "nothing is asked while all are known"
    made._learn_of_others({})
    made._hear_no_more(1, is_last=True)
    assert said[1:] == [f"machine 1 {WORDS[asked]}"]
    assert made.summary()["stopped"] == (asked == "stop")


def test_a_machine_that_could_not_be_asked_was_not_stopped() -> None:
    made, said = watching("away")
    made._told[1] = machines._unreached("stop")
    made._hear_no_more(1, is_last=True)
    assert said[1:] == ["machine 1 could not be asked to stop, and may train on"]
    assert made.summary()["exit_code"] == 4


STOPPED = {"machine": 0, "host": "x", "state": "stop", "ended": {"exit_code": 0, "asked": "stop"}}


@pytest.mark.parametrize("what", ["stop", "leave"])
def test_what_is_said_of_machines_that_cannot_be_ended(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has lost the actor of one, and does not know another one that a third one hears."""
    told: dict[int, Any] = {}
    plan = {"agent": {"agents": {"0": "x:1", "7": "y:1", "9": "z:1"}}, "group": 0}
    asked = SimpleNamespace(remote=lambda *_: None)
    found = {number: SimpleNamespace(ask=asked, plan=asked) for number in (0, 9)}
    seen = [[row(0, 7, hears=[7]), AWAY], [STOPPED, AWAY]]
    monkeypatch.setattr(machines, "AWAY_S", 0.0)
    monkeypatch.setattr(machines, "POLL_S", 0.0)
    monkeypatch.setattr(machines, "_answers", lambda asked, *_: dict.fromkeys(asked, plan))

    def statuses(of: Any, *_: Any) -> list[Any]:
        rows = seen[0] if len(seen) == 1 else seen.pop(0)
        return [one for one in rows if one["machine"] in of]

    monkeypatch.setattr(machines, "statuses", statuses)
    monkeypatch.setattr(machines, "kill", lambda *_, **__: None)
    monkeypatch.setattr(machines.placing, "drop", lambda _: None)
    monkeypatch.setattr(machines.lease, "tell", lambda run, ended: told.update(ended))
    lost = "machine 9 at z" if what == "leave" else "machine 9 at z, 7 at y, 8"
    there = ", ".join(f"gadei-ps stop a-{one}" for one in ((9,) if what == "leave" else (9, 7, 8)))
    with pytest.raises(ClusterError) as caught:
        machines.end(found, "a", what, 9 if what == "leave" else None, 10.0, [0, 8])
    assert str(caught.value) == (
        f"run a: {lost} could not be asked to {what}, for Ray does not reach it: if it lives, end "
        f"its job on its host ({there})"
    )
    unreached = {9: {"exit_code": 0, "asked": what, "unreached": True}}
    assert told == (unreached if what == "leave" else {0: STOPPED["ended"]} | unreached)


def test_nothing_is_said_of_machines_that_end_as_their_command_has_asked() -> None:
    said: list[str] = []
    made = conductor.Conductor(
        config.from_mapping(RUN, "test"), [], "/", lambda say: said.append(say)
    )
    made.stop()
    row: dict[str, Any] = {"machine": 0, "state": "stopping", "ended": None}
    made._hear(row)
    made._hear(row | {"ended": {"exit_code": 0, "asked": "stop"}})
    assert not said
    made._hear({"machine": 1, "state": "ended", "ended": {"exit_code": 1, "error": "no room"}})
    assert said == ["machine 1 has failed: no room"]


def test_a_state_is_said_again_only_after_another_one() -> None:
    """Between the end of its job and its own, a machine looks as if it trained."""
    made, said = watching("training")
    for state in ("ending", "training", "ending", "away", "training"):
        made._hear({"machine": 1, "state": state, "ended": None})
    assert said[1:] == ["machine 1: away", "machine 1: training"]


def test_gradients_of_a_machine_that_was_ended_at_once() -> None:
    """It has no time to count them: those that were seen last are told."""
    made = conductor.Conductor(config.from_mapping(RUN, "test"), [], "/", lambda **_: None)
    row = {"machine": 0, "state": "training", "ended": None}
    made._hear(row | {"job": {"gradients_applied": 7}})
    made._hear(row | {"state": "ending", "job": None})
    made._hear(row | {"ended": {"exit_code": 130, "interrupted": "SIGINT"}})
    assert made.summary()["machines"][0]["gradients_applied"] == 7
    made._hear(row | {"ended": {"exit_code": 130, "gradients_applied": 8}})
    assert made.summary()["machines"][0]["gradients_applied"] == 7


def test_one_process_for_each_machine(runtime_dir: Path) -> None:
    first = door.Lock("a", 0)
    with pytest.raises(JobInUse, match="machine a-0 has a process on this host already"):
        door.Lock("a", 0)
    door.clear("a", 0)  # it lives, so nothing is removed
    assert door.lock_path("a", 0).exists()
    with pytest.raises(JobNotFound, match="no process has machine a-0 here"):
        door.ask("a", 0, "status")
    first.release()
    assert not list(runtime_dir.iterdir())


def test_what_the_next_life_of_an_agent_is_told() -> None:
    settings = {
        "number": 1,
        "group_number": 0,
        "agents": {"1": "h:1"},
        "sources": {"2": {"5": "x:1"}},
    }
    known = keeper.told(settings, 0, {"3": "h:3"})
    assert known["agents"] == {"1": "h:1", "3": "h:3"}
    known = keeper.told(known, 2, {"6": "x:2"})
    assert known["sources"] == {2: {"5": "x:1", "6": "x:2"}}
    assert keeper.told(known, 9, {"7": "x:3"})["sources"] == known["sources"]
    anew = keeper.founded(known, "again", {"1": "h:9"})
    assert anew == known | {"founding": "again", "agents": {"1": "h:9"}, "listen": "h:9"}
