"""Checkpoints: what is read is what was written, and only the newest are kept.

`one(version)` makes a snapshot whose every part follows from its version, so that a checkpoint put
together from two can be recognized.
"""

from __future__ import annotations

import fcntl
import json
import math
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import FILES, MODEL, models, names, one, same, sha256sum

from gadei_ps.errors import CheckpointError
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Model, Tensor, place
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot, found, newest, read, write

# -- what is read is what was written -------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        model=models,
        slots=st.integers(0, 2),
        requeued=st.integers(0, 20),
        version=st.integers(0, 2**63 - 1),
        clocks=st.dictionaries(st.text(max_size=9), st.integers(0, 2**64 - 1), max_size=3),
    )
    def holds(model: Model, slots: int, requeued: int, version: int, clocks: Any) -> None:
        given_one = one(1, model, slots, requeued)
        given_one = Snapshot(**vars(given_one) | {"version": version, "clocks": clocks})
        with tempfile.TemporaryDirectory(dir=tmp_path) as name:
            made = write(Path(name), given_one, keep=1)
            same(read(made.path), given_one)
            assert found(Path(name)) == [(made.path, version)]
            plain = safetensors.numpy.load_file(made.path / "weights.safetensors")
            for tensor, expected in given_one.arrays().items():
                got = plain.pop(tensor)
                assert got.shape == expected.shape
                assert got.tobytes() == expected.tobytes()
            assert not plain
            state = safetensors.numpy.load_file(made.path / "state.safetensors")
            assert len(state) == 1 + slots * len(model.tensors)
            assert state["requeue"].tobytes() == given_one.requeue.tobytes()

    holds()


def test_what_a_checkpoint_is(tmp_path: Path) -> None:
    made = write(tmp_path / "new" / "directory", one(1234), keep=1)
    assert made.path == tmp_path / "new" / "directory" / "checkpoint-000000001234"
    assert names(made.path) == FILES
    assert made.bytes == sum((made.path / name).stat().st_size for name in FILES)
    assert made.seconds > 0
    assert made.problem is None
    sha256sum(made.path)
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["gadei_ps"] and manifest["time"] and manifest["job"] == "a-job"
    assert manifest["tensors"][0] == {
        "name": "block/0.weight",
        "role": "parameter",
        "shape": [7, 3],
        "start": 0,
    }
    path = tmp_path / "renamed"
    made.path.rename(path)
    same(read(path), one(1234))


def test_empty_tensors(tmp_path: Path) -> None:
    model = place(
        [
            Tensor("first", (0, 3)),
            Tensor("a", (7, 3)),
            Tensor("none", (4, 0), aliases=("also none",)),
            Tensor("nothing", (0,), Role.BUFFER),
            Tensor("b", (2,), Role.BUFFER),
            Tensor("last", (0,), Role.BUFFER),
        ]
    )
    given_one = one(3, model)
    path = write(tmp_path, given_one, keep=1).path
    same(read(path), given_one)
    assert safetensors.numpy.load_file(path / "weights.safetensors")["none"].shape == (4, 0)
    only = one(4, place([Tensor("void", (0,))]), requeued=0)
    same(read(write(tmp_path, only, keep=1).path), only)


def test_numbers_and_arrays_as_shared_memory_has_them(tmp_path: Path) -> None:
    given_one = one(6)
    for array in (given_one.weights, *given_one.slots, given_one.requeue):
        array.flags.writeable = False
    shared = Snapshot(
        **vars(given_one)
        | {
            "version": np.uint64(6),
            "steps": np.uint64(7),
            "work": {name: np.uint64(value) for name, value in given_one.work.items()},
        }
    )
    same(read(write(tmp_path, shared, keep=1).path), given_one)


def test_padding_is_not_kept(tmp_path: Path) -> None:
    dirty = one(1)
    dirty.weights[22:32] = 5
    same(read(write(tmp_path, dirty, keep=1).path), one(1))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"weights": np.zeros(3, np.float32)}, "not one of the model's"),
        ({"weights": np.zeros(MODEL.elements)}, "float64"),
        ({"weights": np.zeros(2 * MODEL.elements, np.float32)[::2]}, "not contiguous"),
        ({"slots": (np.zeros(MODEL.elements, np.float32),) * 3}, "slots: "),
        ({"requeue": np.zeros(3, np.int64)}, "requeue is int64"),
        ({"requeue": np.zeros(2**12 + 1, np.uint64)}, "requeue: "),
        ({"requeue": np.zeros(1, np.uint64) + (7 << 32)}, "batch 0 of epoch 7"),
        ({"job": "../x"}, "job: "),
        ({"config": {"name": Path("x")}}, "config"),
        ({"config": {"lr": math.inf}}, "JSON"),
    ],
)
def test_what_could_not_be_read_is_not_written(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    write(tmp_path, one(1), keep=1)
    with pytest.raises(CheckpointError, match=why):
        write(tmp_path, Snapshot(**vars(one(2)) | changed), keep=1)
    assert names(tmp_path) == ["checkpoint-000000000001"]


def test_a_name_that_safetensors_reserve(tmp_path: Path) -> None:
    model = place([Tensor("a", (2,)), Tensor("__metadata__", (2,))])
    with pytest.raises(CheckpointError, match="'__metadata__'"):
        write(tmp_path, one(1, model), keep=1)
    assert names(tmp_path) == []


# -- which ones are there -------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (5, 20, 100, 3_000_000_000_000):
        write(tmp_path, one(version), keep=2)
    assert [version for _, version in found(tmp_path)] == [3_000_000_000_000, 100]
    assert len(names(tmp_path)) == 2
    snapshot, path, problems = newest(tmp_path)
    assert (path, problems) == (tmp_path / "checkpoint-3000000000000", [])
    assert snapshot is not None
    same(snapshot, one(3_000_000_000_000))
    with pytest.raises(ValueError, match="keep"):
        write(tmp_path, one(1), keep=0)


def test_the_same_version_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, one(4), keep=3)
    for number in range(2, 13):
        again = one(5, requeued=number)
        path = write(tmp_path, again, keep=3).path
        assert [version for _, version in found(tmp_path)] == [5, 4]
        same(read(path), again)
    assert path.name == "checkpoint-000000000005.11", "ranked as a number"


def test_those_of_a_run_that_was_given_up_are_set_aside(tmp_path: Path) -> None:
    """Checkpoint 10 is restored though there is 30; after 15 a restart begins there, not at 30."""
    for version in (10, 20, 30):
        write(tmp_path, one(version), keep=3)
    write(tmp_path, one(15), keep=3)
    assert [version for _, version in found(tmp_path)] == [15, 10]
    write(tmp_path, one(30), keep=3)
    write(tmp_path, one(16), keep=3)
    aside = "superseded-checkpoint-0000000000"
    assert names(tmp_path)[-3:] == [f"{aside}20", f"{aside}30", f"{aside}30.2"]
    same(read(tmp_path / f"{aside}30"), one(30))
    mine = tmp_path / f"{aside}30.mine"
    mine.mkdir()
    write(tmp_path, one(12), keep=2)
    assert names(tmp_path)[-3:] == [f"{aside}16", f"{aside}30.2", mine.name], "written last"


def test_nothing_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, None, [])
    assert found(tmp_path / "none") == []
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-000000000012").touch()
    (tmp_path / "checkpoint-000000000012x").mkdir()
    assert newest(tmp_path) == (None, None, [])
    with pytest.raises(CheckpointError, match="missing"):
        read(tmp_path / "none")
    with pytest.raises(CheckpointError, match="Not a directory"):
        found(tmp_path / "checkpoint-000000000012")


def test_others_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-000000000001").write_text("mine")
    (tmp_path / ".tmp").mkdir()
    for version in (1, 2):
        write(tmp_path, one(version), keep=1)
    assert names(tmp_path) == [
        ".tmp",
        "checkpoint-000000000001",
        "checkpoint-000000000002",
        "notes.txt",
    ]


def test_what_dead_writers_have_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".tmp-123-abc").mkdir()
    (tmp_path / ".tmp-123-abc" / "weights.safetensors").write_bytes(bytes(100))
    (tmp_path / ".tmp-124-abc").touch()
    write(tmp_path, one(1), keep=1)
    assert names(tmp_path) == ["checkpoint-000000000001"]


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOCK_TIMEOUT_S", 0.1)
    with open(tmp_path / ".lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (tmp_path / ".tmp-123-abc").mkdir()
        with pytest.raises(CheckpointError, match="another process is writing"):
            write(tmp_path, one(1), keep=1)
        assert names(tmp_path) == [".tmp-123-abc"], "not swept: its writer lives"
    write(tmp_path, one(1), keep=1)


def _write_many(pipe: Connection, directory: Path, first: int) -> None:
    for version in range(first, first + 40, 2):
        write(directory, one(version), keep=2)


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """They wait for each other, and the reader never sees a directory without a whole one."""
    write(tmp_path, one(1), keep=1)
    with (
        support.fork(1, _write_many, tmp_path, 2) as left,
        support.fork(1, _write_many, tmp_path, 3) as right,
    ):
        while left[0].alive or right[0].alive:
            snapshot, _, problems = newest(tmp_path)
            assert snapshot is not None
            assert not problems
            same(snapshot, one(snapshot.version))
        assert left[0].join() == right[0].join() == 0
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]
