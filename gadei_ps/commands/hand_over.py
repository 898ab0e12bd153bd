"""Commands that give what former users' jobs have left to the user of the jobs that come.

Root runs them, so they follow nothing that a former user may have put there. They give away only
what belongs to the owner of a directory: of a file, a user could have made a hard link.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gadei_ps.commands.belongings import Belongings, uid_of
from gadei_ps.job import paths
from gadei_ps.storage import checkpoint

OF_FILE_SYSTEMS = "lost+found"  # of root, and for no job
MOST_LINKS = 40  # that one path leads through, as in the kernel
OTHERS_WRITE = 0o022


@dataclass(frozen=True)
class HandOver:
    """commands: in order. notes: what they leave, a line for each."""

    commands: tuple[str, ...]
    notes: tuple[str, ...]


def plan(theirs: Belongings, user: str) -> HandOver:
    """For all directories of the jobs. What is compiled, or of running jobs only, is removed.

    Compiled kernels are pickles: a user's jobs must not load those that another one has written.
    """
    uid = uid_of(user)
    found_elsewhere, unread = theirs.elsewhere()
    commands, notes, given = list[str](), list(unread), dict[int, list[Path]]()
    if theirs.state.is_dir():
        state = theirs.state.resolve()
        for owner in _former(state, uid):
            given.setdefault(owner, []).append(state)
    for job, directory in found_elsewhere:
        named = f"{theirs.job_file(job)}: its checkpoints in {ascii(str(directory))[1:-1]}"
        try:
            owner, others = directory.stat().st_uid, _entries(directory)[1]
            if owner in (0, uid):
                continue
            if not _is_firm(directory):
                notes.append(f"{named} are reached through a link: they are not given to {user}")
                continue
        except OSError as error:
            notes.append(f"{named} cannot be looked at: {error.strerror}")
            continue
        if others:
            notes.append(
                f"{named} lie beside {others[0].name!a}: the directory itself is not given to "
                f"{user}, who has to be able to write there"
            )
        given.setdefault(owner, []).extend(_entries(directory)[0] if others else [directory])
    for owner, found in sorted(given.items()):
        if unique := shlex.join(map(str, dict.fromkeys(found))):
            commands.append(f"chown -hR --from={paths.user(owner)} {user}: {unique}")
    made_again = [theirs.cache]
    if not any(one.living for one in theirs.memory([user])):
        made_again.append(theirs.runtime)
    again = [one for one in made_again if one.is_dir() and _foreign(one, uid)]
    if again:
        commands.append(f"rm -r {shlex.join(map(str, again))}")
    return HandOver(tuple(commands), tuple(notes))


def _entries(directory: Path) -> tuple[list[Path], list[Path]]:
    """What is there for checkpoints, and what is not."""
    found = [path for path in sorted(directory.iterdir()) if path.name != OF_FILE_SYSTEMS]
    own = [path for path in found if checkpoint.is_own(path.name)]
    return own, [path for path in found if path not in own]


def _former(directory: Path, uid: int | None) -> list[int]:
    """Owners of this directory and of those in it, other than this user.

    Root counts only if the directory itself is root's: a learner of root may write into another.
    """
    first = directory.stat().st_uid
    found = {first, *(path.lstat().st_uid for path in _below(directory))}
    return sorted(one for one in found if one != uid and (one or not first))


def _foreign(directory: Path, uid: int | None) -> bool:
    """Whether it or something in it is another user's. What a command of root has left is not."""
    if directory.stat().st_uid != uid:
        return True
    inside = (
        Path(folder, name)
        for folder, folders, files in os.walk(directory)
        for name in (*folders, *files)
    )
    for path in inside:
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid not in (0, uid):
                return True
    return False


def _below(directory: Path) -> Iterator[Path]:
    """Directories in it."""
    for folder, folders, _ in os.walk(directory):
        for name in folders:
            path = Path(folder, name)
            if name != OF_FILE_SYSTEMS and not path.is_symlink():
                yield path


def _is_firm(path: Path) -> bool:
    """Whether only root could have chosen what the path leads to: it is itself no link.

    Links before its end count where somebody else may write beside them.
    """
    if path.is_symlink():
        return False
    for _ in range(MOST_LINKS):
        link = next((one for one in (*reversed(path.parents), path) if one.is_symlink()), None)
        if link is None:
            return True
        beside = link.parent.stat()
        if beside.st_uid or beside.st_mode & OTHERS_WRITE:
            return False
        path = link.parent / link.readlink() / path.relative_to(link)
    return False
