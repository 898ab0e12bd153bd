"""The process of one machine of a run, without Ray."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from gadei_ps.cluster import door
from gadei_ps.errors import GadeiError
from gadei_ps.machine import process

pytestmark = pytest.mark.usefixtures("compiled")
LEARNER = """
    import time
    import numpy as np
    from gadei_ps.learners.client import Client

    with Client(tensors={"w": np.zeros(8)}) as client:
        while True:
            client.push({"w": np.ones(8)}, samples=1)
            time.sleep(0.01)
"""


@contextlib.contextmanager
def machine(job_name: str, *command: str, log: Path) -> Iterator[list[dict[str, Any]]]:
    """A machine that trains in this block. What it tells at its end; complete after the block."""
    here = "127.0.0.1:0"
    agent = {"job": f"{job_name}-0", "group": "a", "number": 0, "agents": {0: here}}
    plan = {
        "run": job_name,
        "number": 0,
        "group": 0,
        "machines": 1,
        "port": 0,
        "command": [sys.executable, *command],
        "directory": str(Path.cwd()),
        "learners": 1,
        "restart": 0,
        "agent": agent | {"listen": here, "token": "a" * 32, "every": 10**6, "joins": False},
        "log": str(log),
    }
    subprocess.run(
        process.module_command("gadei_ps.cluster.machine"),
        input=json.dumps(plan),
        text=True,
        check=True,
    )
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


def test_a_machine_that_is_stopped_again_and_again_ends_once(job_name: str, tmp_path: Path) -> None:
    (tmp_path / "learner.py").write_text(textwrap.dedent(LEARNER))

    def trains() -> bool:
        job = door.ask(job_name, 0, "status")["job"]
        return bool(job and job["gradients_applied"])

    with machine(job_name, str(tmp_path / "learner.py"), log=tmp_path / "log") as told:
        eventually(trains)
        while door.lives(job_name, 0):
            with contextlib.suppress(GadeiError):
                door.ask(job_name, 0, "stop")
    assert told[0]["summary"]["asked"] == "stop"


def test_a_machine_ends_once_though_its_log_is_on_a_full_disk(job_name: str) -> None:
    with machine(job_name, "-c", "raise SystemExit('no data')", log=Path("/dev/full")) as told:
        pass
    assert told[0]["summary"]["exit_code"] == 1
