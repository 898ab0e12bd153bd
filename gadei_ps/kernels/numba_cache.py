"""Numba's own cache, for functions that Python calls with arrays: tests, and tools that measure.

A server's code is in files of ours (store.py), which are loaded without Numba.

Numba gives a file its name before the file is on the disk, and raises an error for one that it
cannot read or write. Here a file is on the disk before it gets its name, one that cannot be read is
compiled again, and what cannot be written is used without being kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

from gadei_ps.kernels import cache
from gadei_ps.kernels.frozen import caching, numba


class _Kept(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function."""

    def _load_index(self) -> dict[Any, str]:
        try:
            found: dict[Any, str] = super()._load_index()
        except Exception:  # whatever unpickling bytes of any kind raises
            return {}
        return found

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)
        except Exception as error:
            raise OSError(f"{name} is damaged") from error  # for which Numba compiles it again

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before it gets its name


class Quick(caching.FunctionCache):  # type: ignore[misc]
    """The cache of a function that counts no references.

    Numba first prepares for compiling, which takes longer than to load the code. It does so again
    before it compiles.
    """

    def load_overload(self, signature: Any, target: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target)


@contextlib.contextmanager
def _guarded(of: caching.Cache) -> Iterator[None]:
    """Around loading and keeping the code of a function; what has failed is not there."""
    try:
        yield
    except OSError as error:
        cache.note(error)


caching.IndexDataCacheFile = _Kept
caching.Cache._guard_against_spurious_io_errors = _guarded
numba.config.CACHE_DIR = str(cache.directory())
