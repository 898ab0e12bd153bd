"""Training of the model of run times, and the command for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support import trace_files
from support.run_times import as_trace, one_thread, switching
from typer.testing import CliRunner

from gadei_ps.cli import research
from gadei_ps.errors import UsageError
from gadei_ps.run_times import fitting
from gadei_ps.sync import run_time_file
from gadei_ps.sync.prediction import FloatArray
from gadei_ps.sync.run_time_model import RunTimeModel


@pytest.fixture(autouse=True, scope="module")
def small_networks() -> Iterator[None]:
    with one_thread():
        yield


def test_training_is_deterministic_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    trace = as_trace(switching(80, 1))
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    epochs: list[int] = []
    for name in ("one", "again"):
        fitting.train(
            trace,
            out=tmp_path / name,
            epochs=1,
            progress=lambda epoch, of, elbo: epochs.append(epoch),
        )
    fitting.train(trace, out=tmp_path / "other", epochs=1, seed=1)
    one, again, other = ((tmp_path / name).read_bytes() for name in ("one", "again", "other"))
    assert one == again != other
    assert epochs == [1, 1]
    assert torch.rand(1) == wanted
    metadata = run_time_file.metadata(one)
    assert np.isfinite(metadata["held_out_elbo"])  # type: ignore[call-overload]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "one", "other"]


@pytest.mark.parametrize("gone", [slice(100, None), slice(0, 150)], ids=["left", "joined"])
def test_a_learner_that_was_there_for_a_while(gone: slice, tmp_path: Path) -> None:
    """It has no run time among those that are trained with, or that are held out."""
    times = switching(160, 1)
    times[gone, 1] = np.nan
    fitting.train(as_trace(times), out=tmp_path / "model", epochs=1)
    metadata = run_time_file.metadata((tmp_path / "model").read_bytes())
    assert np.isfinite(metadata["held_out_elbo"])  # type: ignore[call-overload]


def test_gaps_and_bounds_count_as_what_they_are(tmp_path: Path) -> None:
    """Bound most of a learner's run times from below only: they are longer than 0.9."""
    generator = np.random.default_rng(0)
    times = generator.normal(1.0, 0.2, (160, 3))
    bound = np.zeros(times.shape, bool)
    bound[:, 0] = times[:, 0] > 0.9
    seen = np.where(bound, 0.9, times)
    seen[::7, 1] = np.nan
    result = fitting.train(as_trace(seen, bound), out=tmp_path / "model", epochs=5)
    assert (result.missing, result.censored) == (23, int(bound.sum()))
    model = RunTimeModel.load(tmp_path / "model", draws=1000)
    for row in seen[1:21]:
        model.observe(np.nan_to_num(row, nan=1.0), np.zeros(3, bool))
    draws = model.sampled(np.arange(3))
    assert draws is not None
    assert draws.mean(axis=0) == pytest.approx([1.0, 1.0, 1.0], abs=0.07)


@pytest.mark.parametrize(
    ("times", "what"),
    [
        (np.ones((79, 3)), "has 79 iterations; record at least 80"),
        (np.ones((80, 1)), "fewer than 2 learners"),
        (np.ones((80, 3)), "all equal"),
        (np.where(np.arange(3) == 1, np.nan, np.arange(240.0).reshape(80, 3)), "'n1' has no run"),
        (np.arange(240.0).reshape(80, 3) - 1, "negative or infinite"),
        (np.where(np.eye(80, 3) > 0, np.inf, 1.0), "negative or infinite"),
    ],
)
def test_traces_that_teach_nothing(tmp_path: Path, times: FloatArray, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        fitting.train(as_trace(times), out=tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    trace = as_trace(switching(80, 1))
    with pytest.raises(UsageError, match="there is no directory"):
        fitting.train(trace, out=tmp_path / "absent" / "model")
    with pytest.raises(UsageError, match="number of epochs is 0"):
        fitting.train(trace, out=tmp_path / "model", epochs=0)
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\)"):
        fitting.train(trace, out=tmp_path, epochs=1)
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(".*.tmp"))


# -- the command ----------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    trace, model = tmp_path / "trace.csv", tmp_path / "model.safetensors"
    trace_files.write(trace, as_trace(switching(80, 1)))
    arguments = ["train", str(trace), "--out", str(model), "--epochs", "1"]
    report = json.loads(run(research.runtime_model, [*arguments, "--json"]).stdout)
    assert set(report) == {one.name for one in dataclasses.fields(fitting.TrainingResult)}
    assert (report["learners"], report["iterations"], report["out"]) == (6, 80, str(model))
    shown = run(research.runtime_model, arguments).stdout
    assert "80 iterations of 6 learners" in shown
    assert f"cutoff:file={model}" in shown
    assert RunTimeModel.load(model).learners == 6
    helped = run(research.runtime_model, ["train", "--help"]).stdout
    assert f"each of {fitting.BATCHES} mini-batches." in " ".join(helped.replace("│", " ").split())
    assert research.DEFAULT_EPOCHS == fitting.EPOCHS
    refused = run(research.runtime_model, ["train", str(tmp_path / "absent")])
    assert isinstance(refused.exception, UsageError)


def test_command_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trace = tmp_path / "trace.csv"
    trace_files.write(trace, as_trace(switching(80, 1)))
    refused = CliRunner().invoke(research.runtime_model, ["train", str(trace)])
    assert isinstance(refused.exception, UsageError)
    assert "pip install 'gadei-ps[torch]'" in str(refused.exception)
