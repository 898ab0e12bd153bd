"""Numba, imported without looking for garbage.

The imports make about 70,000 objects that stay. To look through them again and again would
take a good part of the time of the imports.
"""

from __future__ import annotations

import gc

_enabled = gc.isenabled()
gc.disable()

import numba  # noqa: E402
from numba.core import caching  # noqa: E402

gc.freeze()
if _enabled:
    gc.enable()

__all__ = ["caching", "numba"]
