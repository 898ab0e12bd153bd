"""Compiled C programs, real jobs, and learners in C that obey the test."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from gadei_ps import _native
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.control import Status
from gadei_ps.memory import layout, segment, weights
from gadei_ps.memory.layout import CONTROL, RING, SegmentKind

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
CC = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
LIBRARY = [
    NATIVE / f"{name}.c"
    for name in ("ps_client", "ps_attach", "ps_ring", "ps_copy", "ps_rows", "ps_product")
]


class Programs:
    """C programs, each compiled once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._objects: list[Path] = []

    def run(self, command: list[Any]) -> None:
        done = subprocess.run(
            [str(part) for part in command], cwd=self._directory, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr

    def objects(self) -> list[Path]:
        """The files a learner in C is linked with."""
        if not self._objects:
            self.run([*CC, "-c", *LIBRARY])
            self._objects = [self._directory / f"{source.stem}.o" for source in LIBRARY]
        return self._objects

    def build(
        self, source: Path, *more: Any, compiler: list[Any] | None = None, name: str = ""
    ) -> Path:
        program = self._directory / (name or source.stem)
        if not program.exists():
            self.run([*(compiler or CC), "-o", program, source, *(more or self.objects()), "-lrt"])
        return program


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return Programs(tmp_path_factory.mktemp("programs"))


class Learner:
    """The C learner of driver.c; each command is answered by one line."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen(
            [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def begin(self, *command: object) -> None:
        """Sends a command; the answer comes with `end`."""
        assert self.process.stdin is not None
        print(*command, file=self.process.stdin, flush=True)

    def end(self) -> tuple[int, str]:
        """The answer's number and the text after it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the learner has ended: {self.process.wait()}"
        number, _, text = line.rstrip("\n").partition(" ")
        return int(number), text

    def ask(self, *command: object) -> tuple[int, str]:
        self.begin(*command)
        return self.end()

    def do(self, *command: object) -> None:
        assert self.ask(*command) == (0, ""), command

    def values(self, command: str) -> tuple[float, float]:
        """Smallest and largest weight."""
        self.begin(command)
        assert self.process.stdout is not None
        low, high = self.process.stdout.readline().split()
        return float(low), float(high)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(support.PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def starter(program: Path, stack: ExitStack) -> Callable[[], Learner]:
    def start() -> Learner:
        made = Learner(program)
        stack.callback(made.close)
        return made

    return start


@pytest.fixture
def learner(programs: Programs) -> Iterator[Callable[[], Learner]]:
    """Starts learners in C; they end with the test."""
    with ExitStack() as stack:
        yield starter(programs.build(HERE / "driver.c"), stack)


@pytest.fixture
def hurried(programs: Programs) -> Iterator[Callable[[], Learner]]:
    """The same; what they wait ten seconds for they give up after half a one."""
    compiler = [*CC, "-include", HERE / "hurried.h"]
    with ExitStack() as stack:
        program = programs.build(HERE / "driver.c", *LIBRARY, compiler=compiler, name="hurried")
        yield starter(program, stack)


class Job:
    """A running job, seen from outside; `word` writes what only its own processes should."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.name = daemon.config.name
        self.socket = daemon.socket
        self._control = segment.attach(
            segment.segment_name(self.name, "control"), SegmentKind.CONTROL, writable=True
        )
        self.control = self._control.view(CONTROL)

    def status(self) -> dict[str, Any]:
        return self.daemon.request(Status())

    def weights(self) -> np.ndarray:
        """All values of all tensors, a copy."""
        part = segment.attach(
            segment.segment_name(self.name, "weights"), SegmentKind.WEIGHTS, writable=False
        )
        model, data = weights.read_table(part), weights.data(part)
        return np.concatenate([view.ravel() for view in model.views(data).values()])

    def ring(self, row: int) -> np.void:
        return support.ring_of(self.name, row).view(RING)

    def pause(self, on: bool) -> None:
        """Parks the shards: what is published stays in the rings."""
        self.control["pause"] = layout.UNBOUNDED if on else 0
        _native.bell(self._control.address + layout.offset(CONTROL, "shard_bell"))
        shards = int(self.control["shards"])
        parked = self.control["shard"]["parked"]
        support.eventually(lambda: ((parked[:shards] != 0) == on).all())

    def gone(self) -> None:
        """Waits until every learner has left and its ring is freed."""
        support.eventually(lambda: not self.status()["learners"])
        assert not [one for one in segment.find(self.name) if one.part.startswith("ring")]


SMALL = {"tensors": [{"name": "w", "shape": [3, 5]}, {"name": "b", "shape": [7]}]}
WIDE = {"tensors": [{"name": "w", "shape": [50, 401]}, {"name": "b", "shape": [33]}], "shards": 4}
_numbers = itertools.count()


@contextmanager
def running(settings: dict[str, Any]) -> Iterator[Job]:
    """A job of its own; at the block's end nothing of it is left."""
    name = f"native-{os.getpid()}-{next(_numbers)}"
    directory = tempfile.mkdtemp(prefix="gps-", dir="/tmp")  # a socket's path is short
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GADEI_PS_RUNTIME_DIR", directory)
            daemon = support.daemon(name, **settings)
            daemon.__enter__()
        try:
            yield Job(daemon)
        finally:
            daemon.end()
    finally:
        shutil.rmtree(directory)
    assert not support.segments(name)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Starts jobs that end with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(settings))


@pytest.fixture(scope="session")
def job_of() -> Callable[..., Any]:
    """`running`, for fixtures with a scope of their own."""
    return running


@pytest.fixture(scope="module")
def small() -> Iterator[Job]:
    """A job with a small model and one shard, for all tests of the module."""
    with running(SMALL) as started:
        yield started


@pytest.fixture(scope="module")
def wide() -> Iterator[Job]:
    """A job with several shards, likewise."""
    with running(WIDE) as started:
        yield started
