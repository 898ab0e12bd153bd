"""What of an installed file is not as install-unit would write it, in few words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

MOST = 3  # settings that are named
LONGEST = 72  # characters of one


def of(path: Path, text: str) -> str:
    """What is at this path instead of `text`: `it has Nice=5 instead of Nice=0`."""
    if path.is_symlink():
        return f"it is a link to {path.readlink()}"
    there, new = _settings(path.read_text(errors="replace")), _settings(text)
    own, gone = list((there - new).elements()), list((new - there).elements())
    if not own and not gone:
        return "only in comments or in the order of lines"
    if not own:
        return f"it lacks {_named(gone)}"
    return f"it has {_named(own)}" + (f" instead of {_named(gone)}" if gone else "")


def _settings(text: str) -> Counter[str]:
    """The lines that set something."""
    lines = (line.strip() for line in text.splitlines())
    return Counter(line for line in lines if line and line[0] not in "#;[")


def _named(lines: list[str]) -> str:
    short = [one if len(one) <= LONGEST else f"{one[:LONGEST]}..." for one in lines[:MOST]]
    more = len(lines) - len(short)
    return ", ".join(short) + (f" and {more} more" if more else "")
