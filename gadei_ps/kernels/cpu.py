"""The kernels of the server, compiled by Numba for one core.

A compiled loop without the GIL calls them for a few values at a time, so that these stay in the
first cache: the optimizers for one chunk (64 values), sums and conversions for up to 1024 values.
No kernel allocates, each reads and writes each array once, and a call costs some nanoseconds.
Arrays are contiguous, one-dimensional, of one length and do not overlap. A product that is added
may be rounded once where the reference of the tests (`tests/support/kernel_reference.py`) rounds
twice. Nothing else differs, infinite values and NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from gadei_ps.kernels.compiled import compiled
from gadei_ps.kernels.half import HAS_CONVERSION, from_bits
from gadei_ps.kernels.optimizers import (
    BETA1,
    BETA2,
    CLIP_NORM,
    DECAY,
    EPS,
    FLOOR,
    LR,
    MASS,
    MEAN_NEW,
    MIN_LR,
    MOMENTUM,
    OF_GRADIENT,
    OF_MOMENT,
    RATE,
    SCHEDULE,
    SPIKE_COMPENSATION,
    SQUARE_NEW,
    SQUARE_OLD,
    STALENESS_AWARE,
    STEP_GAMMA,
    STEP_SIZE,
    TOTAL_STEPS,
    UNBIAS,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    Kind,
    Schedule,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Halves = NDArray[np.uint16]
Gradient = Floats | Halves
"""float32, or bfloat16 as bits."""
Scalars = tuple[float, ...]
F = TypeVar("F", bound=Callable[..., object])

# Plain integers: Numba would carry an enum member into the compiled code as a type of its own.
MOMENTUM_SGD = int(Kind.MOMENTUM)
NESTEROV = int(Kind.NESTEROV)
ADAM = int(Kind.ADAM)
ADAMW = int(Kind.ADAMW)
RMSPROP = int(Kind.RMSPROP)
STEP = int(Schedule.STEP)
COSINE = int(Schedule.COSINE)


def _kernel(function: F) -> F:
    """Compile without the GIL, keeping NaN and Inf, to become a part of the loop that calls it.

    `contract` lets a product and a sum become one fused operation and allows nothing else. NumPy's
    error model leaves divisions by zero untested; with that test no loop would be vectorized.
    Kernels are inlined: a call passes each array in seven words, which takes 8 ns for four arrays.
    """
    return compiled(function, forceinline=True, fastmath={"contract"})


@intrinsic
def wide(context: Any, value: Any) -> Any:
    """Return a gradient's value as float32: a bfloat16's bits, given as uint16, or what it is."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value != types.uint16:
            return args[0]
        word = ir.IntType(32)
        bits = builder.shl(builder.zext(args[0], word), word(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), build


@_kernel
def learning_rate(hyper: Doubles, t: int) -> float:
    """Return the learning rate of 0-based step t, as `OptimizerSpec` defines it.

    hyper: float64 of shape (PACKED,), as `OptimizerSpec.pack` returns it.
    """
    lr = float(hyper[LR])
    floor = float(hyper[MIN_LR])
    gamma = float(hyper[STEP_GAMMA])
    warmup = int(hyper[WARMUP_STEPS])
    if t < warmup:
        return lr * (t + 1) / warmup
    since = t - warmup
    schedule = int(hyper[SCHEDULE])
    if schedule == STEP:
        # A power of an integer would be multiplied out, which adds up a rounding for each step.
        steps = float(since // int(hyper[STEP_SIZE]))
        return float(lr * gamma**steps) if lr else 0.0  # the power may be infinite
    if schedule == COSINE:
        part = min(since / (int(hyper[TOTAL_STEPS]) - warmup), 1.0)
        return floor + (lr - floor) * (1 + math.cos(math.pi * part)) / 2
    return lr


@_kernel
def stale_rate(hyper: Doubles, lr: float, staleness: int) -> float:
    """Return the rate for a gradient of that staleness: lr / max(1, staleness) if the job asks.

    staleness: version when applied less version pulled.
    """
    if hyper[STALENESS_AWARE] != 0:
        return lr / max(1, staleness)
    return lr


@_kernel
def clip_scale(hyper: Doubles, squares: float) -> float:
    """Return the factor for a gradient with that sum of squares: 1 unless it is clipped.

    hyper: float64 of shape (PACKED,). The result is also 1 if squares is not finite (a job may
    allow that) or negative: a learner writes it, so it may be anything.
    """
    limit = float(hyper[CLIP_NORM])
    if limit > 0 and squares >= 0 and squares < math.inf:
        return min(1.0, limit / (math.sqrt(squares) + 1e-6))
    return 1.0


@_kernel
def coefficients(
    kind: int, hyper: Doubles, lr: float, t: int, staleness: int, momentum: float, out: Doubles
) -> None:
    """Write what an optimizer needs to know of one gradient: the same for all chunks.

    hyper: float64 of shape (PACKED,). lr: the rate of this step. t counts gradients from 1, and
    this one counts (Adam's bias correction). staleness: version when applied less version pulled.
    momentum: instead of that of hyper, or its beta1; NaN: that one. out: float64 of shape
    (COEFFICIENTS,).
    """
    mass = momentum
    if math.isnan(momentum):
        mass = hyper[BETA1] if kind in (ADAM, ADAMW) else hyper[MOMENTUM]
    decay = hyper[WEIGHT_DECAY]
    out[RATE] = lr
    out[DECAY] = decay
    out[MASS] = mass
    out[FLOOR] = hyper[EPS]
    out[MEAN_NEW] = 1 - mass
    out[SQUARE_OLD] = hyper[BETA2]
    out[SQUARE_NEW] = 1 - hyper[BETA2]
    out[UNBIAS] = 1.0
    missed = float(staleness) if hyper[SPIKE_COMPENSATION] != 0 else 0.0
    out[OF_MOMENT] = 1.0
    out[OF_GRADIENT] = 0.0
    if kind in (ADAM, ADAMW):
        biased = 1 - mass**t
        out[RATE] = lr / biased
        out[UNBIAS] = 1 / math.sqrt(1 - hyper[BETA2] ** t)
        out[OF_MOMENT] = mass**missed
        out[OF_GRADIENT] = (1 - out[OF_MOMENT]) * biased
    if kind in (MOMENTUM_SGD, NESTEROV, RMSPROP):
        # Nesterov's momentum looks ahead by one update, as if each gradient had missed one.
        out[OF_MOMENT] = mass ** (missed + (1.0 if kind == NESTEROV else 0.0))
        out[OF_GRADIENT] = (1 - out[OF_MOMENT]) / (1 - mass)
    if kind == ADAMW:
        out[DECAY] = 1 - lr * decay


@_kernel
def scalars(coef: Doubles) -> Scalars:
    """Return what `coefficients` wrote as values, which a loop over chunks keeps in registers."""
    return (
        coef[0],
        coef[1],
        coef[2],
        coef[3],
        coef[4],
        coef[5],
        coef[6],
        coef[7],
        coef[8],
        coef[9],
    )


@_kernel
def sgd(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights without a slot."""
    rate = np.float32(coef[RATE])
    decay = np.float32(coef[DECAY])
    for i in range(w.size):
        weight = w[i]
        gradient = wide(g[i])
        if decay != np.float32(0):
            gradient += decay * weight
        w[i] = weight - rate * gradient


@_kernel
def momentum(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights along the momentum, s0, and the gradient; also for Nesterov's momentum."""
    rate = np.float32(coef[RATE])
    decay = np.float32(coef[DECAY])
    mass = np.float32(coef[MASS])
    of_moment = np.float32(coef[OF_MOMENT])
    of_gradient = np.float32(coef[OF_GRADIENT])
    for i in range(w.size):
        weight = w[i]
        gradient = wide(g[i])
        if decay != np.float32(0):
            gradient += decay * weight
        moving = mass * s0[i] + gradient
        s0[i] = moving
        w[i] = weight - rate * (of_moment * moving + of_gradient * gradient)


@_kernel
def adagrad(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights by the gradient over the root of the sum of its squares, s0."""
    rate = np.float32(coef[RATE])
    decay = np.float32(coef[DECAY])
    eps = np.float32(coef[FLOOR])
    for i in range(w.size):
        weight = w[i]
        gradient = wide(g[i])
        if decay != np.float32(0):
            gradient += decay * weight
        total = s0[i] + gradient * gradient
        s0[i] = total
        w[i] = weight - rate * (gradient / (math.sqrt(total) + eps))


@_kernel
def adam(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights by the two moments, s0 and s1, with coupled weight decay."""
    rate = np.float32(coef[RATE])
    decay = np.float32(coef[DECAY])
    eps = np.float32(coef[FLOOR])
    mean_new = np.float32(coef[MEAN_NEW])
    square_old = np.float32(coef[SQUARE_OLD])
    square_new = np.float32(coef[SQUARE_NEW])
    unbias = np.float32(coef[UNBIAS])
    of_moment = np.float32(coef[OF_MOMENT])
    of_gradient = np.float32(coef[OF_GRADIENT])
    for i in range(w.size):
        weight = w[i]
        gradient = wide(g[i])
        if decay != np.float32(0):
            gradient += decay * weight
        first = s0[i] + mean_new * (gradient - s0[i])
        second = square_old * s1[i] + square_new * (gradient * gradient)
        s0[i] = first
        s1[i] = second
        along = of_moment * first + of_gradient * gradient
        w[i] = weight - rate * (along / (math.sqrt(second) * unbias + eps))


@_kernel
def adamw(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights by the two moments, s0 and s1, with decoupled weight decay."""
    rate = np.float32(coef[RATE])
    keep = np.float32(coef[DECAY])
    eps = np.float32(coef[FLOOR])
    mean_new = np.float32(coef[MEAN_NEW])
    square_old = np.float32(coef[SQUARE_OLD])
    square_new = np.float32(coef[SQUARE_NEW])
    unbias = np.float32(coef[UNBIAS])
    of_moment = np.float32(coef[OF_MOMENT])
    of_gradient = np.float32(coef[OF_GRADIENT])
    for i in range(w.size):
        gradient = wide(g[i])
        first = s0[i] + mean_new * (gradient - s0[i])
        second = square_old * s1[i] + square_new * (gradient * gradient)
        s0[i] = first
        s1[i] = second
        along = of_moment * first + of_gradient * gradient
        w[i] = keep * w[i] - rate * (along / (math.sqrt(second) * unbias + eps))


@_kernel
def rmsprop(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Update weights along the momentum, s1, of gradients over the root of their mean of squares.

    s0: that mean.
    """
    rate = np.float32(coef[RATE])
    decay = np.float32(coef[DECAY])
    mass = np.float32(coef[MASS])
    eps = np.float32(coef[FLOOR])
    square_old = np.float32(coef[SQUARE_OLD])
    square_new = np.float32(coef[SQUARE_NEW])
    of_moment = np.float32(coef[OF_MOMENT])
    of_gradient = np.float32(coef[OF_GRADIENT])
    for i in range(w.size):
        weight = w[i]
        gradient = wide(g[i])
        if decay != np.float32(0):
            gradient += decay * weight
        square = square_old * s0[i] + square_new * (gradient * gradient)
        scaled = gradient / (math.sqrt(square) + eps)
        moving = mass * s1[i] + scaled
        s0[i] = square
        s1[i] = moving
        w[i] = weight - rate * (of_moment * moving + of_gradient * scaled)


@_kernel
def added(coef: Scalars, w: Floats, s0: Floats, s1: Floats, g: Gradient) -> None:
    """Add an update, which a learner's own optimizer has made."""
    rate = np.float32(coef[RATE])
    for i in range(w.size):
        w[i] += rate * wide(g[i])


KERNELS: dict[int, Callable[..., None]] = {
    Kind.SGD: sgd,
    Kind.MOMENTUM: momentum,
    Kind.NESTEROV: momentum,  # with other coefficients
    Kind.ADAGRAD: adagrad,
    Kind.ADAM: adam,
    Kind.ADAMW: adamw,
    Kind.RMSPROP: rmsprop,
    Kind.ADD: added,
}
"""The loop of each kind, which applies one gradient to some values in place.

coef: from `scalars`. w: float32. g: as long, float32, or bfloat16 as uint16 bits. s0, s1: as long
if the kind has that slot, else of any length.
"""


@_kernel
def accumulate(acc: Floats, g: Floats, factor: float) -> None:
    """Add a gradient times a factor, rounded to float32, to the sum of several, in place."""
    times = np.float32(factor)
    for i in range(acc.size):
        acc[i] += times * g[i]


@_kernel
def scale(acc: Floats, factor: float) -> None:
    """Multiply by a factor, rounded to float32, in place: the sum of n gradients by 1 / n."""
    times = np.float32(factor)
    for i in range(acc.size):
        acc[i] *= times


@_kernel
def decode_bfloat16(source: Halves, out: Floats) -> None:
    """Write bfloat16 values, given as uint16 bits, as float32 of the same length. Exact."""
    for i in range(out.size):
        out[i] = wide(source[i])


@_kernel
def decode_float16(source: Halves, out: Floats) -> None:
    """Write float16 values, given as uint16 bits, as float32 of the same length.

    Exact for every finite and infinite value; a NaN keeps its sign and payload and becomes quiet.
    If the processor cannot convert, all three results (normal, special, tiny) are computed and one
    is selected. So there is no branch, and no subnormal float32 that the processor might flush.
    """
    if HAS_CONVERSION:
        for i in range(out.size):
            out[i] = from_bits(source[i])
        return
    for i in range(out.size):
        half = np.uint32(source[i])
        sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
        low = np.uint32(half & np.uint32(0x7FFF))
        wide = np.uint32(low << np.uint32(13))
        # The exponent's bias is 15 there and 127 here; 31 (infinite, NaN) becomes 255.
        normal = np.uint32(wide + np.uint32(112 << 23))
        special = np.uint32(wide | np.uint32(0x7F800000))
        tiny = np.float32(np.float32(np.int32(low)) * np.float32(2.0**-24)).view(np.uint32)
        bits = special if low >= np.uint32(0x7C00) else normal
        bits = tiny if low < np.uint32(0x0400) else bits
        out[i] = np.uint32(bits | sign).view(np.float32)
