"""The learned prediction of run times: a deep Markov model, evaluated with NumPy alone.

After Teng and Wood 2018 (Cutoff SGD), sections 3.1.2, 3.1.3 and 4.2. The formulas are missing in
the text of the paper. They are reconstructed from its source, Krishnan, Shalit and Sontag 2017
(structured inference networks). x_t are the run times of superstep t, z_t is the cluster's hidden
state. gadei_ps.run_times.fitting trains the model.

    transition   g = sigmoid(MLP(z)); h = MLP(z)
                 z_t ~ N((1 - g) * (W z + b) + g * h, softplus(W relu(h) + b)), z = z_(t-1)
    emission     x_t ~ N(W e + b, softplus(W e + b)), e = relu(MLP(z_t))
    inference    l_t, r_t: tanh RNNs over x from the left and from the right (ST-LR)
                 h_t = (tanh(W z_(t-1) + b) + l_t + r_t) / 3
                 z_t ~ N(W h_t + b, softplus(W h_t + b))

A prediction draws the last state from the inference network over the last `lag` supersteps, makes
one transition, draws the run times, sorts each draw, and averages (equation 5).

Levels are not in the paper. The predicted run times of each learner are multiplied by its level:
the median, over the last `lag` supersteps, of the observed over the predicted run time. The level
is 1 if the networks know the cluster. If another node is slow than in the training trace, the
networks alone choose cutoffs no better than Elfving's formula (60 to 69% of the best throughput on
the synthetic cluster of the benchmarks). With levels they reach 98%.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from gadei_ps.sync.order_statistics import sorted_mean
from gadei_ps.sync.prediction import (
    BoolArray,
    FloatArray,
    History,
    IntArray,
    checked,
    right_tail,
    survival,
)
from gadei_ps.sync.run_time_file import Floats, Sizes, read

SMALLEST: Final = 0.02
LARGEST: Final = 5.0
"""Normalised run times, whose mean is about 1/2, are clipped to this range. A learner that was
stopped for an hour must not dominate the networks' input."""
MIN_STD: Final = 1e-3
"""The smallest deviation. It prevents that one run time outweighs all others in training."""


class Network:
    """The trained networks: a function from a window of run times and noise to the next superstep.

    weights: float32 by the names of Sizes.shapes().
    """

    def __init__(self, sizes: Sizes, weights: Mapping[str, Floats]) -> None:
        self.sizes = sizes
        # Weights are transposed once, so that rows of states can be multiplied from the left.
        self._weights = {
            name: np.ascontiguousarray(value.T if value.ndim == 2 else value)
            for name, value in weights.items()
        }

    def predict(self, window: Floats, noise: Floats) -> tuple[Floats, Floats]:
        """Return means and deviations of the next superstep's run times, one row for each draw.

        window: (lag, learners), normalised. noise: standard normal, (lag + 1, draws, latent).
        Returns (draws, learners) twice, normalised.
        """
        states = self._next_states(self._last_states(window, noise[:-1]), noise[-1])
        hidden = _relu(self._layer("emission", states))
        return self._layer("run_time", hidden), _std(self._layer("run_time_std", hidden))

    def _last_states(self, window: Floats, noise: Floats) -> Floats:
        """Draw z_lag from the inference network: (draws, latent)."""
        context = self._recurrence("left", window) + self._recurrence("right", window[::-1])[::-1]
        states = np.broadcast_to(self._weights["start"], noise.shape[1:])
        for seen, random in zip(context, noise, strict=True):
            hidden = (np.tanh(self._layer("combiner", states)) + seen) / np.float32(3)
            mean = self._layer("posterior", hidden)
            states = mean + _std(self._layer("posterior_std", hidden)) * random
        return states

    def _recurrence(self, name: str, window: Floats) -> Floats:
        """A tanh RNN's state after each row of the window: (lag, recurrent)."""
        states = self._layer(f"{name}.input", window)
        recurrent = self._weights[f"{name}.recurrent"]
        states[0] = np.tanh(states[0])
        for before, state in pairwise(states):
            np.tanh(state + before @ recurrent, out=state)
        return states

    def _next_states(self, states: Floats, noise: Floats) -> Floats:
        """One step of the gated transition."""
        gate = _sigmoid(self._layer("gate.1", _relu(self._layer("gate.0", states))))
        proposal = self._layer("proposal.1", _relu(self._layer("proposal.0", states)))
        mean = (np.float32(1) - gate) * self._layer("linear", states) + gate * proposal
        next_states: Floats = mean + _std(self._layer("transition_std", _relu(proposal))) * noise
        return next_states

    def _layer(self, name: str, values: Floats) -> Floats:
        result: Floats = values @ self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return result


def _relu(values: Floats) -> Floats:
    return np.maximum(values, 0)


def _sigmoid(values: Floats) -> Floats:
    half = np.float32(0.5)
    result: Floats = half * np.tanh(half * values) + half
    return result


def _std(values: Floats) -> Floats:
    """softplus + MIN_STD, without overflow."""
    softplus: Floats = _relu(values) + np.log1p(np.exp(-np.abs(values)))
    return softplus + np.float32(MIN_STD)


class RunTimeModel:
    """A Predictor that uses the learned model.

    It predicts nothing until it has seen `lag` supersteps. It divides all run times by twice the
    mean of those first ones, as in training, so that one model serves for mini-batches of any cost
    (end of section 3.1.3). A censored run time is replaced by a draw from the prediction for that
    learner and superstep, given that it is above the bound (section 4.2). An unknown run time is
    replaced by a draw from the whole prediction.

    Slots from `learners` on were not in the trace that trained the model. Each is predicted as a
    learner drawn at random, and its run times are ignored.
    """

    def __init__(
        self, sizes: Sizes, weights: Mapping[str, Floats], *, draws: int = 64, seed: int = 0
    ) -> None:
        """draws: number of joint samples of a superstep that a prediction averages."""
        self.learners = sizes.learners
        self.lag = sizes.lag
        self._network = Network(sizes, weights)
        self._latent = sizes.latent
        self._draws = draws
        self._generator = np.random.default_rng(seed)
        self._history = History(sizes.lag)
        self.scale = 0.0
        """Seconds in a normalised run time of 1. 0 until `lag` supersteps are seen."""
        self._prediction: tuple[Floats, Floats] | None = None
        self._levels = History(sizes.lag)  # observed over predicted
        self._typical: Floats = np.empty(0, np.float32)  # the networks' own median prediction

    @classmethod
    def load(cls, path: str | Path, *, draws: int = 64, seed: int = 0) -> RunTimeModel:
        """The model in a file of gadei_ps.run_times.fitting. Raises ModelFileError, one line."""
        sizes, weights = read(path)
        return cls(sizes, weights, draws=draws, seed=seed)

    def observe(self, times: FloatArray, censored: BoolArray) -> None:
        """See Predictor."""
        row, bound = checked(times, censored)
        known = np.full(self.learners, np.nan)
        known[: len(row)] = row[: self.learners]
        dropped = np.zeros(self.learners, np.bool_)
        dropped[: len(bound)] = bound[: self.learners]
        if self.scale:
            self._predicted()
            self._history.append(self._imputed(known / self.scale, dropped))
            self._levels.append(self._history.rows[-1] / self._typical)
        elif not np.isnan(known).all():
            self._history.append(self._guessed(known))
            if len(self._history) == self.lag:
                self.scale = max(2 * float(self._history.rows.mean()), 1e-9)
                self._history.rows = np.clip(self._history.rows / self.scale, SMALLEST, LARGEST)
        self._prediction = None

    def expected(self, slots: IntArray) -> FloatArray | None:
        """See Predictor; None until `lag` supersteps have been seen."""
        draws = self.sampled(slots)
        if draws is None or not np.isfinite(draws).all():  # a file may have any weights
            return None
        return sorted_mean(draws)

    def sampled(self, slots: IntArray) -> FloatArray | None:
        """Joint draws of the next superstep: float64 (draws, m), seconds, unsorted; or None."""
        if not self.scale:
            return None
        mean, std = self._predicted()
        columns = np.broadcast_to(slots, (self._draws, len(slots)))
        if (slots >= self.learners).any():
            anybody = self._generator.integers(self.learners, size=columns.shape)
            columns = np.where(columns < self.learners, columns, anybody)
            mean, std = (np.take_along_axis(part, columns, axis=1) for part in (mean, std))
        elif len(slots) != self.learners or (slots != np.arange(self.learners)).any():
            mean, std = mean[:, slots], std[:, slots]
        draws = mean + std * self._generator.standard_normal(mean.shape, np.float32)
        seconds: FloatArray = np.maximum(draws, SMALLEST) * np.float64(self.scale)
        return seconds

    @property
    def window(self) -> FloatArray:
        """The last supersteps as the networks see them, imputed: seconds, oldest first."""
        return self._history.rows * (self.scale or 1.0)

    def _predicted(self) -> tuple[Floats, Floats]:
        """Return means and deviations (draws, learners) of the next superstep, computed once."""
        if self._prediction is None:
            shape = self.lag + 1, self._draws, self._latent
            noise = self._generator.standard_normal(shape, np.float32)
            window = self._history.rows.astype(np.float32)
            mean, std = self._network.predict(window, noise)
            self._typical = np.maximum(np.median(mean, axis=0), np.float32(SMALLEST))
            if len(self._levels):
                level = np.median(self._levels.rows, axis=0).astype(np.float32)
                mean, std = mean * level, std * level
            self._prediction = mean, std
        return self._prediction

    def _imputed(self, row: FloatArray, dropped: BoolArray) -> FloatArray:
        """A normalised superstep (learners,) without gaps or bounds."""
        guessed = np.flatnonzero(dropped | np.isnan(row))
        if len(guessed):
            mean, std = (part[:, guessed].astype(np.float64) for part in self._predicted())
            bound = np.where(dropped[guessed], row[guessed], SMALLEST)
            # Each draw's normal distribution is weighted by its probability above the bound.
            weight = np.cumsum(survival((bound - mean) / std) + 1e-300, axis=0)
            place = self._generator.random(len(guessed)) * weight[-1]
            chosen = (weight < place).sum(axis=0), np.arange(len(guessed))
            row[guessed] = right_tail(self._generator, mean[chosen], std[chosen], bound)
        return np.clip(row, SMALLEST, LARGEST)

    def _guessed(self, row: FloatArray) -> FloatArray:
        """Fill the gaps of an early superstep: the learner's last run time, else the others' mean.

        A lower bound stays as it is, because no prediction has dropped a learner yet.
        """
        if len(self._history):
            row = np.where(np.isnan(row), self._history.rows[-1], row)
        return np.where(np.isnan(row), np.nanmean(row), row)
