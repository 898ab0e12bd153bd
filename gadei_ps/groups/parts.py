"""Linear partition: which values of a model each member of a group sums, and the sum itself.

A model of float32 values is cut into as many parts as the group has members, at chunks of 64
values. Member k receives part k of all models, sums it, and sends the sum to all (Yan and Shao,
figure 2). Sums run in the members' order, so all members hold the same bits afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gadei_ps.memory.layout import CHUNK

Floats = npt.NDArray[np.float32]

BLOCK = 256 * CHUNK
"""Values that loops over a model take at a time, so that what they need besides stays small."""


def cut(values: int, members: int) -> list[slice]:
    """Return each member's part of a model of `values` values, in the members' order.

    Parts lie one after the other and begin at whole chunks. Their sizes differ by at most one
    chunk. With fewer chunks than members, the first parts are empty. Raises ValueError.
    """
    if values < 0 or members < 1:
        raise ValueError(f"a model of {values} values cannot be cut into {members} parts")
    chunks = -(-values // CHUNK)
    whole, more = divmod(chunks, members)
    # The last chunk may be short, so the parts with one chunk more stand at the end.
    ends = [k * whole + max(0, k - (members - more)) for k in range(members + 1)]
    return [
        slice(min(begin * CHUNK, values), min(end * CHUNK, values))
        for begin, end in itertools.pairwise(ends)
    ]


def shares(samples: Sequence[int]) -> Floats:
    """Return the weight of each member's model by its samples, float32 of shape (members,).

    If no member has trained, all weights are equal. Raises ValueError.
    """
    if not samples or min(samples) < 0:
        raise ValueError(f"samples of members must be at least 0, not {list(samples)}")
    total = sum(samples)
    if not total:
        return np.full(len(samples), 1 / len(samples), np.float32)
    return np.array([count / total for count in samples], np.float32)


def is_finite(values: Floats) -> bool:
    """Return whether all values are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is finite only if all its terms are; without that, it may be too large itself.
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def aggregate(models: Sequence[Floats], weights: Floats, out: Floats) -> None:
    """Write the weighted mean of the models, or of one part of each, to `out`.

    models: float32 of one shape (values,), in the members' order; `out` may be one of them.
    weights: as from `shares`; a model with a weight of 0 is left out, whatever its values are. The
    mean is the first model that counts, moved by the weighted differences of the others to it. So
    values that are equal in all stay as they are, to the bit, though the sum of the weights is
    rounded. Each operation is rounded to float32, in the members' order, so every replica gets the
    same bits. Two values whose difference is beyond float32 give an infinity.
    """
    if len(models) != len(weights) or not models:
        raise ValueError(f"{len(models)} models, {len(weights)} weights")
    counted = [one for one in zip(models, weights, strict=True) if one[1]]
    (first, _), *rest = counted or [(models[-1], weights[-1])]
    scratch = np.empty((2, min(BLOCK, len(out))), np.float32)
    for begin in range(0, len(out), BLOCK):
        here = slice(begin, begin + BLOCK)
        total, product = scratch[:, : len(out[here])]
        total[:] = before = first[here]
        for model, weight in rest:
            # Subtracted twice, for -0 - (-0 - -0) is -0, and -0 + (-0 - -0) is not.
            np.subtract(before, model[here], out=product)
            np.multiply(product, weight, out=product)
            np.subtract(total, product, out=total)
        out[here] = total
