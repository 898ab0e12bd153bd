"""The learned model of run times: its file, its evaluation with NumPy, what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_times import as_trace, one_thread, switching

from gadei_ps.run_times import fitting
from gadei_ps.run_times.deep_markov import DeepMarkovModel
from gadei_ps.sync import run_time_file
from gadei_ps.sync.order_statistics import sorted_mean
from gadei_ps.sync.run_time_file import Floats, ModelFileError, Sizes
from gadei_ps.sync.run_time_model import LARGEST, SMALLEST, Network, RunTimeModel

SIZES = Sizes(learners=6, lag=20, latent=3, recurrent=7, hidden=5)
ALL = np.arange(6)
NOBODY = np.zeros(6, bool)


def torch_model(seed: int = 0) -> DeepMarkovModel:
    torch.manual_seed(seed)
    return DeepMarkovModel(SIZES, torch.rand(30, 6))


def arrays(model: DeepMarkovModel) -> dict[str, Floats]:
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True, scope="module")
def small_networks() -> Iterator[None]:
    with one_thread():
        yield


def untrained(seed: int = 0) -> RunTimeModel:
    return RunTimeModel(SIZES, arrays(torch_model()), seed=seed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    fitting.train(as_trace(switching(300, 1)), out=path, epochs=10)
    return path


def test_numpy_and_pytorch_agree() -> None:
    model = torch_model()
    with torch.no_grad():  # far from where training begins
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    window = torch.rand(SIZES.lag, SIZES.learners)
    noise = torch.randn(SIZES.lag + 1, 4, SIZES.latent)
    with torch.no_grad():
        states, _, _ = model.infer(window.expand(4, -1, -1), noise[:-1])
        mean, std = model.transition(states[:, -1])
        wanted = model.emit(mean + std * noise[-1])
    found = Network(SIZES, arrays(model)).predict(window.numpy(), noise.numpy())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-4, atol=2e-5)


def test_names_and_shapes_are_those_of_the_file() -> None:
    shapes = {name: tuple(value.shape) for name, value in torch_model().state_dict().items()}
    assert shapes == SIZES.shapes()


# -- what it predicts -----------------------------------------------------------------------------


def test_it_has_learned_the_switch(trained: Path) -> None:
    """Compare with the mean of each learner's last 20 run times, which needs 20 for a switch."""
    times = switching(200, 2)
    model = RunTimeModel.load(trained)
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
    model = RunTimeModel.load(trained)
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
    model = RunTimeModel.load(trained)
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
    minutes, seconds = RunTimeModel.load(trained), RunTimeModel.load(trained)
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
    """Compare its distribution with the prediction's draws above the bound."""
    weights = arrays(torch_model())
    models = [RunTimeModel(SIZES, weights, seed=seed, draws=200) for seed in range(400)]
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
    model = RunTimeModel.load(trained, draws=4000)
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


def save(path: Path, change: Mapping[str, Floats], **metadata: object) -> Path:
    """A file with this metadata in place of its own."""
    path.write_bytes(run_time_file.contents(SIZES, arrays(torch_model()) | change, metadata))
    return path


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "model", {})
    sizes, weights = run_time_file.read(path)
    assert sizes == SIZES
    for name, value in arrays(torch_model()).items():
        np.testing.assert_array_equal(weights[name], value)
    assert run_time_file.metadata(path.read_bytes())["format"] == run_time_file.FORMAT


@pytest.mark.parametrize(
    ("change", "metadata", "what"),
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
    metadata: dict[str, object],
    what: str,
) -> None:
    path = save(tmp_path / "model", change, **metadata)
    with pytest.raises(ModelFileError) as caught:
        RunTimeModel.load(path)
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
            RunTimeModel.load(tmp_path / "other")
    for path, what in ((tmp_path / "absent", "No such file"), (tmp_path, "it is a directory")):
        with pytest.raises(ModelFileError, match=f"cannot be read .{what}"):
            RunTimeModel.load(path)
    missing = arrays(torch_model())
    del missing["start"]
    (tmp_path / "other").write_bytes(run_time_file.contents(SIZES, missing, {}))
    with pytest.raises(ModelFileError, match="tensor 'start' is missing"):
        RunTimeModel.load(tmp_path / "other")
