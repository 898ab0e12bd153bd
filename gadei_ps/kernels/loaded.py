"""Units of compiled code in this process: from the store, or compiled if they are not there.

Numba is imported only to compile.
"""

from __future__ import annotations

import functools
import importlib

from gadei_ps.kernels import cache, store
from gadei_ps.kernels.store import Code
from gadei_ps.kernels.unit import Unit

_addresses: dict[str, int] = {}


def unit(name: str, module: str) -> Unit:
    """Return a unit whose source is a function of a module.

    module: its full name. It has `source(name)`, which returns a signature and the function.
    """
    load = functools.partial(_load, name, module)
    return Unit(name, load, functools.partial(_is_kept, name))


def _is_kept(name: str) -> bool:
    return name in _addresses or store.is_kept(name)


def address(name: str) -> int:
    """Return the address of a unit that is loaded: a C function."""
    return _addresses[name]


def _load(name: str, module: str) -> None:
    if name not in _addresses:
        from gadei_ps.kernels import engine  # LLVM; takes longer to import than all others here

        _addresses[name] = engine.load(store.read(name) or _compiled(name, module))


def load_kept(name: str) -> None:
    """Load a unit if the store has it; never compile."""
    if name not in _addresses and (code := store.read(name)):
        from gadei_ps.kernels import engine

        _addresses[name] = engine.load(code)


def _compiled(name: str, module: str) -> Code:
    from gadei_ps.kernels import compiled

    signature, function = importlib.import_module(module).source(name)
    cache.check_sources()  # they are imported only now, and an upgrade may have come before
    made = compiled.machine_code(name, signature, function)
    store.keep(name, made)
    return made


def give_back() -> None:
    """Free the memory that only loading needs; called after the last load for now."""
    if _addresses:
        from gadei_ps.kernels import engine

        engine.give_back()
