"""Tables, numbers and durations as every command prints them."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gadei_ps.show.plain import escaped

GAP = 2  # columns between two columns
LEAST_CUT = 12  # columns of cells that are cut
PIPE_WIDTH = 200  # outside a terminal no width is known; lines of a table must not be cut


def console() -> Console:
    """Return the console for standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


class Escaped:
    """The same as rich lays it out, without characters that a terminal takes for commands.

    Names of learners, say, are chosen by the job's user, who need not be the reader.
    """

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in console.render(self._what, options):
            yield part if part.control else Segment(escaped(part.text), part.style)


def show(what: RenderableType) -> None:
    """Print a string as it is, and anything else as rich lays it out, both as Harmless does."""
    if isinstance(what, str):
        print(escaped(what))
    else:
        console().print(Escaped(what))


class FittedTable:
    """A table without lines that omits columns where lines are short, and breaks no word."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        right: Iterable[str] = (),
        whole: Iterable[str] = (),
        dispensable: Sequence[str] = (),
        cut: str = "",
    ) -> None:
        """right: columns of numbers. whole: columns that are not wrapped, not even their headers.

        dispensable: columns that may be omitted, the first one first. cut: a column whose cells are
        cut to the width that the others leave.
        """
        self.columns = list(columns)
        self.rows: list[list[Text]] = []
        self._right = set(right)
        self._whole = set(whole)
        self._dispensable = dispensable
        self._cut = cut

    def add_row(self, *cells: str | Text) -> None:
        """A cell for each column."""
        self.rows.append([one if isinstance(one, Text) else Text(one) for one in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(self.columns)
        for name in (*self._dispensable, None):
            room = options.max_width - GAP * (len(columns) - 1)
            widths = _shared([self._bounds(one) for one in columns], room)
            if name is None or widths:
                break
            columns.remove(name)
        yield self._table(columns, widths)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(self.columns, []))

    def _cells(self, name: str) -> list[Text]:
        at = self.columns.index(name)
        return [row[at].copy() for row in self.rows]

    def _bounds(self, name: str) -> tuple[int, int]:
        """The least width without a broken word, and the width of the longest cell."""
        words = [cell_len(one) for one in name.split()]
        texts = [one.plain for one in self._cells(name)]
        most = max([cell_len(name), *map(cell_len, texts)])
        if name == self._cut:
            return min(LEAST_CUT, most), most
        if name in self._whole:
            return most, most
        if name not in self._right:
            texts = [word for one in texts for word in one.split()]
        return max([*words, *map(cell_len, texts)], default=0), most

    def _table(self, columns: Sequence[str], widths: Sequence[int]) -> Table:
        """widths: of the columns; empty if that is for rich to choose."""
        made = Table(box=None, pad_edge=False, header_style="dim")
        shown = []
        for at, name in enumerate(columns):
            width = widths[at] if widths else None
            cells = self._cells(name)
            if name == self._cut and width is not None:
                for one in cells:
                    one.truncate(width, overflow="ellipsis")
            justify: JustifyMethod = "right" if name in self._right else "left"
            made.add_column(name, justify=justify, overflow="fold", width=width)
            shown.append(cells)
        for row in zip(*shown, strict=True):
            made.add_row(*row)
        return made


def _shared(bounds: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Return widths between these bounds that fill the space; empty if the least do not fit."""
    widths = [least for least, _ in bounds]
    left = room - sum(widths)
    if left < 0:
        return []
    while left and (grow := [at for at, (_, most) in enumerate(bounds) if widths[at] < most]):
        for at in grow[:left]:
            widths[at] += 1
        left -= len(grow[:left])
    return widths


def formatted(
    columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], dispensable: Sequence[str] = ()
) -> FittedTable:
    """A table of names and numbers. columns: how str.format writes a cell, by header."""
    names = list(columns)
    made = FittedTable(names, right=names[1:], dispensable=dispensable)
    for one in rows:
        made.add_row(*(text.format_map(one) for text in columns.values()))
    return made


def facts(rows: Mapping[str, str | Text]) -> Table:
    """Return names and values, one a line."""
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


def when(seconds: float) -> str:
    """Return `11-26 14:29:08` in local time, for seconds since 1970; `?` for an invalid time."""
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "?"


def age(since: float) -> str:
    """`5 s`, `62 min`, `5 h` or `3 d` from `since` (s since 1970) until now."""
    seconds = max(0.0, time.time() - since)
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds // 86_400:,.0f} d"


def alike(values: Sequence[float | None]) -> list[str]:
    """Format the numbers of a column alike, with enough digits for the least; empty for None."""
    sizes = [abs(one) for one in values if one]
    form = ",.4f" if all(1e-3 <= one < 1e7 for one in sizes) else ".3e"
    return ["" if one is None else format(one, form) for one in values]


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
