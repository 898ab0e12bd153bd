"""Tables, numbers and durations as every command prints them."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gadei_ps.show.plain import shown

WIDEST = 1000  # columns, for a table that is measured without a limit
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
        number = name in right
        made.add_column(
            name, justify="right" if number else "left", overflow="fold", no_wrap=number
        )
    return made


class Fitting:
    """A table that omits columns where lines are short, so that no word of the others is broken.

    Each row has a cell for each column. right: columns of numbers. dispensable: columns that may be
    omitted, the first one first. wraps: columns of sentences or of names without a bound.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Mapping[str, str | Text]],
        *,
        right: Iterable[str] = (),
        dispensable: Sequence[str] = (),
        wraps: Sequence[str] = (),
    ) -> None:
        self._columns = list(columns)
        self._rows = list(rows)
        self._right = set(right)
        self._dispensable = dispensable
        self._wraps = wraps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(self._columns)
        unlimited = options.update(width=WIDEST)
        for name in (*self._dispensable, None):
            made = self._table(columns)
            width = Measurement.get(console, unlimited, made).minimum
            if name is None or width <= options.max_width:
                break
            columns.remove(name)
        yield made

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table(self._columns))

    def _table(self, columns: Sequence[str]) -> Table:
        made = table()
        for name in columns:
            widths = [_width(row[name]) for row in self._rows]
            whole = name not in self._wraps
            made.add_column(
                name,
                justify="right" if name in self._right else "left",
                overflow="fold",
                no_wrap=whole,
                min_width=max([cell_len(name), *widths]) if whole else None,
            )
        for row in self._rows:
            made.add_row(*(row[name] for name in columns))
        return made


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


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


def when(seconds: float) -> str:
    """`11-26 14:29:08` in local time, for seconds since 1970; `?` for what is no time."""
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
    """Numbers of a column in one format, with enough digits for the least; empty for None."""
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
