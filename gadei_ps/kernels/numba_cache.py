"""Numba's own cache, for functions that Python calls with arrays: tests, and tools that measure.

A server's code is in files of ours (store.py), which are loaded without Numba.

Numba gives a file its name before the file is on the disk, and raises an error for one that it
cannot read or write. Here a file is on the disk before it gets its name, one that cannot be read is
compiled again, and what cannot be written is used without being kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
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

    Numba's own settings and classes stay as they are, because the process may be a user's script,
    whose functions Numba keeps where the user has set.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        with _directory(str(cache.directory())):
            super().__init__(function)
        impl = self._impl
        stamp = impl.locator.get_source_stamp()
        self._cache_file = _Kept(self._cache_path, impl.filename_base, stamp)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Load without preparing for compiling, which takes longer than to load the code.

        Numba prepares again before it compiles.
        """
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target)

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        """Note an error of loading or keeping code; what has failed is not there."""
        try:
            yield
        except OSError as error:
            cache.note(error)


@contextlib.contextmanager
def _directory(path: str) -> Iterator[None]:
    """Make Numba create caches in a directory of ours, for the length of the block."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, path
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
