"""`gadei-ps group` with a real cluster of Ray: three nodes on this host, each with a machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import support
from shell import Cli, Result, Running
from support import group_machines
from support.agents import certificates

from gadei_ps.cluster import door
from gadei_ps.errors import GadeiError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'gadei-ps[cluster]'",
    ),
    pytest.mark.timeout(600),
]
LONG_S = 4 * support.PATIENCE_S
"""Each command loads Ray; on a busy machine several tests do that at once."""
eventually = functools.partial(support.eventually, timeout_s=LONG_S)
NODES = Path(support.__file__).parent / "ray_nodes.py"
MACHINES = 3
LOOK_S = 0.05
HOST = "127.0.0.2"
TOKEN = "a token of the tests"
SCRIPT = """
    import os, pathlib, signal, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    assert os.environ["GADEI_PS_MACHINES"] == sys.argv[1]
    machine = int(os.environ["GADEI_PS_MACHINE"])
    target, end = 10.0 * machine, pathlib.Path("end")
    if machine == 0:  # it does not end at Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Client(tensors={"w": np.zeros(500)}) as client:
        while not end.exists():
            client.push({"w": client.weights["w"] - target}, samples=1)
            client.wait_applied()
            time.sleep(0.005)
"""


class Nodes:
    """A cluster's processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(NODES), str(MACHINES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "Ray does not start"

    def close(self) -> None:
        """Kills all of them."""
        if self._process.returncode is None:
            self._process.communicate()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The runtime directory of the cluster's machines."""
    with pytest.MonkeyPatch.context() as patch:
        path = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
        patch.setenv("GADEI_PS_RUNTIME_DIR", str(path))
        patch.setenv("GADEI_PS_STATE_DIR", str(path / "state"))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        yield path
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def nodes(place: Path) -> Iterator[Nodes]:
    with contextlib.closing(Nodes()) as made:
        yield made


class Run:
    """A run, seen through the sockets of its machines."""

    def __init__(self, cli: Cli, name: str, place: Path) -> None:
        self.cli, self.name, self.machines = cli, name, MACHINES
        self._place = str(place)
        self.file = cli.directory / f"{name}.toml"
        self.file.write_text(
            "every = 20\nrule = 'mix:0.5'\nlr = 0.01\n"
            "[[groups]]\nmachines = 1\n[[groups]]\nmachines = 2\n"
        )
        (cli.directory / "train.py").write_text(textwrap.dedent(SCRIPT))

    def words(self, nodes: Nodes | None) -> tuple[object, ...]:
        """nodes: of the cluster; None: one of the command's own."""
        where = () if nodes is None else ("--address", nodes.address)
        words = ("group", "run", self.file, *where, "--json", "--", sys.executable, "train.py")
        return *words, str(self.machines)

    def start(self, nodes: Nodes | None) -> Running:
        return self.cli.start(*self.words(nodes), **self.env)

    @property
    def env(self) -> dict[str, str]:
        state = f"{self._place}/state"
        return {"GADEI_PS_RUNTIME_DIR": self._place, "GADEI_PS_STATE_DIR": state}

    def facts(self, number: int) -> dict[str, Any]:
        time.sleep(LOOK_S)  # it costs those who answer
        try:
            return door.ask(self.name, number, "status")
        except GadeiError:
            return {"agent": {"state": "away", "rounds": 0}, "job": None, "pid": 0}

    def has_trained(self, number: int, rounds: int = 1) -> bool:
        agent = self.facts(number)["agent"]
        return agent["state"] == "member" and agent["rounds"] >= rounds

    def rounds(self, number: int) -> int:
        """That a machine has made."""
        rounds: int = self.facts(number)["agent"]["rounds"]
        return rounds

    def ends(self, number: int) -> list[int]:
        """Processes of a machine that others can reach."""
        facts = self.facts(number)
        return [facts["pid"], facts["agent"]["pid"]]

    def pids(self, number: int) -> list[int]:
        """All processes of a machine."""
        facts = self.facts(number)
        job = facts["job"]
        found = [facts["pid"], facts["agent"]["pid"], job["watchdog_pid"], job["server_pid"]]
        found += [job["standby_pid"], *(one["pid"] for one in job["learners"])]
        return [pid for pid in found if pid]


@pytest.fixture
def run(cli: Cli, job_name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(place))
    cli.patience_s = LONG_S
    yield Run(cli, job_name, place)
    for name, number in door.here():  # of a test that has failed
        with contextlib.suppress(GadeiError):
            door.ask(name, number, "stop")


ROWS = "text,label\n" + "".join(
    f"a {word} sentence number {number},{word}\n"
    for number in range(40)
    for word in ("red", "blue")
)
EPOCHS = 3


def free_ports(count: int) -> int:
    """The first of so many, where neither Ray nor the kernel takes one by chance."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return first
    raise AssertionError("no ports are free")


def test_train(run: Run, nodes: Nodes, place: Path) -> None:
    """The classifier is trained to its end, though a machine dies meanwhile."""
    (run.cli.directory / "rows.csv").write_text(ROWS)
    run.file.write_text("every = 10\nlearners = 1\n[[groups]]\nmachines = 2\n")
    options = ("--epochs", EPOCHS, "--patience", EPOCHS, "--address", nodes.address, "--json")
    command = run.cli.start("train", "rows.csv", "--groups", run.file, *options, **run.env)

    def has_trained() -> bool:
        assert command.process.poll() is None, command.err
        job = run.facts(1)["job"]
        return bool(job and job["work"]["epochs_done"])

    eventually(has_trained, what=lambda: command.err)
    for pid in run.pids(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: command.process.poll() is not None)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert (ended.json["epochs"], ended.json["machines"], ended.json["rows"]) == (EPOCHS, 2, 80)
    assert ended.json["gradients_applied"] > 36 and ended.json["rounds"] > 1
    assert (run.cli.directory / "model-1" / "weights.safetensors").exists()
    assert not [one.name for one in place.iterdir() if one.name != "state"]


def interrupted(run: Run, place: Path) -> Result:
    """A `join` that is interrupted while its machine begins, and once more."""

    def machines() -> set[int]:
        found = set()
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_machine = "gadei_ps.cluster.machine" in one.cmdline()
                if is_machine and one.environ().get("GADEI_PS_RUNTIME_DIR") == str(place):
                    found.add(one.pid)
        return found

    before = machines()
    command = run.cli.start("group", "join", run.name, "--group", 1, **run.env)
    new = eventually(lambda: machines() - before, what=lambda: command.err)
    with support.Stopped(new.pop()):
        for _ in range(2):
            command.process.send_signal(signal.SIGINT)
            time.sleep(LOOK_S)
    return command.wait()


def test_ports_certificates_and_the_end_of_learners(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """Mistakes are told in one line; else the learners end by themselves, and so does the run."""
    port = free_ports(2)
    certificates(tmp_path, ["agent"], HOST)

    def write(machines: int, authority: str = "authority") -> None:
        run.machines = machines
        run.file.write_text(
            f"every = 20\nport = {port}\n[[groups]]\nmachines = {machines}\n[tls]\n"
            f"certificate = 'agent.pem'\nkey = 'agent.key'\nauthority = '{authority}.pem'\n"
        )

    def refused(**env: str) -> str:
        return run.cli(*run.words(nodes), **run.env | env).error

    write(1)
    assert "set RAY_AUTH_TOKEN to that with which" in refused(RAY_AUTH_TOKEN="another token")
    place = f"machine 0 at {HOST}: "
    with socket.create_server((HOST, port)):
        assert refused() == f"{place}port {port}: Address already in use: choose another `port`"
    write(1, "stranger")
    assert refused().startswith(
        f"{place}{tmp_path}/agent.pem: other agents would refuse it: unable"
    )
    write(2)
    command = run.start(nodes)

    def has_trained(number: int) -> bool:
        assert command.process.poll() is None, command.err
        return run.has_trained(number)

    eventually(lambda: has_trained(0) and has_trained(1), what=lambda: command.err)
    agents = [run.facts(number)["agent"]["address"] for number in range(2)]
    assert agents == [f"{HOST}:{port}", f"{HOST}:{port + 1}"]
    (run.cli.directory / "end").touch()
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert (ended.json["exit_code"], ended.json["interrupted"]) == (0, None)


def test_a_command_that_is_killed(run: Run, place: Path) -> None:
    """In a cluster of this host's own: the machine trains on, and the same command comes back."""
    run.machines = 1
    run.file.write_text("every = 20\n[[groups]]\nmachines = 1\n")
    command = run.start(None)

    def has_trained(rounds: int) -> bool:
        assert command.process.poll() is None, command.err
        return run.has_trained(0, rounds)

    eventually(lambda: has_trained(1), what=lambda: command.err)
    pid = run.facts(0)["pid"]
    (driver,) = psutil.Process(command.pid).children()
    command.signal(signal.SIGKILL)
    command = run.start(None)
    # What Ray itself has started is in the driver's process group.
    eventually(lambda: not [one for one in support.children() if os.getpgid(one) == driver.pid])
    eventually(lambda: "are taken over: 0" in command.err, what=lambda: command.err)
    assert run.facts(0)["pid"] == pid
    rounds = run.rounds(0)
    eventually(lambda: has_trained(rounds + 2), what=lambda: command.err)
    stopped = run.cli("group", "stop", run.name, **run.env)
    assert (stopped.code, stopped.out) == (0, f"run {run.name} has stopped: 1 machine\n")
    ended = command.wait()
    assert (ended.code, ended.json["exit_code"], ended.json["stopped"]) == (4, 4, True)
    assert not [one.name for one in place.iterdir() if one.name != "state"]


@contextlib.contextmanager
def killed_when_stopped(command: Running) -> Iterator[None]:
    """Kills a command, whose driver goes on as one that waits for a machine that does not answer:
    for long."""
    (driver,) = psutil.Process(command.pid).children()
    driver.suspend()
    try:
        command.signal(signal.SIGKILL)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            driver.kill()


def test_a_stop_of_a_machine_that_ray_does_not_know(run: Run, nodes: Nodes, tmp_path: Path) -> None:
    """Its head has died, say, and another one has come."""
    sleeps = sys.executable, "-c", "import time; time.sleep(1000)"
    group_machines.begin(run.name, *sleeps, log=tmp_path / "log")
    eventually(lambda: run.facts(0)["job"])
    stopped = run.cli("group", "stop", run.name, "--address", nodes.address, **run.env)
    assert (stopped.code, stopped.out) == (0, f"run {run.name} has stopped: 1 machine\n"), (
        stopped.err
    )
    assert not door.lives(run.name, 0)


def test_a_run(run: Run, nodes: Nodes, place: Path) -> None:
    """Machines and agents are killed, machines leave and join; Ray is killed, and is not missed."""
    command = run.start(nodes)

    def all_train(rounds: int = 1, machines: tuple[int, ...] = (0, 1, 2)) -> bool:
        assert command.process.poll() is None, command.err
        return all(run.has_trained(number, rounds) for number in machines)

    eventually(all_train, what=lambda: command.err)
    # Alone, the job of group 0 would stay at 0.
    weights = support.live_weights(f"{run.name}-0")
    eventually(lambda: all_train() and weights[0] > 1, what=lambda: command.err)
    told = run.cli("group", "status", run.name, "--json", **run.env).json
    assert [one["machine"] for one in told["machines"]] == [0, 1, 2]
    with killed_when_stopped(command):
        command = run.start(nodes)
        eventually(lambda: "are taken over: 1, 2" in command.err, what=lambda: command.err)
    again = run.start(nodes)
    cut_off = [told["machines"][2]["actor_pid"], *run.ends(2)]
    with contextlib.ExitStack() as stack:
        for pid in cut_off:
            stack.enter_context(support.Stopped(pid))
        eventually(lambda: run.facts(1)["agent"]["waits"] == [2], what=lambda: command.err)
        given_up = run.cli("group", "leave", run.name, 2, "--dead", **run.env)
        assert given_up.code == 0, given_up.err
        rounds = run.rounds(1)
        eventually(lambda: run.rounds(1) > rounds + 2, what=lambda: command.err)
    eventually(lambda: all_train(rounds), what=lambda: command.err)
    refused = again.wait()
    assert refused.code == 1
    assert f"has its group run already, at 127.0.0.2, process {command.pid}:" in refused.err

    def all_are_known() -> bool:
        """To Ray: also the one that was removed, and is back."""
        told = run.cli("group", "status", run.name, "--json", **run.env).json["machines"]
        states = {one["machine"]: one["state"] for one in told}
        return states.keys() == {0, 1, 2} and "away" not in states.values()

    before = [told["machines"][1]["actor_pid"], *run.pids(1)]
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    rounds = run.rounds(2)
    eventually(lambda: run.rounds(2) > rounds + 2, what=lambda: command.err)
    eventually(lambda: all_train(rounds), what=lambda: command.err)
    assert not set(run.pids(1)) & set(before)

    eventually(all_are_known, what=lambda: command.err)
    lost = [run.facts(number)["agent"]["pid"] for number in (1, 2)]
    for pid in lost:
        os.kill(pid, signal.SIGKILL)  # then nobody has the state of group 1

    def is_new(number: int) -> bool:
        return run.facts(number)["agent"].get("pid") not in (None, *lost)

    eventually(lambda: is_new(1) and is_new(2) and all_train(), what=lambda: command.err)
    eventually(all_are_known, what=lambda: command.err)

    refused = run.cli("group", "join", run.name, "--group", 1, **run.env)
    assert refused.code == 1 and "all nodes have a machine of" in refused.error
    assert run.cli("group", "leave", run.name, 2, **run.env).code == 0
    assert not door.lives(run.name, 2)
    gone = interrupted(run, place)
    assert gone.code == 130 and "machine 3 was taken back" in gone.err
    assert not door.lives(run.name, 3)
    joined = run.cli("group", "join", run.name, "--group", 1, "--json", **run.env).json
    assert joined["machine"] == 3
    eventually(lambda: all_train(run.rounds(1) - 5, (1, 3)), what=lambda: command.err)

    nodes.close()
    ended = command.wait()
    assert ended.code == 1 and "is gone: its machines train on" in ended.err
    pids = [run.facts(number)["pid"] for number in (0, 1, 3)]
    agents = [run.facts(number)["agent"]["pid"] for number in (0, 1, 3)]
    rounds = run.rounds(3)
    eventually(lambda: run.rounds(3) > rounds + 2)
    told = run.cli("group", "status", run.name, "--json", **run.env).json
    assert [one["pid"] for one in told["machines"]] == pids

    with contextlib.closing(Nodes()) as others:
        command = run.start(others)
        eventually(lambda: "are taken over: 1, 3" in command.err, what=lambda: command.err)
        rounds = run.rounds(3)
        eventually(lambda: all_train(rounds, (1, 3)), what=lambda: command.err)
        assert [run.facts(number)["pid"] for number in (0, 1, 3)] == pids
        assert [run.facts(number)["agent"]["pid"] for number in (0, 1, 3)] == agents
        command.process.send_signal(signal.SIGINT)
        line = "machine {} was interrupted by SIGINT"
        eventually(lambda: all(line.format(number) in command.err for number in (1, 3)))
        assert run.has_trained(0)
        ended = command.signal(signal.SIGINT)
        assert ended.code == 130, ended.err
        assert (ended.json["exit_code"], ended.json["interrupted"]) == (130, "SIGINT")
        assert line.format(0) in ended.err and len(ended.json["machines"]) == 3
    left = [one.name for one in place.iterdir() if one.name != "state"]
    assert not left
