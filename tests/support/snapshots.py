"""Checkpoints that tests write, compare and break."""

from __future__ import annotations

import hashlib
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from gadei_ps.errors import CheckpointError
from gadei_ps.job.config import from_mapping
from gadei_ps.job.optimizer_config import NOTHING
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Model, Tensor, place
from gadei_ps.storage.checkpoint import Snapshot, read

FILES = ["SHA256SUMS", "manifest.json", "state.safetensors", "weights.safetensors"]
TENSORS = [
    Tensor("block/0.weight", (7, 3)),
    Tensor("größe", ()),
    Tensor("mean", (5,), Role.BUFFER),
]
MODEL = place(TENSORS)
KINDS = ("sgd", "adagrad", "adam")  # optimizers by their number of slots

tensor_names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=weights.NAME_BYTES
).filter(lambda name: len(name.encode()) <= weights.NAME_BYTES and name != "__metadata__")
shapes = st.lists(st.integers(0, 9), max_size=layout.MAX_DIMS).filter(
    lambda shape: math.prod(shape) <= 3000
)
models = st.lists(
    st.builds(
        lambda name, shape, role, dtype: Tensor(
            name, tuple(shape), role, dtype="F32" if role is Role.PARAMETER else dtype
        ),
        tensor_names | st.sampled_from(["requeue", "0/a", "/", "../../etc/passwd", "file"]),
        shapes,
        st.sampled_from(Role),
        st.sampled_from([one for one in weights.DTYPES if one != "BF16"]),  # which NumPy lacks
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda tensor: tensor.name,
).map(place)


def values_of(model: Model, seed: int) -> np.ndarray:
    """Bit patterns of all kinds, NaNs among them; padding is zero. With the frozen tensors."""
    draw = np.random.default_rng(seed)
    flat = np.zeros(model.words, np.float32)
    for one in model.every:
        values = one.of(flat)
        raw = np.frombuffer(draw.bytes(one.bytes), values.dtype)
        values[...] = (
            (raw.view(np.uint8) & 1).view(bool).reshape(one.shape)
            if one.dtype == "BOOL"
            else raw.reshape(one.shape)
        )
    return flat


def make_sums(path: Path) -> None:
    """Make checksums of what is there now, as no damage makes them."""
    (path / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n"
            for name in FILES[1:]
        )
    )


def one(version: int, model: Model = MODEL, slots: int = 2, requeued: int = 5) -> Snapshot:
    optimizer = {"kind": KINDS[slots]}
    config = from_mapping({"name": "a-job", "optimizer": optimizer}, "test")
    counts = {"optimizer": config.optimizer.filled(NOTHING)}
    flat, end = values_of(model, 3 * version), model.elements
    return Snapshot(
        job="a-job",
        config=config.model_copy(update=counts).model_dump(mode="json"),
        model=model,
        weights=flat[:end],
        frozen=flat[end:],
        slots=tuple(values_of(model, 3 * version + 1 + slot)[:end] for slot in range(slots)),
        version=version,
        steps=version + 1,
        supersteps=version + 2,
        work={
            "batches": 100,
            "epochs": 3,
            "seed": 7,
            "epochs_done": 1,
            "state": 1,
            "next": 1 << 32 | version % 100,
        },
        requeue=np.arange(version, version + requeued, dtype=np.uint64) % 100 + (1 << 32),
        counts={
            "applied": version,
            "dropped": 0,
            "refused": 2,
            "samples": 1 << 60,
            "requeued_total": requeued,
            "loss_count": 2,
        },
        clocks={"learner-0": version, "zweiter": 0},
        loss_sum=-0.75,
    )


def same(left: Snapshot, right: Snapshot) -> None:
    for name in ("job", "config", "model", "version", "steps", "supersteps", "loss_sum"):
        assert getattr(left, name) == getattr(right, name), name
    for name in ("work", "counts", "clocks"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(left.slots) == len(right.slots)
    arrays = zip(
        (left.weights, left.frozen, *left.slots),
        (right.weights, right.frozen, *right.slots),
        strict=True,
    )
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
    message = str(info.value)
    assert "\n" not in message
    assert str(path / file) in message
    for word in why:
        assert word in message
    return message
