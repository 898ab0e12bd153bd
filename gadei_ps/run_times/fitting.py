"""Trains the model of run times (sync/run_time_model.py) with PyTorch, from a trace.

Teng and Wood 2018 (Cutoff SGD), section 3.1.3: stochastic gradient ascent on the evidence lower
bound (ELBO) of windows of `LAG` supersteps, for the generative and the inference networks at once,
with Adam and gradient clipping. A trace of a few hundred iterations is enough.

The paper leaves these points open:

- Each window is scaled as if the run had begun at a random place of the trace: it is divided by
  twice the mean of the `LAG` supersteps there, and multiplied by a little noise. So the networks
  cannot rely on the level at which a run begins.
- A missing run time does not count. A lower bound counts with the probability above it. In place of
  a missing run time, the inference network sees the learner's previous one; of a lower bound, the
  bound itself.
- The end of the trace is held out. The weights with the best ELBO on it are kept.
- KL annealing, as in Krishnan et al. 2017, made no difference and is left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from gadei_ps.errors import UsageError
from gadei_ps.run_times.deep_markov import Batch, DeepMarkovModel
from gadei_ps.run_times.traces import Trace
from gadei_ps.show.counts import counted
from gadei_ps.storage import files
from gadei_ps.sync import run_time_file
from gadei_ps.sync.run_time_file import Floats, Sizes
from gadei_ps.sync.run_time_model import LARGEST, SMALLEST

LAG: Final = 20
LATENT: Final = 8
RECURRENT: Final = 64
HIDDEN: Final = 64

EPOCHS: Final = 30
BATCHES: Final = 40
"""Number of mini-batches of an epoch, for a trace of any length."""
BATCH: Final = 32
LEARNING_RATE: Final = 2e-3
PENALTY: Final = 1e-4
"""Factor of the sum of squares of all weights, beside the ELBO for each run time."""
JITTER: Final = 0.1
"""Deviation of the logarithm of the noise by which a window is multiplied."""
CLIP: Final = 1.0
HELD_OUT: Final = 0.15
TESTED: Final = 64
"""The most held-out windows that are used. It bounds time and memory."""

SHORTEST: Final = 4 * LAG
"""The fewest iterations of a trace. With fewer, none is left to train on after the hold-out."""

Progress = Callable[[int, int, float], None]
"""Called after each epoch with its number from 1, the number of epochs, and the held-out ELBO."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and its figures. ELBOs are nats for each scaled run time.

    missing, censored: number of such run times in the trace. seconds: duration of the training.
    """

    out: str
    learners: int
    lag: int
    iterations: int
    missing: int
    censored: int
    epochs: int
    best_epoch: int
    elbo: float
    held_out_elbo: float
    parameters: int
    seconds: float


def train(
    trace: Trace,
    *,
    out: str | os.PathLike[str],
    epochs: int = EPOCHS,
    seed: int = 0,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train a model on the trace and write it to `out`, whole or not at all.

    The same seed gives the same model on the same machine with the same number of threads. Raises
    UsageError if the trace is too short, has fewer than 2 learners or only equal run times, and if
    the file cannot be written.
    """
    begin = time.monotonic()
    if epochs < 1:
        raise UsageError(f"the number of epochs is {epochs}; it must be at least 1")
    _check(trace)
    target = Path(out)
    if not target.parent.is_dir():  # reported before the work, not after it
        raise UsageError(f"{target}: there is no directory {target.parent}; create it")
    held_out = max(LAG + 5, round(HELD_OUT * len(trace.times)))
    # Before it is divided: a learner may have run times in one part only.
    filled, middle, end = trace.filled(), len(trace.times) - held_out, len(trace.times)
    training, testing = (
        _Windows(trace.part(*rows), filled.part(*rows).times)
        for rows in ((0, middle), (middle, end))
    )
    sizes = Sizes(len(trace.learners), LAG, LATENT, RECURRENT, HIDDEN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepMarkovModel(sizes, training.typical())
        best = _fit(model, training, testing, epochs, progress)
    metadata = {
        "normalisation": f"divided by twice the mean of the first {LAG} supersteps",
        "iterations": len(trace.times),
        "seed": seed,
        "elbo": best.elbo,
        "held_out_elbo": best.held_out_elbo,
    }
    _write(target, run_time_file.contents(sizes, best.weights, metadata))
    return TrainingResult(
        out=str(target),
        learners=sizes.learners,
        lag=sizes.lag,
        iterations=len(trace.times),
        missing=trace.missing,
        censored=int(trace.censored.sum()),
        epochs=epochs,
        best_epoch=best.epoch,
        elbo=best.elbo,
        held_out_elbo=best.held_out_elbo,
        parameters=sum(weight.size for weight in best.weights.values()),
        seconds=time.monotonic() - begin,
    )


def _check(trace: Trace) -> None:
    iterations, learners = trace.times.shape
    if iterations < SHORTEST:
        raise UsageError(
            f"the trace has {counted(iterations, 'iteration')}; "
            f"record at least {SHORTEST}, better hundreds"
        )
    if learners < 2:
        raise UsageError("the trace has fewer than 2 learners; record a job with more")
    if np.isinf(trace.times).any() or (trace.times < 0).any():
        raise UsageError("the trace has run times that are negative or infinite; correct them")
    known = trace.times[~np.isnan(trace.times)]
    if not len(known) or np.ptp(known) <= 1e-6 * known.max():
        raise UsageError("the trace's run times are all equal; the model needs times that vary")


class _Windows:
    """Windows of `LAG` supersteps of a trace. A batch is (windows, LAG, learners), scaled."""

    def __init__(self, trace: Trace, filled: np.ndarray) -> None:
        """filled: the run times of the trace, without gaps."""
        self.count = len(filled) - LAG + 1
        # For each place, twice the mean of the window that begins there.
        means = np.lib.stride_tricks.sliding_window_view(filled.mean(axis=1), LAG).mean(axis=1)
        self._scales = torch.from_numpy(np.maximum(2 * means, 1e-9).astype(np.float32))
        self._times = torch.from_numpy(filled.astype(np.float32))
        self._known = torch.from_numpy(~np.isnan(trace.times)) if trace.missing else None
        self._censored = torch.from_numpy(trace.censored) if trace.censored.any() else None

    def sample(self, count: int) -> Batch:
        """Random windows, each scaled as if the run had begun at another random place."""
        scales = self._scales[torch.randint(self.count, (count,))]
        return self._batch(
            torch.randint(self.count, (count,)), scales * torch.exp(JITTER * torch.randn(count))
        )

    def spread(self, count: int) -> Batch:
        """Return at most `count` windows, evenly spaced, scaled as in a run from the first on."""
        begins = torch.linspace(0, self.count - 1, min(count, self.count)).round().long()
        return self._batch(begins, self._scales[:1].expand(len(begins)))

    def typical(self) -> Tensor:
        """All run times at the usual scale: (iterations, learners)."""
        return self._times / self._scales.mean()

    def _batch(self, begins: Tensor, scales: Tensor) -> Batch:
        places = begins[:, None] + torch.arange(LAG)
        return Batch(
            (self._times[places] / scales[:, None, None]).clamp(SMALLEST, LARGEST),
            None if self._known is None else self._known[places],
            None if self._censored is None else self._censored[places],
        )


@dataclass
class _Best:
    weights: dict[str, Floats]
    epoch: int
    elbo: float
    held_out_elbo: float


def _fit(
    model: DeepMarkovModel,
    training: _Windows,
    testing: _Windows,
    epochs: int,
    progress: Progress | None,
) -> _Best:
    """Train, and return the weights of the epoch that was best on `testing`."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, epochs * BATCHES, LEARNING_RATE / 100
    )
    weights = [value for name, value in model.named_parameters() if name.endswith("weight")]
    held_out = testing.spread(TESTED)
    best = _Best({}, 0, math.nan, -math.inf)
    for epoch in range(1, epochs + 1):
        elbos = []
        for _ in range(BATCHES):
            elbo = model.elbo(training.sample(BATCH), model.noise(BATCH))
            penalty = torch.stack([weight.square().sum() for weight in weights]).sum()
            optimizer.zero_grad()
            (PENALTY * penalty - elbo).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            elbos.append(elbo.item())
        with torch.no_grad():
            # Always the same noise, so that epochs differ only by their weights.
            noise = model.noise(len(held_out.times), torch.Generator().manual_seed(0))
            found = model.elbo(held_out, noise).item()
        if found > best.held_out_elbo:
            kept = {
                name: value.detach().numpy().copy() for name, value in model.state_dict().items()
            }
            best = _Best(kept, epoch, float(np.mean(elbos)), found)
        if progress is not None:
            progress(epoch, epochs, found)
    if not best.weights:
        raise UsageError("training gave numbers that are not finite; look at the trace's run times")
    return best


def _write(target: Path, data: bytes) -> None:
    try:
        with files.replacing(target) as file:
            file.write(data)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{target}: cannot be written ({reason}); name another file") from None
