"""The command line as its users have it: processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support

from gadei_ps.commands import jobs
from gadei_ps.errors import GadeiError

FOREVER = "1000000"  # epochs


@dataclass(frozen=True)
class Result:
    """What a command has left: `code` is negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, in strict JSON."""
        assert self.out.count("\n") == 1, self
        value = json.loads(self.out, parse_constant=pytest.fail)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """The one line of a failure, without its prefix."""
        assert self.code, self
        assert self.err.count("\n") == 1, self
        assert self.err.startswith("gadei-ps: "), self
        return self.err.removeprefix("gadei-ps: ").strip()


class Running:
    """A command that has not ended yet; what it writes goes to files."""

    def __init__(self, arguments: tuple[str, ...], directory: Path, **env: str) -> None:
        number = len(list(directory.glob("*.out")))
        self._paths = [directory / f"{number}.{kind}" for kind in ("out", "err")]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gadei_ps", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | env,
                cwd=directory,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def err(self) -> str:
        """So far."""
        return self._paths[1].read_text()

    @property
    def out(self) -> str:
        """So far."""
        return self._paths[0].read_text()

    def signal(self, number: int) -> Result:
        """Sends a signal and waits for the end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Result:
        return Result(self.process.wait(support.PATIENCE_S), self.out, self.err)


def program(path: Path, text: str) -> Path:
    """An executable program in Python, such as an nvidia-smi that says what a test wants."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return path


class Cli:
    """Runs gadei-ps in the test's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[Running] = []
        self._served: list[str] = []

    def __call__(
        self,
        *arguments: object,
        stdin: bytes = b"",
        patience_s: float = support.PATIENCE_S,
        **env: str,
    ) -> Result:
        """To its end."""
        done = subprocess.run(
            [sys.executable, "-m", "gadei_ps", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            env=os.environ | env,
            cwd=self.directory,
            timeout=patience_s,
            check=False,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: object, **env: str) -> Running:
        """In the background; ended at the test's end if it still runs."""
        one = Running(tuple(map(str, arguments)), self.directory, **env)
        self._running.append(one)
        return one

    def serve(self, job: str, text: str = "") -> Running:
        """A job's daemon, ready; with one server, which starts quicker, unless `text` says so."""
        file = self.directory / f"{job}.toml"
        file.write_text(text if "standby" in text else f"standby = false\n{text}")
        self.made(job)
        daemon = self.start("serve", file)
        support.eventually(
            lambda: is_running(job) or daemon.process.poll() is not None, what=lambda: daemon.err
        )
        assert daemon.process.poll() is None, daemon.err
        return daemon

    def made(self, job: str) -> None:
        """There is such a job from now on."""
        self._served.append(job)

    def close(self) -> None:
        """Ends what runs, and removes what jobs have left that the test has killed."""
        for one in self._running:
            one.process.terminate()
        for one in self._running:
            one.wait()
        for job in self._served:
            jobs.drop(job)
        jobs.collect(self._served)


def is_running(job: str) -> bool:
    try:
        return bool(support.status(job))
    except GadeiError:
        return False


def learning(job: str, command: Running, learners: int) -> Callable[[], bool]:
    """A condition: so many learners are attached and gradients are being applied."""

    def condition() -> bool:
        assert command.process.poll() is None, command.err
        if not is_running(job):
            return False
        status = support.status(job)
        return len(status["learners"]) == learners and status["version"] > 0

    return condition
