"""A job's unit in a booted systemd, with learners outside of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from booted import Booted
from support import eventually

LEARNER = Path(__file__).with_name("learner.py")
JOB = """\
standby = true
[optimizer]
kind = "sgd"
lr = 1.0
[checkpoint]
every_s = 0
[[tensors]]
name = "w"
shape = [1024]
"""
ENVIRONMENT = (
    "GADEI_PS_RUNTIME_DIR=/run/gadei-ps",
    "GADEI_PS_STATE_DIR=/var/lib/gadei-ps",
    "NUMBA_CACHE_DIR=/var/cache",
)


class Service:
    """A job's unit."""

    def __init__(self, manager: Booted, name: str) -> None:
        self.manager, self.name = manager, name
        self.unit, self.end = f"gadei-ps@{name}.service", f"gadei-ps-end@{name}.service"
        self._started = 0
        self.learners: list[tuple[str, subprocess.Popen[str]]] = []
        manager.write(f"/etc/gadei-ps/{name}.toml", JOB)

    def drop_in(self, text: str) -> None:
        self.manager.write(f"/etc/systemd/system/{self.unit}.d/test.conf", text)
        self.manager.do("systemctl", "daemon-reload")

    def systemctl(self, verb: str) -> str:
        return self.manager.do("systemctl", verb, self.unit)

    @property
    def state(self) -> str:
        return self.manager.show(self.unit, "ActiveState")

    @property
    def sub_state(self) -> str:
        return self.manager.show(self.unit, "SubState")

    def gadei_ps(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("gadei-ps")
        return self.manager.run("env", *ENVIRONMENT, program, *arguments)

    def status(self) -> dict[str, object]:
        done = self.gadei_ps("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def learn(self) -> None:
        """Starts a learner outside of the unit, and waits until it pushes."""
        self._started += 1
        file = f"/run/{self.name}.{self._started}"
        command = ("env", *ENVIRONMENT, sys.executable, LEARNER, self.name, file)
        self.learners.append((file, self.manager.start(*command)))
        eventually(lambda: "pushed" in self.manager.run("cat", file).stdout)

    def learned(self) -> int:
        """Pushes that have returned, of all learners; each has been told that the job stopped."""
        total = 0
        for file, process in self.learners:
            process.wait(60)
            last = self.manager.do("tail", "-n", "1", file).split()
            assert last[0] == "stopped", last
            total += int(last[1])
        self.learners.clear()
        return total

    def saved(self) -> int:
        """Gradients in the newest checkpoint."""
        names = self.manager.do("ls", f"/var/lib/gadei-ps/{self.name}").split()
        newest = max(name for name in names if name.startswith("checkpoint-"))
        path = f"/var/lib/gadei-ps/{self.name}/{newest}/manifest.json"
        counts = json.loads(self.manager.do("cat", path))["counts"]
        return int(counts["applied"])

    def pids(self) -> list[int]:
        found = self.status()
        return [int(str(found[f"{who}_pid"])) for who in ("watchdog", "server", "standby")]

    def kill(self, number: str, pid: int) -> None:
        self.manager.do("nsenter", "-t", "1", "-p", "kill", f"-{number}", pid)

    def kill_the_watchdog(self) -> None:
        self.kill("KILL", int(self.manager.show(self.unit, "MainPID")))

    def is_gone(self) -> None:
        """Nothing of it runs, and nothing is left in /dev/shm."""
        over = ("inactive", "failed")
        eventually(lambda: self.manager.show(self.end, "ActiveState") in over, what=self.said)
        assert self.state in over
        left = self.manager.run("pgrep", "-af", f"gadei_ps.*{self.name}").stdout.splitlines()
        assert not [line for line in left if "learner.py" not in line]
        assert self.name not in self.manager.do("ls", "/dev/shm")

    def said(self) -> str:
        return self.manager.journal("gadei-ps*")
