"""Access of compiled code to memory that others see."""

from __future__ import annotations

import itertools
import re

import numba
import numpy as np
import pytest

from gadei_ps.server.symbols import floats, mark, prefetch

pytestmark = pytest.mark.usefixtures("compiled")


@numba.njit
def _between_marks(cursor: int, weights: int, undo: int) -> None:
    w, old = floats(weights, 64), floats(undo, 64)
    for _ in range(2):
        for i in range(64):
            old[i] = w[i]
        mark(cursor, 1)
        for i in range(64):
            w[i] = 2.0
        mark(cursor, 2)


@numba.njit
def _prefetch(address: int) -> None:
    prefetch(address)


def test_prefetch_of_any_address() -> None:
    for address in (0, 2**47, 2**64 - 1):
        _prefetch(np.uint64(address))


def test_no_store_crosses_a_mark() -> None:
    """Check the marks: without them most of these stores would be left out as overwritten."""
    cursor, w, old = np.zeros(1, np.uint64), np.ones(64, np.float32), np.zeros(64, np.float32)
    _between_marks(cursor.ctypes.data, w.ctypes.data, old.ctypes.data)
    assert cursor[0] == 2
    assert (w == 2).all()
    assert (old == 2).all()
    (code,) = _between_marks.inspect_llvm().values()
    # The body of the outer loop, unrolled or not: what is stored, in the order of the code.
    body = code[code.index("define ") :]
    stores = re.findall(r"store (atomic i64 [12]|(?:<\d+ x )?float)|(fence) syncscope", body)
    kinds = ["fence" if fence else store.split(" x ")[-1] for store, fence in stores]
    marks = [i for i, kind in enumerate(kinds) if kind.startswith("atomic")]
    assert len(marks) >= 2
    assert all(kinds[i + 1] == "fence" for i in marks)
    between = [kinds[i + 2 : j] for i, j in itertools.pairwise(marks)]
    assert all("float" in stored for stored in between), kinds
