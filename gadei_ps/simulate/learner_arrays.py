"""Columns: one number for each learner, quick to access one by one and as a whole.

An `array` reads and writes single numbers about twice as fast as NumPy. Unlike a list it has no
scattered objects, which would be cache misses with 100,000 learners. A NumPy view of the same
memory serves access as a whole.
"""

from __future__ import annotations

from array import array

import numpy as np

from gadei_ps.simulate.draws import FloatArray, IntArray


def reals(size: int, value: float = 0.0) -> tuple[array[float], FloatArray]:
    """A column of `size` float64 numbers, and its NumPy view."""
    made = array("d", [value]) * size
    return made, np.frombuffer(made, np.float64)


def wholes(size: int) -> tuple[array[int], IntArray]:
    """A column of `size` int64 zeros, and its NumPy view."""
    made = array("q", [0]) * size
    return made, np.frombuffer(made, np.int64)
