"""Processes of a benchmark. Each gets orders as lines of JSON, and answers each with one line.

`peers.orders` is the other end. The processes end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gadei_ps.machine import process

START_S = 30.0
ANSWER_S = 60.0
END_S = 10.0  # a round may take seconds on a busy machine


class Failed(Exception):
    """A process of a gang has ended or does not answer. The message says why."""


class Gang:
    """Some processes with their pipes.

    commands: arguments of `python`, by process. how: the signal that ends them when this process
    dies. Raises Failed if one of them does not become ready within start_s.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        launcher: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        how: signal.Signals = signal.SIGKILL,
        start_s: float = START_S,
    ) -> None:
        self._how = how
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rest: list[bytes] = []
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (close() does it)
        try:
            for command in commands:
                child = process.spawn(
                    [*launcher, sys.executable, "-P", *command],
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    how=how,
                )
                self._processes.append(child)
                self._rest.append(b"")
            self._answers(len(self._processes), start_s)
        except BaseException:
            self.close()
            raise

    def ask(
        self, order: Mapping[str, Any], first: int | None = None, timeout_s: float = ANSWER_S
    ) -> list[dict[str, Any]]:
        """Send an order to the first processes, or to all; return the answers. Raises Failed."""
        count = len(self._processes) if first is None else first
        line = json.dumps(order).encode() + b"\n"
        for child in self._processes[:count]:
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
            except OSError:
                raise Failed(self._why("has ended")) from None
        return self._answers(count, timeout_s)

    def seconds(
        self, order: Mapping[str, Any], first: int | None = None, timeout_s: float = ANSWER_S
    ) -> float:
        """Send a timed order. Returns the seconds from the first start to the last end."""
        spans = [answer for answer in self.ask(order, first, timeout_s) if "begin" in answer]
        began: float = min(span["begin"] for span in spans)
        ended: float = max(span["end"] for span in spans)
        return ended - began

    def _answers(self, count: int, timeout_s: float) -> list[dict[str, Any]]:
        until = time.monotonic() + timeout_s
        return [json.loads(self._line(index, until)) for index in range(count)]

    def _line(self, index: int, until: float) -> bytes:
        pipe = self._processes[index].stdout
        assert pipe is not None
        while b"\n" not in self._rest[index]:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Failed(self._why("does not answer"))
            part = os.read(pipe.fileno(), 65536)
            if not part:
                raise Failed(self._why("has ended"))
            self._rest[index] += part
        line, _, self._rest[index] = self._rest[index].partition(b"\n")
        return line

    def _why(self, what: str) -> str:
        """A message with the last line that one of them has written to standard error."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        return told[-1][:200] if told else what

    def close(self) -> None:
        """End the processes. Closes their input first, so that they can clean up."""
        for child in self._processes:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
        until = time.monotonic() + END_S
        for child in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            if child.poll() is None:
                child.send_signal(self._how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(END_S)
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # and its children
                child.wait()
            assert child.stdout is not None
            child.stdout.close()
        self._processes.clear()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def mpi_gang(module: str, ranks: int, *arguments: str) -> Gang:
    """An MPI program. Rank 0 gets the orders. Raises Failed if there is no mpiexec."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise Failed("no mpiexec: pip install mpich")
    # mpi4py's runner ends all ranks after an exception in one. The ranks are in process groups of
    # their own; mpiexec ends them when it gets SIGTERM.
    return Gang(
        [["-m", "mpi4py", "-m", module, *arguments]],
        launcher=[mpiexec, "-n", str(ranks)],
        how=signal.SIGTERM,
    )
