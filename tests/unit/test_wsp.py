"""WSP: local and global clocks. What the weights of a mini-batch hold is read from real runs, in
tests/end_to_end/test_wsp.py."""

from __future__ import annotations

import numpy as np
import pytest

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
