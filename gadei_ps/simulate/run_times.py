"""Run times of learners' iterations, drawn from a distribution or read from a trace.

The run time of learner k's i-th iteration depends only on the seed, k and i. It does not depend on
the model under test, nor on the order of the draws. So all models are compared on the same run
times.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gadei_ps.errors import UsageError
from gadei_ps.simulate.draws import FloatArray, IntArray, Stream, normal, uniform

LEAST = 0.01
"""The least run time, as a share of the mean. A normal distribution has negative numbers too."""
GOLDEN = 0.6180339887498949  # multiples of this share of the trace never repeat a shift


class RunTimes(ABC):
    """A source of run times."""

    learners: int | None = None
    """Number of learners that have run times. None: any number."""

    @abstractmethod
    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        """Return the time (s), above 0, of each pair of learner and iteration; arrays broadcast."""


class RecordedTimes(RunTimes):
    """Run times as they were measured, float64 of shape (iterations, learners), without gaps.

    A learner uses a column, and starts it again after its end. If there are more learners than
    columns, the others use the same columns shifted in time, so that no two learners are the same.
    A time of zero, which a coarse clock may give, counts as a millionth of the mean. Raises
    ValueError if a time is negative or not finite, or if all are zero.
    """

    def __init__(self, times: FloatArray) -> None:
        if times.ndim != 2 or not times.size:
            raise ValueError("there are no run times")
        if not np.isfinite(times).all() or (times < 0).any() or not times.any():
            raise ValueError("run times must be finite, at least 0 and not all 0")
        self._times = np.maximum(times, 1e-6 * times.mean())
        self.learners = times.shape[1]

    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        rows, columns = self._times.shape
        again = learners // columns
        shift = again * max(1, round(rows * GOLDEN))
        drawn: FloatArray = self._times[(iterations + shift) % rows, learners % columns]
        return drawn


# -- distributions --------------------------------------------------------------------------------

Parameters = Mapping[str, Any]


def _normal(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw from a normal distribution, with `std` around `mean`, in seconds."""
    noise = normal(seed, learners, iterations)
    drawn: FloatArray = np.maximum(of["mean"] + of["std"] * noise, LEAST * of["mean"])
    return drawn


def _log_normal(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw times whose logarithm is normal with deviation `sigma`. mean: in seconds."""
    noise = normal(seed, learners, iterations)
    drawn: FloatArray = of["mean"] * np.exp(of["sigma"] * noise - of["sigma"] ** 2 / 2)
    return drawn


def _heavy(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw from Pareto's: P(longer than t) falls as t to the power -`alpha`. mean: in seconds."""
    chance = uniform(seed, Stream.TAIL, learners, iterations)
    least = of["mean"] * (of["alpha"] - 1) / of["alpha"]
    drawn: FloatArray = least * chance ** (-1 / of["alpha"])
    return drawn


def _groups(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw for nodes of `size` learners, which are all slower by `factor` at the same time.

    Time is divided into spells of `length` iterations, which begin at a random place for each node.
    A node is slow in a spell with the probability `share`.
    """
    node = learners // of["size"]
    shift = uniform(seed, Stream.SHIFT, node, np.zeros_like(node)) * of["length"]
    spell = (iterations + shift.astype(np.int64)) // of["length"]
    slow = uniform(seed, Stream.SPELL, node, spell) < of["share"]
    return _normal(of, seed, learners, iterations) * np.where(slow, of["factor"], 1.0)


def _switch(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw for learners of which 0 to `slow` - 1 are slower by `factor` below iteration `until`.

    As in figure 2 of the paper on cutoffs (Teng and Wood 2018): 40 of 158 learners share a slow
    machine, which becomes fast at iteration 61.
    """
    slow = (learners < of["slow"]) & (iterations < of["until"])
    return _normal(of, seed, learners, iterations) * np.where(slow, of["factor"], 1.0)


def _speeds(of: Parameters, seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw for unequal learners: learner k does its k-th number of iterations in `mean` seconds.

    If there are more learners than numbers, the numbers are used again in the same order.
    """
    speeds = of["speeds"]
    factor: FloatArray = 1.0 / speeds[learners % len(speeds)]
    return _normal(of, seed, learners, iterations) * factor


class _Kind(NamedTuple):
    """A distribution. form: an example that `parse` reads, with the defaults. bounds: by key."""

    form: str
    draw: Callable[[Parameters, int, IntArray, IntArray], FloatArray]
    bounds: Mapping[str, tuple[str, int]]


ABOVE, FROM, WHOLE = "above", "at least", "a whole number from"
_BASE = {"mean": (ABOVE, 0), "std": (FROM, 0)}
_KINDS = {
    "normal": _Kind("normal:mean=1,std=0.2", _normal, _BASE),
    "lognormal": _Kind(
        "lognormal:mean=1,sigma=0.5", _log_normal, {"mean": (ABOVE, 0), "sigma": (FROM, 0)}
    ),
    "heavy": _Kind("heavy:mean=1,alpha=2.5", _heavy, {"mean": (ABOVE, 0), "alpha": (ABOVE, 1)}),
    "groups": _Kind(
        "groups:size=10,factor=3,share=0.1,length=20,mean=1,std=0.1",
        _groups,
        {"size": (WHOLE, 1), "factor": (ABOVE, 0), "share": (FROM, 0), "length": (WHOLE, 1)}
        | _BASE,
    ),
    "switch": _Kind(
        "switch:slow=40,until=61,factor=2,mean=1,std=0.1",
        _switch,
        {"slow": (WHOLE, 0), "until": (WHOLE, 0), "factor": (ABOVE, 0)} | _BASE,
    ),
    "speeds": _Kind("speeds:1,1.5,2,4,mean=1,std=0.05", _speeds, _BASE),
}
FORMS = (*(one.form for one in _KINDS.values()), "FILE.csv")


class DrawnTimes(RunTimes):
    """Run times of one of _KINDS. Raises ValueError for parameters that it does not take."""

    def __init__(
        self, kind: _Kind, seed: int, given: dict[str, float], speeds: Sequence[float]
    ) -> None:
        values = dict(re.findall(r"(\w+)=([\d.]+)", kind.form)) | given
        if unknown := [key for key in given if key not in kind.bounds]:
            raise ValueError(f"there is no {_shown(unknown[0])}")
        self._parameters: dict[str, Any] = {
            key: _bounded(key, float(values[key]), *kind.bounds[key]) for key in kind.bounds
        }
        if kind.draw is _speeds:
            if not speeds:
                raise ValueError("the speeds are missing")
            self._parameters["speeds"] = np.array(
                [_bounded("a speed", one, ABOVE, 0) for one in speeds]
            )
        self._draw, self._seed = kind.draw, seed

    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        return self._draw(self._parameters, self._seed, learners, iterations)


# -- reading --------------------------------------------------------------------------------------


def parse(spec: str, seed: int) -> RunTimes:
    """Run times from a command line: `KIND:key=value,...`, or the path of a trace file.

    Raises UsageError, one line, if they cannot be read.
    """
    name, _, rest = spec.strip().partition(":")
    if not name:
        raise UsageError(f"run times are missing: write one of {', '.join(FORMS)}")
    if name not in _KINDS:
        if "/" in spec or "." in name or Path(spec).exists():
            return _read(spec)
        raise UsageError(f"run times {_shown(spec)}: write one of {', '.join(FORMS)}")
    kind = _KINDS[name]
    speeds: list[float] = []
    given: dict[str, float] = {}
    try:
        for item in rest.split(",") if rest.strip() else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if equals:
                if key in given:
                    raise ValueError(f"{key} is given twice")
                given[key] = _number(key, value)
            elif name == "speeds":
                speeds.append(_number("a speed", key))
            else:
                raise ValueError(f"cannot read {_shown(item)}")
        return DrawnTimes(kind, seed, given, speeds)
    except ValueError as error:
        raise UsageError(f"run times {_shown(spec)}: {error}; write it like {kind.form}") from None


def _read(path: str) -> RunTimes:
    from gadei_ps.run_times import traces

    times = traces.read(path).filled().times
    try:
        return RecordedTimes(times)
    except ValueError as error:
        raise UsageError(f"{path}: {error}; correct the trace") from None


def _shown(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise ValueError(f"{key} must be a number, not {_shown(text)}")
    return value


def _bounded(key: str, value: float, word: str, least: int) -> float:
    """Return the value, an int if it has to be whole. Raises ValueError if it is out of bounds."""
    inside = value > least if word == ABOVE else value >= least
    if not inside or (word == WHOLE and value != int(value)):
        raise ValueError(f"{key} must be {word} {least}, not {value:g}")
    return int(value) if word == WHOLE else value
