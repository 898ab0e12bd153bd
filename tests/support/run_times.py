"""Run times to learn from, and PyTorch as small networks want it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from gadei_ps.run_times.traces import Trace
from gadei_ps.sync.prediction import FloatArray


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread: networks this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def switching(iterations: int, seed: int) -> FloatArray:
    """Six learners; two are three times as slow half of the time, for 25 iterations in a row."""
    generator = np.random.default_rng(seed)
    slow = (np.arange(iterations) // 25 + seed) % 2 == 0
    factor = np.ones((iterations, 6))
    factor[slow, :2] = 3.0
    times: FloatArray = factor * np.exp(generator.normal(0, 0.05, factor.shape))
    return times


def as_trace(times: FloatArray, censored: FloatArray | None = None) -> Trace:
    bound = np.zeros(times.shape, bool) if censored is None else censored.astype(bool)
    return Trace(times, bound, tuple(f"n{column}" for column in range(times.shape[1])))
