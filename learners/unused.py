"""Iterators that do nothing until somebody takes from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Unused(Iterator[T]):
    """An iterator that warns if it is dropped before anything was taken from it."""

    def __init__(self, inner: Iterator[T], how: str) -> None:
        """how: it should be used, for the warning."""
        self._inner, self._how, self._begun = inner, how, False

    def __next__(self) -> T:
        self._begun = True
        return next(self._inner)

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(f"nothing was trained: write {self._how}", stacklevel=2)
