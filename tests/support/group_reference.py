"""Reference of `gadei_ps/groups/`, written plainly, value by value.

Every operation is rounded to float32 on its own, as the vectorized code does it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from gadei_ps.groups.compress import STEPS
from gadei_ps.groups.parts import Floats
from gadei_ps.memory.layout import CHUNK

f32 = np.float32


def aggregate(models: Sequence[Floats], weights: Floats) -> list[np.float32]:
    """The weighted mean, in the members' order, of the models that weigh something."""
    means = []
    for values in zip(*models, strict=True):
        (first, _), *rest = [pair for pair in zip(values, weights, strict=True) if pair[1]]
        mean = first
        for value, weight in rest:
            mean = f32(mean - f32(f32(first - value) * weight))
        means.append(mean)
    return means


def mix(own: Floats, arrived: Sequence[Floats], weight: float) -> list[np.float32]:
    """The mean with what has arrived; the own model is the first, unless the others weigh more."""
    if not arrived:
        return list(own)
    rest, each = f32(1 - weight), f32(weight / len(arrived))
    models, weights = [own, *arrived], [rest, *[each] * len(arrived)]
    if each > rest:
        models, weights = [*arrived, own], [*weights[1:], rest]
    return aggregate(models, np.array(weights))


class Outer:
    """Nesterov's momentum on differences, in float64: the formulas without their rounding."""

    def __init__(self, weights: Floats, rate: float, momentum: float, delay: int) -> None:
        self.common = [float(one) for one in weights]
        self.speed = [0.0 for _ in weights]
        self.late = [0.0 for _ in weights]
        self.rate, self.momentum, self.delay = rate, momentum, delay
        self.differences = 0

    def end_round(self, aggregate: Floats, arrived: Sequence[Floats]) -> list[float]:
        """The weights of the next round."""
        self.differences += 1 + len(arrived)
        moves = not self.delay or self.differences >= self.delay
        for place, common in enumerate(self.common):
            own = common - float(aggregate[place])
            late = [common - float(model[place]) for model in arrived]
            self.late[place] += own + sum(late)
            step = own
            if moves:
                fresh = self.late[place] / self.differences if self.delay else own
                self.speed[place] = self.momentum * self.speed[place] + fresh
                step = own + self.momentum * self.speed[place]
                self.late[place] = 0.0
            self.common[place] = common - self.rate * step - sum(late) / (1 + len(late))
        if moves:
            self.differences = 0
        return list(self.common)


def to_bfloat16(value: float) -> int:
    """The bits of the nearest bfloat16, ties to even; not for NaN."""
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    high, low = bits >> 16, bits & 0xFFFF
    return high + (low > 0x8000 or (low == 0x8000 and high & 1))


def int8(values: Floats) -> tuple[list[np.float32], list[int]]:
    """Return scales and steps of 8 bits."""
    scales, steps = [], []
    for begin in range(0, len(values), CHUNK):
        chunk = values[begin : begin + CHUNK]
        scale = f32(f32(max(abs(one) for one in chunk)) / f32(STEPS))
        scales.append(scale)
        for one in chunk:
            step = round(float(f32(one / scale))) if scale else round(float(one))
            steps.append(max(-STEPS, min(STEPS, step)))
    return scales, steps
