"""A unit of compiled code: compiled and kept by itself, so another process may do it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Unit(NamedTuple):
    """One of them. name: the same in all processes."""

    name: str
    load: Callable[[], object]
    """Loads it from the cache; compiles and keeps it if it is not there."""
    is_kept: Callable[[], bool]
    """Whether the cache has it, whole. Quick: nothing is loaded."""
