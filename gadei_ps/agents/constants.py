"""Buffers of a model that no sum has room for, such as a mask of attention: constants of a group.

They hold an infinity, or a value so great that a sum of several may be one. A buffer is a constant
if the group has begun with such a value there: the weights with which it begins are those of its
first machine, so all machines find the same, and a newcomer gets their names with the weights. They
are no part of what a group exchanges: its weights, and all copies, have zeros in their place, and
each job keeps its own.

Any other buffer that holds an infinity, on one machine or later, is no constant. There the machine
has diverged, as with an infinity in a parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from gadei_ps.agents.plan import Floats
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Model

MOST = np.float32(1e38)
"""The greatest absolute value that is exchanged of the buffers with which a group begins."""
_MOST_NAMES = 4
"""That a line tells."""

Buffers = Mapping[str, slice]
"""Where the buffers of a model lie among its values, by their names."""


def buffers(model: Model) -> Buffers:
    """Those of this model."""
    return {
        one.name: slice(one.start, one.start + one.count)
        for one in model.tensors
        if one.role is Role.BUFFER
    }


def found(weights: Floats, among: Buffers) -> tuple[str, ...]:
    """The constants of a group that begins with these weights. A buffer with a NaN is none."""
    return tuple(name for name, place in among.items() if _is_great(weights[place]))


def _is_great(values: Floats) -> bool:
    with np.errstate(invalid="ignore"):
        least, most = values.min(), values.max()  # both are NaN if one value is
    return bool(-least > MOST or most > MOST)


def take_out(weights: Floats, names: Iterable[str], among: Buffers) -> None:
    """Writes zeros in their place."""
    for name in names:
        weights[among[name]] = 0


def checksum(names: Iterable[str]) -> int:
    """The same for the same constants, 32 bits."""
    return zlib.crc32("\0".join(names).encode())


def in_words(names: Iterable[str]) -> str:
    """Buffers of these names, or the first of them and how many more there are."""
    all_ = list(names)
    more = f" and {len(all_) - _MOST_NAMES} more" if len(all_) > _MOST_NAMES else ""
    return f"buffer{'s' * (len(all_) > 1)} {', '.join(map(repr, all_[:_MOST_NAMES]))}{more}"
