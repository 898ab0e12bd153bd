"""The units of a server's code, by name. Those that are kept are loaded without Numba."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable

from gadei_ps.kernels.loaded import Unit
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.server import kinds
from gadei_ps.server.structs import PART

FORMS = range(PART["move"].shape[1])
"""Numbers of the forms of a gradient, see payload.FORMS."""
_ROOM = "gadei_ps.server"

_STAND_BY = Unit("stand_by", f"{_ROOM}.shard")
_APPLY = Unit("apply", f"{_ROOM}.apply")
_ARRIVE = Unit("arrive", f"{_ROOM}.arrival")
_CHECK = Unit("check", f"{_ROOM}.frames")
_STANDS_BY = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_CHECKS = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_uint64] * 5)


def _loop(what: str, form: int) -> Unit:
    return Unit(f"{what}-{form}", f"{_ROOM}.chunks")


def _loops(kind: int) -> list[list[Unit]]:
    """Return the loops by the frame's kind and form; kinds that are not applied have no loops."""
    whats = [kinds.TABLE[one].loop if one in kinds.TABLE else "" for one in range(kinds.COUNT)]
    return [[_loop(what.format(kind=kind), form) for form in FORMS if what] for what in whats]


def units(optimizers: Iterable[int]) -> list[Unit]:
    """Return the units for these optimizers; what takes longest to compile comes first."""
    made = [_STAND_BY, _APPLY, _ARRIVE, _CHECK]
    for kind in optimizers:
        made += itertools.chain(*_loops(int(kind)))
    return list({one.name: one for one in made}.values())


def load(optimizers: Iterable[int] = tuple(Kind)) -> None:
    """Load the code for these kinds of optimizer, or compile it once."""
    for unit in units(optimizers):
        unit.load()


def stand_by(part: int) -> None:
    """Run a shard's thread (shard.stand_by) to its end, without the interpreter's lock.

    part: address of PART.
    """
    _STANDS_BY(_STAND_BY.load())(part)


def check_frame(header: int, slot: int, generation: int, sequence: int, part: int) -> int:
    """Call the compiled frames.check_frame. part: address of PART."""
    return int(_CHECKS(_CHECK.load())(header, slot, generation, sequence, part))


def applier() -> int:
    """Return the address of apply._apply, for PART; compile it if it is not kept."""
    return _APPLY.load()


def arriver() -> int:
    """Return the address of arrival._arrive, for PART."""
    return _ARRIVE.load()


def loops(kind: int) -> list[list[int]]:
    """Return the addresses of the loops of chunks.py for PART's `move`. kind: the optimizer's."""
    return [[unit.load() for unit in row] or [0] * len(FORMS) for row in _loops(kind)]
