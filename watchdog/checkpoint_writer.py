"""A process that makes one checkpoint: copies the job between two gradients, then writes the copy.

A process of its own, because a disk may block a process that writes to it. A copy for a client goes
into memory alone, so a thread of the watchdog makes it, with the same code. The shards pause for it
until a deadline, so that a checkpoint writer that dies does not hold them. It prints the outcome as
one line of JSON on standard output, and before that MOVED, a line, whenever more has reached the
disk.

For a watchdog that resumes from memory it does not save, but looks at the checkpoints on the disk.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import CheckpointError, CheckpointMistake, GadeiError, in_words
from gadei_ps.job import recorded
from gadei_ps.job.changes import read
from gadei_ps.job.config import JobConfig
from gadei_ps.machine import lines, process
from gadei_ps.memory import layout, owned, segment, totals, weights
from gadei_ps.memory.layout import CONTROL, SHARD, STATE, SegmentKind, Work
from gadei_ps.memory.shm import segment_name
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.watchdog import initial_model

PAUSE_LIMIT_S = 1.0  # and a second for each gigabyte
COPY_ATTEMPTS_S = 20.0  # a failover or a long gradient may come in between
ATTEMPT_INTERVAL_S = 0.05  # between two attempts, for training
COPY_BYTES = 4 << 20  # a piece that one thread copies at a time
PARKED_POLL_NS = 1_000_000
MOVED = b"."  # a line before the outcome: more of the checkpoint is on the disk


@dataclass(frozen=True)
class Task:
    """Order to save. config: written to the checkpoint. files: open segments, by part.

    look_beyond: save nothing, but look for checkpoints newer than this version.
    """

    job: str
    job_id: str
    files: dict[str, int]
    directory: str
    keep: int
    config: dict[str, Any]
    look_beyond: int | None = None


class Saved(TypedDict):
    """Outcome of a checkpoint that is on the disk. aside: a newer one that was set aside."""

    ok: Literal[True]
    path: str
    bytes: int
    version: int
    pause_ms: float
    write_s: float
    problem: str | None
    aside: str | None


class Copied(TypedDict):
    """Outcome of a copy in a client's file. unanswered: ranges of batches of an epoch."""

    ok: Literal[True]
    version: int
    steps: int
    samples: int
    unanswered: owned.Ranges
    pause_ms: float


class Examined(TypedDict):
    """Outcome of a look at checkpoints. newer: version and path of one newer than the memory."""

    ok: Literal[True]
    newer: tuple[int, str] | None


class Failed(TypedDict):
    """Outcome of what failed. mistake: whether the directory can take no checkpoints."""

    ok: Literal[False]
    error: str
    mistake: NotRequired[bool]


def failed_by(why: str) -> Failed:
    return {"ok": False, "error": why}


Parts = tuple[segment.Segment, segment.Segment, segment.Segment]
"""Control, weights and state of a job."""


def attached(task: Task) -> Parts:
    """The segments of a task's job."""
    job_id = bytes.fromhex(task.job_id)

    def attach(part: str, kind: SegmentKind, writable: bool) -> segment.Segment:
        name = segment_name(task.job, part)
        return segment.attach_file(task.files[part], name, kind, writable=writable, job_id=job_id)

    return (
        attach("control", SegmentKind.CONTROL, True),
        attach("weights", SegmentKind.WEIGHTS, False),
        attach("state", SegmentKind.STATE, False),
    )


def copy_bytes(model: weights.Model, state: np.void, *, slots: bool = True) -> int:
    """Return the sizes (bytes) of copies of the weights and optimizer slots. state: STATE."""
    return (1 + (int(state["streams"]) if slots else 0)) * model.elements * 4


class CheckpointWriter:
    """One copy of one job, between two gradients. parts: of attached().

    into: an open file that gets the weights and then each slot; -1: memory of this process does.
    slots: whether those are copied. is_cancelled: whether the copy is not wanted any more.
    """

    def __init__(
        self,
        task: Task,
        parts: Parts,
        into: int = -1,
        *,
        slots: bool = True,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.task = task
        self._is_cancelled = is_cancelled
        self._segment, weights_segment, state_segment = parts
        self._control = self._segment.view(CONTROL)
        self._state = state_segment.view(STATE)
        self._shards = int(self._control["shards"])
        self._model = weights.read_table(weights_segment)
        elements = self._model.elements
        self._sources = [weights.data(weights_segment)]
        self._frozen = weights.frozen(weights_segment)  # nobody writes there
        for stream in range(int(self._state["streams"]) if slots else 0):
            at = int(self._state["slots_at"]) + stream * int(self._state["slot_bytes"])
            self._sources.append(state_segment.array(np.float32, elements, at))
        self._bytes = max(1, copy_bytes(self._model, self._state, slots=slots))
        self._into = into
        # Pages are allocated before the pause: the first access to each takes longer than the copy.
        if into >= 0:
            if os.fstat(into).st_size != self._bytes:
                raise CheckpointError(f"the file for the copy does not have {self._bytes} bytes")
            os.posix_fallocate(into, 0, self._bytes)
            self._copies = self._sources
        else:
            self._memory = mmap.mmap(-1, self._bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            _native.populate(_native.address(self._memory), self._bytes)
            flat = np.frombuffer(self._memory, np.float32, len(self._sources) * elements)
            self._copies = np.split(flat, len(self._sources))
        self._pool = ThreadPoolExecutor(max(1, min(4, process.cores())))
        self._pool.submit(int).result()  # its first thread is there
        self._unanswered: owned.Ranges = []

    def save(self) -> Saved:
        """Write the checkpoint; return the outcome. Raises CheckpointError."""
        snapshot, pause_s = self._take()
        os.nice(5)  # training has priority, now that the shards continue
        changes = read(snapshot.changes)
        if changes.values:
            config = changes.applied(JobConfig.model_validate(snapshot.config))
            snapshot = replace(snapshot, config=config.model_dump(mode="json"))
        written = checkpoint.write(
            Path(self.task.directory), snapshot, self.task.keep, lambda: lines.write(1, MOVED)
        )
        return {
            "ok": True,
            "path": str(written.path),
            "bytes": written.bytes,
            "version": snapshot.version,
            "pause_ms": pause_s * 1e3,
            "write_s": written.seconds,
            "problem": written.problem,
            "aside": str(written.aside) if written.aside else None,
        }

    def copy(self) -> Copied:
        """Copy the job into the file; return the outcome. Raises CheckpointError."""
        with self._pool:
            snapshot, pause_s = self._take()
        return {
            "ok": True,
            "version": snapshot.version,
            "steps": snapshot.steps,
            "samples": snapshot.counts["samples"],
            "unanswered": self._unanswered,
            "pause_ms": pause_s * 1e3,
        }

    def _take(self) -> tuple[Snapshot, float]:
        """A consistent copy and how long the shards stood still for it, s."""
        until = time.monotonic() + COPY_ATTEMPTS_S
        limit_s = PAUSE_LIMIT_S + self._bytes / 1e9
        while time.monotonic() < until and not self._is_cancelled():
            begin = time.monotonic()
            deadline = time.monotonic_ns() + int(limit_s * 1e9)
            self._pause(deadline)
            try:
                if not self._wait_parked(deadline):
                    continue
                moment = self._moment()
                snapshot = self._copy()
                if self._is_paused(deadline) and self._moment() == moment:
                    self._pause(0)
                    return snapshot, time.monotonic() - begin
                limit_s *= 2
            finally:
                self._pause(0)
            time.sleep(ATTEMPT_INTERVAL_S)
        raise CheckpointError(
            f"no moment to copy job {self.task.job!r} within {COPY_ATTEMPTS_S:.0f} s: "
            "is a server alive?"
        )

    def _pause(self, deadline: int) -> None:
        _native.store(self._segment.word(CONTROL, "pause"), deadline)  # SYNC POINT: pause
        for bell in ("shard_bell", "manager_bell"):
            _native.bell(self._segment.word(CONTROL, bell))

    def _wait_parked(self, deadline: int) -> bool:
        """Wait until every shard stands at the same gradient; False if the time is up."""
        while time.monotonic_ns() < deadline and not self._is_cancelled():
            bell = _native.load32(self._segment.word(CONTROL, "manager_bell"))
            if self._all_parked(deadline):
                return True
            _native.futex_wait(self._segment.word(CONTROL, "manager_bell"), bell, PARKED_POLL_NS)
        return False

    def _all_parked(self, deadline: int) -> bool:
        shards = slice(self._shards)
        at = self._segment.word(CONTROL, "shard") + layout.offset(SHARD, "parked")
        parked = [_native.load(at + index * SHARD.itemsize) for index in range(self._shards)]
        if any(one != deadline for one in parked):
            return False
        # Free rows do not count: after a damaged ring their numbers may differ for ever. Neither do
        # steps: not every shard has made the step of a torn gradient.
        roster = self._control["roster"]
        applied = self._state["applied"][shards, roster["generation"] != roster["retired"]]
        records = self._state["record"][shards]
        return bool(
            (applied == applied[0]).all()
            and (records["cursor"] == layout.IDLE).all()
            and (records["supersteps"] == self._control["superstep"]).all()
        )

    def _is_paused(self, deadline: int) -> bool:
        """Return whether nothing can have moved since the shards parked."""
        mine = _native.load(self._segment.word(CONTROL, "pause")) == deadline
        return mine and time.monotonic_ns() < deadline and self._all_parked(deadline)

    def _moment(self) -> tuple[int, ...]:
        """Return the words that change with every gradient.

        A superstep that was about to be published when the pause began is applied within it, and
        the shards park again.
        """
        steps = self._state["record"]["steps"][: self._shards].tolist()
        words = (int(self._control[name]) for name in ("superstep", "version", "numbers_done"))
        return (*words, *steps)

    def _copy(self) -> Snapshot:
        step = COPY_BYTES // 4
        jobs = [
            self._pool.submit(self._copy_piece, number, slice(at, at + step))
            for number, source in enumerate(self._sources)
            for at in range(0, source.size, step)
        ]
        control = self._control
        roster = control["roster"]
        outstanding = roster["outstanding"].reshape(-1)
        requeue = np.concatenate(
            [
                control["requeue"][: int(control["requeued"])],
                outstanding[outstanding != layout.NO_BATCH],
            ]
        )
        self._unanswered = owned.unanswered(control) if owned.is_on(control) else []
        # The watchdog records a change before it takes effect: what is in force is not left out.
        changes = recorded.read_changes(self._segment)
        snapshot = Snapshot(
            job=self.task.job,
            config=self.task.config,
            model=self._model,
            weights=self._copies[0],
            frozen=self._frozen,
            slots=tuple(self._copies[1:]),
            version=int(control["version"]),
            steps=int(self._state["record"]["steps"][: self._shards].max()),
            supersteps=int(control["superstep"]),
            work=self._work(),
            requeue=requeue,
            counts=totals.saved(control),
            loss_sum=totals.losses(control, self._state)[1],
            clocks={
                str(row): int(roster[row]["clock"]) for row in np.flatnonzero(roster["wanted"])
            },
            changes=changes.model_dump(),
        )
        for one in jobs:
            one.result()
        return snapshot

    def _copy_piece(self, number: int, here: slice) -> None:
        """Copy a piece of source `number`.

        A client's file is written and not mapped, for its owner may truncate it, and an access
        beyond its end would end this process.
        """
        source = self._sources[number]
        if self._into < 0:
            np.copyto(self._copies[number][here], source[here])
            return
        data, at = source[here].view(np.uint8), (number * source.size + here.start) * 4
        while data.size and not self._is_cancelled():
            count = os.pwrite(self._into, data.data, at)
            data, at = data[count:], at + count

    def _work(self) -> dict[str, int]:
        """The words of the work ledger. The watchdog, which does not pause, may be storing them."""
        names = ("batches", "epochs", "seed", "next", "epochs_done")
        state = _native.load32(self._segment.word(CONTROL, "work"))  # SYNC POINT: work
        if state == Work.NONE:  # perhaps some are stored; none counts until all are
            return dict.fromkeys(names, 0) | {"state": state}
        return {name: int(self._control[name]) for name in names} | {"state": state}


def look(directory: Path, config: JobConfig, version: int) -> Examined:
    """Examine the directory of a job that resumes from memory at `version`.

    Prints MOVED once checkpoints are known to be possible. Returns the newest checkpoint, if it is
    newer than the memory and the job could resume from it. Raises CheckpointError if none can be
    written, or if the directory cannot be read.
    """
    if config.checkpoint is not None:
        checkpoint.check(directory)
    lines.write(1, MOVED)
    newer = None
    if any(one.version > version for one in checkpoint.found(directory)):
        with contextlib.suppress(CheckpointError):  # then no start could take it
            snapshot, path, _ = checkpoint.newest(directory)
            if snapshot is not None and path is not None and snapshot.version > version:
                initial_model.check_fits(config, snapshot, path)
                newer = snapshot.version, str(path)
    return {"ok": True, "newer": newer}


def main() -> None:
    """Make one checkpoint. The watchdog starts this program, and writes its task to its input."""
    process.end_first()
    try:
        task = Task(**json.load(sys.stdin))
        if task.look_beyond is not None:
            config = JobConfig.model_validate(task.config)
            outcome: Saved | Examined | Failed = look(
                Path(task.directory), config, task.look_beyond
            )
        else:
            outcome = CheckpointWriter(task, attached(task)).save()
    except (GadeiError, OSError, MemoryError, RuntimeError) as error:  # the last: no more threads
        mistake = isinstance(error, CheckpointMistake)
        outcome = {"ok": False, "error": in_words(error), "mistake": mistake}
    print(json.dumps(outcome), flush=True)
    sys.exit(0 if outcome["ok"] else 1)


if __name__ == "__main__":
    main()
