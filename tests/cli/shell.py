"""The command line as users see it: processes, their output and their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import support
from support import quick

from gadei_ps.commands import jobs
from gadei_ps.errors import GadeiError

FOREVER = "1000000"  # epochs
# What a new interpreter would look at; a fork has done so before the test.
AT_START = ("NUMBA_CACHE_DIR", "PYTHONPATH")
BEFORE = {name: os.environ.get(name, "") for name in AT_START}


@dataclass(frozen=True)
class Result:
    """The result of a command. `code` is negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The only object on stdout, in strict JSON."""
        assert self.out.count("\n") == 1, self
        value = json.loads(self.out, parse_constant=pytest.fail)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """The only line of a failure, without its prefix."""
        assert self.code, self
        assert self.err.count("\n") == 1, self
        assert self.err.startswith("gadei-ps: "), self
        return self.err.removeprefix("gadei-ps: ").strip()


class Running:
    """A running command. Its output goes to files."""

    def __init__(
        self, start: Callable[..., Any], directory: Path, patience_s: float = support.PATIENCE_S
    ) -> None:
        """start: as Cli._started, without the command's words and the environment."""
        self._patience_s = patience_s
        number = len(list(directory.glob("*.out")))
        self._paths = [directory / f"{number}.{kind}" for kind in ("out", "err")]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = start(subprocess.DEVNULL, out, err)

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
        """Send a signal and wait until the command has ended."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Result:
        return Result(self.process.wait(self._patience_s), self.out, self.err)


def program(path: Path, text: str) -> Path:
    """Write an executable Python program, such as a fake nvidia-smi."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return path


def _where(process: subprocess.Popen[bytes] | quick.Forked, err: IO[bytes]) -> str:
    """Return what a command that does not end has printed to `err`, and where its threads are."""

    def printed() -> str:
        err.seek(0)
        return err.read().decode()

    if isinstance(process, quick.Forked):
        quick.print_stacks(process.pid, printed)
    return printed()


class Cli:
    """Runs gadei-ps in the test's directory.

    Each command is a process, and so is what it starts. interpreters: each of them a new
    interpreter, as users have it; otherwise forks of this process, which start quickly (see
    support.quick). servers: whether servers may be started, which need compiled code.
    """

    def __init__(
        self, directory: Path, *, interpreters: bool = False, servers: bool = True
    ) -> None:
        self.directory = directory
        self.interpreters = interpreters
        self.fork_server = False  # jobs have one
        self.patience_s = support.PATIENCE_S
        self._servers = servers
        self._running: list[Running] = []
        self._served: list[str] = []

    def _started(
        self,
        arguments: tuple[str, ...],
        env: dict[str, str],
        stdin: int | IO[bytes],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> subprocess.Popen[bytes] | quick.Forked:
        command = [sys.executable, "-m", "gadei_ps", *arguments]
        environment = os.environ | env
        other = any(environment.get(name, "") != BEFORE[name] for name in AT_START)
        how: dict[str, Any] = {"env": environment, "cwd": self.directory}
        how |= {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        if self.interpreters or other:
            return subprocess.Popen(command, **how)
        quick.load_commands()
        with (
            quick.fork_quickly(fork_server=self.fork_server)
            if self._servers
            else contextlib.nullcontext()
        ):
            return quick.Forked(command, **how)

    def __call__(
        self,
        *arguments: object,
        stdin: bytes = b"",
        patience_s: float | None = None,
        **env: str,
    ) -> Result:
        """Run a command until it ends."""
        words = set(arguments)
        assert words != {"gc"} and words != {"gc", "--json"}, "it takes what other tests have left"
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(stdin)
            given.seek(0)
            process = self._started(tuple(map(str, arguments)), env, given, out, err)
            try:
                code = process.wait(patience_s or self.patience_s)
            except BaseException as error:
                if isinstance(error, subprocess.TimeoutExpired):
                    error.add_note(_where(process, err))
                process.kill()
                process.wait()
                raise
            outputs = []
            for stream in (out, err):
                stream.seek(0)
                outputs.append(stream.read().decode())
        return Result(code, *outputs)

    def start(self, *arguments: object, **env: str) -> Running:
        """Start a command in the background. It is ended when the test ends."""
        words = tuple(map(str, arguments))
        one = Running(
            lambda *streams: self._started(words, env, *streams), self.directory, self.patience_s
        )
        self._running.append(one)
        return one

    def serve(self, job: str, text: str = "") -> Running:
        """Start a job's daemon, by default without a standby. Wait until it is ready."""
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
        """Record a job that close() must remove."""
        self._served.append(job)

    def close(self) -> None:
        """End all commands, and remove what killed jobs have left."""
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
    """A condition: this number of learners is attached, and gradients are applied."""

    def condition() -> bool:
        assert command.process.poll() is None, command.err
        if not is_running(job):
            return False
        status = support.status(job)
        return len(status["learners"]) == learners and status["version"] > 0

    return condition
