"""Machines of one run, all on this host: started by `gadei-ps group run`, watched, killed.

Ray has one node (`gadei_ps/replicas/own_cluster.py`). Runtime and state directories are of their
own, so that what is left behind is seen.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gadei_ps.benchmarks.gang import Failed
from gadei_ps.errors import GadeiError, UsageError
from gadei_ps.job import paths
from gadei_ps.job.faults import Processes
from gadei_ps.machine import process
from gadei_ps.memory import shm
from gadei_ps.memory.totals import total
from gadei_ps.replicas import sockets
from gadei_ps.replicas.config import job_name

LOOK_S = 0.02
READ_S = 0.001
PATIENCE_S = 120.0
TRIES = 3
Facts = dict[str, Any]


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """Make directories of this benchmark's own, for this process and those that it starts."""
    directory = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))  # short: sockets lie there
    (directory / "run").mkdir(mode=0o700)
    wanted = {
        "GADEI_PS_RUNTIME_DIR": str(directory / "run"),
        "GADEI_PS_STATE_DIR": str(directory / "state"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield directory
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(directory, ignore_errors=True)


def needs_ray(name: str) -> None:
    """Raise UsageError if there is no Ray for this benchmark."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"bench {name} needs ray: pip install 'gadei-ps[torch,bench]'")


def until(
    condition: Callable[[], object],
    what: str,
    said: Callable[[], str] = str,
    patience_s: float = PATIENCE_S,
) -> None:
    """Wait for it. said: what stands in the error beside `what`. Raises Failed."""
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {patience_s:g} s. {said()}")
        time.sleep(LOOK_S)


def assignments(control: np.void) -> int:
    """Return the assignments that a job has applied; for an instant one less. control: CONTROL.

    A frame is counted a moment before the version that it makes.
    """
    while True:
        applied, version = total(control, "applied"), int(control["version"])
        if total(control, "applied") == applied:
            return version - applied


class Machines:
    """A run. `close` ends all of it, whatever has happened."""

    def __init__(self, directory: Path, name: str, settings: str, command: Sequence[str]) -> None:
        """settings: the contents of GROUPS.toml. command: of a learner."""
        self.name, self._command = name, list(command)
        self._file = directory / f"{name}.toml"
        self._file.write_text(settings)
        self._said = directory / f"{name}.said"
        self._before = _shared()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start `gadei-ps group run`, or comes back to machines that train on."""
        words = ("group", "run", str(self._file), "--", *self._command)
        with self._said.open("wb") as stream:
            self._process = process.spawn(
                process.module_command("gadei_ps", *words),
                stdout=stream,
                stderr=stream,
            )

    def said(self) -> str:
        """Return the last line that the command has printed."""
        lines = self._said.read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])

    def facts(self, number: int) -> Facts | None:
        """Return the status of a machine; None if it does not exist."""
        try:
            found: Facts = sockets.ask(self.name, number, "status")
            return found
        except (GadeiError, OSError, ValueError):
            return None

    def rounds(self, number: int) -> int:
        """Return the rounds of the machine, 0 if it is not a member of its group."""
        found = self.facts(number)
        if found is None or found["exchange"]["state"] != "member":
            return 0
        return int(found["exchange"]["rounds"])

    def assignments(self, number: int) -> int | None:
        """Return the assignments that a replica's job has applied; None if there is no job."""
        readings = []
        with contextlib.suppress(GadeiError, OSError):
            control = Processes(job(self.name, number)).control
            for _ in range(TRIES):
                readings.append(assignments(control))
                time.sleep(READ_S)
        return max(readings, default=None)

    def gradients(self, number: int) -> int:
        """Return the gradients that the job of a replica has applied, 0 if it is not there."""
        found = self.facts(number)
        return int(found["job"]["gradients_applied"]) if found and found["job"] else 0

    def await_rounds(self, numbers: Sequence[int], least: int) -> None:
        """Wait until each of these machines has so many rounds. Raises Failed."""

        def there() -> bool:
            self.check()
            return all(self.rounds(number) >= least for number in numbers)

        until(there, f"round {least} of machines {', '.join(map(str, numbers))}", self.said)

    def check(self) -> None:
        """Raise Failed if the command has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise Failed(f"group run has ended: {self.said()}")

    # -- deaths -----------------------------------------------------------------------------------

    def kill(self, number: int, chance: random.Random) -> float:
        """SIGKILL to all processes of a machine, in any order; returns when (time.monotonic())."""
        pids = list(self._pids(number))
        chance.shuffle(pids)
        begin = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return begin

    def kill_learner(self, number: int, chance: random.Random) -> float:
        """SIGKILL to a learner of a machine; returns when (time.monotonic())."""
        facts = self.facts(number)
        if facts is None or facts["job"] is None or not facts["job"]["learners"]:
            raise Failed(f"machine {number} has no learner to be killed")
        begin = time.monotonic()
        os.kill(chance.choice(facts["job"]["learners"])["pid"], signal.SIGKILL)
        return begin

    def kill_actor(self, title: str, chance: random.Random) -> float:
        """SIGKILL to an actor of Ray whose process has this title; returns when.

        During a call, the name of the method follows.
        """
        found = self._of_ray(lambda one: "".join(one.cmdline()[:1]).partition(".")[0] == title)
        if not found:
            raise Failed(f"no process {title} was found")
        begin = time.monotonic()
        chance.choice(found).kill()
        return begin

    def _of_ray(self, wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        assert self._process is not None
        found = []
        for one in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [one] if wanted(one) else []
        return found

    def _pids(self, number: int) -> set[int]:
        facts = self.facts(number)
        if facts is None or facts["job"] is None:
            raise Failed(f"machine {number} was to be killed, and is not there")
        job = facts["job"]
        found = {facts["pid"], *(one["pid"] for one in job["learners"])}
        found |= {value for name, value in job.items() if name.endswith("_pid")}
        for pid in tuple(found):
            with contextlib.suppress(psutil.NoSuchProcess, TypeError):
                found |= {one.pid for one in psutil.Process(pid).children(recursive=True)}
        return {pid for pid in found if pid}

    def kill_head(self) -> float:
        """SIGKILL to the head of Ray; returns when (time.monotonic())."""
        found = self._of_ray(lambda one: one.name().startswith("gcs_server"))
        if len(found) != 1:
            raise Failed(f"{len(found)} heads of Ray were found, not 1")
        begin = time.monotonic()
        found[0].kill()
        return begin

    def await_loss(self) -> None:
        """Wait until the command has seen that Ray is gone, and has ended."""
        assert self._process is not None
        found = self._process
        until(lambda: found.poll() is not None, "the end of group run without Ray", self.said)
        self._process = None

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run as a user does, who tries again where that is advised. Raises Failed."""
        command = process.module_command("gadei_ps", "group", "stop", self.name)
        for _ in range(TRIES):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
            if not done.returncode or not sockets.here(self.name):
                break
        else:
            raise Failed(f"group stop: {done.stderr.strip()[-200:]}")
        if self._process is not None:
            self._process.wait(PATIENCE_S)
            self._process = None

    def left(self) -> list[str]:
        """List the remains of the run: processes, shared memory, files."""
        here = os.environ["GADEI_PS_RUNTIME_DIR"]
        processes = [
            f"process {one.pid}"
            for one in psutil.process_iter()
            if one.pid != os.getpid() and _environment(one).get("GADEI_PS_RUNTIME_DIR") == here
        ]
        memory = [name for name in _shared() - self._before if is_of(name, self.name)]
        files = [one.name for one in paths.directory().iterdir()]
        return processes + sorted(memory) + files

    def close(self) -> None:
        """Kill what is left. For the end after an error; stop() leaves nothing to do."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
        for number in sockets.here(self.name):
            with contextlib.suppress(GadeiError):
                sockets.ask(self.name, number, "stop")
        with contextlib.suppress(Failed):
            until(lambda: not sockets.here(self.name), "the end of all machines", patience_s=30.0)


def _environment(one: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; empty if it has ended, or is another user's."""
    try:
        return one.environ()
    except (psutil.Error, OSError):
        return {}


def _shared() -> set[str]:
    """Return the names in /dev/shm."""
    return {one.name for one in shm.SHM.iterdir()}


def is_of(name: str, run: str) -> bool:
    """Return whether a new name in /dev/shm may be of this run: all but those of other jobs."""
    match = shm.SEGMENT_NAME.fullmatch(name)
    return match is None or match["job"].startswith(f"{run}-")


def settings(**values: Any) -> str:
    """A GROUPS.toml of these fields; `groups` are the numbers of machines."""
    groups = values.pop("groups")
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    lines += [f"[[groups]]\nmachines = {machines}" for machines in groups]
    return "\n".join(lines) + "\n"


def job(run: str, number: int) -> str:
    """The name of a machine's job."""
    return job_name(run, number)
