"""Text of others for a terminal."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: str, to: TextIO | None = None) -> None:
    """Prints lines, by default to standard error, as shown() gives them.

    Commands print text by this function or tables.show(). Both escape it.
    """
    print(shown(text), file=to or sys.stderr, flush=True)


def plain(text: str) -> str:
    """The same in one line, without characters that a terminal takes for commands.

    They are shown as in a Python string. Names of files, say, may be chosen by other users.
    """
    return shown(" ".join(text.split()))


def shown(text: str) -> str:
    """As plain(), but line feeds and tabs stay."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )
