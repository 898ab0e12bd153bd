"""Weights of a checkpoint in files that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from support.snapshots import MODEL, models, names, one

from gadei_ps.errors import CheckpointError, UsageError
from gadei_ps.memory.weights import Model, Tensor, place
from gadei_ps.storage.export import export


def test_exports(tmp_path: Path) -> None:
    @settings(max_examples=30, deadline=None)
    @given(models)
    def holds(model: Model) -> None:
        given_one = one(1, model)
        expected = {
            name: (values.shape, values.tobytes()) for name, values in given_one.arrays().items()
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


def test_aliases(tmp_path: Path) -> None:
    """The formats that people load strictly have a tensor under each of its names."""
    tensors = [Tensor("a", (2, 3), aliases=("head.a", "b/a")), Tensor("c", (4,))]
    given_one = one(1, place(tensors))
    views = given_one.model.views(given_one.weights)
    expected = views | {"head.a": views["a"], "b/a": views["a"]}
    for suffix in ("safetensors", "npz", "pt"):
        out = tmp_path / f"x.{suffix}"
        export(given_one, out)
        if suffix == "safetensors":
            found = safetensors.numpy.load_file(out)
        elif suffix == "npz":
            found = dict(np.load(out, allow_pickle=False))
        else:
            torch = pytest.importorskip("torch")
            state = torch.load(out, weights_only=True)
            assert state["a"].data_ptr() == state["head.a"].data_ptr()
            found = {name: tensor.numpy() for name, tensor in state.items()}
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].tobytes() == values.tobytes()


def test_names_of_aliases() -> None:
    for tensors, says in (
        ([Tensor("a", (1,), aliases=("b",)), Tensor("b", (1,))], "'b' is given twice"),
        ([Tensor("a", (1,), aliases=("a",))], "'a' is given twice"),
        ([Tensor("a", (1,), aliases=("",))], "tensor name ''"),
        ([Tensor("a", (1,), aliases=("x" * 376,))], "use 1 to 375 bytes"),
    ):
        with pytest.raises(UsageError, match=says):
            place(tensors)


def test_exports_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x", "x.bin", "x.npy"):
        with pytest.raises(UsageError, match=r"ends in \.safetensors, \.npz, \.pt"):
            export(one(1), tmp_path / name)
    with pytest.raises(UsageError, match=r"'a' with 'a\.npy'"):
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
