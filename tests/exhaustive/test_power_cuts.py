"""Power cuts: states of the disk, at every moment of what is written to it.

Real writers are recorded (recorder.c). Of each moment between two of their operations, states are
made in which a disk may be found then, and what is read from them is compared: the old or the new,
whole; and what was said to be written is there. Every combination of the changes of names is made;
of what a file may hold, which is too much to try, the few contents of File.contents() in disk.py.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import writers
from disk import Disk, State, found, put
from preloaded import ask, preloaded
from support.snapshots import one, same
from writers import MODEL, NEW, OLD

from gadei_ps.commands import saved
from gadei_ps.errors import CheckpointError
from gadei_ps.job.config import from_mapping
from gadei_ps.storage import checkpoint
from gadei_ps.storage.export import export
from gadei_ps.watchdog import initial_model

EVERY = 40  # of so many states a short run looks at one, besides the extremes of each moment
EVERY_DEATH = 8
CUT = pytest.mark.timeout(3600)


class Recorder:
    """The process whose forks are recorded."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def record(self, task: str, root: Path, to: Path, die: int = 0) -> int:
        """Run a task; return its exit code. Several tasks may be recorded in one file."""
        to.touch()
        asked = {"task": task, "root": str(root), "log": str(to), "die": die}
        return int(ask(self._process, asked))


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with preloaded("recorder.c", "writers.py") as process:
        yield Recorder(process)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory, where thousands of small files cost little."""
    path = Path(tempfile.mkdtemp(prefix="gps-cuts-", dir="/dev/shm"))
    (path / "root").mkdir()
    yield path
    shutil.rmtree(path)


class Count:
    """The states of one recorded life of a disk, and what is expected of them.

    old: name of what is there before. A writer marks in the record which name it begins to write
    and which it has written; `allowed` are those that may be found: the last one that was written,
    and all that were begun since.
    """

    def __init__(self, place: Path, whole: bool, old: object = None) -> None:
        self.place = place
        self.whole = whole
        self.root = place / "root"
        self.disk = Disk(self.root)
        self.log = place / "log"
        self.allowed: tuple[Any, ...] = (old,)
        self.moments = self.states = self.looked = 0

    def _hear(self, line: str) -> None:
        what, name = line.split()
        self.allowed = (name,) if what == "end" else (*self.allowed, name)

    def run(
        self,
        check: Callable[[Path, tuple[Any, ...]], None],
        seen_as: Callable[[State], object] = lambda state: state,
        every: int = EVERY,
    ) -> None:
        """Look at each state, once for what is allowed. seen_as: what the reader sees of it."""
        known: set[int] = set()
        scratch = self.place / "scratch"
        for line in self.disk.play(self.log):
            if line is not None:
                self._hear(line)
            self.moments += 1
            states = list(self.disk.states())
            for number, state in enumerate(states):
                key = hash((seen_as(state), self.allowed))
                if key in known:
                    continue
                known.add(key)
                self.states += 1
                extreme = number in (0, len(states) - 1)
                if not (self.whole or extreme or self.states % every == 0):
                    continue
                self.looked += 1
                put(state, scratch)
                try:
                    check(scratch, self.allowed)
                except BaseException as error:
                    error.add_note(f"moment {self.moments}, allowed {self.allowed}, in the state:")
                    for path, data in state:
                        error.add_note(f"  {path} {'/' if data is None else len(data)}")
                    raise
        assert self.disk.now() == found(self.root), "the record has all that was done"

    def figures(self, what: str) -> str:
        return (
            f"power cuts, {what}: {self.moments} moments, {self.states} states of the disk, "
            f"{self.looked} looked at"
        )


# -- checkpoints ----------------------------------------------------------------------------------


def read_newest(root: Path, allowed: tuple[str | None, ...]) -> None:
    """Check what `serve`, `restore` and `export` find; then write another checkpoint."""
    directory = root / "jobs" / "a"
    given = {"name": "a-job", "checkpoint": {"every_s": 0, "directory": str(directory)}}
    log = Mock()
    first = initial_model.from_checkpoint(from_mapping(given, "test"), None, log)
    assert not log.error.called, log.error.call_args
    if first is None:
        assert None in allowed, "a checkpoint that was written is gone"
        with pytest.raises(CheckpointError, match=r"no checkpoint in this|no such directory"):
            saved.find(str(directory))
    else:
        assert first.snapshot is not None
        version = first.snapshot.version
        assert str(version) in allowed, f"found version {version}"
        same(first.snapshot, one(version, MODEL))
        known = saved.find(str(directory))
        assert known.problems == ()
        assert known.snapshot.version == version
    for each in checkpoint.found(directory):
        assert checkpoint.read(each.path).version == each.version
    made = checkpoint.write(directory, one(9, MODEL), keep=1)
    assert made.problem is None
    left = {path.name for path in directory.iterdir() if not path.name.startswith("superseded")}
    assert left == {".lock", made.path.name}


@CUT
def test_checkpoints(recorder: Recorder, place: Path, whole: bool, report: list[str]) -> None:
    """Write checkpoints from none on: pruned, written again at the same version, superseded."""
    count = Count(place, whole)
    assert recorder.record("checkpoints", count.root, count.log) == 0
    count.run(read_newest)
    report.append(count.figures("checkpoints"))


@CUT
@pytest.mark.parametrize("there", [False, True], ids=["the first", "another"])
def test_a_writer_is_killed_before(
    recorder: Recorder, place: Path, there: bool, whole: bool, report: list[str]
) -> None:
    """A writer is killed before each of its operations; the next one writes; the power is cut."""
    sums = [0, 0, 0]
    for die in range(1, 100):
        path = place / str(die)
        (path / "root").mkdir(parents=True)
        if there:
            assert recorder.record("two", path / "root", path / "before") == 0
        count = Count(path, whole, "2" if there else None)
        if recorder.record("fourth", count.root, count.log, die) == 0:
            break
        # Distinguished: what was renamed last is not synced, so it may have both names.
        renamed = b"rename " in count.log.read_bytes().splitlines()[-1]
        assert recorder.record("fifth", count.root, count.log) == 0
        if whole or renamed or die % EVERY_DEATH == 2:
            count.run(read_newest)
        counted = count.moments, count.states, count.looked
        sums = [sum(pair) for pair in zip(sums, counted, strict=True)]
        shutil.rmtree(path)
    assert die > 15
    report.append(
        f"power cuts after {die - 1} deaths of a writer: {sums[0]} moments, {sums[1]} states of "
        f"the disk, {sums[2]} looked at"
    )


# -- single files ---------------------------------------------------------------------------------


class Files(Count):
    """Several files, each replaced in turn; `allowed`: what was begun, and what is done (!)."""

    def __init__(self, place: Path, whole: bool, names: tuple[str, ...]) -> None:
        self.names = names
        for name in names:
            if not (place / "root" / name).exists():
                (place / "root" / name).write_bytes(f"old {name}".encode() * 50)
        self.old = {name: (place / "root" / name).read_bytes() for name in names}
        super().__init__(place, whole)
        self.allowed = ()

    def _hear(self, line: str) -> None:
        what, name = line.split()
        self.allowed = (*self.allowed, name if what == "begin" else f"{name}!")

    def check(self, root: Path, allowed: tuple[str, ...]) -> None:
        """Each file is the old one or, once it is begun, the new one; once written, the new one."""
        for name in self.names:
            held = (root / name).read_bytes()
            new = (self.root / name).read_bytes()
            if f"{name}!" in allowed:
                assert held == new, f"{name} was written"
            elif name in allowed:
                assert held in (self.old[name], new), f"{name} is neither the old nor the new one"
            else:
                assert held == self.old[name], f"{name} is not the old one"


@CUT
def test_exports(recorder: Recorder, place: Path, whole: bool, report: list[str]) -> None:
    names = ["out.safetensors", "out.npz"]
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

        names.append("out.pt")
    for name in names:
        export(one(OLD, MODEL), place / "root" / name)
    count = Files(place, whole, tuple(names))
    assert recorder.record("exports", count.root, count.log) == 0
    count.run(count.check)
    report.append(count.figures("exports"))


@CUT
def test_single_files(recorder: Recorder, place: Path, whole: bool, report: list[str]) -> None:
    count = Files(place, whole, ("model.npz", "unit.service", "words.json"))
    assert recorder.record("singles", count.root, count.log) == 0
    count.run(count.check)
    report.append(count.figures("single files"))


@CUT
def test_what_train_and_predict_write(
    recorder: Recorder, place: Path, whole: bool, report: list[str]
) -> None:
    from gadei_ps.classifier.model_directory import load_result

    assert recorder.record("result_of_old", place / "root", place / "before") == 0
    count = Files(place, whole, ("labels.csv",))

    def version(path: Path) -> int | None:
        return load_result(path).config["training"]["version"] if path.exists() else None

    def check(root: Path, allowed: tuple[str, ...]) -> None:
        count.check(root, allowed)
        for name, old in (("new/first", None), ("again", OLD)):
            held = version(root / name)
            if f"{name}!" in allowed:
                assert held == NEW, f"{name} was written"
            else:
                assert held == old or (name in allowed and held == NEW), f"{name} is of {held}"

    assert recorder.record("results", count.root, count.log) == 0
    count.run(check)
    report.append(count.figures("results of train and predict"))


# -- what a start needs ---------------------------------------------------------------------------


@CUT
def test_lock_and_socket(
    recorder: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, report: list[str]
) -> None:
    """A watchdog starts, whatever is left of the lock and the socket of another one."""

    def check(root: Path, allowed: tuple[str, ...]) -> None:
        monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(root / "run"))
        writers.watchdog(root)

    count = Count(place, whole)
    assert recorder.record("watchdog", count.root, count.log) == 0
    count.run(check)
    report.append(count.figures("lock and socket"))


@CUT
def test_compiled_code(
    recorder: Recorder, place: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, report: list[str]
) -> None:
    """A server loads its code or compiles it again, and what it has compiled then is kept."""
    from gadei_ps.kernels import cache

    def load(root: Path) -> bytes | None:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(root))
        return cache.read("toy")

    def check(root: Path, allowed: tuple[str, ...]) -> None:
        code = load(root)
        if code is None:
            cache.keep("toy", made)
            code = load(root)
        assert code == made

    count = Count(place, whole)
    assert recorder.record("code", count.root, count.log) == 0
    made = load(count.root)
    assert made is not None

    def seen(state: State) -> object:
        return tuple(one for one in state if not one[0].endswith(".new"))

    count.run(check, seen, every=4)
    report.append(count.figures("compiled code"))
