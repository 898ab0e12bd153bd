"""Damaged and foreign checkpoints: each is refused, with its file and the reason.

`forge` changes the contents and makes new checksums, as no damage does.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import FILES, make_sums, names, one, refused, same

from gadei_ps.errors import CheckpointError
from gadei_ps.storage import files
from gadei_ps.storage.checkpoint import newest, read, write

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
    """Check it even if a flip changes how a digit is written and not what it says."""
    path = write(tmp_path, one(9), keep=1).path
    whole = (path / "SHA256SUMS").read_bytes()
    for at, bit in itertools.product(range(len(whole)), (0, 5)):
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        (path / "SHA256SUMS").write_bytes(raw)
        with pytest.raises(CheckpointError, match="SHA256SUMS"):
            read(path)


def endless(path: Path) -> None:
    """A regular file of a size that no disk has."""
    path.touch()
    os.truncate(path, 2**40)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, one(9), keep=1).path
    (path / name).unlink()
    refused(path, name, "missing")
    for make, why in (
        (Path.mkdir, "it is a directory"),
        (os.mkfifo, "it is a FIFO"),
        (lambda one: one.symlink_to("/dev/zero"), "it is a device"),
        (lambda one: one.symlink_to(one), "symbolic links"),
        (lambda one: one.symlink_to("/proc/self/mem"), ""),
        (endless, "at most are read"),
        (Path.touch, "damaged"),
    ):
        make(path / name)
        refused(path, name, why)
        (path / name).rmdir() if (path / name).is_dir() else (path / name).unlink()


def test_the_lock_is_no_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (tmp_path / ".lock").symlink_to(other)
    with pytest.raises(CheckpointError, match="symbolic links"):
        write(tmp_path, one(1), keep=1)
    assert not other.exists()


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
    assert "checkpoint-000000000004/weights.safetensors: damaged" in str(problems[0])
    assert "checkpoint-000000000003/SHA256SUMS: missing" in str(problems[1])
    write(tmp_path, one(3), keep=1)
    assert names(tmp_path) == ["checkpoint-000000000003.2", "superseded-checkpoint-000000000004"]


# -- foreign ones: the checksums are right, the contents are not ----------------------------------


def forge(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a manifest's fields or a file's tensors."""
    if name == "manifest.json":
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(change(fields) or fields))
    else:
        tensors = safetensors.numpy.load_file(path / name)
        safetensors.numpy.save_file(change(tensors) or tensors, path / name)
    make_sums(path)


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
        (lambda m: m.update(format=4), "format 4"),
        (lambda m: m.update(format=2), "has no group"),
        (lambda m: m.update(format="1"), "format '1'"),
        (lambda m: m.pop("work") and None, "work: Field required"),
        (lambda m: m.update(version=-1), "version: "),
        (lambda m: m.update(version=True), "version: "),
        (lambda m: m.update(version=8), "version 8"),
        (lambda m: m.update(steps=1.0), "steps: "),
        (lambda m: m.update(job=3), "job: "),
        (lambda m: m.update(counts={"applied": "1"}), "counts.applied: "),
        (lambda m: m.update(clocks={"a": True}), "clocks"),
        (lambda m: m.update(slots=3), "slots: "),
        (lambda m: m["work"].update(batches=0), "no batches"),
        (lambda m: m["work"].update(state=0), "no work has begun"),
        (lambda m: m["work"].update(next=3 << 32), "batch 0 of epoch 3, and there is none"),
        (lambda m: m.update(steps=2**80), "steps: "),
        (lambda m: m.update(job="../x"), "job: "),
        (lambda m: m.update(requeue=2**40), "requeue: "),
        (lambda m: m.update(elements=2**40), "elements"),
        (lambda m: m.update(parameters=16), "elements"),
        (lambda m: m.update(tensors=[]), "no tensors"),
        (lambda m: m.update(tensors=[{"name": "a"}]), "tensors.0.role: "),
        (lambda m: m["tensors"][0].update(role="else"), "tensors.0.role: "),
        (lambda m: m["tensors"][0].update(shape=[1.5]), "tensors.0.shape.0: "),
        (lambda m: m["tensors"][0].update(shape=[-1]), "tensors.0.shape.0: "),
        (lambda m: m["tensors"][0].update(shape=[1] * 9), "more than 8 dimensions"),
        (lambda m: m["tensors"][0].update(shape=[2**20, 2**20, 2**20]), "values; the limit"),
        (lambda m: m["tensors"][2].update(shape=[2**50]), "a dimension has 0 to"),
        (lambda m: m["tensors"][0].update(name="x" * 376), "tensor name 'xxx"),
        (lambda m: m["tensors"][0].update(name="\ud800"), "bytes of UTF-8"),
        (lambda m: m["tensors"][0].update(name="mean"), "twice"),
        (lambda m: m["tensors"][1].update(start=0), "starts at 0"),
        (lambda m: m["tensors"][1].update(start=1 << 40), "starts at"),
        (lambda m: m["tensors"].reverse(), "starts at"),
    ],
)
def test_foreign_manifests(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    path = write(tmp_path, one(9), keep=1).path
    forge(path, "manifest.json", change)
    message = refused(path, "manifest.json", why)
    assert "damaged" not in message


@pytest.mark.parametrize("raw", [b"", b"\xff", b"{", b"[" * 100_000, b"9" * 5000])
def test_manifests_that_are_not_json(tmp_path: Path, raw: bytes) -> None:
    path = write(tmp_path, one(9), keep=1).path
    (path / "manifest.json").write_bytes(raw)
    make_sums(path)
    refused(path, "manifest.json", "not JSON")


def test_batches_that_the_work_lacks(tmp_path: Path) -> None:
    path = write(tmp_path, one(9), keep=1).path
    forge(path, "manifest.json", lambda fields: fields["work"].update(batches=12))
    refused(path, "state.safetensors", "requeue has batch 12 of epoch 1, and there is none")


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
    message = refused(path, name, why)
    assert "damaged" not in message


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
        (lambda raw: raw + b"x", "1 byte behind the last tensor"),
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
