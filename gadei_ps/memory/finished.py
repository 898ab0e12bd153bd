"""Learners, by number, that have ended for good: nobody awaits them. The watchdog keeps them.

Those of the job file, which are not started again, and those of `run` that have ended before the
job's first superstep.
"""

from __future__ import annotations

import numpy as np

BITS = 64


def add(control: np.void, number: int) -> None:
    """Add a learner. control: CONTROL, writable. number: below layout.MAX_LEARNERS."""
    control["finished"][number // BITS] |= np.uint64(1 << number % BITS)


def has(control: np.void, number: int) -> bool:
    """Return whether the learner of this number has ended for good."""
    return bool(int(control["finished"][number // BITS]) >> number % BITS & 1)


def count(control: np.void) -> int:
    """Return the number of learners that have ended for good."""
    return sum(int(word).bit_count() for word in control["finished"])
