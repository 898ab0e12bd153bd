"""Units of compiled code in this process: from the store, or compiled if they are not there.

Each unit is compiled and kept by itself, so that processes can share the work. Numba is imported
only to compile.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from gadei_ps.kernels import cache, store
from gadei_ps.kernels.store import Code

_addresses: dict[str, int] = {}


class Unit(NamedTuple):
    """A unit of compiled code. name: the same in all processes.

    module: full name of the one that has `source(name)`, which returns a signature and the
    function.
    """

    name: str
    module: str

    def is_kept(self) -> bool:
        """Return whether the unit is loaded, or the store has it, whole."""
        return self.name in _addresses or store.is_kept(self.name)

    def load(self) -> int:
        """Load the unit, compiled if the store lacks it; return the address of its C function."""
        if self.name not in _addresses:
            self._enter(store.read(self.name) or self.compile())
        return _addresses[self.name]

    def load_kept(self) -> None:
        """Load the unit if the store has it; never compile."""
        if self.name not in _addresses and (code := store.read(self.name)):
            self._enter(code)

    def _enter(self, code: Code) -> None:
        from gadei_ps.kernels import engine  # LLVM; takes longer to import than all others here

        _addresses[self.name] = engine.load(code)

    def compile(self) -> Code:
        """Compile the unit, and keep it in the store."""
        from gadei_ps.kernels import compiled

        signature, function = importlib.import_module(self.module).source(self.name)
        cache.check_sources()  # they are imported only now, and an upgrade may have come before
        made = compiled.machine_code(self.name, signature, function)
        store.keep(self.name, made)
        return made


def give_back() -> None:
    """Free the memory that only loading needs; called after the last load for now."""
    if _addresses:
        from gadei_ps.kernels import engine

        engine.give_back()
