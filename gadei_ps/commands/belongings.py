"""What jobs of the units have on this machine: directories, checkpoints, and memory of dead ones.

It belongs to the user that the jobs ran as. So another user, and a machine without the units, need
commands that hand it on, save it, or remove it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from gadei_ps import homes
from gadei_ps.commands.units import Scope
from gadei_ps.errors import GadeiError
from gadei_ps.job import config, paths
from gadei_ps.memory import presence, segment
from gadei_ps.memory.shm import JOB_NAME
from gadei_ps.show.counts import counted
from gadei_ps.show.tables import size
from gadei_ps.storage import checkpoint, history


@dataclass(frozen=True)
class Memory:
    """Memory of a job in /dev/shm.

    kept: whether it is more than the rest of a stopped job, so that it can be saved. saves: whether
    the job makes a last checkpoint. living: whether processes of the job run. build: how its build
    differs from this program's.
    """

    job: str
    uid: int
    bytes: int
    kept: bool
    saves: bool
    living: bool
    build: str | None

    @property
    def user(self) -> str:
        return paths.user(self.uid)

    def __str__(self) -> str:
        found = f"memory of job {self.job} of user {self.user}, {size(self.bytes)}"
        if self.living:
            return f"{found}: the job runs"
        what = "it may be more than any checkpoint has" if self.kept else "nothing can be saved"
        return f"{found}: {what}"


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a job in a directory. bytes: of all files there."""

    job: str
    path: Path
    count: int
    bytes: int

    def __str__(self) -> str:
        found = counted(self.count, "checkpoint")
        return f"it holds {found} of job {self.job}, {size(self.bytes)}"


@dataclass(frozen=True)
class Belongings:
    """Where jobs of the units have what is theirs.

    jobs: directory of job files. home: of the user that they run as, None for this process's.
    """

    scope: Scope
    jobs: Path
    state: Path
    cache: Path
    runtime: Path
    home: Path | None = None

    @classmethod
    def of(
        cls, scope: Scope, jobs: Path, where: Path | None = None, user: str | None = None
    ) -> Belongings:
        """where: what stands for the root directory, in tests. user: of the system's units."""
        if scope == Scope.SYSTEM:
            home = None
            if user is not None and uid_of(user) is not None:
                home = Path(pwd.getpwnam(user).pw_dir)
            places = (homes.STATE, homes.CACHE, homes.RUNTIME)
            state, cache, runtime = (
                where / one.relative_to("/") if where else one for one in places
            )
            return cls(scope, jobs, state, cache, runtime, home)
        if where:
            return cls(scope, jobs, where / "state", where / "cache", where / "runtime")
        state_directory, cache_directory = config.state_directory(), platformdirs.user_cache_path()
        return cls(
            scope,
            jobs,
            state_directory,
            cache_directory / "gadei-ps",
            platformdirs.user_runtime_path() / "gadei-ps",
        )

    @property
    def directories(self) -> tuple[Path, ...]:
        """Those of all jobs that are there."""
        return tuple(one for one in (self.state, self.cache, self.runtime) if one.is_dir())

    def job_file(self, job: str) -> Path:
        return self.jobs / f"{job}.toml"

    def owner(self) -> str | None:
        """The user whose the directories are; None without them, or if they are root's."""
        for one in self.directories:
            if uid := one.stat().st_uid:
                return paths.user(uid)
        return None

    def _known(self) -> set[str]:
        """Names of jobs that the units have served, or may have."""
        found = {path.stem for path in self.jobs.glob("*.toml")}
        if self.scope == Scope.SYSTEM:  # a user's own directories are not those of the units only
            with contextlib.suppress(OSError):
                found |= {path.name for path in self.state.iterdir()}
            found |= {path.stem for path in self.runtime.glob("[!.]*.*")}
        return {one for one in found if JOB_NAME.fullmatch(one)}

    def memory(self, users: Iterable[str]) -> tuple[Memory, ...]:
        """Of the units' jobs; users: that they ran as, in addition to the directories' owners."""
        owners = {os.getuid()}
        if self.scope == Scope.SYSTEM:
            owners = {one.stat().st_uid for one in self.directories}
            owners |= {uid for one in users if (uid := uid_of(one)) is not None}
        known, bytes_ = self._known(), dict[tuple[str, int], int]()
        for one in presence.find():
            if not one.foreign and one.uid in owners and one.job in known:
                bytes_[one.job, one.uid] = bytes_.get((one.job, one.uid), 0) + one.size
        return tuple(
            Memory(
                job,
                uid,
                total,
                segment.is_kept(job, uid),
                _saves(job, uid),
                presence.living(job, uid).anyone,
                segment.other_build(job, uid),
            )
            for (job, uid), total in sorted(bytes_.items())
        )

    def elsewhere(self) -> tuple[list[tuple[str, Path]], list[str]]:
        """Job and directory of checkpoints that a job file has put somewhere else.

        And a line for each job file of which that cannot be told.
        """
        found, unread = [], []
        for path in sorted(self.jobs.glob("*.toml")):
            try:
                told = config.load(path, self.home).checkpoint
                if told is not None and told.directory is not None and told.directory.is_dir():
                    found.append((path.stem, told.directory))
            except (GadeiError, OSError) as error:
                why = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
                unread.append(f"{why}: its checkpoints have not been looked for")
        return found, unread

    def checkpoints(self) -> tuple[Checkpoints, ...]:
        """All of the units' jobs, of others, too, for a user's own."""
        folders = {path.resolve(): (job, path) for job, path in self.elsewhere()[0]}
        with contextlib.suppress(OSError):
            for path in sorted(self.state.iterdir()):
                if path.is_dir() and JOB_NAME.fullmatch(path.name):
                    folders[path.resolve()] = (path.name, path)
        found = []
        for job, path in folders.values():
            with contextlib.suppress(OSError, GadeiError):
                if count := len(checkpoint.found(path)):
                    found.append(Checkpoints(job, path, count, bytes_in(path)))
        return tuple(found)

    def others(self) -> tuple[tuple[Path, str], ...]:
        """What is in the directory of the state besides checkpoints(), with a description."""
        known = {one.path for one in self.checkpoints() if one.path.is_relative_to(self.state)}
        there = [one for one in _entries(self.state) if not history.is_own(one.name)]
        found = [(path, "directory of checkpoints") for path in there]
        found = [one for one in found if one[0] not in known]
        for folder in sorted(known):
            own = [path for path in _entries(folder) if not checkpoint.is_own(path.name)]
            found += [(path, "checkpoint") for path in own]
        sizes = ((path, what, bytes_in(path)) for path, what in found)
        return tuple((path, f"it is no {what}, {size(one)}") for path, what, one in sizes if one)

    # -- commands ---------------------------------------------------------------------------------

    def _command(self, program: Sequence[str], uid: int, *words: str) -> str:
        """A command of gadei-ps that sees the units' jobs, as the user of the memory."""
        line = [*program, *words]
        if self.scope == Scope.SYSTEM:
            given = (
                f"GADEI_PS_RUNTIME_DIR={self.runtime}",
                f"GADEI_PS_STATE_DIR={self.state}",
                f"NUMBA_CACHE_DIR={self.cache.parent}",
            )
            line = [*_as(uid), "env", *given, *line]
        return shlex.join(line)

    def save(self, program: Sequence[str], one: Memory) -> str:
        """The command that saves this memory and ends the job.

        Of a job without a last checkpoint, it saves the weights, and the memory stays. Those of the
        system's jobs are written where their user may write, and end where no advice removes them.
        """
        if not one.saves:
            if self.scope == Scope.USER:
                return self._command(program, one.uid, "export", one.job, f"{one.job}.safetensors")
            out = str(self.state / f"{one.job}.safetensors")
            export = self._command(program, one.uid, "export", one.job, out)
            move = shlex.join(["mv", "--backup=numbered", out, f"{kept_in()}/"])
            return f"{export} && {move}"
        file = str(self.job_file(one.job))
        return self._command(program, one.uid, "serve", "--finish", "--name", one.job, file)

    def discard(self, program: Sequence[str], one: Memory) -> str:
        """The command that removes this memory."""
        return self._command(program, one.uid, "gc", one.job)

    def stop(self, program: Sequence[str], one: Memory) -> str:
        """The command that stops the job of this memory."""
        return self._command(program, one.uid, "stop", one.job)

    def settle(self, program: Sequence[str], found: Iterable[Memory]) -> list[str]:
        """Lines that leave nothing of this memory: commands, and comments before them.

        What removes memory that can be saved is run only after that, or is a comment.
        """
        lines = []
        for one in found:
            if one.living:
                lines += [f"# {one}. Stop it:", self.stop(program, one)]
            elif one.kept:
                own = f", with its own gadei-ps (it was {one.build})" if one.build else ""
                how = "Save it" if one.saves else "Save its weights, and remove it"
                lines.append(f"# {one}. {how}{own}:")
                save, discard = self.save(program, one), self.discard(program, one)
                if one.saves:
                    lines += [save, f"# or discard it: {discard}"]
                elif one.build:
                    lines += [f"({save})", f"# and then: {discard}"]
                else:
                    lines.append(f"({save} && {discard})")
            else:
                lines += [f"# {one}. Remove it:", self.discard(program, one)]
        return lines

    def told(self, program: Sequence[str], found: Iterable[Memory]) -> list[dict[str, Any]]:
        """The same for programs."""
        return [
            {
                "what": str(one),
                "job": one.job,
                "user": one.user,
                "bytes": one.bytes,
                "save": self.save(program, one) if one.kept else None,
                "discard": self.discard(program, one),
            }
            for one in found
        ]


def kept_in() -> Path:
    """Where root keeps weights that are saved as the last of a job."""
    return Path(pwd.getpwuid(0).pw_dir)


def _saves(job: str, uid: int) -> bool:
    """Whether the job makes a last checkpoint; its own gadei-ps tells if this one cannot."""
    control = presence.peek(job, uid)
    return control is None or bool(int(control["saves"]))


def uid_of(user: str) -> int | None:
    """None if there is no such user."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def _as(uid: int) -> list[str]:
    """The beginning of a command that root runs as this user, who may have been removed."""
    try:
        return ["runuser", "-u", pwd.getpwuid(uid).pw_name, "--"]
    except KeyError:
        return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def bytes_in(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    total = 0
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for one in inside if path.is_dir() and not path.is_symlink() else (path,):
        with contextlib.suppress(FileNotFoundError):
            total += one.lstat().st_size
    return total
