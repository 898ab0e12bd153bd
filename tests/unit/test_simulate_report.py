"""Learning in virtual time, the oracle, and the command that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gadei_ps.cli.research import ProblemName, simulate
from gadei_ps.errors import UsageError
from gadei_ps.simulate import oracle
from gadei_ps.simulate.compare import compare, model, run
from gadei_ps.simulate.descent import Descent, Learning
from gadei_ps.simulate.problems import PROBLEMS, Logistic, Problem
from gadei_ps.simulate.run_times import RecordedTimes, parse
from gadei_ps.simulate.setting import Setting
from gadei_ps.sync import parse as parse_model

# -- learning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_against_differences(name: str) -> None:
    problem = PROBLEMS[name](3)
    chance = np.random.default_rng(0)
    weights = problem.initial() + 0.1 * chance.normal(size=problem.initial().shape)
    # The held-out loss has no gradient here: the loss of some samples is integrated instead.
    rows = chance.integers(problem.samples, size=50)
    found = problem.gradient(weights, rows)
    assert found.shape == weights.shape
    for direction in chance.normal(size=(5, *weights.shape)):
        step = 1e-5 * direction
        # Of a smooth function, the gradient along a path is the difference of its ends.
        middle = problem.gradient(weights, rows) @ step
        assert abs(middle) > 0
        ahead, behind = (_loss(problem, weights + sign * step / 2, rows) for sign in (1, -1))
        assert middle == pytest.approx(ahead - behind, rel=1e-4, abs=1e-12)


def _loss(problem: Any, weights: np.ndarray, rows: np.ndarray) -> float:
    """Return the loss of training samples: the held-out ones are swapped for them."""
    kept = problem._held, problem._held_labels
    problem._held, problem._held_labels = problem._inputs[rows], problem._labels[rows]
    try:
        return float(problem.loss(weights)["loss"])
    finally:
        problem._held, problem._held_labels = kept


class Counting:
    """Its one weight counts gradients; notes the weights that each gradient is asked of."""

    name = "counting"
    samples = 10
    lr = 1.0

    def __init__(self) -> None:
        self.asked: list[tuple[float, int]] = []

    def initial(self) -> np.ndarray:
        return np.zeros(1)

    def gradient(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        assert rows.min() >= 0
        assert rows.max() < self.samples
        self.asked.append((float(weights[0]), len(rows)))
        return np.full(1, -1.0)

    def loss(self, weights: np.ndarray) -> dict[str, float]:
        return {"loss": float(weights[0]), "accuracy": 0.0}


def test_gradients_are_those_of_the_weights_pulled() -> None:
    problem = Counting()
    setting = Setting(2, RecordedTimes(np.array([[1.0, 2.0]])), gradients=6)
    found = run(parse_model("asp"), setting, Learning(problem, batch=3, lr_on_arrival=1.0))
    # Learner 0 pulls at 0, 1, 2, 3; learner 1 at 0 and 2, after learner 0 was applied there.
    assert problem.asked == [(0, 3), (1, 3), (0, 3), (2, 3), (4, 3), (3, 3)]
    assert found.curve[-1] == {"seconds": 4.0, "gradients": 6, "loss": 6.0, "accuracy": 0.0}


def test_a_superstep_moves_by_the_mean() -> None:
    problem = Counting()
    setting = Setting(4, RecordedTimes(np.ones((1, 4))), iterations=5)
    found = run(parse_model("bsp"), setting, Learning(problem, batch=3, lr=2.0))
    # The mini-batches of those that pulled the same weights are one.
    assert problem.asked == [(2.0 * step, 12) for step in range(5)]
    assert found.curve[-1]["loss"] == 10.0


def test_the_mean_of_gradients_of_different_weights() -> None:
    problem = Logistic(0)
    setting = Setting(2, parse("normal", 0), iterations=1)
    descent = Descent(Learning(problem, batch=4, lr=1.0), setting)
    first = descent.weights
    descent.pull((0, 1, 2))
    descent.begin((0, 1, 2), (5, 0, 0))
    descent.publish(1)
    descent.apply((1,), on_arrival=False)
    second = descent.weights
    descent.pull((1,))
    descent.begin((1,), (1,))
    for learner in (0, 1, 2):
        descent.publish(learner)
    descent.apply((0, 1, 2), on_arrival=False)
    gradients = [
        problem.gradient(weights, descent._rows(learner, iteration))
        for weights, learner, iteration in ((first, 0, 5), (second, 1, 1), (first, 2, 0))
    ]
    np.testing.assert_allclose(descent.weights, second - np.mean(gradients, axis=0), atol=1e-12)


def test_a_wave_adds_its_updates_up() -> None:
    problem = Counting()
    setting = Setting(2, RecordedTimes(np.ones((1, 2))), iterations=6)
    learning = Learning(problem, batch=3, lr_on_arrival=0.5)
    found = run(parse_model("wsp:D=0,s_local=2"), setting, learning)
    # The second waves begin with the weights of their learners' last pulls, which were made in the
    # first waves, and pull for their last mini-batches.
    later = [(0.0, 6), (2 * 3 * 0.5, 3)]
    assert problem.asked == [(0.0, 9), (0.0, 9), *later, *later]
    assert found.curve[-1]["loss"] == 4 * 3 * 0.5
    assert found.curve[-1]["gradients"] == 12


def test_dropped_gradients_are_not_computed() -> None:
    problem = Counting()
    setting = Setting(2, RecordedTimes(np.array([[1.0, 3.0]])), iterations=4)
    run(parse_model("cutoff:1"), setting, Learning(problem, batch=3, lr=1.0))
    assert len(problem.asked) == 4


@pytest.mark.parametrize("name", PROBLEMS)
def test_learning_learns_as_plain_descent_does(name: str) -> None:
    problem: Problem = PROBLEMS[name](1)
    setting = Setting(4, parse("normal", 1), seed=1, iterations=150)
    found = run(parse_model("bsp"), setting, Learning(problem, points=20))
    assert 20 <= len(found.curve) <= 21
    losses = [point["loss"] for point in found.curve]
    assert losses[-1] < 0.8 * losses[0]
    again = run(parse_model("bsp"), setting, Learning(problem, points=20))
    assert again.curve == found.curve
    # The same mini-batches, one after the other, without any simulator.
    weights = problem.initial()
    descent = Descent(Learning(problem), setting)
    for iteration in range(150):
        rows = np.concatenate([descent._rows(k, iteration) for k in range(4)])
        weights = weights - problem.lr * problem.gradient(weights, rows)
    assert problem.loss(weights)["loss"] == pytest.approx(losses[-1], rel=1e-9)


def test_too_stale_gradients_do_not_learn() -> None:
    """Show why the learning rate depends on learners: one rate for stale gradients diverges."""
    problem = Logistic(0)
    setting = Setting(64, parse("normal", 0), iterations=20)
    good, bad = (
        run(parse_model("asp"), setting, Learning(problem, lr=2.0, lr_on_arrival=rate)).curve[-1]
        for rate in (None, 2.0)
    )
    assert good["loss"] < 0.5 < bad["loss"]


# -- the oracle -------------------------------------------------------------------------------


def test_the_oracle_by_hand() -> None:
    rows = np.array([[1.0, 1.2, 9.0], [1.0, 1.0, 1.0], [4.0, 1.0, 4.0]])
    best = oracle.run(Setting(3, RecordedTimes(rows), iterations=3))
    assert (best.supersteps, best.gradients) == (3, 2 + 3 + 1)
    assert best.seconds == pytest.approx(1.2 + 1.0 + 1.0)
    best = oracle.run(Setting(3, RecordedTimes(rows), gradients=4, server_s=0.5))
    assert (best.supersteps, best.gradients) == (2, 5)
    assert best.seconds == pytest.approx(1.2 + 1.0 + 5 * 0.5)
    assert oracle.run(Setting(3, RecordedTimes(rows), seconds=2.3)).supersteps == 3


def test_the_oracle_beats_barriers() -> None:
    report = compare(["bsp", "cutoff:28", "asp"], Setting(32, parse("heavy", 0), iterations=50))
    shares = {one["model"]: one["oracle_share"] for one in report["models"]}
    assert shares["bsp"] < shares["cutoff:c=28"] < 1 < shares["asp"]


# -- the command ------------------------------------------------------------------------------


def spoken(capsys: pytest.CaptureFixture[str], *models: str, **how: Any) -> Any:
    assert simulate(list(models), as_json=True, **how) == 0
    return json.loads(capsys.readouterr().out)


def without_wall(report: Any) -> Any:
    if isinstance(report, dict):
        return {key: without_wall(value) for key, value in report.items() if key != "wall_s"}
    return [without_wall(one) for one in report] if isinstance(report, list) else report


def test_json_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    how = {"learners": 6, "iterations": 30, "deaths": 0.02, "return_after": "2s", "seed": 4}
    how |= {"loss": ProblemName.NETWORK, "server_time": "10ms", "times": "lognormal"}
    models = ("bsp", "asp", "ssp:2", "elastic-bsp", "cutoff:4", "wsp:1")
    first, second = (spoken(capsys, *models, **how) for _ in range(2))
    assert without_wall(first) == without_wall(second)
    assert [one["model"].partition(":")[0] for one in first["models"]] == [
        name.partition(":")[0] for name in models
    ]
    assert first["learners"] == 6
    for one in first["models"]:
        assert one["deaths"] > 0
        assert one["curve"][-1]["loss"] < one["curve"][0]["loss"]
    other = spoken(capsys, *models, **(how | {"seed": 5}))
    assert without_wall(other) != without_wall(first)


def test_the_table_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for loss in (None, ProblemName.CONVEX):
        files = [tmp_path / f"{number}.svg" for number in range(2)]
        for file in files:
            assert simulate(["bsp", "cutoff:3"], learners=4, deaths=0.01, loss=loss, plot=file) == 0
        shown = capsys.readouterr().out
        for word in ("of oracle", "waiting", "staleness", "deaths", "cutoff:c=3", "99%"):
            assert word in shown
        assert ("accuracy" in shown) == (loss is not None)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert b"</svg>" in files[0].read_bytes()
    with pytest.raises(UsageError, match="name another file"):
        simulate(["bsp"], plot=tmp_path / "no" / "where.svg")
    with pytest.raises(UsageError, match=r"ends in \.svg"):
        simulate(["bsp"], plot=tmp_path / "plot.docx")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib: pip install 'gadei-ps\[plot"):
        simulate(["bsp"], iterations=1, plot=tmp_path / "plot.svg")


def test_as_a_process(tmp_path: Path) -> None:
    """One run and one mistake, each with its exit code; a trace is read from a file."""
    file = tmp_path / "trace.csv"
    file.write_text("iteration,learner,started,seconds,censored\n0,0,,1,0\n0,1,,3,0\n")
    script = (
        "import sys, typer; from gadei_ps.cli import exits; "
        "from gadei_ps.cli.research import simulate; "
        "app = typer.Typer(); app.command()(simulate); "
        "sys.exit(exits.execute(lambda: typer.main.get_command(app), sys.argv[1:]))"
    )
    line = [sys.executable, "-c", script, "bsp", "--learners=2", f"--times={file}", "--json"]
    done = subprocess.run([*line, "--iterations=5"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["models"][0]["seconds"] == 15
    assert report["models"][0]["waiting_share"] == pytest.approx(1 / 3)
    assert "10 pushes" in done.stderr
    failed = subprocess.run([*line, "--iterations=0"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr == "gadei-ps: simulation: iterations, gradients and time must be above 0\n"
    assert json.loads(failed.stdout)["kind"] == "UsageError"


@pytest.mark.parametrize(
    ("models", "how", "message"),
    [
        (["chaos"], {}, "unknown model 'chaos'"),
        (["ssp"], {}, "s is missing"),
        (["cutoff:9"], {"learners": 8}, "c = 9 is above the number of learners, 8"),
        (["bsp"], {"learners": 1}, "--learners must be from 2 to 100,000, not 1"),
        (["bsp"], {"learners": 10**6}, "learners must be from 1 to 100,000"),
        (["bsp"], {"time_": "soon"}, "duration 'soon'"),
        (["bsp"], {"times": "normal:std=-2"}, "std must be at least 0"),
        (["bsp"], {"deaths": -0.1}, "a probability from 0 to 1"),
        (["bsp"], {"die": ["3"]}, "--die '3': write learner and time like 3@12.5"),
        (["bsp"], {"die": ["x@1"]}, "--die 'x@1'"),
        (["bsp"], {"die": ["30@1"]}, "there is no learner 30 of 8"),
        (["bsp"], {"join": ["3@late"]}, "duration 'late'"),
        (["bsp"], {"give_up_after": "200%"}, "a share must be from 0% to 100%"),
        (["bsp"], {"give_up_after": "some%"}, "a share must be from 0% to 100%"),
        (["bsp"], {"give_up_after": "later"}, "duration 'later'"),
        (["bsp"], {"lr": 0.1}, "--lr and --lr-on-arrival need --loss"),
    ],
)
def test_mistakes_are_told_in_one_line(
    models: list[str], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        simulate(models, **how)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_when_stragglers_give_up(capsys: pytest.CaptureFixture[str]) -> None:
    lost = {
        word: spoken(capsys, "cutoff:6", times="heavy", give_up_after=word)["models"][0]["lost_s"]
        for word in ("0", "100ms", "20%", "never")
    }
    assert lost["0"] < lost["100ms"] < lost["never"]
    assert lost["0"] < lost["20%"] < lost["never"]


def test_a_model_is_checked_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="c = 5"):
        model("cutoff:5", 4)
