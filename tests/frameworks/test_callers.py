"""Keras 3 and JAX with Optax: loops that are not torch's train with a job.

The examples in a short form: with one learner under BSP, which comes to the figures of the
framework alone, and with two learners as users start them, of which one may die. A test is skipped
where its framework is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Cli
from support import daemon, status
from support.scripts import Loaded
from support.torch_models import one_thread as one_thread
from support.waiting import PATIENCE_S as SHORT_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
KERAS, JAX = "keras_fit", "optax_train"
NEEDS = {KERAS: ("keras",), JAX: ("jax", "optax")}
IMPORTS = {
    KERAS: "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras",
    JAX: "import jax, optax",
}
ADAPTERS = {KERAS: ("keras", "_step"), JAX: ("jax", "step")}
SHORT = {KERAS: ["--epochs", "2", "--samples", "128"], JAX: ["--steps", "30"]}
PUSHES = {KERAS: 2 * 128 // 32, JAX: 30}  # of one learner
SAMPLES = {KERAS: 2 * 128, JAX: 30 * 32}
PATIENCE_S = 4 * SHORT_S  # interpreters that import a framework, on a busy machine
pytestmark = pytest.mark.timeout(400)
# One of the two learners makes five steps, and is killed in the sixth.
DIES = """
import os, runpy, signal, sys
os.environ["KERAS_BACKEND"] = "torch"
from gadei_ps.learners.{0} import Learner
step, made = Learner.{1}, []
def counted(*given, **named):
    made.append(1)
    if os.environ["GADEI_PS_LEARNER"] == "1" and len(made) > 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*given, **named)
Learner.{1} = counted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
REFUSED = {
    KERAS: """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy
from keras.optimizers import *
from gadei_ps.learners.keras import Learner
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer={}, loss="mse")
model.fit(numpy.zeros((4, 2)), numpy.zeros(4), callbacks=[Learner()], verbose=0)
""",
    JAX: """
from gadei_ps.learners.jax import Learner
Learner({})
""",
}
# Prints the weight after a fit() whose last callback, or the one before Learner, has doubled it.
WAVES = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy
from gadei_ps.learners.keras import Learner
class Doubles(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        self.model.set_weights([2 * one for one in self.model.get_weights()])
plain = "--plain" in sys.argv
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "tanh", False, "ones")])
steps = {"gradient_accumulation_steps": 4} if plain else {}
model.compile(optimizer=keras.optimizers.SGD(0.4 if plain else 0.1, **steps), loss="mse")
inputs = numpy.random.default_rng(0).standard_normal((48, 2), numpy.float32)
ours = [] if plain else [Learner()]
callbacks = [Doubles(), *ours] if "--before" in sys.argv else [*ours, Doubles()]
model.fit(inputs, inputs[:, 0], batch_size=4, shuffle=False, callbacks=callbacks, verbose=0)
print("loss", model.get_weights()[0].sum())
"""


@pytest.fixture(scope="module", params=NEEDS)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of an example, whose framework is there."""
    for package in NEEDS[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"there is no {package}: pip install {package}")
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> Iterator[Loaded]:
    """Run examples and scripts of the framework."""
    with contextlib.closing(Loaded(IMPORTS[name])) as made:
        yield made


def figure(loaded: Loaded, name: str, words: list[str], job: str | None) -> float:
    variables = {"GADEI_PS_JOB": job, "GADEI_PS_LEARNER": "0"} if job else {}
    ((output, error),) = loaded.outputs(str(EXAMPLES / name), words + SHORT[name], [variables])
    assert not error, output
    return float(re.findall(r"loss (\S+)", output)[-1])


@pytest.mark.parametrize(
    ("name", "words", "near"),
    [
        (KERAS, ["--optimizer", "sgd"], 1e-5),
        (KERAS, ["--optimizer", "momentum"], 1e-5),
        (KERAS, ["--optimizer", "adamw"], 1e-2),  # Keras adds epsilon elsewhere
        (JAX, [], 1e-4),
        (JAX, ["--own"], 1e-5),
    ],
    indirect=["name"],
)
def test_one_learner_does_what_the_framework_alone_does(
    name: str, words: list[str], near: float, job_name: str, loaded: Loaded
) -> None:
    plain = figure(loaded, name, ["--plain", *words], None)
    with daemon(job_name, sync="bsp", start_with=1, optimizer={}) as served:
        one = figure(loaded, name, words, job_name)
        served.check()
    assert one == pytest.approx(plain, rel=near)


def test_two_learners(name: str, cli: Cli, interpreters: None, job_name: str) -> None:
    """Start them as users do; under BSP there are two in the next test."""
    script = [sys.executable, EXAMPLES / f"{name}.py", *SHORT[name]]
    sync = ("--sync", "wsp:D=0,s_local=3")
    result = cli(
        "run", job_name, "--learners", 2, *sync, "--json", "--", *script, patience_s=PATIENCE_S
    )
    assert result.code == 0, result
    assert result.json["gradients_refused"] == 0
    assert result.json["samples"] == 2 * SAMPLES[name]


def test_one_of_two_learners_dies(name: str, job_name: str, tmp_path: Path, loaded: Loaded) -> None:
    path = tmp_path / "dies.py"
    path.write_text(DIES.format(*ADAPTERS[name]))
    words = [str(EXAMPLES / f"{name}.py"), *SHORT[name]]
    learners = [{"GADEI_PS_JOB": job_name, "GADEI_PS_LEARNER": str(one)} for one in range(2)]
    with daemon(job_name, sync="bsp", start_with=2, optimizer={}) as served:
        (output, error), (_, killed) = loaded.outputs(str(path.with_suffix("")), words, learners)
        served.check()
        assert status(job_name)["gradients_applied"] == PUSHES[name] + 5
    assert not error and "loss" in output, output
    assert killed == "ended with -9"


@pytest.mark.parametrize(
    ("name", "script", "message"),
    [
        (KERAS, "RMSprop()", r"UsageError: model.compile\(optimizer=RMSprop\(\)\): a job has SGD"),
        (KERAS, "SGD(momentum=0.9, weight_decay=0.1)", r"SGD\(weight_decay with momentum\)"),
        (JAX, "{'a': 1}", "ModelMismatch: params: 'a' is int32"),
        (JAX, "{'a': {'b': 1.0}, 'a/b': 2.0}", "ModelMismatch: two arrays of a pytree"),
    ],
    indirect=["name"],
)
def test_what_a_job_does_not_train_is_refused(
    name: str, script: str, message: str, tmp_path: Path, loaded: Loaded
) -> None:
    path = tmp_path / "refused.py"
    path.write_text(REFUSED[name].format(script))
    ((_, error),) = loaded.outputs(str(path.with_suffix("")), [], [{}])
    assert re.search(message, error), error


@pytest.mark.parametrize("order", ["--before", "--after"])
@pytest.mark.parametrize("name", [KERAS], indirect=True)
def test_a_wave_of_keras_is_one_sum_and_what_ends_a_fit_may_write(
    order: str, tmp_path: Path, job_name: str, loaded: Loaded
) -> None:
    (tmp_path / "waves.py").write_text(WAVES)
    script = str(tmp_path / "waves")
    found = []
    with daemon(job_name, sync="wsp:D=0,s_local=3", start_with=1, optimizer={}) as served:
        for words, variables in ((["--plain"], {}), ([], {"GADEI_PS_JOB": job_name})):
            ((output, error),) = loaded.outputs(script, [order, *words], [variables])
            assert not error, output
            found.append(float(output.split()[-1]))
        served.check()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
