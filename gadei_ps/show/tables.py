"""Tables, numbers and durations as every command prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gadei_ps.show.plain import shown

PIPE_WIDTH = 200  # outside a terminal no width is known; lines of a table must not be cut


def console() -> Console:
    """For standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


class Harmless:
    """The same as rich lays it out, without characters that a terminal takes for commands.

    Names of learners, say, are chosen by the job's user, who need not be the reader.
    """

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self._what, options):
            yield part if part.control else Segment(shown(part.text), part.style)


def show(what: RenderableType) -> None:
    """Prints a string as it is, and anything else as rich lays it out, both as Harmless does."""
    if isinstance(what, str):
        print(shown(what))
    else:
        console().print(Harmless(what))


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table without lines; columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def facts(rows: Mapping[str, str | Text]) -> Table:
    """Names and values, one a line."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        made.add_row(name, Text(value) if isinstance(value, str) else value)
    return made


def size(count: int | None) -> str:
    """`1.7 KiB`, `12.3 MiB` or `2.0 GiB`; empty for None."""
    if count is None:
        return ""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= bytes_:
            return f"{count / bytes_:,.1f} {unit}"
    return f"{count / 1024:.1f} KiB" if count else "0 KiB"


def duration(seconds: float | None) -> str:
    """`3 s`, `4 min 5 s` or `1 h 2 min`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
