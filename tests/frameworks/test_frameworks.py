"""Hugging Face's Trainer and PyTorch Lightning with their own loops, callbacks and checkpoints.

The examples in a short form: as plain torch, with one learner under BSP, which comes to the same
figures, and with two learners as users start them. One learner is run and then resumed from its
checkpoint; each run loads its best model at the end.
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
from support import daemon
from support.scripts import Loaded
from support.torch_models import one_thread as one_thread
from support.waiting import PATIENCE_S as SHORT_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
NEEDS = {"hugging_face": ("transformers", "accelerate"), "lightning_fit": ("lightning",)}
IMPORTS = {
    "hugging_face": "from transformers import BertForSequenceClassification, Trainer",
    "lightning_fit": "import lightning",
}
SAMPLES = 128
PATIENCE_S = 4 * SHORT_S  # interpreters that import a framework, on a busy machine
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=NEEDS)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of an example, whose framework is there."""
    for package in NEEDS[request.param]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"there is no {package}: pip install '.[frameworks]' brings it")
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> Iterator[Loaded]:
    """Run the example."""
    with contextlib.closing(Loaded(IMPORTS[name])) as made:
        yield made


def test_every_example_is_run() -> None:
    other = {"keras_fit", "optax_train"}  # see test_callers.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, *other}


def options(epochs: int, directory: Path) -> list[str]:
    words = ["--samples", SAMPLES, "--epochs", epochs, "--directory", directory]
    return [*map(str, words), *(["--resume"] if epochs > 2 else [])]


def figures(output: str) -> list[float]:
    """Return the figures of the last line."""
    found = [float(one) for one in re.findall(r"\d+\.\d+(?:e-\d+)?", output.splitlines()[-1])]
    assert len(found) == 2, output
    return found


def run(loaded: Loaded, name: str, words: list[str], job: str | None) -> list[float]:
    variables = {"GADEI_PS_JOB": job, "GADEI_PS_LEARNER": "0"} if job else {}
    ((output, error),) = loaded.outputs(str(EXAMPLES / name), words, [variables])
    assert not error, output
    return figures(output)


def test_one_learner_does_what_the_framework_alone_does(
    name: str, loaded: Loaded, tmp_path: Path, job_name: str
) -> None:
    for epochs in (2, 4):
        plain = run(loaded, name, ["--plain", *options(epochs, tmp_path / "plain")], None)
        job = f"{job_name}-{epochs}"
        with daemon(job, sync="bsp", start_with=1, optimizer={}) as served:
            one = run(loaded, name, options(epochs, tmp_path / "job"), job)
            served.check()
        assert one == pytest.approx(plain, rel=1e-3)


def test_two_learners(name: str, cli: Cli, interpreters: None, job_name: str) -> None:
    """Start them as users do."""
    script = [sys.executable, EXAMPLES / f"{name}.py", *options(2, Path("kept"))]
    result = cli("run", job_name, "--learners", 2, "--json", "--", *script, patience_s=PATIENCE_S)
    assert result.code == 0, result
    assert result.json["gradients_refused"] == 0
    assert result.json["gradients_applied"] >= 2 * SAMPLES // 16
    for learner in range(2):
        lines = [one for one in result.err.splitlines() if one.startswith(f"[{learner}]")]
        assert any("best" in one for one in lines), result.err
