"""How the code of the shard threads is compiled: without the GIL, kept on disk, like NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from gadei_ps.kernels import cache  # noqa: F401 (sets where Numba keeps compiled code)

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled without the GIL; keeps the signature for the type checker."""
    made: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return made


def inlined(function: F) -> F:
    """The same, for what runs once a chunk: a call would cost as much as a part of the work."""
    made: F = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)(function)
    return made
