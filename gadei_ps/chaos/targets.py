"""The job whose processes `gadei-ps chaos` hits: its own, or a given one.

In its own job, chaos counts gradients (tally.py), and restarts learners and the watchdog when they
die. The watchdog restarts servers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass

from gadei_ps.chaos.counted_learner import EXACT, LEDGER
from gadei_ps.chaos.tally import Count, Ring, Tally
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import ControlError, JobFailed, SegmentError, UsageError
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.faults import Processes, Role, Target
from gadei_ps.machine import interrupts, process
from gadei_ps.machine.launch import JOB_VARIABLE
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Phase
from gadei_ps.memory.totals import total
from gadei_ps.show.counts import counted

POLL_S = 0.002
DRAIN_S = 60.0
HANG_S = 1.0  # some stops last longer, so that the watchdog has to kill hung servers
MAX_FAILURES = 20  # failures in a row of learners that were not hit
ADAPTIVE_LR = 1e-3


@dataclass(frozen=True)
class OwnJob:
    """Options of chaos's own job. size: bytes of weights. verbose: show its processes' output."""

    learners: int = 2
    optimizer: str = EXACT
    size: int = 2_000_000
    shards: int = 0
    verbose: bool = False

    def config(self) -> JobConfig:
        """Raise UsageError."""
        values = max(1, self.size // 4 // layout.CHUNK) * layout.CHUNK
        # With a rate of 1, the results of SGD are whole numbers, and exact.
        rate, ledger = (1.0, LEDGER) if self.optimizer == EXACT else (ADAPTIVE_LR, 0)
        wanted = from_mapping(
            {
                "name": f"chaos-{os.getpid()}",
                "optimizer": {"kind": self.optimizer, "lr": rate},
                "shards": self.shards,
                "history": False,
                "hang_s": HANG_S,
                "tensors": [{"name": "w", "shape": [values]}]
                + ([{"name": "ledger", "shape": [ledger]}] if ledger else []),
            },
            "chaos",
        )
        shards = wanted.resolved_shards(values + ledger)
        if layout.shard_range(values + ledger, shards, shards - 1)[0] >= values:
            raise UsageError(
                f"--size: {self.size} bytes are too few for {counted(shards, 'shard')}; "
                f"use at least {LEDGER * 4 * shards}"
            )
        return wanted


class ExistingJob:
    """A given job. Chaos starts nothing in it."""

    def __init__(self, job: str) -> None:
        self.processes = Processes(job)
        if self.processes.server() is None and self.processes.watchdog() is None:
            raise ControlError(f"job {self.processes.job!r} is dead: it has no server, no watchdog")

    def maintain(self) -> None:
        if int(self.processes.control["phase"]) > Phase.DRAINING:
            raise JobFailed(f"job {self.processes.job!r} has ended")

    def learners(self) -> list[Target]:
        return self.processes.learners()

    def count(self) -> Count | None:
        return None


@dataclass(eq=False)
class _Learner:
    """A learner of chaos's own job: its process, and its ring after it attached."""

    child: subprocess.Popen[bytes]
    output: bytes = b""
    target: Target | None = None
    ring: Ring | None = None


class CountedJob:
    """Chaos's own job, whose gradients it can count."""

    def __init__(self, daemon: Daemon, wanted: OwnJob) -> None:
        self._daemon = daemon
        self._wanted = wanted
        self.processes = Processes(daemon.config.name)
        self._tally = Tally(daemon.config.name)
        self._learners: list[_Learner] = []
        self._failures = 0

    def __enter__(self) -> CountedJob:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._learners:
            one.child.kill()
            one.child.wait()

    def maintain(self) -> None:
        """Restart dead processes. Lets learners push when their rings are mapped."""
        self._daemon.check()
        while len(self._learners) < self._wanted.learners:
            self._learners.append(self._start())
        for one in list(self._learners):
            if one.child.poll() is not None:
                self._remove(one)
            elif one.ring is None:
                self._admit(one)

    def learners(self) -> list[Target]:
        return [one.target for one in self._learners if one.target is not None]

    def _start(self) -> _Learner:
        child = process.spawn(
            process.module_command("gadei_ps.chaos.counted_learner", self._wanted.optimizer),
            env=os.environ | {JOB_VARIABLE: str(self._daemon.socket), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._wanted.verbose else subprocess.DEVNULL,
        )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        return _Learner(child)

    def _admit(self, one: _Learner) -> None:
        assert one.child.stdout is not None
        assert one.child.stdin is not None
        one.output += one.child.stdout.read() or b""
        if not one.output.endswith(b"\n"):
            return
        row, generation = map(int, one.output.split())
        # If the ring's name is gone already, the learner is dying and has pushed nothing.
        with contextlib.suppress(FileNotFoundError, SegmentError, BrokenPipeError):
            one.ring = Ring(self.processes.job, row, generation)
            start = process.start_ticks(one.child.pid)
            one.target = Target(Role.LEARNER, one.child.pid, start, row, generation)
            one.child.stdin.write(b"\n")
            one.child.stdin.flush()

    def _remove(self, one: _Learner) -> None:
        self._learners.remove(one)
        if one.ring is not None and one.target is not None:
            assert one.target.generation is not None
            self._tally.add(one.target.generation, one.ring.published)
        for pipe in (one.child.stdin, one.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._failures = self._failures + 1 if one.child.returncode > 0 else 0
        if self._failures >= MAX_FAILURES:
            raise JobFailed("learners fail again and again without being hit; --verbose shows why")

    def count(self) -> Count | None:
        """Kill the learners, wait until their published gradients are consumed, and count."""
        for one in list(self._learners):
            one.child.kill()
            one.child.wait()
            self._remove(one)
        until = time.monotonic() + DRAIN_S
        roster = self.processes.control["roster"]
        while (roster["retired"] != roster["generation"]).any() and time.monotonic() < until:
            interrupts.check()
            self._daemon.check()
            time.sleep(POLL_S)
        return self._tally.count(total(self.processes.control, "dropped"))
