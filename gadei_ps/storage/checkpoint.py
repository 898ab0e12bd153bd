"""Checkpoints on disk: written whole or not at all, and verified to the last bit when read.

    DIRECTORY/
        checkpoint-000000001234/   its version; written again at that version: .2, .3 and so on
            weights.safetensors    the tensors by name, float32
            state.safetensors      "requeue", uint64 (n,); "0/NAME", "1/NAME": slots, float32
            manifest.json          all else, and what those two hold
            SHA256SUMS             of these three, for sha256sum -c
        superseded-checkpoint-*/   of a higher version than one written later
        .tmp-*/                    in the making or in removal; swept by the next writer
        .lock                      held by the process that writes

A checkpoint becomes visible by one rename, when all of it is on the disk, and goes by one rename,
when a newer one is there to stay. So the newest visible checkpoint is whole, whichever process dies
at whichever instant. This module knows files only, no shared memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gadei_ps.errors import CheckpointError
from gadei_ps.storage import files
from gadei_ps.storage.snapshot import Snapshot, parse

__all__ = ["FoundCheckpoint", "Snapshot", "WrittenCheckpoint", "found", "newest", "read", "write"]

MANIFEST: Final = "manifest.json"
STATE: Final = "state.safetensors"
WEIGHTS: Final = "weights.safetensors"
SUMS: Final = "SHA256SUMS"

LOCK_TIMEOUT_S: Final = 10.0
_MOST_SUMS: Final = 1 << 12  # bytes
_NAME: Final = re.compile(r"checkpoint-([0-9]{12,20})(?:\.([0-9]{1,9}))?")
_SUPERSEDED: Final = re.compile(rf"superseded-{_NAME.pattern}(\.[0-9]{{1,9}})?")
_SUM: Final = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that is on the disk.

    problem: one line if older ones could not be removed. aside: the newest of those of a higher
    version that were there, under its name from now on.
    """

    path: Path
    bytes: int
    seconds: float
    problem: str | None = None
    aside: Path | None = None


class FoundCheckpoint(NamedTuple):
    """A checkpoint known by its name only; it may be damaged."""

    path: Path
    version: int


# -- writing --------------------------------------------------------------------------------------


def write(
    directory: Path, snapshot: Snapshot, keep: int, on_disk: Callable[[], object] | None = None
) -> WrittenCheckpoint:
    """Write a checkpoint, then remove all but the newest `keep`.

    on_disk: called whenever more of it has reached the disk.

    An older one of the same version is replaced. Those of a higher version are of a run that was
    given up when an older checkpoint was restored; they are set aside as superseded-*, or the next
    restart would take them for the newest. Of these the last `keep` stay too. The arrays are
    neither copied nor changed. Raises CheckpointError, after which the checkpoints are those that
    were there before.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1: {keep}")
    begin = time.monotonic()
    try:
        snapshot.check()
        files.make_directory(directory)
        with _locked(directory):
            _sweep(directory)
            path, size = _write_new(directory, snapshot, on_disk)
            problem, aside = _remove_old(directory, path, snapshot.version, keep)
    except ValueError as error:
        raise CheckpointError(f"{directory}: no checkpoint written: {error}") from None
    except OSError as error:
        raise files.unwritten(directory, "no checkpoint written", error) from None
    return WrittenCheckpoint(path, size, time.monotonic() - begin, problem, aside)


def check(directory: Path) -> None:
    """Make the directory. Raises CheckpointError if no checkpoint can be written into it."""
    try:
        files.make_directory(directory)
        probe = _temporary(directory)
        probe.mkdir()
        with contextlib.suppress(FileNotFoundError):  # a writer has tidied up meanwhile
            probe.rmdir()
    except OSError as error:
        raise files.unwritten(directory, "cannot be written", error) from None


def _sweep(directory: Path) -> None:
    """Remove what writers that died have left. The caller holds the lock."""
    left = list(directory.glob(".tmp-*"))
    if left:
        # It may be a checkpoint whose renaming is not on the disk yet, and which a power failure
        # would make visible again.
        files.sync(directory)
    for one in left:
        _delete(one)


def _write_new(
    directory: Path, snapshot: Snapshot, on_disk: Callable[[], object] | None
) -> tuple[Path, int]:
    """Make a new checkpoint visible. Returns its path and its bytes."""
    made = _temporary(directory)
    try:
        made.mkdir()
        sums, total = "", 0
        for name, blocks in (
            (MANIFEST, [snapshot.manifest()]),
            (STATE, files.safetensors(snapshot.state_tensors())),
            (WEIGHTS, files.safetensors(snapshot.weight_tensors())),
        ):
            digest, size = files.write(made / name, blocks, on_disk)
            sums += f"{digest}  {name}\n"
            total += size
        total += files.write(made / SUMS, [sums.encode()])[1]
        path = directory / _next_name(directory, snapshot.version)
        files.replace_directory(made, path)
    except BaseException:
        _delete(made)
        raise
    return path, total


def _remove_old(
    directory: Path, path: Path, version: int, keep: int
) -> tuple[str | None, Path | None]:
    """Once the checkpoint `path` is there to stay. Returns `problem` and `aside` of `Written`."""
    kept, removed, newest_aside = 1, [], None
    try:
        for one in found(directory):
            if one.path == path:
                continue
            if one.version > version:
                to = _unused(one.path.with_name(f"superseded-{one.path.name}"))
                one.path.rename(to)
                newest_aside = newest_aside or to
            elif one.version < version and kept < keep:
                kept += 1
            else:
                removed.append(one.path.rename(_temporary(directory)))
        aside = [old for old in directory.iterdir() if _SUPERSEDED.fullmatch(old.name)]
        aside.sort(key=lambda old: old.stat().st_mtime_ns)
        removed += [old.rename(_temporary(directory)) for old in aside[:-keep]]
        # Gone for good, before any file is: a power failure must not leave half of one visible.
        files.sync(directory)
        for old in removed:
            _delete(old)
    except OSError as error:
        problem = str(files.unwritten(directory, "older checkpoints cannot be removed", error))
        return problem, newest_aside
    return None, newest_aside


def _next_name(directory: Path, version: int) -> str:
    """A name that ranks above all others of this version."""
    taken = [one for one in map(_rank, directory.iterdir()) if one and one[0] == version]
    return f"checkpoint-{version:012}" + (f".{max(taken)[1] + 1}" if taken else "")


def _unused(path: Path) -> Path:
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _temporary(directory: Path) -> Path:
    return directory / f".tmp-{os.getpid()}-{secrets.token_hex(6)}"


def _delete(path: Path) -> None:
    """Remove what can be removed of a temporary; the next writer tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time; the kernel takes the lock from a dead one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(directory / ".lock", flags, 0o666), "wb") as file:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    what = "no checkpoint written (another process is writing one)"
                    remedy = "give each job its directory"
                    raise files.failure(directory, what, remedy, error) from None
                time.sleep(0.02)
        try:
            yield
        finally:
            # Closing is not enough where a forked child has inherited the file.
            fcntl.flock(file, fcntl.LOCK_UN)


# -- reading --------------------------------------------------------------------------------------


def found(directory: Path) -> list[FoundCheckpoint]:
    """Return the checkpoints, newest first, by their names only; none without a directory.

    Raises CheckpointError if the directory cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            paths = [directory / entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"cannot be read ({files.reason(error)})"
        raise files.failure(directory, what, "name a directory of checkpoints", error) from None
    ranked = sorted(((rank, path) for path in paths if (rank := _rank(path))), reverse=True)
    return [FoundCheckpoint(path, rank[0]) for rank, path in ranked]


def _rank(path: Path) -> tuple[int, int] | None:
    """Version and number of a checkpoint, by its name; None for anything else."""
    name = _NAME.fullmatch(path.name)
    return (int(name[1]), int(name[2] or 1)) if name else None


def newest(directory: Path) -> tuple[Snapshot | None, Path | None, list[CheckpointError]]:
    """The newest checkpoint that is whole, its path, and what is wrong with each newer one.

    Raises CheckpointError if the directory cannot be read, or if a checkpoint that may be whole
    cannot be: an older one would lose what it has.
    """
    tried: set[Path] = set()
    problems: list[CheckpointError] = []
    # Listed again after each failure: a writer may have replaced this one by a newer.
    while fresh := [one.path for one in found(directory) if one.path not in tried]:
        path = fresh[0]
        tried.add(path)
        try:
            return read(path), path, problems
        except CheckpointError as error:
            if error.may_be_whole:
                raise
            if path.exists():
                problems.append(error)
    return None, None, problems


def read(path: Path) -> Snapshot:
    """Read a checkpoint and verify all of it.

    Raises CheckpointError: one line that names the file and what is wrong with it.
    """
    sums = _read_sums(path / SUMS)
    with files.verified(path / MANIFEST, sums.get(MANIFEST), files.MOST_TEXT) as file:
        manifest, model = parse(file.read_text(file.left))
        if (rank := _rank(path)) and rank[0] != manifest.version:
            raise ValueError(f"it is of version {manifest.version}, unlike its directory's name")
    if sums.keys() != {MANIFEST, STATE, WEIGHTS}:
        raise files.damaged(path / SUMS, f"it is of {', '.join(sums)}")
    room = files.MOST_TEXT + 8  # of a header
    size = sum(one.bytes for one in model.every)
    with files.verified(path / WEIGHTS, sums[WEIGHTS], size + room) as file:
        # Before memory is taken: a manifest cannot ask for more than there is.
        file.need(size)
        made = manifest.snapshot(model)
        file.fill_tensors(made.weight_tensors())
    slot = 4 * sum(one.count for one in model.tensors)
    most = slot * manifest.slots + 8 * manifest.requeue + room
    with files.verified(path / STATE, sums[STATE], most) as file:
        file.need(most - room)
        file.fill_tensors(made.state_tensors())
        manifest.work.check(made.requeue)
    return made


def _read_sums(path: Path) -> dict[str, str]:
    """SHA-256 by file name. Only one spelling is understood: then every flipped bit is seen."""
    with files.opened(path, _MOST_SUMS) as file:
        try:
            text = file.read_text(file.left).decode()
        except ValueError as error:
            raise files.damaged(path, str(error)) from None
    sums, at = {}, 0
    while line := _SUM.match(text, at):
        sums[line[2]], at = line[1], line.end()
    if at != len(text) or not sums:
        raise files.damaged(path, "not lines of a SHA-256 and a name")
    return sums
