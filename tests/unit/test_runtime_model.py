"""The learned model of run times: training, files, evaluation with NumPy, what it predicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gadei_ps.cli import runtime_model as cli_runtime_model
from gadei_ps.errors import UsageError
from gadei_ps.run_times import traces
from gadei_ps.run_times import training as runtime_training
from gadei_ps.run_times.network import DeepMarkovModel
from gadei_ps.run_times.traces import Trace
from gadei_ps.sync import runtime_file
from gadei_ps.sync.order_statistics import sorted_mean
from gadei_ps.sync.prediction import FloatArray
from gadei_ps.sync.runtime_file import Floats, ModelFileError, Sizes
from gadei_ps.sync.runtime_model import LARGEST, SMALLEST, Network, RuntimeModel

SIZES = Sizes(learners=6, lag=20, latent=3, recurrent=7, hidden=5)
ALL = np.arange(6)
NOBODY = np.zeros(6, bool)


def torch_model(seed: int = 0) -> DeepMarkovModel:
    torch.manual_seed(seed)
    return DeepMarkovModel(SIZES, torch.rand(30, 6))


def arrays(model: DeepMarkovModel) -> dict[str, Floats]:
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small networks are slower with more, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def untrained(seed: int = 0) -> RuntimeModel:
    return RuntimeModel(SIZES, arrays(torch_model()), seed=seed)


def switching(iterations: int, seed: int) -> FloatArray:
    """Six learners; two are three times as slow half of the time, for 25 iterations in a row."""
    generator = np.random.default_rng(seed)
    slow = (np.arange(iterations) // 25 + seed) % 2 == 0
    factor = np.ones((iterations, 6))
    factor[slow, :2] = 3.0
    times: FloatArray = factor * np.exp(generator.normal(0, 0.05, factor.shape))
    return times


def as_trace(times: FloatArray, censored: FloatArray | None = None) -> Trace:
    bound = np.zeros(times.shape, bool) if censored is None else censored.astype(bool)
    return Trace(times, bound, tuple(f"n{column}" for column in range(times.shape[1])))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    runtime_training.train(as_trace(switching(300, 1)), out=path, epochs=10)
    return path


def test_numpy_and_pytorch_agree() -> None:
    model = torch_model()
    with torch.no_grad():  # far from where training begins
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    window = torch.rand(SIZES.lag, SIZES.learners)
    noise = torch.randn(SIZES.lag + 1, 4, SIZES.latent)
    with torch.no_grad():
        wanted = model(window.expand(4, -1, -1), noise)
    found = Network(SIZES, arrays(model)).predict(window.numpy(), noise.numpy())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-4, atol=2e-5)


def test_names_and_shapes_are_those_of_the_file() -> None:
    shapes = {name: tuple(value.shape) for name, value in torch_model().state_dict().items()}
    assert shapes == SIZES.shapes()


# -- what it predicts -----------------------------------------------------------------------------


def test_it_has_learned_the_switch(trained: Path) -> None:
    """Against the mean of each learner's last 20 run times, which needs 20 to see a switch."""
    times = switching(200, 2)
    model = RuntimeModel.load(trained)
    assert (model.learners, model.lag) == (6, 20)
    ours, theirs = [], []
    for step, row in enumerate(times):
        expected = model.expected(ALL)
        assert (expected is None) == (step < 20)
        if expected is not None:
            truth = np.sort(row)
            ours.append(np.abs(expected - truth).mean())
            theirs.append(np.abs(np.sort(times[step - 20 : step].mean(axis=0)) - truth).mean())
        model.observe(row, NOBODY)
    assert np.mean(ours) < 0.5 * np.mean(theirs)


def test_it_sees_a_recovery_through_censored_run_times(trained: Path) -> None:
    """It only ever sees the four quick learners, until the slow ones are as quick."""
    times = switching(25, 2)
    model = RuntimeModel.load(trained)
    for row in times[:20]:
        model.observe(row, NOBODY)
    slow = np.isin(ALL, (0, 1))
    for row in times[20:]:
        expected = model.expected(ALL)
        assert expected is not None
        assert expected[4] > 2 * expected[3]
        model.observe(np.where(slow, row[2:].max(), row), slow)
    for _ in range(4):
        model.observe(np.ones(6), NOBODY)
    expected = model.expected(ALL)
    assert expected is not None
    assert expected[5] < 1.5 * expected[0]


def test_it_gets_used_to_a_learner_that_is_slow_as_never_before(trained: Path) -> None:
    """Learner 4 was as quick as the others all through the trace."""
    generator = np.random.default_rng(0)
    model = RuntimeModel.load(trained)
    errors = []
    for _ in range(60):
        row = np.exp(generator.normal(0, 0.05, 6)) * np.where(ALL == 4, 2.5, 1.0)
        expected = model.expected(ALL)
        if expected is not None:
            errors.append(abs(expected[5] - 2.5))
            # It is dropped from then on, which must not make it seem quicker.
            dropped = (ALL == 4) & (len(errors) > 10)
            row = np.where(dropped, 1.2, row)
            model.observe(row, dropped)
        else:
            model.observe(row, NOBODY)
    assert errors[0] > 0.5
    assert np.mean(errors[20:]) < 0.3


def test_the_level_of_a_run_does_not_matter(trained: Path) -> None:
    times = switching(40, 2)
    minutes, seconds = RuntimeModel.load(trained), RuntimeModel.load(trained)
    for row in times:
        seconds.observe(row, NOBODY)
        minutes.observe(row / 60, NOBODY)
    one, other = seconds.expected(ALL), minutes.expected(ALL)
    assert one is not None
    assert other is not None
    np.testing.assert_allclose(other * 60, one, rtol=1e-3)


def test_the_same_seed_says_the_same() -> None:
    one, again, another = untrained(), untrained(), untrained(seed=1)
    generator = np.random.default_rng(3)
    for _ in range(25):
        row, dropped = generator.random(6) + 0.5, generator.random(6) < 0.3
        for model in (one, again, another):
            model.observe(row, dropped)
    np.testing.assert_array_equal(one.expected(ALL), again.expected(ALL))
    assert (one.expected(ALL) != another.expected(ALL)).any()


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_imputed_run_times_are_above_their_bound(seed: int, level: float) -> None:
    generator = np.random.default_rng(seed)
    model = untrained(seed)
    for _ in range(20):
        model.observe(level * (generator.random(6) + 0.5), NOBODY)
    for _ in range(5):
        row, dropped = level * generator.exponential(1.0, 6), generator.random(6) < 0.5
        model.observe(row, dropped)
        seen = model.window[-1]
        shortest, longest = SMALLEST * model.scale, LARGEST * model.scale
        assert (seen[dropped] >= np.minimum(row[dropped], longest) * (1 - 1e-9)).all()
        inside = ~dropped & (row > shortest) & (row < longest)
        np.testing.assert_allclose(seen[inside], row[inside])


def test_an_imputed_run_time_is_the_right_tails() -> None:
    """Its distribution is the prediction's, of those draws that are above the bound."""
    weights = arrays(torch_model())
    models = [RuntimeModel(SIZES, weights, seed=seed, draws=200) for seed in range(400)]
    found = []
    for model in models:
        for _ in range(20):
            model.observe(np.ones(6), NOBODY)
    draws = np.concatenate([model.sampled(ALL)[:, 2] for model in models[:20]])  # type: ignore[index]
    bound = float(np.quantile(draws, 0.6))
    for model in models:
        model.observe(np.full(6, bound), ALL == 2)
        found.append(model.window[-1, 2])
    tail = draws[draws > bound]
    spread = tail.std() / np.sqrt(len(found))
    assert abs(np.mean(found) - tail.mean()) < 4 * spread
    assert np.std(found) == pytest.approx(tail.std(), rel=0.2)


def test_draws_that_are_below_the_bound_do_not_count() -> None:
    """Quick in one half of the draws, slow in the other, and not quicker than 2: so it is slow."""

    class Two:
        def predict(self, window: Floats, noise: Floats) -> tuple[Floats, Floats]:
            mean = np.where(np.arange(noise.shape[1]) % 2, 3.0, 1.0).astype(np.float32)
            return np.tile(mean[:, None], 6), np.full((len(mean), 6), 0.1, np.float32)

    found = []
    for seed in range(50):
        model = untrained(seed)
        model._network = cast(Network, Two())
        for _ in range(20):
            model.observe(np.full(6, 0.5), NOBODY)
        assert model.scale == 1.0
        model.observe(np.full(6, 2.0), np.ones(6, bool))
        found.append(model.window[-1])
    assert np.mean(found) == pytest.approx(3.0, abs=0.05)
    assert np.min(found) > 2.5


def test_learners_come_and_go_and_clocks_break() -> None:
    model = untrained()
    generator = np.random.default_rng(0)
    for step in range(80):
        row = generator.random(3 + step // 10) + 0.5
        row[generator.random(len(row)) < 0.2] = np.nan
        row[generator.random(len(row)) < 0.05] = np.inf
        row[generator.random(len(row)) < 0.05] = 1e9
        model.observe(row, generator.random(len(row)) < 0.2)
        expected = model.expected(np.array([9, 0, 4]))
        if step >= 25:
            assert expected is not None
            assert np.isfinite(expected).all()
            assert (np.diff(expected) >= 0).all()
            assert (expected > 0).all()
    before = model.window.copy()
    model.observe(np.full(0, np.nan), np.zeros(0, bool))
    assert model.window.shape == before.shape
    with pytest.raises(ValueError, match="two equal rows"):
        model.observe(np.ones(3), NOBODY)


def test_nothing_known_at_first_does_no_harm() -> None:
    model = untrained()
    model.observe(np.full(6, np.nan), NOBODY)
    model.observe(np.array([1.0, np.nan, 3.0]), np.zeros(3, bool))
    np.testing.assert_array_equal(model.window, [[1, 2, 3, 2, 2, 2]])
    model.observe(np.full(6, np.nan), NOBODY)
    assert len(model.window) == 1
    for _ in range(19):
        model.observe(np.zeros(6), NOBODY)
    assert model.expected(ALL) is not None


def test_slots_select_learners_and_strangers_are_anybody(trained: Path) -> None:
    model = RuntimeModel.load(trained, draws=4000)
    for row in switching(20, 2):  # it ends with learners 0 and 1 slow
        model.observe(row, NOBODY)
    slow, quick = (model.expected(np.array(slots)) for slots in ([0, 1], [2, 5]))
    stranger = model.expected(np.array([6]))
    everybody = model.expected(ALL)
    assert slow is not None
    assert quick is not None
    assert stranger is not None
    assert everybody is not None
    assert slow[0] > 2 * quick[1]
    assert stranger[0] == pytest.approx(everybody.mean(), rel=0.05)
    mixed = model.expected(np.array([2, 77]))
    assert mixed is not None
    assert mixed.shape == (2,)


def test_samples_are_what_is_averaged() -> None:
    model, again = untrained(), untrained()
    assert model.sampled(ALL) is None
    for _ in range(20):
        model.observe(np.arange(1.0, 7.0), NOBODY)
        again.observe(np.arange(1.0, 7.0), NOBODY)
    draws = model.sampled(ALL)
    assert draws is not None
    assert draws.shape == (64, 6)
    np.testing.assert_array_equal(again.expected(ALL), sorted_mean(draws))


# -- files ----------------------------------------------------------------------------------------


def save(path: Path, change: Mapping[str, Floats], **told: object) -> Path:
    """A file whose metadata says `told` in place of the truth."""
    path.write_bytes(runtime_file.contents(SIZES, arrays(torch_model()) | change, told))
    return path


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "model", {})
    sizes, weights = runtime_file.read(path)
    assert sizes == SIZES
    for name, value in arrays(torch_model()).items():
        np.testing.assert_array_equal(weights[name], value)
    assert runtime_file.metadata(path.read_bytes())["format"] == runtime_file.FORMAT


@pytest.mark.parametrize(
    ("change", "told", "what"),
    [
        ({}, {"format": "pictures"}, "not a model of run times"),
        ({}, {"version": 2}, "of version 2, where this release reads 1"),
        ({}, {"learners": 1}, "learners is 1, not within 2 and 100000"),
        ({}, {"learners": 7}, "is float32 (7, 6), not float32 (7, 7)"),
        ({}, {"lag": 0}, "lag is 0, not within 2 and 1000"),
        ({}, {"lag": "many"}, "its metadata has lag 'many', not a whole number"),
        ({"start": np.zeros(4, np.float32)}, {}, "'start' is float32 (4,), not float32 (3,)"),
        ({"start": np.zeros(3)}, {}, "'start' is float64 (3,), not float32 (3,)"),
        ({"start": np.full(3, np.nan, np.float32)}, {}, "'start' has values that are not finite"),
        ({"more": np.zeros(3, np.float32)}, {}, "tensor 'more' is unknown"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path,
    change: dict[str, Floats],
    told: dict[str, object],
    what: str,
) -> None:
    path = save(tmp_path / "model", change, **told)
    with pytest.raises(ModelFileError) as caught:
        RuntimeModel.load(path)
    assert what in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_other_kinds_of_files(tmp_path: Path) -> None:
    whole = save(tmp_path / "model", {}).read_bytes()
    deep = b"[" * 100_000
    for data, what in (
        (b"", "not a safetensors file"),
        (b"a picture", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (len(deep).to_bytes(8, "little") + deep, "not a safetensors file"),
        (b"\x02" + b"\0" * 7 + b"{}", "not a model of run times"),
        (b"\x02" + b"\0" * 7 + b"[]", "not a safetensors file"),
        (whole[:-4], "damaged"),
        (whole + b"more", "damaged"),
    ):
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(ModelFileError, match=what):
            RuntimeModel.load(tmp_path / "other")
    for path, what in ((tmp_path / "absent", "No such file"), (tmp_path, "not a file")):
        with pytest.raises(ModelFileError, match=f"cannot be read .{what}"):
            RuntimeModel.load(path)
    missing = arrays(torch_model())
    del missing["start"]
    (tmp_path / "other").write_bytes(runtime_file.contents(SIZES, missing, {}))
    with pytest.raises(ModelFileError, match="tensor 'start' is missing"):
        RuntimeModel.load(tmp_path / "other")


# -- training -------------------------------------------------------------------------------------


def test_training_is_deterministic_and_leaves_the_generator_alone(tmp_path: Path) -> None:
    trace = as_trace(switching(80, 1))
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    epochs: list[int] = []
    for name in ("one", "again"):
        runtime_training.train(
            trace,
            out=tmp_path / name,
            epochs=1,
            progress=lambda epoch, of, elbo: epochs.append(epoch),
        )
    runtime_training.train(trace, out=tmp_path / "other", epochs=1, seed=1)
    one, again, other = ((tmp_path / name).read_bytes() for name in ("one", "again", "other"))
    assert one == again != other
    assert epochs == [1, 1]
    assert torch.rand(1) == wanted
    told = runtime_file.metadata(one)
    assert np.isfinite(told["held_out_elbo"])  # type: ignore[call-overload]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "one", "other"]


def test_gaps_and_bounds_count_as_what_they_are(tmp_path: Path) -> None:
    """Of most of a learner's run times it is known only that they are longer than 0.9."""
    generator = np.random.default_rng(0)
    times = generator.normal(1.0, 0.2, (160, 3))
    bound = np.zeros(times.shape, bool)
    bound[:, 0] = times[:, 0] > 0.9
    seen = np.where(bound, 0.9, times)
    seen[::7, 1] = np.nan
    result = runtime_training.train(as_trace(seen, bound), out=tmp_path / "model", epochs=5)
    assert (result.missing, result.censored) == (23, int(bound.sum()))
    model = RuntimeModel.load(tmp_path / "model", draws=1000)
    for row in seen[1:21]:
        model.observe(np.nan_to_num(row, nan=1.0), np.zeros(3, bool))
    draws = model.sampled(np.arange(3))
    assert draws is not None
    assert draws.mean(axis=0) == pytest.approx([1.0, 1.0, 1.0], abs=0.07)


@pytest.mark.parametrize(
    ("times", "what"),
    [
        (np.ones((79, 3)), "has 79 iterations; record 80 at least"),
        (np.ones((80, 1)), "fewer than 2 learners"),
        (np.ones((80, 3)), "all equal"),
        (np.where(np.arange(3) == 1, np.nan, np.arange(240.0).reshape(80, 3)), "'n1' has no run"),
        (np.arange(240.0).reshape(80, 3) - 1, "negative or infinite"),
        (np.where(np.eye(80, 3) > 0, np.inf, 1.0), "negative or infinite"),
    ],
)
def test_traces_that_teach_nothing(tmp_path: Path, times: FloatArray, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        runtime_training.train(as_trace(times), out=tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    trace = as_trace(switching(80, 1))
    with pytest.raises(UsageError, match="there is no directory"):
        runtime_training.train(trace, out=tmp_path / "absent" / "model")
    with pytest.raises(UsageError, match="0 epochs"):
        runtime_training.train(trace, out=tmp_path / "model", epochs=0)
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\)"):
        runtime_training.train(trace, out=tmp_path, epochs=1)
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(".*.tmp"))


# -- the command ----------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    trace, model = tmp_path / "trace.csv", tmp_path / "model.safetensors"
    traces.write(trace, as_trace(switching(80, 1)))
    arguments = ["train", str(trace), "--out", str(model), "--epochs", "1"]
    told = json.loads(run(cli_runtime_model.app, [*arguments, "--json"]).stdout)
    assert set(told) == {one.name for one in dataclasses.fields(runtime_training.TrainingResult)}
    assert (told["learners"], told["iterations"], told["out"]) == (6, 80, str(model))
    shown = run(cli_runtime_model.app, arguments).stdout
    assert "80 iterations of 6 learners" in shown
    assert f"cutoff:file={model}" in shown
    assert RuntimeModel.load(model).learners == 6
    helped = run(cli_runtime_model.app, ["train", "--help"]).stdout
    assert f"Epochs of {runtime_training.BATCHES} mini-batches." in helped
    assert cli_runtime_model.DEFAULT_EPOCHS == runtime_training.EPOCHS
    refused = run(cli_runtime_model.app, ["train", str(tmp_path / "absent")])
    assert isinstance(refused.exception, UsageError)


def test_command_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = CliRunner().invoke(cli_runtime_model.app, ["train", str(tmp_path / "trace.csv")])
    assert isinstance(refused.exception, UsageError)
    assert "pip install 'gadei-ps[torch]'" in str(refused.exception)
