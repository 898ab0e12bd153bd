"""The process of one machine: what it does when it is told to end, and when its disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import PATIENCE_S

from gadei_ps.cluster import door, driver, machine, orders, rays
from gadei_ps.cluster.keeper import Keeper
from gadei_ps.cluster.locks import Lock
from gadei_ps.cluster.machine import Machine, Settings
from gadei_ps.errors import ClusterError, ClusterLost, JobNotFound, UsageError
from gadei_ps.machine import interrupts

AGENT: dict[str, Any] = {"number": 0, "joins": False, "agents": {"0": "h:1"}, "listen": "h:1"}


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray runs on this host, commands find it."""
    monkeypatch.delenv(rays.ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_an_agent_that_is_to_leave_before_it_begins_does_not_begin() -> None:
    keeper = Keeper(AGENT, pytest.fail)
    keeper.leave()
    assert keeper._live() == 0 and not keeper.lives


def test_a_word_on_a_machine_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A person's word on its death is repeated until the agent knows it."""
    keeper = Keeper(AGENT, pytest.fail)
    for view in (3, 3, 3, 4):
        keeper.told["view"] = view
        keeper.give_up(1)
    assert capsys.readouterr().err.count("agent: machine 1 counts as dead unless it is heard") == 2


def test_an_agent_that_waits_says_why_the_other_one_is_not_heard() -> None:
    """It lives: who says that it is dead, or brings back its host, changes nothing."""
    keeper = Keeper(AGENT, pytest.fail)
    why = "agent 1 at 10.0.0.2:4100: its certificate cannot be trusted: self-signed certificate"
    for refused, line in (
        (why, f"hears nothing of 1: {why}"),
        ("", "hears nothing of 1, which may live: bring back its host, or `group leave --dead`"),
    ):
        keeper._hear(json.dumps({"waits": [1], "stands": False, "refused": refused}))
        assert keeper.facts()["why"] == line


def test_an_agent_goes_on_though_its_words_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = Keeper(AGENT, pytest.fail)
    full = open("/dev/full", "w")  # noqa: SIM115 (to close it fails)
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", full)
        keeper._hear("gadei-ps: there is something to say")
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert keeper.why == "there is something to say"


def test_a_machine_that_is_to_end_begins_no_job(runtime_dir: Path, job_name: str) -> None:
    """It may hear of it while a job of the process before is ending."""
    settings = Settings(job_name, 0, 0, 1, 0, ["false"], "/", 1, 0, AGENT, "/dev/null")
    made = Machine(settings)
    try:
        made._asked = "stop"
        assert made._train() == {"exit_code": 0}
        made._summary = {"exit_code": 1, "error": "it is an answer, not the end of it"}
        made._ended.set()
        assert door.ask(job_name, 0, "await")["summary"] == made._summary
    finally:
        made._door.shutdown()
        made._door.server_close()
        made._lock.release()


def test_a_machine_that_is_taken_back_has_left(
    runtime_dir: Path, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join was interrupted: its run is not stopped, and the machine waits for nobody."""
    settings = Settings(job_name, 0, 0, 1, 0, ["false"], "/", 1, 0, AGENT, "/dev/null")
    made = Machine(settings)
    asked: list[str] = []
    monkeypatch.setattr(made, "_end", asked.append)
    actor = pytest.importorskip("gadei_ps.cluster.actor")
    begun = actor.MachineActor.__new__(actor.MachineActor)
    begun._run, begun._number, begun._has_begun = job_name, 0, True
    begun._starting, begun._over, begun._summary = threading.Lock(), threading.Event(), None
    begun._over.set()
    begun.abandon()
    assert made.facts()["state"] == "leaving"
    monkeypatch.setattr(made, "_keeper", SimpleNamespace(end=lambda: None))
    made._close()
    assert asked == ["stop"] and made._summary["asked"] == "leave"


def test_nobody_else_can_read_the_token_of_a_cluster(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no instant: the runtime directory may be one that others can read."""
    monkeypatch.setattr(Path, "chmod", None)
    rays.note("a", "h:1", "a token of the tests")
    assert stat.S_IMODE(rays.note_path("a").stat().st_mode) == 0o600
    told = {"address": "h:1", "token": "a token of the tests", "files": None}
    assert rays.noted("a") == told
    rays.unnote("a", "h:2")  # of a cluster that has ended since
    assert rays.noted("a") == told
    rays.unnote("a", "h:1")
    assert rays.noted("a") is None


@pytest.mark.parametrize(
    ("nodes", "is_node"),
    [
        ([("127.0.0.2", 0)], True),
        ([("192.0.2.1", 0), ("127.0.0.1", 0)], True),
        ([("192.0.2.1", 0), ("127.0.0.1", 1)], False),  # the one here has died
    ],
)
def test_a_cluster_that_has_no_node_here(nodes: list[tuple[str, int]], is_node: bool) -> None:
    """Ray itself would look for one for a minute, and say no more than that it cannot connect."""
    found = {n: SimpleNamespace(node_manager_address=a, state=s) for n, (a, s) in enumerate(nodes)}
    client = SimpleNamespace(get_all_node_info=lambda timeout: found)
    given = SimpleNamespace(_raylet=SimpleNamespace(GcsClient=lambda address: client))
    with contextlib.nullcontext() if is_node else pytest.raises(ClusterError, match="ray start"):
        rays._check_node(given, "h:1")


def test_the_cluster_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray notes it where `ray start` is run; commands need no address there."""
    monkeypatch.delenv(rays.ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert rays.nearby() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert rays.nearby() == "10.0.0.1:6379"
    monkeypatch.setenv(rays.ADDRESS_VARIABLE, "10.0.0.2:6379")
    assert rays.nearby() == "10.0.0.2:6379"
    monkeypatch.setenv(rays.ADDRESS_VARIABLE, "auto")
    assert rays.nearby() == "10.0.0.1:6379"


@pytest.mark.parametrize("answers", [True, False])
def test_a_cluster_that_is_not_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Somebody who has started Ray on several hosts means these, and has forgotten to say so."""
    said: list[str] = []
    (tmp_path / "ray").mkdir()
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{there.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        if not answers:
            there.close()
        monkeypatch.setattr(rays, "own", lambda *_: contextlib.nullcontext(("x:1", "token")))
        monkeypatch.setattr(rays, "connect", lambda *_: None)
        run = {"name": "a", "every": 1, "groups": [{"machines": 2}]}
        order = {"order": "run", "address": None, "token": None, "run": run, "files": "x"}
        with (
            pytest.raises(ClusterError, match="was killed"),
            driver._cluster(order | {"command_pid": 0}, lambda say: said.append(say)),
        ):
            pass
    note = f"Ray runs already, at {address}: give --address to train on its hosts"
    assert said == ["starting Ray on this host, with 2 nodes"] + [note] * answers


def test_a_stop_sweeps_up_what_killed_machines_have_left(runtime_dir: Path) -> None:
    for run in ("a", "a-1"):
        lock = door.Lock(run, 0)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(door.socket_path(run, 0)))
        os.close(lock._fd)
    with pytest.raises(JobNotFound):
        orders.ask("stop", "a", None, lambda *_: None)
    assert {one.name for one in runtime_dir.iterdir()} == {
        "a-1-0.machine.lock",
        "a-1-0.machine.sock",
    }


def test_why_a_machine_has_ended(tmp_path: Path) -> None:
    """Its learners say it; or a learner was killed, and has said nothing."""
    log = tmp_path / "a-0.log"
    ours = "03:42:18 [warning  ] learner died pid=1\ngadei-ps: learner 0 ended\nagent: gone\n"
    log.write_text(f"step 1\nValueError: a mistake\n\n{ours}")
    assert machine._last_words(str(log)) == "ValueError: a mistake"
    ended = [{"learner": 0, "exit_code": 0}, {"learner": 1, "exit_code": -9}]
    assert machine._killed({"ended": ended}) == "learner 1 was killed by SIGKILL"
    assert machine._killed({"ended": ended[:1]}) == ""


def say_nothing(line: str, progress: bool) -> None:
    pass


TAKES_BACK = """
import json, pathlib, sys, time

def tell(**told):
    print(json.dumps(told), flush=True)

sys.stdin.readline()
tell(say="begins")
sys.stdin.readline()
tell(say="takes back")
while not pathlib.Path("twice").exists():
    time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_join_that_is_interrupted_again_and_again(
    ends: bool, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits until its machine has been taken back, or has come to stay."""
    monkeypatch.chdir(tmp_path)
    told = {"error": "was taken back", "kind": "ClusterError", "exit_code": 1}
    result = {"result": {"machine": 3}}
    program = TAKES_BACK.format(end=f"tell(**{told if ends else result})")
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(orders.process, "module_command", lambda _: command)
    said: list[str] = []

    def interrupt(line: str, progress: bool) -> None:
        said.append(line)
        if line in ("begins", "takes back"):
            os.kill(os.getpid(), signal.SIGINT)
        if line == "takes back":
            Path("twice").touch()

    def join() -> dict[str, Any]:
        with interrupts.of_commands():
            return orders.ask("join", "a", "127.0.0.1:1", interrupt, group=0, node=None)

    if ends:
        with pytest.raises(KeyboardInterrupt):
            join()
        assert said == ["begins", "takes back", "was taken back"]
    else:
        assert join() == {"machine": 3}


def test_where_no_machine_of_a_run_is(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended, or it begins just now: then nobody else begins it, and nobody stops it."""
    with pytest.raises(JobNotFound, match=r"^no run 'a' on this host: it has ended, or say --add"):
        orders.ask("status", "a", None, say_nothing)
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("every = 1\n[[groups]]\nmachines = 1\n")
    lock = Lock(rays.lock_path("a"), "")
    for order in ("status", "stop", "join"):
        with pytest.raises(JobNotFound, match=r"^run 'a' begins or ends just now: try again"):
            orders.ask(order, "a", None, say_nothing)
    with pytest.raises(
        UsageError, match=r"on this host already: stop it first \(gadei-ps group st"
    ):
        orders.run(Path("a.toml"), ["true"], None, Path(), say_nothing)
    os.close(lock._fd)  # as SIGKILL does
    (tmp_path / "ray").mkdir()
    rays.note("a", "127.0.0.1:1", "a token of the tests", str(tmp_path / "ray"))
    gone = "^no run 'a': the Ray cluster at 127.0.0.1:1 does not answer, and no machine is here"
    with pytest.raises(JobNotFound, match=gone):
        orders.ask("stop", "a", None, say_nothing)
    assert not list(runtime_dir.iterdir()) and not (tmp_path / "ray").exists()


DIES = """
import json, os, pathlib, sys
files = pathlib.Path(json.loads(sys.stdin.readline())["files"])
(files / "ray").mkdir()
pathlib.Path("told").write_text(str(files))
os.kill(os.getpid(), 9)
"""


def test_no_file_of_a_cluster_is_left_where_its_process_is_killed(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends it, say, once the cluster's head is dead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(orders.process, "module_command", lambda _: [sys.executable, "-c", DIES])
    Path("a.toml").write_text("every = 1\n[[groups]]\nmachines = 1\n")
    with pytest.raises(ClusterError, match="is gone"):
        orders.run(Path("a.toml"), ["true"], None, tmp_path, lambda *_: None)
    assert not Path(Path("told").read_text()).exists()


def test_the_cluster_of_a_command_that_was_killed_ends_before_the_next_one(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdout=subprocess.PIPE) as cluster:
        assert cluster.stdout is not None
        where = f"127.0.0.1:{int(cluster.stdout.readline())}"
        for token, line in ((None, "is in the cluster at"), ("secret", f"at {where}: end its Ray")):
            rays.note("a", where, token)
            with monkeypatch.context() as changed, pytest.raises(UsageError, match=line):
                changed.setattr(orders, "LAST_S", 0.0)
                orders._alone("a", say_nothing).__enter__()
        said: list[str] = []

        def kill(line: str, progress: bool) -> None:
            said.append(line)
            cluster.kill()

        with orders._alone("a", kill):
            assert not rays.answers(where)
    assert said == [f"waiting for the end of the Ray cluster at {where}, whose command was killed"]
    assert not rays.lock_path("a").exists()


def test_a_run_that_this_host_has_begins_in_no_other_cluster(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first one is touched: neither its machines nor the note on its cluster."""
    monkeypatch.setattr(orders, "Driven", None)
    (tmp_path / "a.toml").write_text("every = 1\n[[groups]]\nmachines = 1\n")

    def refused(address: str | None) -> str:
        with pytest.raises(UsageError) as caught:
            orders.run(tmp_path / "a.toml", ["true"], address, tmp_path, say_nothing)
        return str(caught.value)

    there = "run 'a' is on this host already: stop it first (gadei-ps group stop a)"
    lock = Lock(rays.lock_path("a"), "")  # its Ray is just starting
    assert refused("h:1") == there
    lock.release()
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        rays.note("a", f"127.0.0.1:{cluster.getsockname()[1]}", "secret")
        assert refused("h:1") == there
    with monkeypatch.context() as changed:
        changed.setattr(orders.door, "here", lambda name: [(name, 0)])
        assert refused("h:1") == there  # its command was killed, and its machines train on
    assert rays.own_address("a")
    with pytest.raises(TypeError, match="NoneType"):  # all has ended
        orders.run(tmp_path / "a.toml", ["true"], "h:1", tmp_path, say_nothing)


def test_a_run_of_several_hosts_begins_on_none_of_them_alone(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is on another host, so nothing is noted on this one."""
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        where = f"127.0.0.1:{cluster.getsockname()[1]}"
        monkeypatch.setenv(rays.ADDRESS_VARIABLE, where)
        with orders._alone("a", say_nothing):
            pass  # it has no machine here
        monkeypatch.setattr(orders.door, "here", lambda name: [(name, 0)])
        with pytest.raises(UsageError, match=f"^run 'a' is in the cluster at {where}: say --addr"):
            orders._alone("a", say_nothing).__enter__()
    assert not rays.lock_path("a").exists()


CLUSTER = """
import socket, time
door = socket.create_server(("127.0.0.1", 0))
print(door.getsockname()[1], flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("ends", "token"), [(True, "secret"), (False, "secret"), (True, None)], ids=str
)
def test_a_stop_that_loses_its_cluster(
    ends: bool, token: str | None, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this host's own ends as soon as `group run` knows that all machines have."""
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdout=subprocess.PIPE) as cluster:
        assert cluster.stdout is not None
        rays.note("a", f"127.0.0.1:{int(cluster.stdout.readline())}", token)
        driver = f"import os; {ends} and os.kill({cluster.pid}, 9)"
        command = [sys.executable, "-c", driver]
        monkeypatch.setattr(orders.process, "module_command", lambda _: command)
        monkeypatch.setattr(orders, "GONE_S", PATIENCE_S if ends else 0.0)
        if ends and token:
            told = orders.ask("stop", "a", None, lambda *_: None)
            assert told == {"run": "a", "machines": []}
        else:
            with pytest.raises(ClusterLost, match="was lost meanwhile"):
                orders.ask("stop", "a", None, lambda *_: None)
        cluster.kill()
