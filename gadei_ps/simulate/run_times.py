"""Run times of learners' iterations, drawn from a distribution or read from a trace.

The run time of learner k's i-th iteration depends only on the seed, k and i. It does not depend on
the model under test, nor on the order of the draws. So all models are compared on the same run
times.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from gadei_ps.errors import UsageError
from gadei_ps.simulate.draws import FloatArray, IntArray, Stream, normal, uniform

LEAST = 0.01
"""The least run time, as a share of the mean. A normal distribution has negative numbers too."""
GOLDEN = 0.6180339887498949  # multiples of this share of the trace never repeat a shift


class RunTimes(ABC):
    """A source of run times."""

    form: ClassVar[str]
    """An example that `parse` reads."""

    learners: int | None = None
    """Number of learners that have run times. None: any number."""

    @abstractmethod
    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        """Return the time (s), above 0, of each pair of learner and iteration; arrays broadcast."""


class Normal(RunTimes):
    """Normally distributed, with `std` around `mean`, in seconds."""

    form = "normal:mean=1,std=0.2"

    def __init__(self, seed: int, mean: float = 1.0, std: float = 0.2) -> None:
        self._seed = seed
        self._mean = _above("mean", mean, 0)
        self._std = _least("std", std, 0)

    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        noise = normal(self._seed, learners, iterations)
        base = np.maximum(self._mean + self._std * noise, LEAST * self._mean)
        return base * self._factor(learners, iterations)

    def _factor(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        """The factor by which each iteration is slower."""
        return np.ones(np.broadcast_shapes(learners.shape, iterations.shape))


class LogNormal(RunTimes):
    """The logarithm is normal with deviation `sigma`. `mean` is the mean run time in seconds."""

    form = "lognormal:mean=1,sigma=0.5"

    def __init__(self, seed: int, mean: float = 1.0, sigma: float = 0.5) -> None:
        self._seed = seed
        self._mean = _above("mean", mean, 0)
        self._sigma = _least("sigma", sigma, 0)

    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        noise = normal(self._seed, learners, iterations)
        return self._mean * np.exp(self._sigma * noise - self._sigma**2 / 2)


class HeavyTailed(RunTimes):
    """Pareto distributed: P(longer than t) falls as t to the power -`alpha`. mean: in seconds."""

    form = "heavy:mean=1,alpha=2.5"

    def __init__(self, seed: int, mean: float = 1.0, alpha: float = 2.5) -> None:
        self._seed = seed
        self._alpha = _above("alpha", alpha, 1)
        self._least = _above("mean", mean, 0) * (alpha - 1) / alpha

    def draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        chance = uniform(self._seed, Stream.TAIL, learners, iterations)
        return self._least * chance ** (-1 / self._alpha)


class Groups(Normal):
    """Nodes of `size` learners. All learners of a node are slower by `factor` at the same time.

    Time is divided into spells of `length` iterations, which begin at a random place for each node.
    A node is slow in a spell with the probability `share`.
    """

    form = "groups:size=10,factor=3,share=0.1,length=20,mean=1,std=0.1"

    def __init__(
        self,
        seed: int,
        size: float = 10,
        factor: float = 3.0,
        share: float = 0.1,
        length: float = 20,
        mean: float = 1.0,
        std: float = 0.1,
    ) -> None:
        super().__init__(seed, mean, std)
        self._size = _whole("size", size, 1)
        self._slow = _above("factor", factor, 0)
        self._share = _least("share", share, 0)
        self._length = _whole("length", length, 1)

    def _factor(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        node = learners // self._size
        shift = uniform(self._seed, Stream.SHIFT, node, np.zeros_like(node)) * self._length
        spell = (iterations + shift.astype(np.int64)) // self._length
        slow = uniform(self._seed, Stream.SPELL, node, spell) < self._share
        return np.where(slow, self._slow, 1.0)


class Switch(Normal):
    """Learners 0 to `slow` - 1 are slower by `factor` in their iterations below `until`.

    As in figure 2 of the paper on cutoffs (Teng and Wood 2018): 40 of 158 learners share a slow
    machine, which becomes fast at iteration 61.
    """

    form = "switch:slow=40,until=61,factor=2,mean=1,std=0.1"

    def __init__(
        self,
        seed: int,
        slow: float = 40,
        until: float = 61,
        factor: float = 2.0,
        mean: float = 1.0,
        std: float = 0.1,
    ) -> None:
        super().__init__(seed, mean, std)
        self._slow = _whole("slow", slow, 0)
        self._until = _whole("until", until, 0)
        self._by = _above("factor", factor, 0)

    def _factor(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        return np.where((learners < self._slow) & (iterations < self._until), self._by, 1.0)


class Speeds(Normal):
    """Learners of unequal speed: learner k does its k-th number of iterations in `mean` seconds.

    If there are more learners than numbers, the numbers are used again in the same order.
    """

    form = "speeds:1,1.5,2,4,mean=1,std=0.05"

    def __init__(self, seed: int, *speeds: float, mean: float = 1.0, std: float = 0.05) -> None:
        super().__init__(seed, mean, std)
        if not speeds:
            raise ValueError("the speeds are missing")
        self._speeds = np.array([_above("a speed", speed, 0) for speed in speeds])

    def _factor(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        factor: FloatArray = 1.0 / self._speeds[learners % len(self._speeds)]
        return factor + np.zeros(iterations.shape)


class RecordedTimes(RunTimes):
    """Run times as they were measured, float64 of shape (iterations, learners), without gaps.

    A learner uses a column, and starts it again after its end. If there are more learners than
    columns, the others use the same columns shifted in time, so that no two learners are the same.
    A time of zero, which a coarse clock may give, counts as a millionth of the mean. Raises
    ValueError if a time is negative or not finite, or if all are zero.
    """

    form = "FILE.csv"

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


_KINDS: Mapping[str, Callable[..., RunTimes]] = {
    "normal": Normal,
    "lognormal": LogNormal,
    "heavy": HeavyTailed,
    "groups": Groups,
    "switch": Switch,
    "speeds": Speeds,
}
FORMS = tuple(
    one.form for one in (Normal, LogNormal, HeavyTailed, Groups, Switch, Speeds, RecordedTimes)
)


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
    make = _KINDS[name]
    form: str = make.form  # type: ignore[attr-defined]
    values: list[float] = []
    named: dict[str, float] = {}
    try:
        for item in rest.split(",") if rest.strip() else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if equals:
                if key in named:
                    raise ValueError(f"{key} is given twice")
                named[key] = _number(key, value)
            elif make is Speeds:
                values.append(_number("a speed", key))
            else:
                raise ValueError(f"cannot read {_shown(item)}")
        known = re.findall(r"(\w+)=", form)
        unknown = [key for key in named if key not in known]
        if unknown:
            raise ValueError(f"there is no {_shown(unknown[0])}")
        return make(seed, *values, **named)
    except ValueError as error:
        raise UsageError(f"run times {_shown(spec)}: {error}; write it like {form}") from None


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


def _above(key: str, value: float, bound: float) -> float:
    if not value > bound:
        raise ValueError(f"{key} must be above {bound}, not {value:g}")
    return value


def _least(key: str, value: float, bound: float) -> float:
    if not value >= bound:
        raise ValueError(f"{key} must be at least {bound}, not {value:g}")
    return value


def _whole(key: str, value: float, bound: int) -> int:
    if not value >= bound or value != int(value):
        raise ValueError(f"{key} must be a whole number from {bound}, not {value:g}")
    return int(value)
