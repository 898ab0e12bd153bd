"""The process of one machine of a run, without Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Cli
from support import eventually, group_machines

from gadei_ps.cluster import door
from gadei_ps.errors import GadeiError

pytestmark = pytest.mark.usefixtures("compiled")
LEARNER = """
    import signal, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    if "stays" in sys.argv:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Client(tensors={"w": np.zeros(8)}) as client:
        while True:
            client.push({"w": np.ones(8)}, samples=1)
            time.sleep(0.01)
"""


@contextlib.contextmanager
def machine(
    job_name: str, *command: str, log: Path, every: int = 10**6
) -> Iterator[list[dict[str, Any]]]:
    """A machine that trains in this block. What it tells at its end; complete after the block."""
    group_machines.begin(job_name, sys.executable, *command, log=log, every=every)
    told: list[dict[str, Any]] = []

    def wait() -> None:
        with contextlib.suppress(GadeiError):
            told.append(door.ask(job_name, 0, "await", timeout_s=None))

    waiting = threading.Thread(target=wait)
    waiting.start()
    yield told
    waiting.join()
    assert len(told) == 1, "it has ended without a word"
    door.wait_for_end(told[0]["pid"])
    assert not door.here(job_name)


@pytest.fixture
def learner(tmp_path: Path) -> str:
    (tmp_path / "learner.py").write_text(textwrap.dedent(LEARNER))
    return str(tmp_path / "learner.py")


def trains(job_name: str) -> bool:
    job = door.ask(job_name, 0, "status")["job"]
    return bool(job and job["gradients_applied"])


def test_a_machine_that_is_stopped_again_and_again_ends_once(
    job_name: str, learner: str, tmp_path: Path
) -> None:
    with machine(job_name, learner, log=tmp_path / "log") as told:
        eventually(lambda: trains(job_name))
        while door.lives(job_name, 0):
            with contextlib.suppress(GadeiError):
                door.ask(job_name, 0, "stop")
    assert told[0]["summary"]["asked"] == "stop"


def test_machines_of_this_host_without_a_cluster(
    cli: Cli, job_name: str, learner: str, tmp_path: Path
) -> None:
    """They are shown, and stopped. While another watchdog takes over, a machine trains."""
    with machine(job_name, learner, log=tmp_path / "log") as told:
        eventually(lambda: trains(job_name))
        watchdog = door.ask(job_name, 0, "status")["job"]["watchdog_pid"]
        os.kill(watchdog, signal.SIGKILL)
        states, has_another = set(), False
        while not has_another:
            facts = door.ask(job_name, 0, "status")
            states.add(facts["state"])
            has_another = bool(facts["job"]) and facts["job"]["watchdog_pid"] != watchdog
        assert states == {"training"}

        report = cli("group", "status", job_name, "--json").json
        assert [(one["machine"], one["state"]) for one in report["machines"]] == [(0, "training")]
        assert "again to bring its machines together" in cli("group", "leave", job_name, 0).error
        stopped = cli("group", "stop", job_name)
        assert (stopped.code, stopped.out) == (0, f"run {job_name} has stopped: 1 machine\n")
        assert "no cluster is known: these are the machines on this host" in stopped.err
    assert told[0]["summary"]["asked"] == "stop"


def test_a_second_signal_ends_learners_at_once(job_name: str, learner: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with machine(job_name, learner, "stays", log=log) as told:
        eventually(lambda: trains(job_name))
        door.ask(job_name, 0, "signal", signal=signal.SIGINT)
        eventually(lambda: "once more ends them at once" in log.read_text())
        assert trains(job_name)
        door.ask(job_name, 0, "signal", signal=signal.SIGINT)
    assert "did not end in time" not in log.read_text()
    summary = told[0]["summary"]
    assert (summary["exit_code"], summary["interrupted"]) == (130, "SIGINT")


def test_what_an_agent_writes_is_no_gradient(job_name: str, learner: str, tmp_path: Path) -> None:
    def counts() -> bool:
        told = door.ask(job_name, 0, "status")
        job = told["job"]
        known = job and told["agent"]["rounds"] > 2 and job["gradients_applied"]
        return bool(known and job["gradients_applied"] == job["samples"] < job["version"])

    with machine(job_name, learner, log=tmp_path / "log", every=3):
        eventually(counts)
        door.ask(job_name, 0, "stop")


def test_a_machine_ends_once_though_its_log_is_on_a_full_disk(job_name: str) -> None:
    with machine(job_name, "-c", "raise SystemExit('no data')", log=Path("/dev/full")) as told:
        pass
    assert told[0]["summary"]["exit_code"] == 1
