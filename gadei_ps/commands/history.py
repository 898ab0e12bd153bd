"""Finds and reads the history of a job that runs, or that has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from gadei_ps.commands import jobs
from gadei_ps.errors import ControlError, JobNotFound, UsageError
from gadei_ps.job import config, paths
from gadei_ps.machine import user_files
from gadei_ps.memory import shm
from gadei_ps.monitoring.reading import Reader
from gadei_ps.show import history_view
from gadei_ps.storage import history_file

PART_BYTES = 64 << 10  # of each end of a file, for a list of runs


def find(source: str) -> Path:
    """The file of a job's history. source: its name, its socket, its job file, or the file itself.

    Raises JobNotFound, UsageError.
    """
    path = Path(source)
    if source.endswith(".jsonl"):
        return path if "/" in source or path.exists() else config.state_directory() / path
    if source.endswith(".toml"):
        wanted = config.load(path)
        if not wanted.history:
            raise UsageError(f"{source}: the job keeps no history (history = false)")
        return wanted.history_file()
    if source and path.is_dir():
        return path / "history.jsonl"
    with contextlib.suppress(JobNotFound, ControlError):
        if (file := jobs.status(source)["history"]) is None:
            raise UsageError(f"job {source!r} keeps no history (history = false in its job file)")
        return Path(file)
    if "/" in source:
        raise JobNotFound(f"{source}: no job is there; give its name, or its job file")
    state, name = config.state_directory(), shm.check_job_name(source)
    there = [
        one
        for one in (state / name / "history.jsonl", state / f"{name}.history.jsonl")
        if one.is_file()
    ]
    if not there:
        raise JobNotFound(
            f"job {name!r} is not running and has left no history in {state}; give its job file if "
            "that names a directory for checkpoints, or set GADEI_PS_STATE_DIR as the job has it"
        )
    return max(there, key=lambda one: one.stat().st_mtime)


class Run(NamedTuple):
    """Summary of one run of a job in a history.

    started, changed: times of its first and last line, s since 1970. state: running, or how it has
    ended; empty if its watchdog was killed. accuracy, loss: the last ones.
    """

    job: str
    file: str
    started: float
    changed: float
    state: str
    gradients: int
    accuracy: float | None
    loss: float | None
    command: str


def runs() -> list[Run]:
    """All runs that have a history in the state directory, and of running jobs; newest first."""
    there = [one for one in Reader(paths.owner()).jobs() if one.watchdog_pid and one.history]
    running = {str(one.history): one.name for one in there}
    found = {str(path): path for path in files()} | {name: Path(name) for name in running}
    read = [_run(path, running.get(name)) for name, path in found.items()]
    return sorted((one for one in read if one), key=lambda one: one.changed, reverse=True)


def files() -> list[Path]:
    """Return the histories in the state directory, and in directories of checkpoints there."""
    state = config.state_directory()
    there = (*state.glob("*.history*.jsonl"), *state.glob("*/history*.jsonl"))
    return [path for path in there if history_file.is_own(path.name)]


def _run(path: Path, running: str | None) -> Run | None:
    """None for a file that has no line. running: the job's name, if it runs."""
    try:
        with user_files.open_file(path) as file:
            raw = file.read(PART_BYTES)
            if len(raw) == PART_BYTES:  # of a long one, both ends are enough
                file.seek(max(PART_BYTES, path.stat().st_size - PART_BYTES))
                raw += b"\n" + file.read(PART_BYTES)
    except OSError:
        return None
    found = history_file.parsed(raw)
    if not found:
        return None
    last: dict[str, Any] = {}
    for one in found:
        last |= {name: value for name, value in one.items() if value is not None}
    measured = last.get("measured")
    state = str(found[-1].get("ended", ""))
    return Run(
        job=running or history_file.job_of(path),
        file=str(path),
        started=found[0]["time"],
        changed=found[-1]["time"],
        state="running" if running else state,
        gradients=history_view.gradients(last) or 0,
        accuracy=measured.get("accuracy") if isinstance(measured, dict) else None,
        loss=last.get("loss"),
        command=str(last.get("command", "")),
    )


def read(source: str, last: int | None = None) -> dict[str, Any]:
    """`job`, `file` and `lines`: the whole history, or its last lines.

    Raises JobNotFound, UsageError.
    """
    path = find(source)
    found = lines(path)
    return {"job": source, "file": str(path), "lines": found if last is None else found[-last:]}


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file. Raises UsageError."""
    try:
        with user_files.open_file(path) as file:
            return history_file.parsed(file.read(history_file.MOST_BYTES))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no history yet; it starts a second after the job's model exists"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
