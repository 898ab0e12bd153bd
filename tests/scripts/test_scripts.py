"""The scripts of examples/scripts/ in a short form: as plain torch, with one learner, with two.

One learner under BSP waits for each of its gradients: its figure is the plain script's, to the
rounding of float32, which steps amplify; in bfloat16, to the rounding of that. A job's Adam counts
one number of steps, and torch's one for each expert of mixture_of_experts. Two learners under ASP
make half of the steps each: in a short form their figure may be somewhat worse. How far whole runs
come is for the benchmark of scripts.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from shell import Cli
from support import daemon
from support.scripts import SCRIPTS, figures, outputs
from support.torch_models import one_thread as one_thread


@dataclass(frozen=True)
class Short:
    """A script's short form. words: its options, `{}` for how long it trains.

    whole: this much, in `{}`, for one learner; two learners train half of it each. rtol: how far
    one learner's figure may be from the plain script's. two: the figure of two learners as a
    multiple of the plain script's; at most this, or at least if it is below 1.
    """

    words: str
    whole: int
    rtol: float = 1e-4
    two: float = 1.3
    second: str = ""
    """The option that names a second job, where the script has two models."""
    loads: str = "torch"
    """Module that takes long to import: this process does so once, for all of its forks."""

    def options(self, share: int = 1, job: str = "") -> list[str]:
        words = self.words.format(self.whole // share).split()
        return [*words, self.second, second(job)] if self.second and job else words


def second(job: str) -> str:
    return f"{job}-second"


SHORT = {
    "actor_critic": Short("--episodes {}", 20, two=0.4),
    "bfloat16": Short("--steps {}", 60, rtol=0.1),
    "clip": Short("--epochs {} --samples 320", 2),
    "compiled": Short("--steps {} --backend eager", 16, loads="torch._dynamo"),
    "distillation": Short("--epochs {} --samples 320 --teacher-epochs 1", 2),
    "dqn": Short("--steps {}", 240, two=0.3),
    "fine_tuning": Short("--epochs {} --samples 320 --pretraining 320", 4, rtol=1e-3),
    "gan": Short("--niter {}", 16, rtol=1e-3, second="--generator"),
    "gcn": Short("--epochs {} --nodes 300", 40),
    "gpt": Short("--steps {}", 12),
    "matrix_factorization": Short("--epochs {} --ratings 6400 --users 300 --items 200", 4, two=1.6),
    "mixed_precision": Short("--steps {}", 60, rtol=1e-3),
    "mixture_of_experts": Short("--steps {}", 60, rtol=5e-3),
    "mnist_cnn": Short("--epochs {} --samples 256", 2),
    "mnist_hogwild": Short("--epochs {} --samples 320", 4),
    "neural_ode": Short("--niters {}", 40),
    "normalizing_flow": Short("--steps {}", 60, two=1.5),
    "pinn": Short("--steps {}", 60),
    "ppo": Short("--iterations {}", 4, two=0.4),
    "quickstart_mlp": Short("--epochs {} --samples 640", 4),
    "resnet": Short("--epochs {} --samples 256", 2, rtol=1e-3),
    "super_resolution": Short("--nEpochs {} --images 160", 2, two=1.5),
    "tabular": Short("--epochs {} --rows 1280", 4),
    "text_classifier": Short("--epochs {} --samples 1600", 2, two=1.5),
    "time_series": Short("--epochs {} --length 400", 2),
    "translation": Short("--steps {}", 12),
    "triplet": Short("--epochs {} --samples 320", 2),
    "vae": Short("--epochs {} --samples 1280", 2),
    "word_language_model": Short("--epochs {} --length 8000", 2),
}
# What the changed line ends with where a job cannot do what the script wants.
REFUSED = {
    "gan": "ModelMismatch: tensor '0.weight' has shape [16, 32, 4, 4], the job's has [16, 1, 4, 4]",
    "time_sequence_prediction": "UsageError: like=LBFGS: a job has the optimizers",
}
NO_LEARNER: Mapping[str, str] = {}


def variables(job: str, learners: int) -> list[Mapping[str, str]]:
    """Return the variables of each learner, as `gadei-ps run` sets them."""
    return [
        {"GADEI_PS_JOB": job, "GADEI_PS_LEARNER": str(one), "GADEI_PS_LEARNERS": str(learners)}
        for one in range(learners)
    ]


@contextlib.contextmanager
def served(name: str, job: str, **values: Any) -> Iterator[None]:
    """The script's job, and its second one if it needs one."""
    with contextlib.ExitStack() as jobs:
        jobs.enter_context(daemon(job, **values, optimizer={}))
        if SHORT[name].second:
            jobs.enter_context(daemon(second(job), **values, optimizer={}))
        yield


def test_every_script_is_run() -> None:
    helpers = {"cartpole"}
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*SHORT, *REFUSED} | helpers


@pytest.mark.parametrize("name", SHORT)
def test_a_script(name: str, job_name: str) -> None:
    short = SHORT[name]
    importlib.import_module(short.loads)
    (plain,) = figures(name, ["--plain", *short.options()], [NO_LEARNER])
    with served(name, job_name, sync="bsp", start_with=1):
        (one,) = figures(name, short.options(1, job_name), variables(job_name, 1))
    assert one == pytest.approx(plain, rel=short.rtol)
    job = f"{job_name}-two"
    with served(name, job):
        last = figures(name, short.options(2, job), variables(job, 2))
    if short.two < 1:
        assert max(last) >= short.two * plain
    else:
        assert min(last) <= short.two * plain


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_is_refused(name: str, job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        ((output, error),) = outputs(name, [], variables(job_name, 1))
    assert error, f"a job takes what {name} wants: move it from REFUSED to SHORT, and in the docs"
    assert error.startswith(REFUSED[name]), output


def test_a_script_as_users_start_it(cli: Cli, interpreters: None, job_name: str) -> None:
    words = SHORT["quickstart_mlp"].options(2)
    script = [sys.executable, SCRIPTS / "quickstart_mlp.py", *words]
    result = cli("run", job_name, "--learners", 2, "--json", "--", *script)
    assert result.code == 0, result
    assert result.json["gradients_applied"] == 2 * 2 * 10
    for learner in range(2):
        assert f"[{learner}] Epoch 2: accuracy" in result.err, result.err
