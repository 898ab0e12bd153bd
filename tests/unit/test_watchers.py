"""Watchers watch the heads of rings in the place of shards that sleep."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eventually

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, MAX_LEARNERS, RING
from gadei_ps.server import watchers
from gadei_ps.server.shards import new_board
from gadei_ps.server.structs import BOARD
from gadei_ps.server.watchers import DIRECT, FROM, GROUP, PERIOD_S, Watcher, Watchers

LONG_NS = 60_000_000_000
_u64, _u32 = ctypes.c_uint64, ctypes.c_uint32
_sleep = ctypes.CDLL(_native.__file__).ps_shard_sleep
_sleep.argtypes, _sleep.restype = [_u64] * 6 + [_u32, _u64], None


class Ring:
    """A ring's header in plain memory, as the table of rings has it."""

    def __init__(self, row: int) -> None:
        self.row, self.generation = row, 1000 + row
        self._memory = np.zeros(1, RING)
        self.at = self._memory.ctypes.data
        self.ring: Any = self

    def word(self, kind: np.dtype[np.void], field: str) -> int:
        return self.at + layout.offset(kind, field)

    @property
    def head(self) -> int:
        return _native.load(self.word(RING, "head"))

    def publish(self) -> None:
        _native.store(self.word(RING, "head"), self.head + 1)


class Table:
    """Table of rings as a watcher needs it, and a control segment in plain memory."""

    def __init__(self, rows: list[int]) -> None:
        self.control = np.zeros(1, CONTROL)
        self.board = new_board()
        self.rings = {row: Ring(row) for row in rows}
        self.shard_bell = self.word("shard_bell")
        self.shards = self.held = 1

    def word(self, field: str) -> int:
        return self.control.ctypes.data + layout.offset(CONTROL, field)

    def all(self) -> list[Ring]:
        return list(self.rings.values())

    def watched(self) -> set[int]:
        words = self.board[0]["watched"]
        return {row for row, ring in self.rings.items() if words[row] == ring.generation}

    def sleep(self) -> None:
        """Sleep as shard 0 does, which has consumed all that is there."""
        rings = self.all()
        bell = _native.load32(self.shard_bell)
        address = np.array([ring.at for ring in rings], np.uint64)
        apart = np.array([ring.row in self.watched() for ring in rings], np.uint64)
        heads = np.array([ring.head for ring in rings], np.uint64)
        arrays = [array.ctypes.data for array in (address, heads, apart)]
        _sleep(self.control.ctypes.data, 0, *arrays, len(rings), bell, LONG_NS)


def test_a_silent_ring_of_many_wakes_a_shard() -> None:
    """Wake for more rings than one call watches, each by its own head, never by a time-out."""
    table = Table(list(range(MAX_LEARNERS)))
    threads = Watchers(table)  # type: ignore[arg-type]
    threads.follow()
    try:
        for row in (3, GROUP - 1, GROUP, 200, MAX_LEARNERS - 1, 3):
            # A moment: it is left to the shards for at least one period.
            eventually(lambda row=row: row in table.watched(), what=f"{row} is watched")
            shard = threading.Thread(target=table.sleep, daemon=True)
            shard.start()
            eventually(lambda: table.control[0]["sleepers"] == 1)
            table.rings[row].publish()
            _native.futex_wake(table.rings[row].word(RING, "head"))  # it sees `sleepers`
            shard.join(LONG_NS / 1e9 / 2)
            assert not shard.is_alive()
            assert table.control[0]["sleepers"] == 0
    finally:
        table.board["quit"] = 1
        version = table.board.ctypes.data + layout.offset(BOARD, "table_version")
        _native.store(version, 1)
        _native.futex_wake(version)


def test_few_rings_have_no_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "Watcher", None)  # to start one would fail
    Watchers(Table(list(range(FROM)))).follow()  # type: ignore[arg-type]
    table = Table(list(range(GROUP)))
    table.held = 0  # a server that stands by
    Watchers(table).follow()  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 40))
def test_what_a_watcher_watches(data: st.DataObject, count: int) -> None:
    """It reports each head that moves while it watches, and leaves the shards a few at most."""
    table = Table(list(range(count)))
    one = Watcher(table, 0)  # type: ignore[arg-type]
    now = 0.0
    for _ in range(12):
        before = table.watched()
        moved = data.draw(st.sets(st.integers(0, count - 1)), label="moved")
        for row in moved:
            table.rings[row].publish()
        period = data.draw(st.booleans(), label="period")
        now += PERIOD_S if period else 0.0
        assert one.look(now) == bool(moved & before)
        left = set(table.rings) - table.watched()
        assert before - moved <= table.watched()
        if period:
            assert len(left) <= DIRECT
    one.look(now + 2 * PERIOD_S)  # more than one period: sums of floats may be a little less
    one.look(now + 4 * PERIOD_S)
    assert table.watched() == set(table.rings)  # all have been silent for a period
    table.rings[0].generation += 1  # another learner's ring in this row
    assert 0 not in table.watched()
