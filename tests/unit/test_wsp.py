"""WSP: local and global clocks. What the weights of a mini-batch hold is read from real runs, in
tests/end_to_end/test_wsp.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import Watch, simulate

from gadei_ps.simulate.run_times import RecordedTimes
from gadei_ps.simulate.run_times import parse as run_times
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


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    source=st.sampled_from(["normal", "heavy:alpha=1.5", "groups", "speeds:1,3"]),
    D=st.integers(0, 3),
    s_local=st.integers(0, 4),
    learners=st.integers(2, 8),
    seed=st.integers(0, 99),
    server_s=st.sampled_from([0.0, 0.02]),
)
def test_wsp_keeps_its_bound(
    source: str, D: int, s_local: int, learners: int, seed: int, server_s: float
) -> None:
    """Park et al. 2020: a mini-batch p > (D + 1)(s_local + 1) + s_local is computed from weights
    that hold the mini-batches of every other learner up to p - (s_global + 1)."""
    model = WSP(D, s_local)

    class Bound(Watch):
        def __init__(self) -> None:
            super().__init__()
            self.done: Counter[int] = Counter()
            self.seen: dict[int, int] = {}
            self.before: dict[int, int] = {}
            self.lacks = 0

        def pull(self, learners_: Sequence[int]) -> None:
            super().pull(learners_)
            for k in learners_:
                others = min(self.done[other] for other in range(learners) if other != k)
                self.seen[k] = others * model.wave

        def begin(self, learners_: Sequence[int], iterations: Sequence[int]) -> None:
            super().begin(learners_, iterations)
            self.before.update({k: self.seen[k] for k in learners_})

        def publish(self, learner: int) -> None:
            last = (self.published[learner] + 1) * model.wave
            super().publish(learner)
            for p, seen in ((last - 1, self.before[learner]), (last, self.seen[learner])):
                if p > (D + 1) * model.wave + s_local:
                    self.lacks = max(self.lacks, p - (model.s_global + 1) - seen)

        def apply(self, learners: Sequence[int], *, on_arrival: bool) -> None:
            super().apply(learners, on_arrival=on_arrival)
            self.done.update(learners)

    watch, iterations = Bound(), 8 * model.wave
    simulate(
        str(model),
        run_times(source, seed),
        learners=learners,
        iterations=iterations,
        server_s=server_s,
        seed=seed,
        training=watch,
    )
    assert not watch.lacks


class Waves(ASP):
    """Another model with waves."""

    @property
    def wave(self) -> int:
        return 4


def test_any_model_with_waves_is_simulated_by_waves() -> None:
    setting = Setting(2, RecordedTimes(np.ones((1, 2))), iterations=8, server_s=0.0)
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
