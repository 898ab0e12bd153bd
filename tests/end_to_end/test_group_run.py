"""`gadei-ps group` with real clusters of Ray: of three nodes, and of the commands' own."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from shell import Cli, Running
from support import tutorials

from gadei_ps.benchmarks import group_deaths
from gadei_ps.benchmarks.group_deaths_counts import AGAIN, FINISHED, MISSING
from gadei_ps.benchmarks.group_deaths_learner import BATCHES
from gadei_ps.errors import GadeiError
from gadei_ps.replicas import sockets

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
LEARN = Path(__file__).parents[2] / "docs" / "learn"
UNTIL_END = "iter(lambda: not __import__('os').path.exists('end'), False)"
"""Steps of the tutorial's script until the test ends it."""
NODES = Path(support.__file__).parent / "ray_nodes.py"
MACHINES = 3
LOOK_S = 0.05
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
            time.sleep(0.02)
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

    @functools.cached_property
    def address(self) -> str:
        """Its address, once Ray has started."""
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        assert address, "Ray does not start"
        return address

    def close(self) -> None:
        """Kill all of them."""
        if self._process.returncode is None:
            self._process.communicate()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The runtime directory of the cluster's replicas."""
    with pytest.MonkeyPatch.context() as patch:
        path = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
        patch.setenv("GADEI_PS_RUNTIME_DIR", str(path))
        patch.setenv("GADEI_PS_STATE_DIR", str(path / "state"))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        yield path
        shutil.rmtree(path)


@pytest.fixture
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
            "every = 10\nrule = 'mix:0.5'\nlr = 0.01\n"
            "[[groups]]\nmachines = 1\n[[groups]]\nmachines = 2\n"
        )
        (cli.directory / "train.py").write_text(textwrap.dedent(SCRIPT))

    def words(self, nodes: Nodes) -> tuple[object, ...]:
        where = "--address", nodes.address, "--json"
        words = "group", "run", self.file, *where, "--", sys.executable, "train.py"
        return *words, str(self.machines)

    def start(self, nodes: Nodes) -> Running:
        return self.cli.start(*self.words(nodes), **self.env)

    @property
    def env(self) -> dict[str, str]:
        state = f"{self._place}/state"
        return {"GADEI_PS_RUNTIME_DIR": self._place, "GADEI_PS_STATE_DIR": state}

    def facts(self, number: int) -> dict[str, Any]:
        time.sleep(LOOK_S)  # it costs those who answer
        try:
            report: dict[str, Any] = sockets.ask(self.name, number, "status")
            return report
        except GadeiError:
            return {"exchange": {"state": "away", "rounds": 0}, "job": None, "pid": 0}

    def has_trained(self, number: int, rounds: int = 1) -> bool:
        exchange = self.facts(number)["exchange"]
        return exchange["state"] == "member" and exchange["rounds"] >= rounds

    def rounds(self, number: int) -> int:
        """Return the rounds that a replica has made."""
        rounds: int = self.facts(number)["exchange"]["rounds"]
        return rounds

    def gradients(self, number: int) -> int:
        job = self.facts(number)["job"]
        return int(job["gradients_applied"]) if job else 0

    def pids(self, number: int) -> list[int]:
        """All processes of a replica."""
        facts = self.facts(number)
        job = facts["job"]
        found = [facts["pid"], job["watchdog_pid"], job["server_pid"]]
        found += [job["standby_pid"], *(one["pid"] for one in job["learners"])]
        return [pid for pid in found if pid]

    def await_rounds(self, numbers: Iterable[int], least: int) -> None:
        eventually(lambda: all(self.has_trained(one, least) for one in numbers))

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = self.cli("group", "status", self.name, "--json", **self.env).json
        return report


@pytest.fixture
def run(
    cli: Cli, job_name: str, place: Path, interpreters: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Run interpreters: a fork of a process that has loaded Ray has its token."""
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(place))
    cli.patience_s = LONG_S
    yield Run(cli, job_name, place)
    for number in sockets.here(job_name):  # of a test that has failed
        with contextlib.suppress(GadeiError):
            sockets.ask(job_name, number, "stop")


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_run(run: Run, nodes: Nodes, place: Path, request: pytest.FixtureRequest) -> None:
    """Kill replicas and the coordinator, let replicas leave and join; kill Ray."""
    command = run.start(nodes)

    def all_train(rounds: int = 1, replicas: tuple[int, ...] = (0, 1, 2)) -> bool:
        assert command.process.poll() is None, command.err
        return all(run.has_trained(number, rounds) for number in replicas)

    eventually(all_train, what=lambda: command.err)
    # Alone, the job of group 0 would stay at 0.
    weights = support.live_weights(f"{run.name}-0")
    eventually(lambda: all_train() and weights[0] > 1, what=lambda: command.err)
    second, stranger = (
        run.cli.start(*run.words(nodes), **run.env | {"RAY_AUTH_TOKEN": token})
        for token in (TOKEN, "another token")
    )
    report = run.status()
    assert [one["machine"] for one in report["machines"]] == [0, 1, 2]
    refused = second.wait()
    assert refused.code == 1
    assert f"has its group run already, at 127.0.0.2, process {command.pid}:" in refused.err
    assert "set RAY_AUTH_TOKEN to that with which" in stranger.wait().error

    before = [report["machines"][1]["actor_pid"], *run.pids(1)]
    rounds = run.rounds(2)
    kill(before)
    eventually(lambda: run.rounds(2) > rounds + 2, what=lambda: command.err)
    rounds = run.rounds(2)
    eventually(lambda: all_train(rounds), what=lambda: command.err)
    assert not set(run.pids(1)) & set(before)

    kill([report["coordinator"]["pid"]])
    rounds = run.rounds(2)
    eventually(lambda: all_train(rounds + 2, (1, 2)), what=lambda: command.err)

    with support.Stopped(run.facts(2)["pid"]):  # it is silent, not dead
        rounds = run.rounds(1)
        eventually(lambda: run.rounds(1) > rounds + 2, what=lambda: command.err)
    eventually(lambda: all_train(rounds, (1, 2)), what=lambda: command.err)

    refused = run.cli("group", "join", run.name, "--group", 1, **run.env)
    assert refused.code == 1 and "all nodes have a replica of" in refused.error
    assert run.cli("group", "leave", run.name, 2, **run.env).code == 0
    assert not sockets.lives(run.name, 2)
    joined = run.cli("group", "join", run.name, "--group", 1, "--json", **run.env).json
    assert joined["machine"] == 3
    eventually(lambda: all_train(run.rounds(1) - 5, (1, 3)), what=lambda: command.err)

    command.signal(signal.SIGKILL)
    command = run.start(nodes)
    eventually(lambda: "are adopted: 0, 1, 3" in command.err, what=lambda: command.err)

    others = Nodes()  # it starts meanwhile, at other ports
    request.addfinalizer(others.close)
    nodes.close()
    ended = command.wait()
    assert ended.code == 1 and "is gone: its replicas train on" in ended.err, ended.err
    pids = [run.facts(number)["pid"] for number in (0, 1, 3)]
    gradients = [run.gradients(number) for number in (0, 1, 3)]
    for number, before_ in zip((0, 1, 3), gradients, strict=True):
        eventually(lambda number=number, n=before_: run.gradients(number) > n + 20)
    assert [one["pid"] for one in run.status()["machines"]] == pids

    rounds = run.rounds(3)
    command = run.start(others)
    eventually(lambda: "are adopted: 0, 1, 3" in command.err, what=lambda: command.err)
    eventually(lambda: all_train(rounds + 2, (1, 3)), what=lambda: command.err)
    assert [run.facts(number)["pid"] for number in (0, 1, 3)] == pids
    command.process.send_signal(signal.SIGINT)
    line = "replica {} was interrupted by SIGINT"
    eventually(lambda: all(line.format(number) in command.err for number in (1, 3)))
    assert run.has_trained(0)
    ended = command.signal(signal.SIGINT)
    assert ended.code == 130, ended.err
    assert (ended.json["exit_code"], ended.json["interrupted"]) == (130, "SIGINT")
    assert line.format(0) in ended.err and len(ended.json["machines"]) == 3
    left = [one.name for one in place.iterdir() if one.name != "state"]
    assert not left


ROWS = "text,label\n" + "".join(
    f"a {word} sentence number {number},{word}\n"
    for number in range(40)
    for word in ("red", "blue")
)
EPOCHS = 3


def test_train(run: Run, place: Path) -> None:
    """The classifier is trained to its end, though a machine dies meanwhile."""
    (run.cli.directory / "rows.csv").write_text(ROWS)
    run.file.write_text("every = 10\nlearners = 1\n[[groups]]\nmachines = 2\n")
    options = ("--epochs", EPOCHS, "--patience", EPOCHS, "--json")
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


def test_the_tutorial(run: Run, place: Path) -> None:
    """The commands of docs/learn/replicas.md print what it shows.

    Learners are paused during exchanges, which nothing in the output shows. Then a replica joins,
    and the command is killed: its replicas train on, and it comes back.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    first, second = ((LEARN / f"{name}.md").read_text() for name in ("first-job", "replicas"))
    script = next(one.text for one in tutorials.blocks(first) if one.file == "my_train.py")
    settings, started, asked = (one for one in tutorials.blocks(second) if one.how != "skip")
    run.machines = 2
    paused = "silence_s = 60\noverlap = false\n"
    text = settings.text.replace("every = 100", "every = 10")
    run.file.write_text(paused + text.replace("demo", run.name))
    for steps, ours in (("range(1, 4001)", UNTIL_END), ("time.sleep(0.002)", "time.sleep(0.02)")):
        assert steps in script
        script = script.replace(steps, ours)
    (run.cli.directory / "my_train.py").write_text(script)
    words = ("group", "run", run.file, "--", sys.executable, "my_train.py")
    env = run.env | {"COLUMNS": "100"}
    command = killed = run.cli.start(*words, **env)
    ((_, shown),) = asked.commands

    def have_trained(rounds: int, replicas: range) -> bool:
        assert command.process.poll() is None, command.err
        return all(run.has_trained(number, rounds) for number in replicas)

    def is_shown() -> bool:
        return have_trained(3, range(2)) and tutorials.fits(
            here(shown), here(run.cli("group", "status", run.name, **env).out)
        )

    def are_adopted() -> bool:
        assert command.process.poll() is None, command.err
        return "that train are adopted: 0, 1, 2" in command.err

    eventually(is_shown, what=lambda: command.err)
    assert run.cli("group", "join", run.name, "--json", **env).json["machine"] == 2
    eventually(lambda: have_trained(1, range(3)), what=lambda: command.err)
    pids = [run.facts(number)["pid"] for number in range(3)]
    command.signal(signal.SIGKILL)
    command = run.cli.start(*words, **env)
    eventually(are_adopted, what=lambda: command.err)
    assert [run.facts(number)["pid"] for number in range(3)] == pids
    rounds = run.rounds(0)
    eventually(lambda: have_trained(rounds + 2, range(3)), what=lambda: command.err)
    (run.cli.directory / "end").touch()
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert not [one.name for one in place.iterdir() if one.name != "state"]
    found = here(f"{killed.err}\n{ended.err}".replace(run.name, "demo"))
    ((_, shown),) = started.commands
    # When the command looks, a replica may train already, be silent, or end before the other one.
    wanted, printed = (set(tutorials.masked(text)) for text in (here(shown), found))
    assert wanted <= printed, found


def here(text: str) -> str:
    """Return a text without addresses of this host, and with replicas that train already."""
    text = re.sub(r"\b127(\.\d+){3}\b", "", text)
    return re.sub(r": (starting|training)(, log \S+)?$", ": training", text, flags=re.M)


def test_each_batch_is_in_the_weights_once(run: Run) -> None:
    """Divide the batches of a pass among replicas; one of them is killed, and comes back."""
    run.machines = 2
    settings = "every = 20\nrule = 'outer:1:0'\noptimizer = 'sgd'\nlr = 1.0\ndivide = true\n"
    run.file.write_text(settings + "[[groups]]\nmachines = 2\n")
    words = ("group", "run", run.file, "--json", "--", sys.executable)
    learner = "-P", "-m", "gadei_ps.benchmarks.group_deaths_learner", run.cli.directory
    command = run.cli.start(*words, *learner, **run.env)

    def passes() -> int:
        assert command.process.poll() is None, command.err
        jobs = [run.facts(number)["job"] for number in range(2)]
        return min(job["work"]["epochs_done"] if job else 0 for job in jobs)

    eventually(lambda: passes() >= 0 and run.has_trained(1, 3), what=lambda: command.err)
    kill(run.pids(1))
    eventually(lambda: passes() >= 2, what=lambda: command.err)
    found = group_deaths.audit(run, 2, run.cli.directory)
    assert found[FINISHED] >= 2 * BATCHES
    assert (found[MISSING], found[AGAIN]) == (0, 0)
    stopped = run.cli("group", "stop", run.name, **run.env)
    assert (stopped.code, stopped.out) == (0, f"run {run.name} has stopped: 2 replicas\n")
    ended = command.wait()
    assert (ended.code, ended.json["exit_code"], ended.json["stopped"]) == (4, 4, True)
