"""Finds the checkpoint that a user names by its path, a directory, a job file or a job's name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.errors import (
    CheckpointError,
    CheckpointMistake,
    ControlError,
    JobNotFound,
    OtherVersion,
    UsageError,
)
from gadei_ps.job import config, control, paths
from gadei_ps.job.absence import unseen
from gadei_ps.job.config import JobConfig
from gadei_ps.job.control import Status
from gadei_ps.memory import presence, segment, shm, weights
from gadei_ps.memory.layout import CONTROL, SegmentKind
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.storage.export import export as write_weights

ANSWER_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint and, if a job file led to it, that file's configuration."""

    path: Path
    snapshot: Snapshot
    job: JobConfig | None
    problems: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, one line each."""

    def job_config(self) -> JobConfig:
        """The configuration to serve it with. Raises UsageError if another release wrote it."""
        if self.job is not None:
            return self.job
        return config.from_mapping(self.snapshot.config, str(self.path))


def find(source: str, version: int | None = None) -> Saved:
    """The newest whole checkpoint of `source`, or that of a version.

    source: a checkpoint, a directory of them, a job file, or a job's name (in the state directory).
    Raises CheckpointError, UsageError.
    """
    job = None
    path = Path(source)
    if source.endswith(".toml"):
        job = config.load(path)
        path = job.checkpoint_directory()
    elif not path.is_dir() and "/" not in source:
        path = config.state_directory() / shm.check_job_name(source)
    if (path / checkpoint.MANIFEST).exists() or (path / checkpoint.SUMS).exists():
        if version is not None:
            raise UsageError(f"{path} is one checkpoint; --version needs a directory of them")
        return Saved(path, checkpoint.read(path), job)
    if not path.is_dir():
        state = "" if job or "/" in source else " or set GADEI_PS_STATE_DIR as the job has it"
        raise CheckpointMistake(
            f"{path}: no such directory; give a directory of checkpoints{state}"
        )
    if version is not None:
        for one in checkpoint.found(path):
            if one.version == version:
                return Saved(one.path, checkpoint.read(one.path), job)
        there = ", ".join(str(one.version) for one in checkpoint.found(path)[:8]) or "none"
        raise CheckpointMistake(f"{path}: no checkpoint of version {version}; there are: {there}")
    snapshot, newest, problems = checkpoint.newest(path)
    if snapshot is None or newest is None:
        if problems:
            raise problems[0]
        raise CheckpointMistake(f"{path}: there is no checkpoint in this directory")
    return Saved(newest, snapshot, job, tuple(map(str, problems)))


def export(source: str, out: Path, version: int | None = None) -> dict[str, Any]:
    """Writes the weights of a job in memory, or else of a checkpoint; returns what was written.

    Raises CheckpointError, UsageError.
    """
    snapshot = None
    origin = f"memory of job {source}"
    problems: tuple[str, ...] = ()
    named = "/" not in source and not source.endswith(".toml")
    if version is None and named and not Path(source).is_dir():
        snapshot = _in_memory(source)
    if snapshot is None:
        found = _find_named(source, version) if named else find(source, version)
        snapshot, origin, problems = found.snapshot, str(found.path), found.problems
        if named and version is None and _runs(source):
            problems = (
                f"job {source!r} is running, but the names of its segments are lost (see gadei-ps "
                "doctor): these are the weights of its newest checkpoint, not its current ones",
                *problems,
            )
    write_weights(snapshot, out)
    return {
        "from": origin,
        "problems": list(problems),
        "out": str(out),
        "job": snapshot.job,
        "version": snapshot.version,
        "tensors": len(snapshot.model.tensors),
        "values": snapshot.model.values,
    }


def export_memory(job: str, out: Path) -> None:
    """Writes the weights of a job that is in memory. Raises CheckpointError, UsageError."""
    snapshot = _in_memory(job)
    if snapshot is None:
        raise CheckpointError(f"job {job!r} is not in memory any more")
    write_weights(snapshot, out)


def _find_named(job: str, version: int | None) -> Saved:
    """As find(), but the error says whose job it may be."""
    try:
        return find(job, version)
    except CheckpointError:
        place, why = config.state_directory() / job, unseen(job)
        if not place.is_dir():  # also for the shell's user who has just seen `run` end
            error = CheckpointMistake(
                f"job {job!r} is not in memory and has no checkpoints: {place}: no such directory; "
                "the weights of a job that `run` makes end with its learners: keep them with run "
                "--out FILE, or export while it runs. Else give a directory of checkpoints, or set "
                "GADEI_PS_STATE_DIR as the job has it"
            )
        raise type(error)(f"{error}; {why}" if why else str(error)) from None


def _runs(job: str) -> bool:
    with contextlib.suppress(JobNotFound, ControlError):
        control.ask(job, Status(), ANSWER_TIMEOUT_S)
        return True
    return False


def _in_memory(job: str) -> Snapshot | None:
    """The current weights, read without locks, also of a dead job; None if none are in memory.

    Raises CheckpointError for a job without a model, or of another build of gadei-ps.
    """
    uid = paths.owner()
    if not (presence.living(job, uid).anyone or segment.is_kept(job, uid)):
        return None
    names = [shm.segment_name(job, part, uid) for part in ("control", "weights")]
    try:
        control_ = segment.attach(names[0], SegmentKind.CONTROL, writable=False, owner=uid)
        words = control_.view(CONTROL)
        if not int(words["model_ready"]):
            raise CheckpointError(f"job {job!r} has no model yet; attach a learner first")
        mapped = segment.attach(names[1], SegmentKind.WEIGHTS, writable=False, owner=uid)
    except FileNotFoundError:
        return None
    except OtherVersion as error:
        raise CheckpointError(
            f"job {job!r} is in memory, {error.what}: export it with its own gadei-ps, or give a "
            "checkpoint of it"
        ) from None
    return Snapshot(
        job=job,
        config={},
        model=weights.read_table(mapped),
        weights=weights.data(mapped).copy(),
        slots=(),
        version=int(words["version"]),
        steps=0,
        supersteps=0,
        work={},
        requeue=np.empty(0, np.uint64),
        counts={},
        clocks={},
    )
