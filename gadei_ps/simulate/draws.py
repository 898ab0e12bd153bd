"""Random numbers by place: the number at (seed, stream, learner, iteration), in any order.

SplitMix64 (Steele, Lea and Flood 2014, 'Fast splittable pseudorandom number generators') is a
counter that steps by an odd constant, and a bijection that mixes it. Each (seed, stream, learner)
starts its counter elsewhere, and the iteration is the step. So a number depends on its place alone,
never on earlier draws, and every model gets the same run times.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Stream(IntEnum):
    """The purpose of a number. Streams are independent of each other."""

    RADIUS = 0
    ANGLE = 1
    TAIL = 2
    SPELL = 3
    SHIFT = 4
    DEATH = 5
    MOMENT = 6
    BATCH = 7


def words(seed: int, stream: Stream, learners: IntArray, iterations: IntArray) -> WordArray:
    """64 random bits for each pair of learner and iteration. The arrays broadcast."""
    key = _mixed(np.array([seed % 2**64], np.uint64) + np.uint64((stream + 1) * int(_STEP) % 2**64))
    start = _mixed(key + _STEP * (learners.astype(np.uint64) + np.uint64(1)))
    return _mixed(start + _STEP * (iterations.astype(np.uint64) + np.uint64(1)))


def uniform(seed: int, stream: Stream, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Draw numbers in (0, 1), neither end included."""
    high = words(seed, stream, learners, iterations) >> np.uint64(11)
    return (high.astype(np.float64) + 0.5) * 2.0**-53


def normal(seed: int, learners: IntArray, iterations: IntArray) -> FloatArray:
    """Standard normal numbers, by Box and Muller (1958)."""
    radius = np.sqrt(-2.0 * np.log(uniform(seed, Stream.RADIUS, learners, iterations)))
    angle = uniform(seed, Stream.ANGLE, learners, iterations)
    return radius * np.cos(2.0 * np.pi * angle)


def _mixed(word: WordArray) -> WordArray:
    """SplitMix64's bijection of 64 bits (Stafford's variant 13)."""
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))
