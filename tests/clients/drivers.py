"""Learners in C and in Python that a test controls, their C programs, and jobs to learn in."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from support import quick
from support.turns import Turns

from gadei_ps import _native
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.control import Attach, Connection, Detach, Status
from gadei_ps.memory import layout, presence, segment, shm, weights
from gadei_ps.memory.layout import CONTROL, ENTRY, FRAME, RING, SegmentKind

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
PYTHON = [sys.executable, "-m", "clients.driver"]
# What the functions of gadei.h return.
NONFINITE = 1
TIMEOUT, STOPPED, EVICTED, FINISHED, FAILED, ERROR = -1, -2, -3, -4, -5, -6
SANITIZERS = os.environ.get("TESTED_CFLAGS", "").split()  # see native/test_sanitized.py
CC = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", *SANITIZERS]
# What a learner in C is linked with, as native/gadei.h says.
LIBRARY = sorted([*NATIVE.glob("gadei_*.c"), *NATIVE.glob("ps_*.c")])


class Programs:
    """C programs, each compiled once for all workers."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._directory = turns.directory / "programs"
        self._directory.mkdir(exist_ok=True)

    def run(self, command: list[Any]) -> None:
        done = subprocess.run(
            [str(part) for part in command], cwd=self._directory, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr

    def objects(self) -> list[Path]:
        """The files a learner in C is linked with."""
        self._turns.once("objects", lambda: self.run([*CC, "-c", *LIBRARY]))
        return [self._directory / f"{source.stem}.o" for source in LIBRARY]

    def build(
        self, source: Path, *more: Any, compiler: list[Any] | None = None, name: str = ""
    ) -> Path:
        program = self._directory / (name or source.stem)
        command = [*(compiler or CC), "-o", program, source, *(more or self.objects()), "-lrt"]
        self._turns.once(f"program-{program.name}", lambda: self.run(command))
        return program


class Learner:
    """The learner of driver.c or driver.py; each command is answered by one line."""

    def __init__(self, *command: object) -> None:
        """The learner in Python is a fork of this process, which starts quickly."""
        words = [str(part) for part in command]
        start = quick.Forked if quick.can_fork(words) else subprocess.Popen
        self.process = start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._commands = io.TextIOWrapper(self.process.stdin)
        self._answers = io.TextIOWrapper(self.process.stdout)

    def begin(self, *command: object) -> None:
        """Send a command; the answer comes with `end`."""
        print(*command, file=self._commands, flush=True)

    def end(self) -> tuple[int, str]:
        """The answer's number and the text after it."""
        line = self._answers.readline()
        assert line, f"the learner has ended: {self.process.wait()}"
        number, _, text = line.rstrip("\n").partition(" ")
        return int(number), text

    def line(self) -> str:
        """An answer as it is."""
        return self._answers.readline().rstrip("\n")

    def ask(self, *command: object) -> tuple[int, str]:
        self.begin(*command)
        return self.end()

    def do(self, *command: object) -> None:
        assert self.ask(*command) == (0, ""), command

    def values(self, command: str) -> tuple[float, float]:
        """Smallest and largest weight."""
        self.begin(command)
        low, high = self.line().split()
        return float(low), float(high)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        try:
            self.process.wait(support.PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._answers.close()


def starter(stack: ExitStack, *command: object) -> Callable[[], Learner]:
    """Start learners that end with the stack."""

    def start() -> Learner:
        made = Learner(*command)
        stack.callback(made.close)
        return made

    return start


class Job:
    """A running job, seen from outside; `word` writes what only its own processes should."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.name = daemon.config.name
        self.socket = daemon.socket
        self._control = segment.attach(
            shm.segment_name(self.name, "control"), SegmentKind.CONTROL, writable=True
        )
        self.control = self._control.view(CONTROL)

    def status(self) -> dict[str, Any]:
        return self.daemon.request(Status())

    def weights(self) -> np.ndarray:
        """All values of all tensors, a copy."""
        part = segment.attach(
            shm.segment_name(self.name, "weights"), SegmentKind.WEIGHTS, writable=False
        )
        model, data = weights.read_table(part), weights.data(part)
        return np.concatenate([view.ravel() for view in model.views(data).values()])

    def between(self) -> np.ndarray:
        """Return a copy of what lies between the tensors of the weights."""
        part = segment.attach(
            shm.segment_name(self.name, "weights"), SegmentKind.WEIGHTS, writable=False
        )
        model, data = weights.read_table(part), weights.data(part)
        inside = np.zeros(model.elements, bool)
        for tensor in model.tensors:
            inside[tensor.start : tensor.start + tensor.count] = True
        return data[~inside]

    def ring(self, row: int) -> np.void:
        return support.ring_of(self.name, row).view(RING)

    def frame(self, row: int, sequence: int) -> tuple[np.void, bytes]:
        """The header and the payload of a frame that has been published, copies."""
        ring = support.ring_of(self.name, row)
        head = ring.view(RING)
        at = int(head["slots_at"]) + sequence % int(head["slots"]) * int(head["slot_bytes"])
        header = ring.array(FRAME, 1, at)[0].copy()
        begin = at + layout.PAYLOAD_AT
        return header, bytes(ring.memory[begin : begin + int(header["payload_bytes"])])

    def scribble(self, row: int) -> None:
        """Fill the slots of a learner, which nobody uses now, with what no frame should keep."""
        name = shm.segment_name(self.name, f"ring.{row}")
        ring = segment.attach(name, SegmentKind.RING, writable=True)
        head = ring.view(RING)
        for slot in range(int(head["slots"])):
            at = int(head["slots_at"]) + slot * int(head["slot_bytes"]) + layout.PAYLOAD_AT
            ring.array(np.dtype(np.uint8), int(head["capacity"]), at)[:] = 0xA5

    @contextmanager
    def full(self) -> Iterator[None]:
        """Every row of the roster is taken, by this process."""
        with Connection(str(self.socket)) as mine:
            taken = [mine.request(Attach(name="")) for _ in range(layout.MAX_LEARNERS)]
            try:
                yield
            finally:
                for one in taken:
                    mine.request(Detach(row=one["row"], generation=one["generation"]))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Shard 0 seems to be in the middle of a write to the weights."""
        self.pause(True)
        sequence = self.control["shard"]["sequence"]
        sequence[0] += 1
        try:
            yield
        finally:
            sequence[0] -= 1
            self.pause(False)

    def grant(self, row: int) -> None:
        """A turn for this learner, whatever the synchronization model says."""
        entry = self._control.word(CONTROL, "roster") + row * ENTRY.itemsize
        _native.store(entry + layout.offset(ENTRY, "grant"), layout.UNBOUNDED)
        _native.bell(entry + layout.offset(ENTRY, "grant_seq"))

    def pause(self, on: bool) -> None:
        """Park the shards: what is published stays in the rings."""
        self.control["pause"] = layout.UNBOUNDED if on else 0
        _native.bell(self._control.word(CONTROL, "shard_bell"))
        shards = int(self.control["shards"])
        parked = self.control["shard"]["parked"]
        support.eventually(lambda: ((parked[:shards] != 0) == on).all())

    def gone(self) -> None:
        """Wait until every learner has left and its ring is freed."""
        support.eventually(lambda: not self.status()["learners"])
        assert not [one for one in presence.find(self.name) if one.part.startswith("ring")]


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
