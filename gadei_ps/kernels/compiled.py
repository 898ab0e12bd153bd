"""How the code of the shard threads is compiled: without the GIL, kept on disk, like NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from gadei_ps.kernels import cache  # noqa: F401 (sets where Numba keeps compiled code)

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled to run without the GIL; the type checker sees the signature of the function."""
    made: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return made


def inlined(function: F) -> F:
    """Compiled into each caller: for what runs once a chunk, where a call would be too slow."""
    made: F = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)(function)
    return made
