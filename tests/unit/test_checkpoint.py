"""Checkpoints: what is read is what was written, damage is named, and kills leave a whole one.

Real files, real SIGKILLs, a file system that is really full. What the tests count on:

- `one(version)` makes a snapshot whose every part follows from its version, so that a checkpoint
  put together from two can be told;
- `forge` changes the contents and makes the checksums anew, as no damage does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import support
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import CheckpointError, UsageError
from gadei_ps.job.config import from_mapping
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Model, Tensor, place
from gadei_ps.storage import checkpoint, files
from gadei_ps.storage.checkpoint import Snapshot, found, newest, read, write
from gadei_ps.storage.export import export

FILES = ["SHA256SUMS", "manifest.json", "state.safetensors", "weights.safetensors"]
TENSORS = [
    Tensor("block/0.weight", (7, 3)),
    Tensor("größe", ()),
    Tensor("mean", (5,), Role.BUFFER),
]
MODEL = place(TENSORS)


def values_of(model: Model, seed: int) -> np.ndarray:
    """Bit patterns of all kinds, NaNs among them; padding is zero."""
    drawn = np.random.default_rng(seed).integers(0, 2**32, model.values, np.uint32)
    flat = np.zeros(model.elements, np.float32)
    at = 0
    for one in model.tensors:
        flat.view(np.uint32)[one.start : one.start + one.count] = drawn[at : at + one.count]
        at += one.count
    return flat


def one(version: int, model: Model = MODEL, slots: int = 2, requeued: int = 5) -> Snapshot:
    return Snapshot(
        job="a-job",
        config=from_mapping({"name": "a-job"}, "test").model_dump(mode="json"),
        model=model,
        weights=values_of(model, 3 * version),
        slots=tuple(values_of(model, 3 * version + 1 + slot) for slot in range(slots)),
        version=version,
        steps=version + 1,
        supersteps=version + 2,
        work={"batches": 10, "epochs": 3, "seed": 7, "next": 1 << 32 | version, "state": 1},
        requeue=np.arange(version, version + requeued, dtype=np.uint64) << np.uint64(40),
        counts={"applied": version, "dropped": 0, "refused": 2, "samples": 1 << 60},
        clocks={"learner-0": version, "zweiter": 0},
    )


def same(left: Snapshot, right: Snapshot) -> None:
    for name in ("job", "config", "model", "version", "steps", "supersteps"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("work", "counts", "clocks"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(left.slots) == len(right.slots)
    arrays = zip((left.weights, *left.slots), (right.weights, *right.slots), strict=True)
    for mine, other in arrays:
        assert mine.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32))
    assert left.requeue.dtype == right.requeue.dtype == np.uint64
    np.testing.assert_array_equal(left.requeue, right.requeue)


def names(directory: Path) -> list[str]:
    """All that is there but the lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def sha256sum(path: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--strict", "--check", "SHA256SUMS"], cwd=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 3


def refused(path: Path, file: str, *why: str) -> str:
    """The checkpoint is refused in one line that names the file."""
    with pytest.raises(CheckpointError) as info:
        read(path)
    said = str(info.value)
    assert "\n" not in said
    assert str(path / file) in said
    for word in why:
        assert word in said
    return said


# -- what is read is what was written -------------------------------------------------------------

tensor_names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=119
).filter(lambda name: len(name.encode()) <= weights.NAME_BYTES and name != "__metadata__")
shapes = st.lists(st.integers(1, 9), max_size=layout.MAX_DIMS).filter(
    lambda shape: math.prod(shape) <= 3000
)
models = st.lists(
    st.builds(
        lambda name, shape, role: Tensor(name, tuple(shape), role),
        tensor_names | st.sampled_from(["requeue", "0/a", "/", "../../etc/passwd", "file"]),
        shapes,
        st.sampled_from(Role),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda tensor: tensor.name,
).map(place)


def test_round_trip(tmp_path: Path) -> None:
    @settings(max_examples=60, deadline=None)
    @given(
        model=models,
        slots=st.integers(0, 2),
        requeued=st.integers(0, 20),
        version=st.integers(0, 2**64 - 1),
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
            for tensor, expected in model.views(given_one.weights).items():
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
    """No job has any, but the files may."""
    start, chunk = layout.rounded(21, weights.LINE), layout.CHUNK
    tensors = (
        Tensor("first", (0, 3)),
        Tensor("a", (7, 3)),
        Tensor("none", (4, 0), start=start),
        Tensor("nothing", (0,), Role.BUFFER, chunk),
        Tensor("b", (2,), Role.BUFFER, chunk),
        Tensor("last", (0,), Role.BUFFER, chunk + weights.LINE),
    )
    model = Model(tensors, chunk + weights.LINE, chunk)
    given_one = one(3, model)
    path = write(tmp_path, given_one, keep=1).path
    same(read(path), given_one)
    assert safetensors.numpy.load_file(path / "weights.safetensors")["none"].shape == (4, 0)
    only = one(4, Model((Tensor("void", (0,)),), 0, 0), requeued=0)
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
        ({"slots": (np.zeros(MODEL.elements, np.float32),) * 3}, "3 slots"),
        ({"requeue": np.zeros(3, np.int64)}, "requeue is int64"),
        ({"requeue": np.zeros(2**20 + 1, np.uint64)}, "more than can be requeued"),
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


# -- damage ---------------------------------------------------------------------------------------


def test_damage_is_seen(tmp_path: Path) -> None:
    """A bit flipped, a tail cut off or bytes added, anywhere in any file."""
    path = write(tmp_path, one(9), keep=1).path
    whole = {name: (path / name).read_bytes() for name in FILES}

    @settings(max_examples=300, deadline=None)
    @given(name=st.sampled_from(FILES), how=st.sampled_from(["flip", "cut", "add"]), data=st.data())
    def holds(name: str, how: str, data: st.DataObject) -> None:
        raw = bytearray(whole[name])
        at = data.draw(st.integers(0, len(raw) - 1))
        if how == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del raw[at:]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            if raw == whole[name]:
                return
        (path / name).write_bytes(raw)
        try:
            with pytest.raises(CheckpointError) as info:
                read(path)
        finally:
            (path / name).write_bytes(whole[name])
        assert name in str(info.value)
        assert "\n" not in str(info.value)

    holds()
    same(read(path), one(9))


def test_every_byte_of_the_checksums_counts(tmp_path: Path) -> None:
    """Also where a flip changes how a digit is written and not what it says."""
    path = write(tmp_path, one(9), keep=1).path
    whole = (path / "SHA256SUMS").read_bytes()
    for at, bit in itertools.product(range(len(whole)), (0, 5)):
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        (path / "SHA256SUMS").write_bytes(raw)
        with pytest.raises(CheckpointError, match="SHA256SUMS"):
            read(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, one(9), keep=1).path
    (path / name).unlink()
    refused(path, name, "missing")
    (path / name).mkdir()
    refused(path, name, "Is a directory")
    (path / name).rmdir()
    os.mkfifo(path / name)
    refused(path, name)
    (path / name).unlink()
    (path / name).touch()
    refused(path, name, "damaged")


def test_the_one_before_is_used(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        write(tmp_path, one(version), keep=4)
    (tmp_path / "checkpoint-000000000004" / "weights.safetensors").write_bytes(b"")
    shutil.rmtree(tmp_path / "checkpoint-000000000003")
    (tmp_path / "checkpoint-000000000003").mkdir()
    snapshot, path, problems = newest(tmp_path)
    assert path == tmp_path / "checkpoint-000000000002"
    assert snapshot is not None
    same(snapshot, one(2))
    assert len(problems) == 2
    assert "checkpoint-000000000004/weights.safetensors: damaged" in problems[0]
    assert "checkpoint-000000000003/SHA256SUMS: missing" in problems[1]
    write(tmp_path, one(3), keep=1)
    assert names(tmp_path) == ["checkpoint-000000000003.2", "superseded-checkpoint-000000000004"]


# -- foreign ones: the checksums are right, the contents are not ----------------------------------


def forge(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a manifest's fields or a file's tensors."""
    if name == "manifest.json":
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(change(fields) or fields))
    else:
        tensors = safetensors.numpy.load_file(path / name)
        safetensors.numpy.save_file(change(tensors) or tensors, path / name)
    make_sums(path)


def make_sums(path: Path) -> None:
    (path / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n"
            for name in FILES[1:]
        )
    )


def test_another_writer_may_order_tensors_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, one(9), keep=1).path
    state, plain = path / "state.safetensors", path / "weights.safetensors"
    turned = dict(reversed(one(9).state_tensors().items()))
    state.write_bytes(b"".join(files.safetensors(turned)))
    metadata = {"format": "pt"}
    safetensors.numpy.save_file(safetensors.numpy.load_file(plain), plain, metadata=metadata)
    make_sums(path)
    same(read(path), one(9))


def test_another_job_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, one(9), keep=1).path
    forge(path, "manifest.json", lambda fields: fields.update(job="another"))
    assert read(path).job == "another"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: ["x"], "not a JSON object"),
        (lambda m: {"kind": "else"}, "not the manifest"),
        (lambda m: m.update(kind=None), "not the manifest"),
        (lambda m: m.update(format=2), "format 2"),
        (lambda m: m.update(format="1"), "format '1'"),
        (lambda m: m.pop("work") and None, "work is NoneType"),
        (lambda m: m.update(version=-1), "version is negative"),
        (lambda m: m.update(version=True), "version is bool"),
        (lambda m: m.update(version=8), "version 8"),
        (lambda m: m.update(steps=1.0), "steps is float"),
        (lambda m: m.update(job=3), "job is int"),
        (lambda m: m.update(counts={"applied": "1"}), "counts"),
        (lambda m: m.update(clocks={"a": True}), "clocks"),
        (lambda m: m.update(slots=3), "3 slots"),
        (lambda m: m.update(requeue=2**40), "requeued"),
        (lambda m: m.update(elements=2**40), "elements"),
        (lambda m: m.update(parameters=16), "elements"),
        (lambda m: m.update(tensors=[]), "no tensors"),
        (lambda m: m.update(tensors=[{"name": "a"}]), "does not describe"),
        (lambda m: m["tensors"][0].update(role="else"), "does not describe"),
        (lambda m: m["tensors"][0].update(shape=[1.5]), "does not describe"),
        (lambda m: m["tensors"][0].update(shape=[-1]), "impossible shape"),
        (lambda m: m["tensors"][0].update(shape=[1] * 9), "impossible shape"),
        (lambda m: m["tensors"][0].update(shape=[2**20, 2**20, 2**20]), "begins at"),
        (lambda m: m["tensors"][2].update(shape=[2**50]), "too many values"),
        (lambda m: m["tensors"][0].update(name="x" * 120), "impossible name"),
        (lambda m: m["tensors"][0].update(name="\ud800"), "impossible name"),
        (lambda m: m["tensors"][0].update(name="mean"), "twice"),
        (lambda m: m["tensors"][1].update(start=0), "begins at 0"),
        (lambda m: m["tensors"][1].update(start=1 << 40), "begins at"),
        (lambda m: m["tensors"].reverse(), "begins at"),
    ],
)
def test_foreign_manifests(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    path = write(tmp_path, one(9), keep=1).path
    forge(path, "manifest.json", change)
    said = refused(path, "manifest.json", why)
    assert "damaged" not in said


@pytest.mark.parametrize("raw", [b"", b"\xff", b"{", b"[" * 100_000, b"9" * 5000])
def test_manifests_that_are_not_json(tmp_path: Path, raw: bytes) -> None:
    path = write(tmp_path, one(9), keep=1).path
    (path / "manifest.json").write_bytes(raw)
    make_sums(path)
    refused(path, "manifest.json", "not JSON")


def float64(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name].astype(np.float64)


def turned(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name] = tensors[name].T.copy()


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("weights.safetensors", lambda t: t.update(more=np.zeros(1)), "'more'"),
        ("weights.safetensors", lambda t: t.pop("mean") is None, "'mean' is missing"),
        ("weights.safetensors", lambda t: t.update({"x": t.pop("mean")}), "'mean' is missing"),
        ("weights.safetensors", lambda t: float64(t, "mean"), "'F64', not 'F32'"),
        ("weights.safetensors", lambda t: turned(t, "block/0.weight"), "[3, 7], not [7, 3]"),
        ("state.safetensors", lambda t: t.pop("1/mean") is None, "'1/mean' is missing"),
        ("state.safetensors", lambda t: t.update({"2/mean": t["1/mean"]}), "'2/mean'"),
        ("state.safetensors", lambda t: t.pop("requeue") is None, "'requeue' is missing"),
        ("state.safetensors", lambda t: t.update(requeue=t["requeue"][1:].copy()), "[4], not [5]"),
        ("state.safetensors", lambda t: float64(t, "requeue"), "'F64', not 'U64'"),
    ],
)
def test_foreign_tensors(
    tmp_path: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any], why: str
) -> None:
    def changed(tensors: dict[str, np.ndarray]) -> None:
        change(tensors)

    path = write(tmp_path, one(9), keep=1).path
    forge(path, name, changed)
    said = refused(path, name, why)
    assert "damaged" not in said


def header(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """The file with another header."""

    def fake(raw: bytes) -> bytes:
        size = int.from_bytes(raw[:8], "little")
        fields = json.loads(raw[8 : 8 + size])
        changed = change(fields)
        text = json.dumps(fields if changed is None else changed).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + size :]

    return fake


@pytest.mark.parametrize(
    ("fake", "why"),
    [
        (header(lambda h: h.update(mean=1)), "not described"),
        (header(lambda h: h["mean"].update(data_offsets=[0, 20])), "data_offsets"),
        (header(lambda h: h["mean"].update(data_offsets=[88, 2**60])), "data_offsets"),
        (header(lambda h: h["mean"].update(data_offsets=[-20, 0])), "data_offsets"),
        (header(lambda h: h["mean"].update(data_offsets="x")), "data_offsets"),
        (header(lambda h: h["mean"].update(shape=[2**62])), "shape"),
        (header(lambda h: []), "not a JSON object"),
        (lambda raw: raw + b"x", "1 bytes behind the last tensor"),
        (lambda raw: raw[:-1], "ends too early"),
        (lambda raw: raw[:5], "5 bytes where"),
        (lambda raw: b"\xff" * 8 + raw[8:], "needed"),
    ],
)
def test_foreign_files(tmp_path: Path, fake: Callable[[bytes], bytes], why: str) -> None:
    path = write(tmp_path, one(9), keep=1).path
    (path / "weights.safetensors").write_bytes(fake((path / "weights.safetensors").read_bytes()))
    make_sums(path)
    refused(path, "weights.safetensors", why)


def test_names_in_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path, one(9), keep=1).path
    text = (path / "SHA256SUMS").read_text()
    (path / "SHA256SUMS").write_text(text.replace("weights.s", "../weights.s"))
    refused(path, "SHA256SUMS", "../weights.safetensors")


# -- kills ----------------------------------------------------------------------------------------

BIG = place([Tensor("a", (300, 1000)), Tensor("b", (1000,), Role.BUFFER)])


def _write_on(pipe: Connection, directory: Path, first: int) -> None:
    """Every third version is written twice."""
    for count in itertools.count(first):
        version = count - count // 3
        write(directory, one(version, BIG), keep=2)
        pipe.send(version)


def test_kills_at_random_instants(tmp_path: Path) -> None:
    first, written, left = 1, 0, 0
    for round_ in range(25):
        with support.fork(1, _write_on, tmp_path, first) as (child,):
            child.receive()
            time.sleep(random.Random(round_).random() * 0.1)
            child.signal(signal.SIGKILL)
            support.eventually(lambda child=child: not child.alive)
            with contextlib.suppress(EOFError):
                while True:
                    written = max(written, child.receive())
        left += any(name.startswith(".tmp") for name in names(tmp_path))
        snapshot, path, problems = newest(tmp_path)
        assert problems == []
        assert snapshot is not None
        assert path is not None
        assert snapshot.version >= written, "what was said to be written is there"
        same(snapshot, one(snapshot.version, BIG))
        sha256sum(path)
        first = snapshot.version * 3 // 2 + 1
    assert left, "some kills hit a write"
    write(tmp_path, one(10**6, BIG), keep=1)
    assert names(tmp_path) == ["checkpoint-000001000000"]


STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def _die_at(pipe: Connection, directory: Path, version: int, step: int) -> None:
    """Writes a checkpoint and is killed when it is about to do its step-th thing with files."""
    steps = itertools.count()

    def hook(event: str, args: object) -> None:
        if event in STEPS and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write(directory, one(version), keep=2)


@pytest.mark.parametrize("version", [15, 20, 30], ids=["superseding", "replacing", "pruning"])
def test_a_kill_before_each_step(tmp_path: Path, version: int) -> None:
    """The newest before is the newest after, or the new one is; others are whole as well."""
    start = tmp_path / "start"
    for old in (10, 20):
        write(start, one(old), keep=2)
    seen = set()
    for step in range(200):
        directory = tmp_path / str(step)
        shutil.copytree(start, directory)
        with support.fork(1, _die_at, directory, version, step) as (child,):
            code = child.join()
        snapshot, path, problems = newest(directory)
        assert not problems
        assert snapshot is not None
        assert path is not None
        same(snapshot, one(snapshot.version))
        seen.add(path.name)
        assert all(read(each.path).version == each.version for each in found(directory))
        write(directory, one(40), keep=1)
        assert [name for name in names(directory) if name[:10] != "superseded"] == [
            "checkpoint-000000000040"
        ]
        shutil.rmtree(directory)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert step > 12
    again = ".2" if version == 20 else ""
    assert seen == {"checkpoint-000000000020", f"checkpoint-{version:012}{again}"}


def test_the_order_of_what_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, their directory, the rename, the parent; then old ones go, and then their files."""
    write(tmp_path, one(1), keep=1)
    done: list[tuple[str, str]] = []
    fsync, rename, unlink = os.fsync, os.rename, os.unlink

    def seen_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name[:5]))

    def seen_rename(old: Path, new: Path) -> None:
        rename(old, new)
        done.append(("rename", Path(new).name[:5]))

    def seen_unlink(path: Any, **options: Any) -> None:
        unlink(path, **options)
        done.append(("unlink", ""))

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    monkeypatch.setattr(os, "unlink", seen_unlink)
    write(tmp_path, one(2), keep=1)
    parent = ("fsync", tmp_path.name[:5])
    assert done == [
        *[("fsync", name[:5]) for name in [*FILES[1:], FILES[0]]],
        ("fsync", ".tmp-"),
        ("rename", "check"),
        parent,
        ("rename", ".tmp-"),
        parent,
        *[("unlink", "")] * 4,
    ]


# -- disks that do not take it --------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own, which may be mounted again with other options."""
    path = tmp_path / "mounted"
    path.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "gadei-ps-test", path]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", path], check=True)


def kept(directory: Path, before: list[str]) -> None:
    """What was there is there, whole, and nothing else."""
    assert names(directory) == before
    for each in found(directory):
        same(read(each.path), one(each.version, BIG))


def test_a_full_disk(mount: Callable[[str], Path]) -> None:
    directory = mount("size=10m") / "checkpoints"
    write(directory, one(1, BIG), keep=5)
    write(directory, one(2, BIG), keep=5)
    before = names(directory)
    with pytest.raises(CheckpointError) as info:
        write(directory, one(3, BIG), keep=5)
    assert str(info.value) == (
        f"{directory}: no checkpoint written (No space left on device); "
        "free some space or name another place"
    )
    kept(directory, before)
    shutil.rmtree(directory / before[0])
    (directory / ".tmp-1-dead").write_bytes(bytes(5 << 20))  # swept, or there is no room
    write(directory, one(3, BIG), keep=5)
    assert [version for _, version in found(directory)] == [3, 2]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_exports_to_a_full_disk(mount: Callable[[str], Path], suffix: str) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    out = mount("size=600k") / f"out{suffix}"
    out.write_text("old")
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        export(one(1, BIG), out)
    assert names(out.parent) == [out.name]
    assert out.read_text() == "old"


def test_a_read_only_file_system(mount: Callable[[str], Path]) -> None:
    directory = mount("size=12m")
    write(directory, one(1, BIG), keep=1)
    before = names(directory)
    mount("remount,ro")
    with pytest.raises(CheckpointError, match="Read-only file system"):
        write(directory, one(2, BIG), keep=1)
    kept(directory, before)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        export(one(1), directory / "x.npz")


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """As a disk that fills up in the midst of a file; Python ignores SIGXFSZ."""
    write(tmp_path, one(1, BIG), keep=1)
    before = names(tmp_path)
    _, hard = limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_001, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large\); raise the limit"):
            write(tmp_path, one(2, BIG), keep=1)
        with pytest.raises(CheckpointError, match="File too large"):
            export(one(2, BIG), tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    kept(tmp_path, before)


def _as_nobody(pipe: Connection, directory: Path) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    said: list[str] = []
    attempts: list[Callable[[], object]] = [
        lambda: write(directory, one(2, BIG), keep=1),
        lambda: write(directory / "new", one(2, BIG), keep=1),
        lambda: export(one(2, BIG), directory / "x.npz"),
        lambda: found(directory / "closed"),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("done")
        except CheckpointError as error:
            said.append(str(error))
    pipe.send(said)


def test_no_permission() -> None:
    base = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    base.chmod(0o755)
    directory = base / "checkpoints"
    try:
        write(directory, one(1, BIG), keep=1)
        before = names(directory)
        (directory / "closed").mkdir(mode=0)
        directory.chmod(0o555)
        with support.fork(1, _as_nobody, directory) as (child,):
            said = child.receive()
        assert len(said) == 4
        for line in said:
            assert "Permission denied" in line
            assert "\n" not in line
        directory.chmod(0o755)
        (directory / "closed").rmdir()
        kept(directory, before)
    finally:
        shutil.rmtree(base)


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="Not a directory"):
            write(directory, one(1), keep=1)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="File exists"):
        write(tmp_path / "link", one(1), keep=1)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_old_one_that_cannot_be_removed(mount: Callable[[str], Path]) -> None:
    """The new one is written all the same."""
    directory = mount("size=12m")
    write(directory, one(1), keep=1)
    stuck = directory / "checkpoint-000000000001"
    subprocess.run(["mount", "--bind", stuck, stuck], check=True)  # a mount cannot be renamed
    try:
        made = write(directory, one(2), keep=1)
    finally:
        subprocess.run(["umount", stuck], check=True)
    assert made.problem is not None
    assert "older checkpoints cannot be removed" in made.problem
    same(read(made.path), one(2))
    assert write(directory, one(3), keep=1).problem is None
    assert names(directory) == ["checkpoint-000000000003"]


# -- export ---------------------------------------------------------------------------------------


def test_exports(tmp_path: Path) -> None:
    @settings(max_examples=30, deadline=None)
    @given(models)
    def holds(model: Model) -> None:
        given_one = one(1, model)
        expected = {
            name: (values.shape, values.tobytes())
            for name, values in model.views(given_one.weights).items()
        }
        export(given_one, tmp_path / "x.safetensors")
        plain = safetensors.numpy.load_file(tmp_path / "x.safetensors")
        assert {name: (one.shape, one.tobytes()) for name, one in plain.items()} == expected
        if any(f"{name}.npy" in expected for name in expected):
            return
        export(given_one, tmp_path / "x.npz")
        with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
            assert {name: (one.shape, one.tobytes()) for name, one in arrays.items()} == expected

    holds()
    assert names(tmp_path) == ["x.npz", "x.safetensors"]


def test_export_for_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    given_one = one(1)
    given_one.weights.flags.writeable = False
    export(given_one, tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    expected = MODEL.views(given_one.weights)
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        assert state[name].shape == values.shape
        assert state[name].numpy().tobytes() == values.tobytes()


def test_exports_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "x.bin", "x.npy"):
        with pytest.raises(UsageError, match=r"ends in \.safetensors, \.npz, \.pt"):
            export(one(1), tmp_path / name)
    with pytest.raises(UsageError, match=r"'a' from 'a\.npy'"):
        export(one(1, place([Tensor("a", (1,)), Tensor("a.npy", (1,))])), tmp_path / "x.npz")
    with pytest.raises(UsageError, match="'__metadata__'"):
        export(one(1, place([Tensor("__metadata__", (1,))])), tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        export(one(1), tmp_path / "none" / "x.npz")
    (tmp_path / "dir.npz").mkdir()
    with pytest.raises(CheckpointError, match="directory"):
        export(one(1), tmp_path / "dir.npz")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="needs PyTorch"):
        export(one(1), tmp_path / "x.pt")
    assert names(tmp_path) == ["dir.npz"]
