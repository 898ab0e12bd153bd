"""The order in which a shard looks at its rings, as Python runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.memory.layout import MAX_LEARNERS
from gadei_ps.server import order
from gadei_ps.server.structs import KNOWN_RING, PART


@pytest.fixture(autouse=True)
def as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "integer", int)


class Looker:
    """A shard that has so many rings, of slots of so many bytes."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        part = np.zeros(1, PART).view(np.recarray)
        known = np.zeros(MAX_LEARNERS, KNOWN_RING).view(np.recarray)
        known.slot_bytes = slot_bytes
        self.s: Any = SimpleNamespace(part=part, known=known)
        order.reset.py_func(self.s, count)

    def chosen(self, everything: bool = False) -> list[int]:
        looks = order.choose.py_func(self.s, self.count, everything)
        return self.s.part[0].looked[:looks].tolist()

    def turn(self, pushing: set[int], everything: bool = False) -> list[int]:
        """A pass, in which these rings hold something. Returns the lines that it looked at."""
        lines = self.chosen(everything)
        for line in lines:
            if line in pushing:
                order.had_news.py_func(self.s, line)
        order.sort_out.py_func(self.s, len(lines))
        return lines


@settings(max_examples=50, deadline=None)
@given(data=st.data(), count=st.integers(1, MAX_LEARNERS), size=st.sampled_from([512, 1 << 17]))
def test_no_ring_waits_longer_than_a_round(data: st.DataObject, count: int, size: int) -> None:
    """Look at each ring once a round, whoever pushes, and at no ring twice in a pass."""
    looker = Looker(count, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "QUIET", np.uint64(data.draw(st.integers(0, 5))))
        share = min(count, int(looker.s.part[0].share))
        assert share >= min(count, order.LEAST)
        left = [0] * count
        for number in range(60):
            pushing = data.draw(st.sets(st.integers(0, count - 1), max_size=8), label="pushing")
            everything = number % 17 == 16
            lines = looker.turn(pushing, everything)
            assert len(lines) == len(set(lines))
            assert not everything or set(lines) == set(range(count))
            left = [0 if line in lines else waited + 1 for line, waited in enumerate(left)]
            assert max(left) < -(-count // share) + 1


def test_a_pass_costs_by_the_rings_that_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "QUIET", np.uint64(50))
    looker = Looker(256, 40_000)
    assert len(looker.turn(set())) == 256  # all are new
    for _ in range(int(order.QUIET)):
        lines = looker.turn({7, 200})
        assert {7, 200} <= set(lines)
    costs = [looker.turn({7, 200}) for _ in range(128)]
    assert max(map(len, costs)) == 2 + order.LEAST
    assert set().union(*costs) == set(range(256))
    assert len(looker.turn(set(), everything=True)) == 256


def test_a_ring_that_pushes_again_is_looked_at_in_every_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "QUIET", np.uint64(100))
    looker = Looker(256, 40_000)
    for _ in range(int(order.QUIET) + 1):
        looker.turn({7})
    found = next(number for number in range(65) if 100 in looker.turn({7, 100}))
    assert found <= 64
    for _ in range(100):
        assert {7, 100} <= set(looker.chosen())


@pytest.mark.parametrize(
    ("size", "others"), [(512, 4), (1 << 20, 64), (4 << 20, 256), (1 << 30, 256)]
)
def test_large_gradients_let_a_pass_look_at_more(size: int, others: int) -> None:
    looker = Looker(256, size)
    assert int(looker.s.part[0].share) == others
