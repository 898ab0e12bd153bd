"""Finds the checkpoint that a user names by its path, a directory, a job file or a job's name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps import sync
from gadei_ps.commands.durations import ANSWER_TIMEOUT_S
from gadei_ps.errors import (
    CheckpointError,
    CheckpointMistake,
    ControlError,
    GadeiError,
    JobNotFound,
    OtherVersion,
    UsageError,
)
from gadei_ps.job import config, control, paths
from gadei_ps.job.config import CheckpointConfig, JobConfig
from gadei_ps.job.control import Status
from gadei_ps.job.diagnosis import diagnose_other_users
from gadei_ps.memory import presence, segment, shm, weights
from gadei_ps.memory.layout import CONTROL, SegmentKind
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.storage.export import export as write_weights

KEEP = CheckpointConfig.model_fields["keep"].default


@dataclass(frozen=True)
class Saved:
    """A checkpoint and, if a job file led to it, that file's configuration.

    name: of the job, if the user named it.
    """

    path: Path
    snapshot: Snapshot
    job: JobConfig | None = None
    name: str | None = None
    problems: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, one line each."""

    def job_config(self) -> JobConfig:
        """The configuration to serve it with: that of the job file, or else the checkpoint's own.

        A checkpoint may be from anybody. It has an optimizer and a synchronization model, and names
        no program, path, user or memory: the job has no learners, its checkpoints are written
        beside this one, and all else has the defaults. Raises UsageError where that cannot be.
        """
        if self.job is not None:
            return self.job
        manifest, directory = self.path / checkpoint.MANIFEST, self.path.absolute().parent
        name = self.name or self.snapshot.job
        if self.name is None and segment.is_kept(name, paths.owner()):
            raise UsageError(
                f"{manifest}: the checkpoint is of job {name!r}, whose memory is still there: drop "
                f"that (gadei-ps gc {name}), or give the job file (--job-file)"
            )
        if directory.stat().st_uid != os.geteuid():
            owner = paths.user(directory.stat().st_uid)
            raise UsageError(
                f"{directory}: the job's checkpoints would be written there, and it belongs to "
                f"user {owner}: copy the checkpoint to a directory of yours, or give a job file "
                "(--job-file)"
            )
        has = self.snapshot.config
        values = {key: has[key] for key in ("optimizer", "sync") if has.get(key) is not None}
        optimizer = values.get("optimizer")
        if isinstance(optimizer, dict) and isinstance(groups := optimizer.get("groups"), list):
            # Those of a script have no patterns; the job takes them from the checkpoint.
            matched = all(isinstance(one, dict) and "match" in one for one in groups)
            values["optimizer"] = optimizer | {"groups": groups if matched else []}
        with contextlib.suppress(sync.SpecError):  # from_mapping() reports it
            if sync.names_file(values.get("sync", "asp")):
                raise UsageError(
                    f"{manifest}: the synchronization model of the checkpoint reads a file: give a "
                    "job file that names it (--job-file)"
                )
        there = len(checkpoint.found(directory))
        copies = {"directory": directory, "keep": min(max(KEEP, there), 1000)}
        return config.from_mapping(values | {"name": name, "checkpoint": copies}, str(manifest))

    @property
    def notice(self) -> str:
        """Describe the differences from the checkpoint's job; empty with a job file."""
        if self.job is not None:
            return ""
        return (
            "served without a job file: the job starts no learners, and writes its checkpoints to "
            f"{self.path.absolute().parent}"
        )


def find(source: str, version: int | None = None, job_file: Path | None = None) -> Saved:
    """The newest whole checkpoint of `source`, or that of a version.

    source: a checkpoint, a directory of them, a job file, or a job's name (in the state directory).
    job_file: to serve it with, if `source` is not one. Raises CheckpointError, JobNotFound,
    UsageError.
    """
    job = config.load(job_file) if job_file is not None else None
    name = None
    path = Path(source)
    if source.endswith(".toml"):
        if job is not None:
            raise UsageError(f"--job-file: {source} is a job file already; leave out the option")
        job = config.load(path)
        path = job.checkpoint_directory()
    elif "/" not in source and not (source and path.is_dir()):
        name = shm.check_job_name(source)
        path = config.state_directory() / name
    if (path / checkpoint.MANIFEST).exists() or (path / checkpoint.SUMS).exists():
        if version is not None:
            raise UsageError(f"{path} is one checkpoint; --version needs a directory of them")
        return Saved(path, checkpoint.read(path), job, name)
    if not path.is_dir():
        why = f"{path}: no such directory; give a directory of checkpoints"
        if name is not None:
            raise JobNotFound(f"{why} or set GADEI_PS_STATE_DIR as the job has it")
        raise CheckpointMistake(why)
    if version is not None:
        for one in checkpoint.found(path):
            if one.version == version:
                return Saved(one.path, checkpoint.read(one.path), job, name)
        there = ", ".join(str(one.version) for one in checkpoint.found(path)[:8]) or "none"
        raise CheckpointMistake(f"{path}: no checkpoint of version {version}; there are: {there}")
    snapshot, newest, problems = checkpoint.newest(path)
    if snapshot is None or newest is None:
        if problems:
            raise problems[0]
        raise CheckpointMistake(f"{path}: there is no checkpoint in this directory")
    return Saved(newest, snapshot, job, name, tuple(map(str, problems)))


def export(source: str, out: Path, version: int | None = None) -> dict[str, Any]:
    """Write the weights of a job in memory, or else of a checkpoint; return what was written.

    Raises CheckpointError, JobNotFound, UsageError.
    """
    snapshot = None
    origin = f"memory of job {source}"
    problems: tuple[str, ...] = ()
    named = "/" not in source and not source.endswith(".toml") and not Path(source).is_dir()
    if version is None and named and (held := hold(source)) is not None:
        snapshot = held()
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
    """Write the weights of a job that is in memory. Raises CheckpointError, UsageError."""
    held = hold(job)
    if held is None:
        raise CheckpointError(f"job {job!r} is not in memory any more")
    write_weights(held(), out)


def _find_named(job: str, version: int | None) -> Saved:
    """Call find(); the error names the possible owner of the job."""
    try:
        return find(job, version)
    except (CheckpointError, JobNotFound) as found:
        error: GadeiError = found
        place, why = config.state_directory() / job, diagnose_other_users(job)
        if not place.is_dir():  # also for the shell's user who has just seen `run` end
            error = JobNotFound(
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


def hold(job: str) -> Callable[[], Snapshot] | None:
    """Map the weights of a job, which stay readable when the job ends; None if none are in memory.

    Returns what copies them, without locks. Raises CheckpointError for a job without a model, or of
    another build of gadei-ps.
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
    return lambda: Snapshot(
        job=job,
        config={},
        model=weights.read_table(mapped),
        weights=weights.data(mapped).copy(),
        frozen=weights.frozen(mapped).copy(),
        slots=(),
        version=int(words["version"]),
        steps=0,
        supersteps=0,
        work={},
        requeue=np.empty(0, np.uint64),
        counts={},
        clocks={},
    )
