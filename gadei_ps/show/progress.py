"""How far the making of segments is, in lines for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

LINE_S = 1.0  # before the first line, and between two


def making(note: Mapping[str, Any]) -> str:
    """`the model is being made: 512 of 2,048 MiB`. note: what, and done and total in bytes.

    Of a note that has a text, the text. Of less than 1 MiB, no size.
    """
    if "text" in note:
        return str(note["text"])
    done, total = note["done"] >> 20, note["total"] >> 20
    if not total:
        return f"{note['what']} is being made"
    return f"{note['what']} is being made: {done:,} of {total:,} MiB"


class Lines:
    """Lines on standard error, for what takes longer than a moment."""

    def __init__(self) -> None:
        self._next: float | None = None
        self._said = ""

    def __call__(self, note: Mapping[str, Any]) -> None:
        """Says how far it is, unless it has just been said."""
        now = time.monotonic()
        if self._next is None:
            self._next = now + LINE_S
        text = making(note)
        if now >= self._next and text != self._said:
            self._next = now + LINE_S
            self._said = text
            print(f"gadei-ps: {text}", file=sys.stderr, flush=True)
