"""Commands for replicas of this host without a cluster of Ray, and what killed ones leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import eventually

from gadei_ps.errors import ClusterError, JobNotFound, UsageError
from gadei_ps.machine import interrupts
from gadei_ps.replicas import commands, rays, sockets

REPLICA = """
import sys, threading
from gadei_ps.replicas import sockets

number, over = int(sys.argv[1]), threading.Event()

def answer(what):
    if what == "stop":
        over.set()
    return {"machine": number, "state": "training"}

server = sockets.Server(sockets.replica_path("a", number), answer)
lock = sockets.replica_lock("a", number)
over.wait()
server.close()
lock.release()
"""
NOWHERE = "127.0.0.1:9"
"""The address of a cluster that has ended."""


@pytest.fixture
def replicas(runtime_dir: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    rays.note("a", NOWHERE, None)
    made = [subprocess.Popen([sys.executable, "-c", REPLICA, str(one)]) for one in range(2)]
    eventually(lambda: sockets.here("a") == [0, 1])
    yield made
    for one in made:
        one.kill()
        one.wait()


def test_lines_of_ray_are_not_in_the_output_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints one when an actor dies; the output may be JSON."""
    ray = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setattr(rays, "connect", lambda *_: ray)
    monkeypatch.setattr(interrupts, "install", lambda: None)  # it would stay in this process
    with commands._connected(NOWHERE, None):
        print("(raylet) A worker died", file=sys.stdout)
    print("{}")
    assert capfd.readouterr().out == "{}\n"


def test_a_run_whose_actors_another_command_has_ended_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command that follows a run ends them, perhaps before a slow `stop` sees why."""
    following = pytest.importorskip("gadei_ps.replicas.following")
    actor = pytest.importorskip("gadei_ps.replicas.actor")
    handle = SimpleNamespace(ask=SimpleNamespace(remote=lambda *_: None))
    known = [{0: handle}, {0: handle}, {}]
    rows = {"machine": 0, "ended": None}
    states = iter(["training", "away"])
    monkeypatch.setattr(actor, "actors", lambda _: known.pop(0))
    monkeypatch.setattr(following, "statuses", lambda _: [rows | {"state": next(states)}])
    monkeypatch.setattr(commands, "_clean_up", lambda *_, **__: None)
    assert commands._end("a", NOWHERE, "stop", None)["machines"] == [{"machine": 0, "host": None}]


def ask(order: str, **how: Any) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    return commands.ask(order, "a", None, lambda line, _: messages.append(line), **how), messages


def test_status_without_a_cluster(replicas: list[subprocess.Popen[bytes]]) -> None:
    report, messages = ask("status")
    assert [(one["machine"], one["state"]) for one in report["machines"]] == [
        (0, "training"),
        (1, "training"),
    ]
    assert messages == [
        f"the Ray cluster at {NOWHERE} does not answer: these are the replicas on this host"
    ]


def test_an_empty_address_is_a_mistake(replicas: list[subprocess.Popen[bytes]]) -> None:
    """It would be another cluster than the one that a script was to name."""
    with pytest.raises(UsageError, match=r"^--address : write HOST:PORT"):
        commands.ask("stop", "a", "", lambda *_: None)
    assert sockets.here("a") == [0, 1]


def test_leave_and_join_need_a_cluster(replicas: list[subprocess.Popen[bytes]]) -> None:
    again = "does not answer: run a again to bring its replicas together"
    with pytest.raises(ClusterError, match=again):
        ask("leave", machine=0)
    with pytest.raises(ClusterError, match=again):
        ask("join", group=0, node=None)
    assert sockets.here("a") == [0, 1]


def test_stop_without_a_cluster(replicas: list[subprocess.Popen[bytes]], runtime_dir: Path) -> None:
    replicas[1].kill()
    replicas[1].wait()
    report, _ = ask("stop")
    assert [one["machine"] for one in report["machines"]] == [0]
    assert replicas[0].wait() == 0
    assert not list(runtime_dir.iterdir())
    with pytest.raises(JobNotFound, match="no run 'a': no cluster is known, and no replica is"):
        ask("stop")


def test_what_killed_replicas_leave_is_removed_and_nothing_of_living_ones(
    replicas: list[subprocess.Popen[bytes]], runtime_dir: Path
) -> None:
    replicas[0].send_signal(signal.SIGKILL)
    replicas[0].wait()
    left = {"a-0.replica.lock", "a-0.replica.sock"}
    lives = {"a-1.replica.lock", "a-1.replica.sock", "a.groups.json"}
    for number in (1, 0):
        assert {one.name for one in runtime_dir.iterdir()} == left | lives
        sockets.clear("a", number)
    assert {one.name for one in runtime_dir.iterdir()} == lives
    sockets.clear("a")
    sockets.clear("b")
    assert {one.name for one in runtime_dir.iterdir()} == lives
