"""Compares several models and the oracle on the same run times, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gadei_ps.errors import UsageError
from gadei_ps.simulate import oracle
from gadei_ps.simulate.descent import Descent, Learning
from gadei_ps.simulate.outcome import Outcome
from gadei_ps.simulate.problems import PROBLEMS, Problem
from gadei_ps.simulate.setting import Setting
from gadei_ps.simulate.simulator import Simulator
from gadei_ps.sync import SpecError, SyncModel, parse


def problem(name: str, seed: int) -> Problem:
    """One of PROBLEMS by its name. Raises UsageError."""
    if name not in PROBLEMS:
        raise UsageError(f"no problem {name!r}; the problems are {', '.join(PROBLEMS)}")
    return PROBLEMS[name](seed)


def model(spec: str, learners: int) -> SyncModel:
    """A new model, checked for this number of learners. Raises UsageError."""
    try:
        made = parse(spec)
        made.check(learners)
    except SpecError as error:
        raise UsageError(str(error)) from None
    return made


def run(made: SyncModel, setting: Setting, learning: Learning | None = None) -> Outcome:
    """Simulate one model. `made` must be new."""
    descent = None if learning is None else Descent(learning, setting, made.wave)
    found = Simulator(made, setting, descent).run()
    if descent is not None:
        found.curve = descent.curve
    return found


def compare(
    specs: Sequence[str],
    setting: Setting,
    learning: Learning | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The results that `gadei-ps simulate --json` prints, without the setting.

    Deterministic, except the keys `wall_s`. say: called with a line after each model. Raises
    UsageError for an unknown model before it simulates any.
    """
    began = time.perf_counter()
    models = [model(spec, setting.learners) for spec in specs]
    best = oracle.run(setting)
    found = []
    for made in models:
        outcome = run(made, setting, learning)
        found.append(outcome.as_dict(best.throughput))
        say(f"{outcome.model}: {outcome.pushed:,} pushes in {outcome.wall_s:.1f} s")
    return {"oracle": best.as_dict(), "models": found, "wall_s": time.perf_counter() - began}
