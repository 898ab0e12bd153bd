"""Finds and reads the history of a job that runs, or that has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gadei_ps.commands import jobs
from gadei_ps.errors import ControlError, JobNotFound, UsageError
from gadei_ps.job import config
from gadei_ps.machine import given
from gadei_ps.memory import shm
from gadei_ps.storage import history


def find(source: str) -> Path:
    """The file of a job's history. source: its name, its socket, its job file, or the file itself.

    Raises UsageError.
    """
    path = Path(source)
    if source.endswith(".jsonl"):
        return path
    if source.endswith(".toml"):
        wanted = config.load(path)
        if not wanted.history:
            raise UsageError(f"{source}: the job keeps no history (history = false)")
        return wanted.history_file()
    if path.is_dir():
        return path / "history.jsonl"
    with contextlib.suppress(JobNotFound, ControlError):
        told = jobs.status(source)["history"]
        if told is None:
            raise UsageError(f"job {source!r} keeps no history (history = false in its job file)")
        return Path(told)
    if "/" in source:
        raise UsageError(f"{source}: no job is there; give its name, or its job file")
    state, name = config.state_directory(), shm.check_job_name(source)
    there = [
        one
        for one in (state / name / "history.jsonl", state / f"{name}.history.jsonl")
        if one.is_file()
    ]
    if not there:
        raise UsageError(
            f"job {name!r} is not running and has left no history in {state}; give its job file if "
            "that names a directory for checkpoints, or set GADEI_PS_STATE_DIR as the job has it"
        )
    return max(there, key=lambda one: one.stat().st_mtime)


def read(source: str, last: int | None = None) -> dict[str, Any]:
    """`job`, `file` and `lines`: the whole history, or its last lines. Raises UsageError."""
    path = find(source)
    try:
        with given.opened(path) as file:
            lines = history.parsed(file.read(history.MOST_BYTES))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no history yet; it begins a second after the job's model is there"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return {"job": source, "file": str(path), "lines": lines if last is None else lines[-last:]}
