"""The API pages have every public method, and each of them has a docstring."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from gadei_ps.commands.notebook import ServedJob
from gadei_ps.learners.client import Client
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.learners.waves import GradientWaves, Waves

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MODULE = re.compile(r"^\.\. automodule:: (\S+)\n((?:   :.*\n)*)", re.M)
PUBLIC: list[type] = [Client, Pipeline, Waves, GradientWaves, ServedJob]


def documented() -> dict[str, bool]:
    """Return the modules of all pages, and whether members of base classes are shown."""
    text = "".join(path.read_text() for path in sorted(REFERENCE.glob("*.rst")))
    return {name: ":inherited-members:" in options for name, options in MODULE.findall(text)}


def missing(of: type, modules: dict[str, bool]) -> list[str]:
    """Return the public names of a class that its page lacks, or that have no docstring."""
    wrong = []
    for name in dir(of):
        if name.startswith("_"):
            continue
        home = next(one for one in of.__mro__ if name in vars(one))
        found = home is of or modules.get(of.__module__, False)
        if of.__module__ not in modules or not found or not inspect.getdoc(getattr(of, name)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("of", PUBLIC)
def test_every_public_method_is_documented(of: type) -> None:
    assert not missing(of, documented())


def test_torch_learners_are_documented() -> None:
    torch = pytest.importorskip("torch")
    from gadei_ps.learners.torch import LocalOptimizer, Optimizer
    from gadei_ps.learners.virtual import VirtualWorker

    learners = (Optimizer, LocalOptimizer, VirtualWorker)
    modules = documented() | dict.fromkeys((one.__module__ for one in learners), False)
    assert modules.keys() >= {"gadei_ps.learners.torch", "gadei_ps.learners.virtual"}
    theirs = set(dir(torch.optim.Optimizer))
    for of in learners:
        assert set(missing(of, modules)) <= theirs


def test_what_is_missing_is_found() -> None:
    class Base:
        def inherited(self) -> None:
            """Do it."""

    class One(Base):
        def bare(self) -> None: ...

    modules = {One.__module__: False}
    assert missing(One, modules) == ["bare", "inherited"]
    assert missing(One, {One.__module__: True}) == ["bare"]
    assert missing(One, {}) == ["bare", "inherited"]
