"""Reference of every kernel of `gadei_ps/kernels/`, written plainly in NumPy.

Arithmetic on weights is float32 throughout, each operation rounded on its own; scalars are worked
out in float64 and rounded once. Formulas are those of `torch.optim`, in its order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gadei_ps.kernels import optimizers as o
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, Schedule, WireType

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]


def learning_rate(hyper: NDArray[np.float64], t: int) -> float:
    """Return the learning rate of 0-based step t, as `OptimizerSpec` defines it.

    hyper: float64 of shape (PACKED,), as `OptimizerSpec.pack` returns it.
    """
    spec = OptimizerSpec.unpack(hyper)
    if t < spec.warmup_steps:
        return spec.lr * (t + 1) / spec.warmup_steps
    since = t - spec.warmup_steps
    if spec.schedule is Schedule.STEP and spec.lr == 0:
        return 0.0
    if spec.schedule is Schedule.STEP:
        with np.errstate(over="ignore"):  # infinite, where Python's floats would raise
            return float(spec.lr * np.float64(spec.step_gamma) ** (since // spec.step_size))
    if spec.schedule is Schedule.COSINE:
        span = spec.total_steps - spec.warmup_steps
        part = min(since / span, 1.0)
        return spec.min_lr + (spec.lr - spec.min_lr) * (1 + math.cos(math.pi * part)) / 2
    return spec.lr


def stale_rate(hyper: NDArray[np.float64], lr: float, staleness: int) -> float:
    """Return the rate for a gradient of that staleness: lr / max(1, staleness) if the job asks.

    staleness: version when applied less version pulled.
    """
    return lr / max(1, staleness) if hyper[o.STALENESS_AWARE] else lr


def clip_scale(hyper: NDArray[np.float64], squares: float) -> float:
    """Return the factor for a gradient with that sum of squares: 1 unless it is clipped.

    As torch.nn.utils.clip_grad_norm_ with max_norm = clip_norm.
    """
    limit = float(hyper[o.CLIP_NORM])
    if limit <= 0 or not math.isfinite(squares):
        return 1.0
    return min(1.0, limit / (math.sqrt(squares) + 1e-6))


def step(
    spec: OptimizerSpec,
    weights: Floats,
    slots: Sequence[Floats],
    gradient: Floats,
    t: int,
    lr: float,
    staleness: int = 0,
) -> None:
    """Apply one gradient to the weights and slots in place.

    weights, gradient and each of `slots(spec.kind)` slots: float32 of one shape. t counts gradients
    from 1, this one included (Adam's bias correction). lr: the rate of this step. staleness:
    updates that the gradient has missed, of which spike compensation wants to know.
    """
    f = np.float32
    missed = staleness if spec.spike_compensation else 0
    g = gradient
    if spec.weight_decay != 0 and spec.kind is not Kind.ADAMW:
        g = g + f(spec.weight_decay) * weights

    if spec.kind is Kind.ADD:
        weights += f(lr) * gradient
    elif spec.kind is Kind.SGD:
        weights -= f(lr) * g
    elif spec.kind in (Kind.MOMENTUM, Kind.NESTEROV):
        (momentum,) = slots
        momentum[:] = f(spec.momentum) * momentum + g
        # Nesterov's momentum looks ahead by one update, as if each gradient had missed one.
        kept = spec.momentum ** (missed + (spec.kind is Kind.NESTEROV))
        weights -= f(lr) * (f(kept) * momentum + f((1 - kept) / (1 - spec.momentum)) * g)
    elif spec.kind is Kind.ADAGRAD:
        (squares,) = slots
        squares += g * g
        weights -= f(lr) * (g / (np.sqrt(squares) + f(spec.eps)))
    elif spec.kind is Kind.RMSPROP:
        square, momentum = slots
        square[:] = f(spec.alpha) * square + f(1 - spec.alpha) * (g * g)
        scaled = g / (np.sqrt(square) + f(spec.eps))
        momentum[:] = f(spec.momentum) * momentum + scaled
        kept = spec.momentum**missed
        direction = f(kept) * momentum + f((1 - kept) / (1 - spec.momentum)) * scaled
        weights -= f(lr) * direction
    else:
        mean, square = slots
        if spec.kind is Kind.ADAMW:
            weights *= f(1 - lr * spec.weight_decay)
        mean += f(1 - spec.beta1) * (g - mean)
        square[:] = f(spec.beta2) * square + f(1 - spec.beta2) * (g * g)
        unbias = math.sqrt(1 - spec.beta2**t)
        denominator = np.sqrt(square) / f(unbias) + f(spec.eps)
        biased = 1 - spec.beta1**t
        kept = spec.beta1**missed
        direction = f(kept) * mean + f((1 - kept) * biased) * g
        weights -= f(lr / biased) * (direction / denominator)


def step_in_groups(
    specs: Sequence[OptimizerSpec],
    group: NDArray[np.int64],
    weights: Floats,
    slots: Sequence[Floats],
    gradient: Floats,
    t: int,
    rates: Sequence[float],
    staleness: int = 0,
) -> None:
    """Apply one gradient in place, each value with the settings of its group.

    specs, rates: for each group. group: of each value, shape as weights; another number leaves the
    value as it is. The rest as for `step`.
    """
    for number, (spec, rate) in enumerate(zip(specs, rates, strict=True)):
        at = group == number
        moved, own = weights[at], [slot[at] for slot in slots]
        step(spec, moved, own, gradient[at], t, rate, staleness)
        weights[at] = moved
        for slot, part in zip(slots, own, strict=True):
            slot[at] = part


def decode(wire_type: WireType, raw: Halves | Floats) -> Floats:
    """Return as new float32 the values of a payload: uint16 bits of a half type, or float32."""
    if wire_type is WireType.FLOAT32:
        return raw.astype(np.float32)
    if wire_type is WireType.BFLOAT16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float16).astype(np.float32)


def encode(wire_type: WireType, values: Floats) -> Halves | Floats:
    """Return float32 values as a payload: uint16 bits of a half type, or a float32 copy.

    Rounds to nearest, ties to even; what is too large becomes infinite, NaN stays NaN.
    """
    if wire_type is WireType.FLOAT32:
        return values.copy()
    if wire_type is WireType.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + even)) >> np.uint32(16)).astype(np.uint16)
    # Rounding up a NaN whose high mantissa bits are ones would carry into the sign.
    quiet = (bits >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    return np.where(np.isnan(values), quiet, rounded)
