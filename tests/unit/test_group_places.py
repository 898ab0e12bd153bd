"""Placement of a run's replicas, what keeps a node out, and what a command prints of them."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import PATIENCE_S

import gadei_ps
from gadei_ps.errors import ClusterError, JobInUse, JobNotFound
from gadei_ps.replicas import config, rays, sockets

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

import ray
from ray.exceptions import ActorDiedError

from gadei_ps.replicas import actor, following, placing
from gadei_ps.replicas.coordinator import FOLLOWED_S
from gadei_ps.replicas.placing import Seat

RUN = {"name": "a", "every": 1, "groups": [{"machines": 2}, {"nodes": ["x", "y"]}]}


def test_replicas_that_live_stay_where_they_are() -> None:
    run = config.from_mapping(RUN, "test")
    one = {"CPU": 1}
    x, y, z = ({"CPU": 1, f"node:{name}": 0.001} for name in "xyz")
    fresh = placing.seats(run, {})
    assert fresh == [Seat(0, 0, one), Seat(1, 0, one), Seat(2, 1, x), Seat(3, 1, y)]
    # Replica 7 has joined after replica 0 had left, and replica 2 is on the other node.
    found = placing.seats(run, {7: ("z", 0), 2: ("y", 1)})
    assert found == [Seat(7, 0, z), Seat(0, 0, one), Seat(2, 1, y), Seat(3, 1, x)]
    # More than the file says have come together.
    found = placing.seats(run, {5: ("z", 0), 6: ("x", 0), 7: ("y", 0)})
    assert [seat.number for seat in found] == [5, 6, 7, 2, 3]


def test_other_versions_are_named() -> None:
    same = {"gadei_ps": gadei_ps.__version__, "ray": ray.__version__}
    placing.check("h", same)
    with pytest.raises(ClusterError, match=r"^node h has gadei-ps 0\.1, this one .*: install the"):
        placing.check("h", same | {"gadei_ps": "0.1"})
    with pytest.raises(ClusterError, match=r"^node h has ray 2\.52\.0, this one "):
        placing.check("h", same | {"ray": "2.52.0"})
    error = ImportError("a\nModuleNotFoundError: No module named 'gadei_ps'")
    assert placing.line(error).startswith("gadei-ps is not installed there: pip install")


def test_what_a_host_lacks(runtime_dir: Path, tmp_path: Path) -> None:
    made = actor.ReplicaActor.__new__(actor.ReplicaActor)
    assert made._mistake({"memory": True}, str(tmp_path), None) is None
    mistake = made._mistake({"memory": False}, str(tmp_path), None) or ""
    assert mistake.startswith("there is no /dev/shm that can be written")
    mistake = made._mistake({"memory": True}, str(tmp_path / "none"), None) or ""
    assert mistake.endswith("put the script at the same place everywhere")


def test_a_replica_that_nobody_begins_can_be_stopped(runtime_dir: Path) -> None:
    """The command that was to begin it was killed; its run waits for its end."""
    made = actor.ReplicaActor.__new__(actor.ReplicaActor)
    made._run, made._number, made._watcher, made._summary = "a", 0, None, None
    made._starting, made._over = threading.Lock(), threading.Event()
    made.ask("signal", signal=2)
    assert made._summary is None
    made.ask("leave")
    assert made.end() == {"exit_code": 0, "asked": "leave"}
    assert made.start() is False  # too late


@pytest.fixture
def killed(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> actor.ReplicaActor:
    """An actor whose replica's process was killed; it is not watched yet."""
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor, "FIRST_REST_S", 0.001)
    made = actor.ReplicaActor("a", 0, 0)
    monkeypatch.setattr(made, "_lost", lambda: None)
    made._watcher = threading.Thread(target=made._watch, daemon=True)
    return made


@pytest.mark.parametrize(
    ("what", "how", "summary"),
    [
        ("stop", {}, {"exit_code": 0, "asked": "stop"}),
        ("leave", {}, {"exit_code": 0, "asked": "leave"}),
        ("signal", {"signal": 2}, {"exit_code": 130, "interrupted": "SIGINT"}),
    ],
)
def test_a_replica_that_cannot_begin_again_can_be_ended(
    what: str,
    how: dict[str, Any],
    summary: dict[str, Any],
    killed: actor.ReplicaActor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def begin() -> None:
        tries.append(killed._why)
        if len(tries) == 3:
            killed.ask(what, **how)
        raise OSError("no space left on device")

    monkeypatch.setattr(killed, "_begin", begin)
    assert killed._watcher is not None
    killed._watcher.start()
    assert killed.end() == summary
    failed = "its process was killed, and cannot begin again: no space left on device"
    assert tries == ["its process was killed: it joins again", failed, failed]


def test_a_replica_that_was_stopped_while_it_began_again(
    killed: actor.ReplicaActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that has failed to begin a run asks only once."""
    asked = threading.Event()

    def answer(what: str, **_: Any) -> Any:
        if what == "await":
            asked.wait()
            return {"summary": {"exit_code": 0, "asked": "stop"}, "pid": 2**22 + 1}
        assert what == "stop"
        asked.set()
        return None

    def begin() -> None:
        killed.ask("stop")
        servers.append(sockets.Server(sockets.replica_path("a", 0), answer))

    servers: list[sockets.Server] = []
    monkeypatch.setattr(killed, "_begin", begin)
    assert killed._watcher is not None
    killed._watcher.start()
    assert killed._over.wait(PATIENCE_S) and killed._why == "its process was killed: it joins again"
    servers[0].close()


def test_no_note_on_a_cluster_is_left_on_another_host(runtime_dir: Path) -> None:
    """A run begins on one host, and is stopped on another one."""
    made = actor.ReplicaActor.__new__(actor.ReplicaActor)
    made._run, made._number, made._server, made._asked = "a", 0, None, None
    for token, is_left in (("that of a cluster of this host's own", True), (None, False)):
        rays.note("a", "h:1", token)
        made.clear()
        assert rays.noted("a")
        made.clear(whole=True)
        assert rays.note_path("a").exists() == is_left


WORDS = {
    "leave": "has left its group",
    "stop": "was stopped",
    "lost": "is not known to Ray any more, and may train on",
}


def watching(state: str) -> tuple[following.Following, list[str]]:
    """A command that has seen replica 1 in this state, and what it prints."""
    messages: list[str] = []
    run = config.from_mapping(RUN, "test")
    made = following.Following(run, "h:1", [], "/", lambda line, _: messages.append(line))
    job = {"gradients_applied": 7}
    made._note({"machine": 1, "state": state, "ended": None, "job": job})
    return made, messages


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
def test_how_replicas_have_ended_that_another_command_has_ended(
    state: str, is_last: bool, asked: str, code: int
) -> None:
    """A run that one replica has left was not stopped."""
    made, messages = watching(state)
    made._note_gone(1, is_last=is_last)
    made._note_gone(1, is_last=True)
    assert messages[1:] == [f"replica 1 {WORDS[asked]}"]
    summary = made.result()
    assert (summary["exit_code"], summary["stopped"]) == (code, asked == "stop")
    assert summary["machines"][0]["gradients_applied"] == 7


def test_a_run_whose_coordinator_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise ActorDiedError

    method = SimpleNamespace(remote=lambda *_: None)
    context = SimpleNamespace(get_node_id=lambda: "1")
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "h")
    monkeypatch.setattr(following, "actors", lambda _: {})
    monkeypatch.setattr(following, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(placing, "place", lambda _: {})
    coordinator = SimpleNamespace(follow=method, followed=method)
    monkeypatch.setattr(placing, "detached", lambda *_, **__: coordinator)
    run = config.from_mapping(RUN, "test")
    made = following.Following(run, "h:1", [], "/", lambda *_: None)
    with pytest.raises(ClusterError, match=r"^the coordinator does not start: The actor died"):
        made.begin()


def test_a_command_ends_where_another_one_follows_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for too long, or cut off; it ends no replica of the other one."""
    made, messages = watching("training")
    made._signed -= following.SIGN_S
    monkeypatch.setattr(made, "_check_cluster", lambda: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "h")
    made._coordinator = SimpleNamespace(follow=SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(following, "asked", lambda *_: "x, process 7")
    monkeypatch.setattr(following, "actors", lambda _: pytest.fail("it looks for replicas"))
    line = r"^another group run, at x, process 7, follows run a now: this one ends, the replicas co"
    for made.stops in (False, True):
        with pytest.raises(ClusterError, match=line):
            made.look()
    assert len(messages) == 1


@pytest.mark.parametrize(("other", "passed"), [(None, [2]), ("x, process 7", [])])
def test_signals_are_for_the_command_that_follows_the_run(
    other: str | None, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was stopped for too long passes none on to the learners of another one."""
    made, _ = watching("training")
    given: list[int] = []
    ask = SimpleNamespace(remote=lambda _, signal: given.append(signal))
    made._found = {1: SimpleNamespace(ask=ask)}
    made.signal(1)
    assert given == [1]  # it has just reported that it follows the run
    given.clear()
    made._signed -= FOLLOWED_S
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "h")
    made._coordinator = SimpleNamespace(follow=SimpleNamespace(remote=lambda *_: None))
    monkeypatch.setattr(following, "asked", lambda *_: other)
    made.signal(2)
    assert given == passed


def test_nothing_is_printed_of_replicas_that_end_as_their_command_has_asked() -> None:
    made, messages = watching("training")
    made.stops, messages[:] = True, []
    row: dict[str, Any] = {"machine": 0, "state": "stopping", "ended": None}
    made._note(row)
    made._note(row | {"ended": {"exit_code": 0, "asked": "stop"}})
    assert not messages
    made._note({"machine": 1, "state": "ended", "ended": {"exit_code": 1, "error": "no room"}})
    assert messages == ["replica 1 has failed: no room"]


def test_a_state_is_printed_again_only_after_another_one() -> None:
    """Check the time between its job's end and its own, when a replica seems to train."""
    made, messages = watching("training")
    for state in ("ending", "training", "ending", "away", "training"):
        made._note({"machine": 1, "state": state, "ended": None})
    assert messages[1:] == ["replica 1: away", "replica 1: training"]


def test_gradients_of_a_replica_that_was_ended_at_once() -> None:
    """It has no time to count them: those that were seen last are printed."""
    made, _ = watching("training")
    row: dict[str, Any] = {"machine": 1, "state": "training", "ended": None}
    made._note(row | {"state": "ending", "job": None})
    made._note(row | {"ended": {"exit_code": 130, "interrupted": "SIGINT"}})
    assert made.result()["machines"][0]["gradients_applied"] == 7
    made._note(row | {"ended": {"exit_code": 130, "gradients_applied": 8}})
    assert made.result()["machines"][0]["gradients_applied"] == 8


def test_one_process_for_each_replica(runtime_dir: Path) -> None:
    first = sockets.replica_lock("a", 0)
    with pytest.raises(JobInUse, match="replica a-0 has a process on this host already"):
        sockets.replica_lock("a", 0)
    sockets.clear("a", 0)  # it lives, so nothing is removed
    assert sockets.lives("a", 0)
    with pytest.raises(JobNotFound, match=r"no process listens at a-0\.replica\.sock"):
        sockets.ask("a", 0, "status")
    first.release()
    assert not sockets.lives("a", 0) and not list(runtime_dir.iterdir())


def test_requests_and_their_errors(runtime_dir: Path) -> None:
    def answer(what: str, **how: Any) -> Any:
        if what != "add":
            raise ClusterError("no")
        return how["one"] + how["other"]

    server = sockets.Server(sockets.replica_path("a", 0), answer)
    path = sockets.replica_path("a", 0)
    assert sockets.request(path, "add", one=1, other=2) == 3
    with pytest.raises(sockets.ControlError, match=r"^no$"):
        sockets.request(path, "subtract")
    assert sockets.request(path, "add", one=b"a", other=b"b") == b"ab"
    server.close()
    assert not list(runtime_dir.iterdir())
