"""Text of others for a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from gadei_ps.errors import printable


def say(text: str, to: TextIO | None = None, *, end: str = "\n") -> None:
    """Print lines, by default to standard error, as shown() gives them.

    Commands print text by this function or tables.show(), because both escape it.
    """
    print(shown(text), file=to or sys.stderr, end=end, flush=True)


def plain(text: str) -> str:
    """The same in one line, without characters that a terminal takes for commands.

    They are shown as in a Python string. Names of files, say, may be chosen by other users.
    """
    return shown(" ".join(text.split()))


def shown(text: str) -> str:
    """Return plain(), with line feeds and tabs kept."""
    return printable(text)
