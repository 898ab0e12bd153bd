"""WSP: local and global clocks, and what the weights of a mini-batch hold, under any schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.simulate.run_times import Recorded
from gadei_ps.simulate.setting import Setting
from gadei_ps.simulate.simulator import Simulator
from gadei_ps.sync import SpecError, parse
from gadei_ps.sync.asp import ASP
from gadei_ps.sync.wsp import WSP


def test_the_papers_example() -> None:
    """Figure 13: D = 0, s_local = 3."""
    model = WSP(D=0, s_local=3)
    assert model.s_global == 6
    assert model.wave == 4
    model.join(1, 0.0)
    model.join(2, 0.0)
    assert model.mini_batches(1) == 7, "5, 6 and 7 before the others have pushed wave 0"
    model.push(1, 1.0)
    assert model.mini_batches(1) == 7
    model.push(2, 2.0)
    assert model.mini_batches(1) == 11, "12 needs the updates from 1 to 8"


class Waves(ASP):
    """Another model with waves."""

    @property
    def wave(self) -> int:
        return 4


def test_any_model_with_waves_is_simulated_by_waves() -> None:
    setting = Setting(2, Recorded(np.ones((1, 2))), iterations=8, server_s=0.0)
    found = Simulator(Waves(), setting).run()
    assert (found.wave, found.pushed, found.seconds) == (4, 4, 8.0)


@pytest.mark.parametrize(
    ("D", "s_local", "s_global"), [(0, 0, 0), (0, 3, 6), (1, 0, 1), (4, 3, 22)]
)
def test_global_staleness(D: int, s_local: int, s_global: int) -> None:
    assert WSP(D, s_local).s_global == s_global


def test_spec() -> None:
    assert str(parse("wsp:D=2,s_local=3")) == "wsp:D=2,s_local=3"
    assert str(parse("wsp:2")) == "wsp:D=2,s_local=0"
    with pytest.raises(SpecError, match="wsp: D must be a whole number from 0"):
        parse("wsp:D=-1")
    with pytest.raises(SpecError, match="wsp: D is missing"):
        parse("wsp:s_local=1")


@dataclass
class Worker:
    """A virtual worker: a pipeline of mini-batches, counted from 1."""

    started: int = 0
    finished: int = 0


def run_schedule(D: int, s_local: int, workers: int, chance: random.Random, steps: int) -> int:
    """Any order of starting, finishing and pushing; returns how many mini-batches were checked.

    `pushed[k]` is what of worker k's waves is in the global weights, which every start may read.
    """
    model = WSP(D, s_local)
    wave = s_local + 1
    pushed = [0] * workers
    state = [Worker() for _ in range(workers)]
    for k in range(workers):
        model.join(k, 0.0)
    speeds = [chance.choice((1, 1, 5, 20)) for _ in range(workers)]
    for now in range(steps):
        (k,) = chance.choices(range(workers), speeds)
        worker = state[k]
        may_start = (
            worker.started < model.mini_batches(k) and worker.started - worker.finished <= s_local
        )
        if may_start and (chance.random() < 0.6 or worker.started == worker.finished):
            worker.started += 1
            p = worker.started
            if p > (D + 1) * wave + s_local:
                # All updates of all others from mini-batch 1 to p - (s_global + 1).
                least = min(pushed[other] * wave for other in range(workers) if other != k)
                assert least >= p - (model.s_global + 1), (p, pushed)
            # A worker with local clock c >= D + 1 has all waves up to c - D - 1.
            c = (p - 1 - s_local) // wave
            if c >= D + 1:
                assert min(pushed) >= c - D
        elif worker.finished < worker.started:
            worker.finished += 1
            if worker.finished % wave == 0:
                model.push(k, float(now))
                pushed[k] += 1
        assert model.clock(k) == pushed[k]
        assert max(pushed) - min(pushed) <= D + 1
        assert any(
            worker.started < model.mini_batches(k) or worker.finished < worker.started
            for k, worker in enumerate(state)
        )
    return sum(worker.started for worker in state)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    D=st.integers(0, 4),
    s_local=st.integers(0, 4),
    workers=st.integers(2, 5),
    seed=st.integers(0, 2**32),
)
def test_invariants_hold_under_any_schedule(D: int, s_local: int, workers: int, seed: int) -> None:
    assert run_schedule(D, s_local, workers, random.Random(seed), steps=120) > 0
