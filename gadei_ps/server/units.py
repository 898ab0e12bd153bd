"""The units of a server's code, by name: from the cache, or compiled if they are not there.

Each unit is compiled and kept by itself, so that processes can share the work. Numba is imported
only to compile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
from collections.abc import Iterable
from typing import NamedTuple

from gadei_ps.kernels import cache
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.machine import log
from gadei_ps.server import kinds
from gadei_ps.server.structs import PART

FORMS = range(PART["move"].shape[1])
"""Numbers of the forms of a gradient, see payload.FORMS."""

# Before Numba is imported, which reads it once: kept code must not call Intel's library of
# mathematics, because LLVM ends a process that loads such code without Numba.
os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"

_addresses: dict[str, int] = {}


class Unit(NamedTuple):
    """A unit of compiled code. name: the same in all processes.

    module: name of the one of this folder that has `source(name)`, which returns a signature and
    the function.
    """

    name: str
    module: str

    def is_kept(self) -> bool:
        """Return whether the unit is loaded, or the cache has it, whole."""
        return self.name in _addresses or cache.read(self.name) is not None

    def load(self) -> int:
        """Load the unit, compiled if the cache lacks it; return the address of its C function."""
        if self.name not in _addresses:
            from gadei_ps.kernels import engine  # LLVM; takes longer to import than all others here

            code = cache.read(self.name)
            if code is None:
                code = self.compile()
                try:
                    cache.keep(self.name, code)
                except OSError as error:
                    _warn(error.strerror)
            _addresses[self.name] = engine.load(self.name, code)
        return _addresses[self.name]

    def compile(self) -> bytes:
        """Return the compiled code of the unit."""
        from gadei_ps.kernels import compiled

        signature, function = importlib.import_module(self.module).source(self.name)
        cache.check_sources()  # they are imported only now, and an upgrade may have come before
        return compiled.machine_code(self.name, signature, function)


@functools.cache
def _warn(reason: str) -> None:
    log.get().warning("compiled code cannot be kept for the next start", reason=reason)


STAND_BY = Unit("stand_by", f"{__package__}.shard")
APPLY = Unit("apply", f"{__package__}.apply")
ARRIVE = Unit("arrive", f"{__package__}.arrival")
CHECK = Unit("check", f"{__package__}.frames")
_STANDS_BY = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_CHECKS = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_uint64] * 5)


def _loops(kind: int) -> list[list[Unit]]:
    """Return the loops by the frame's kind and form; kinds that are not applied have no loops."""
    whats = [kinds.TABLE[one].loop if one in kinds.TABLE else "" for one in range(kinds.COUNT)]
    names = [[f"{what.format(kind=kind)}-{form}" for form in FORMS if what] for what in whats]
    return [[Unit(name, f"{__package__}.chunks") for name in row] for row in names]


def units(optimizers: Iterable[int]) -> list[Unit]:
    """Return the units for these optimizers; what takes longest to compile comes first."""
    made = [STAND_BY, APPLY, ARRIVE, CHECK]
    for kind in optimizers:
        made += itertools.chain(*_loops(int(kind)))
    return list(dict.fromkeys(made))


def load(optimizers: Iterable[int] = tuple(Kind)) -> None:
    """Load the code for these kinds of optimizer, or compile it once."""
    for unit in units(optimizers):
        unit.load()


def stand_by(part: int) -> None:
    """Run a shard's thread (shard.stand_by) to its end, without the interpreter's lock.

    part: address of PART.
    """
    _STANDS_BY(STAND_BY.load())(part)


def check_frame(header: int, slot: int, generation: int, sequence: int, part: int) -> int:
    """Call the compiled frames.check_frame. part: address of PART."""
    return int(_CHECKS(CHECK.load())(header, slot, generation, sequence, part))


def loops(kind: int) -> list[list[int]]:
    """Return the addresses of the loops of chunks.py for PART's `move`. kind: the optimizer's."""
    return [[unit.load() for unit in row] or [0] * len(FORMS) for row in _loops(kind)]
