"""Text of others for a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from gadei_ps.errors import printable


def print_text(text: str, to: TextIO | None = None, *, end: str = "\n") -> None:
    """Print lines, by default to standard error, as escaped() gives them.

    Commands print text by this function or tables.show(), because both escape it.
    """
    print(escaped(text), file=to or sys.stderr, end=end, flush=True)


def plain(text: str) -> str:
    """The same in one line, without characters that a terminal takes for commands.

    They are shown as in a Python string. Names of files, say, may be chosen by other users.
    """
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """Return plain(), with line feeds and tabs kept."""
    return printable(text)
