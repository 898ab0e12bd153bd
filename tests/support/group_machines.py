"""The process of one machine of a run, started without Ray."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from gadei_ps.machine import process


def begin(run: str, *command: str, log: Path, every: int = 10**6) -> None:
    """Starts machine 0 of a run, whose learner is this command."""
    here = "127.0.0.1:0"
    agent = {"job": f"{run}-0", "group": "a", "group_number": 0, "number": 0, "agents": {0: here}}
    plan = {
        "run": run,
        "number": 0,
        "group": 0,
        "machines": 1,
        "port": 0,
        "command": list(command),
        "directory": str(Path.cwd()),
        "learners": 1,
        "restart": 0,
        "agent": agent | {"listen": here, "token": "a" * 32, "every": every, "joins": False},
        "log": str(log),
    }
    subprocess.run(
        process.module_command("gadei_ps.cluster.machine"),
        input=json.dumps(plan),
        text=True,
        check=True,
    )
