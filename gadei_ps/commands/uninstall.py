"""How uninstall-unit removes what install-unit has written, and what it says is left."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gadei_ps.commands import manager, systemd, units
from gadei_ps.commands.belongings import Belongings, bytes_in
from gadei_ps.commands.manager import INSTANCE
from gadei_ps.commands.units import SERVICE_USER, Scope
from gadei_ps.errors import UsageError
from gadei_ps.show.counts import counted
from gadei_ps.show.tables import size


@dataclass(frozen=True)
class Removed:
    """What uninstall() removed, and what it left: files that are not its own, with the reason.

    memory: of jobs, with the commands that save and discard it. next: commands that leave nothing.
    """

    scope: Scope
    removed: tuple[Path, ...]
    left: tuple[tuple[Path, str], ...]
    memory: tuple[dict[str, Any], ...]
    next: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "scope": self.scope.value,
            "removed": [str(path) for path in self.removed],
            "left": [{"path": str(path), "why": why} for path, why in self.left],
            "memory": list(self.memory),
            "next": list(self.next),
        }


def uninstall(
    scope: Scope, *, force: bool = False, dry_run: bool = False, where: Path | None = None
) -> Removed:
    """Removes what install() has written. Job files, checkpoints and drop-ins stay.

    Waits until what stopped jobs have left has ended. Raises UsageError, and changes nothing, if a
    unit is enabled or runs, unless `force` is given.
    """
    if scope == Scope.SYSTEM and not dry_run and where is None and os.geteuid():
        raise UsageError(
            "--system needs root: sudo gadei-ps uninstall-unit --system, or use --user"
        )
    flag = "" if scope == Scope.SYSTEM else " --user"
    base = where or systemd.directory(scope)
    enabled = sorted(_enabled(base))
    running = manager.instances(scope).used if where is None else ()
    used = sorted({*(path.name for path in enabled), *running})
    if used and not force:
        raise UsageError(
            f"{used[0]} is enabled or running; first: systemctl{flag} disable --now "
            + shlex.join(used)
        )
    if where is None and not force and not dry_run:
        manager.wait_for_ends(scope, systemd.say)
    jobs = where / "gadei-ps" if where else systemd.job_directory(scope)
    set_ = systemd.user_of(systemd.place(scope, units.NAME, where))
    theirs = Belongings.of(scope, jobs, where, set_)
    user = set_ or theirs.owner() or SERVICE_USER
    ours, left = [], []
    for name in units.texts(scope, ""):
        path = systemd.place(scope, name, where)
        if path.is_symlink():
            left.append((path, "it is a link: masked, or somebody else's"))
        elif path.is_file():
            if systemd.MARK in path.read_text(errors="replace"):
                ours.append(path)
            else:
                left.append((path, "gadei-ps has not written it"))
    own = [path for path in base.glob("gadei-ps*@?*.service") if INSTANCE.fullmatch(path.name)]
    left += [(path, "it is a unit of your own for one job") for path in sorted(own)]
    empty = []
    for path in sorted((*base.glob("gadei-ps*@*.d"), *base.glob("gadei-ps*@*.wants"))):
        if path.is_dir() and not any(path.iterdir()):
            empty.append(path)
        elif path.suffix == ".d":
            left.append((path, "it holds your own changes"))
    if jobs.is_dir():
        left.append((jobs, "it holds job files"))
    left += [(one.path, str(one)) for one in theirs.checkpoints()]
    left += [(jobs, why) for why in theirs.elsewhere()[1]]
    left += theirs.others() if scope == Scope.SYSTEM else ()
    memory = theirs.memory([user, SERVICE_USER])
    if not dry_run:
        for path in ours:
            path.unlink()
        for path in empty:
            path.rmdir()
    told = []
    if running:  # while systemd still knows their units
        told.append(f"systemctl{flag} stop {shlex.join(running)}")
    if enabled:
        told.append(f"rm {shlex.join(map(str, enabled))}")
    told.append(f"systemctl{flag} daemon-reload")
    stopping = {found["job"] for name in running if (found := INSTANCE.fullmatch(name))}
    told += theirs.settle(systemd.program(), [one for one in memory if one.job not in stopping])
    if running or memory:
        again = [*systemd.program(), "uninstall-unit", f"--{scope}"]
        told.append(f"{shlex.join(again)}  # again, then: it says what is left")
    elif scope == Scope.SYSTEM:
        made = systemd.place(scope, units.USERS, where) in ours
        told += _remove(theirs, made=made or user == SERVICE_USER)
    saving = tuple(theirs.told(systemd.program(), memory))
    return Removed(scope, (*ours, *empty), tuple(left), saving, tuple(told))


def _remove(theirs: Belongings, *, made: bool) -> list[str]:
    """Commands that leave nothing of stopped and saved jobs; the user is the last thing to go.

    made: whether install-unit has had SERVICE_USER made.
    """
    lines = []
    if theirs.state.is_dir():
        what = "the checkpoints of all jobs"
        if others := theirs.others():
            what += f" and {counted(len(others), 'other file')}"  # a name could end the comment
        total = size(bytes_in(theirs.state))
        lines.append(f"rm -r {shlex.quote(str(theirs.state))}  # {what}, {total}, for ever")
    if made_again := [one for one in (theirs.runtime, theirs.cache) if one.is_dir()]:
        lines.append(f"rm -r {shlex.join(map(str, made_again))}")
    if made and systemd.exists(SERVICE_USER):
        kept = "  # last: files that you keep would be nobody's" if theirs.directories else ""
        lines.append(f"userdel {SERVICE_USER}{kept}")
    return lines


def _enabled(base: Path) -> Iterator[Path]:
    """Links to instances that are started by another unit."""
    for path in base.glob("*.wants/gadei-ps*@*.service"):
        if path.is_symlink() and INSTANCE.fullmatch(path.name):
            yield path
