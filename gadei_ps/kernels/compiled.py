"""How the code of the shard threads is compiled: without the GIL, kept on disk, like NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from gadei_ps.kernels import cache  # noqa: F401 (sets where Numba keeps compiled code)

F = TypeVar("F", bound=Callable[..., Any])

HOW = {"nogil": True, "error_model": "numpy"}
# Without what would make a function callable from Python; that is a third of the time to compile.
PART = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_made: list[object] = []


def compiled(function: F) -> F:
    """Compiled to run without the GIL; the type checker sees the signature of the function.

    For what Python calls; the compiled code is kept on disk.
    """
    made: F = numba.njit(cache=True, **HOW)(function)
    return made


def inner(function: F) -> F:
    """Compiled as a part of other compiled code, which alone can call it."""
    made: F = numba.njit(**HOW, **PART)(function)
    return made


def inlined(function: F) -> F:
    """Compiled into each caller: for what runs once a chunk, where a call would be too slow."""
    made: F = numba.njit(forceinline=True, **HOW, **PART)(function)
    return made


def address_of(signature: Any, function: Callable[..., None]) -> int:
    """The address of the function, compiled as a C function; it is never freed.

    Numba compiles a function's callees again as a part of it, and so on for each of its callers.
    What is called at its address is compiled once.
    """
    made = numba.cfunc(signature, cache=True, error_model="numpy")(function)
    _made.append(made)
    return int(made.address)
