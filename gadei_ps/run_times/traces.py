"""Recorded run times of learners, as CSV files: one row for each learner and iteration.

Two forms, distinguished by the header:

    iteration,learner,started,seconds,censored      our own
    ,worker,gpu,time,batch_time_norm                Alibaba's cluster-trace-gpu-v2020, a job's file

In our own form, `started` is the time of a monotonic clock in seconds. It may be empty, and readers
ignore it. `seconds` is the run time. If `censored` is 1, the learner was dropped after `seconds`,
so its run time is longer. Otherwise `censored` is 0.
"""

from __future__ import annotations

import csv
import io
import math
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import UsageError
from gadei_ps.machine import user_files
from gadei_ps.show.counts import counted
from gadei_ps.sync.parameters import short_repr

HEADER: Final = ("iteration", "learner", "started", "seconds", "censored")
_ALIBABA: Final = ("", "worker", "gpu", "time", "batch_time_norm")
_MOST_CELLS: Final = 1 << 27  # a gigabyte of float64

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Trace:
    """Run times, iterations by learners.

    times: float64 (iterations, learners), in the file's unit (seconds in our own form), NaN if
    missing. censored: bool of that shape; True: the time is a lower bound. learners: a name for
    each column. Raises ValueError for other shapes.
    """

    times: FloatArray
    censored: BoolArray
    learners: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.times.ndim != 2 or self.times.shape[1] != len(self.learners):
            raise ValueError(f"times of shape {self.times.shape} for {len(self.learners)} learners")
        if self.censored.shape != self.times.shape:
            raise ValueError(f"censored {self.censored.shape} is not times {self.times.shape}")

    @property
    def missing(self) -> int:
        """Number of missing run times, which `filled` makes up."""
        return int(np.isnan(self.times).sum())

    def filled(self) -> Trace:
        """A copy without gaps. A missing run time is the learner's previous one, else its next one.

        A repeated lower bound remains one. Raises UsageError if a learner has no run time.
        """
        known = ~np.isnan(self.times)
        for name, column in zip(self.learners, known.T, strict=True):
            if not column.any():
                raise UsageError(f"learner {name!r} has no run time in the trace; leave it out")
        if not known.size:
            return Trace(self.times.copy(), self.censored.copy(), self.learners)
        # For each cell: the row of the last known time, else of the first known time.
        rows = np.where(known, np.arange(len(known))[:, None], -1)
        source = np.maximum.accumulate(rows, axis=0)
        source = np.where(source < 0, known.argmax(axis=0)[None, :], source)
        return Trace(
            np.take_along_axis(self.times, source, axis=0),
            np.take_along_axis(self.censored, source, axis=0),
            self.learners,
        )

    def part(self, begin: int, end: int) -> Trace:
        """Return iterations `begin` to `end` - 1, counted from the start of the trace."""
        return Trace(self.times[begin:end], self.censored[begin:end], self.learners)


# -- reading --------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Trace:
    """The trace in a CSV file of either form.

    Iterations are in ascending order. Numbers that do not occur are left out. Learners are in
    numerical order if all names are numbers, else in the order in which they first occur. If the
    file cannot be read, raises UsageError: one line with the file and the line number.
    """
    shown = _shown(path)
    rows = csv.reader(io.StringIO(_text(path, shown), newline=""), strict=True)
    cells: list[_Cell] = []
    try:
        header = tuple(name.strip() for name in next(rows, []))
        if header not in (HEADER, _ALIBABA):
            wanted = " or ".join(",".join(form) for form in (HEADER, _ALIBABA))
            raise UsageError(f"{shown}:1: not the header of a trace; it must be {wanted}")
        parse = _own if header == HEADER else _alibaba
        for row in rows:
            if not row:
                continue
            try:
                if len(row) != len(header):
                    given = counted(len(row), "field")
                    raise ValueError(f"{given} where the header has {len(header)}")
                cells.append(_Cell(rows.line_num, *parse(row)))
            except ValueError as error:
                raise UsageError(f"{shown}:{rows.line_num}: {error}; correct the row") from None
    except csv.Error as error:
        raise UsageError(f"{shown}:{rows.line_num}: {error}; give a CSV file") from None
    if not cells:
        raise UsageError(f"{shown}: there is a header but no row; add run times")
    return _trace(cells, shown)


class _Cell(NamedTuple):
    """A row of a file. line: its number."""

    line: int
    iteration: int
    learner: str
    seconds: float
    censored: bool


def _own(row: list[str]) -> tuple[int, str, float, bool]:
    iteration, learner, started, seconds, censored = row
    if started.strip():
        _number(started, "started")
    if censored.strip() not in ("0", "1"):
        raise ValueError(f"censored is {short_repr(censored)}, not 0 or 1")
    number, name = _whole(iteration, "iteration"), _name(learner)
    return number, name, _duration(seconds, "seconds"), censored.strip() == "1"


def _alibaba(row: list[str]) -> tuple[int, str, float, bool]:
    _, learner, _, time, duration = row
    seconds = _duration(duration, "batch_time_norm")
    return _whole(time, "time"), _name(learner), seconds, False


def _trace(cells: list[_Cell], shown: str) -> Trace:
    names = list(dict.fromkeys(one.learner for one in cells))
    if all(name.isascii() and name.isdigit() for name in names):
        names.sort(key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    iterations = sorted({one.iteration for one in cells})
    if len(iterations) * len(names) > _MOST_CELLS:
        raise UsageError(
            f"{shown}: {len(iterations)} iterations of {len(names)} learners are too many; "
            f"leave some out, at most {_MOST_CELLS} run times fit"
        )
    rows = {iteration: row for row, iteration in enumerate(iterations)}
    columns = {name: column for column, name in enumerate(names)}
    times = np.full((len(rows), len(columns)), np.nan)
    censored = np.zeros(times.shape, np.bool_)
    for one in cells:
        place = rows[one.iteration], columns[one.learner]
        if not math.isnan(times[place]):
            raise UsageError(
                f"{shown}:{one.line}: learner {short_repr(one.learner)} has iteration "
                f"{one.iteration} twice; leave one out"
            )
        times[place], censored[place] = one.seconds, one.censored
    return Trace(times, censored, tuple(names))


def _name(text: str) -> str:
    name = text.strip()
    if not name:
        raise ValueError("the learner has no name")
    return name


def _whole(text: str, what: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError(f"{what} is {short_repr(text)}, not a whole number from 0")
    return int(text)


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{what} is {short_repr(text)}, not a number")
    return value


def _duration(text: str, what: str) -> float:
    value = _number(text, what)
    if value < 0:
        raise ValueError(f"{what} is {short_repr(text)}, which is negative")
    return value


def _text(path: str | os.PathLike[str], shown: str) -> str:
    try:
        data = user_files.read_all(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{shown}: cannot be read ({reason}); give the path of a CSV file"
        ) from None
    body = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{shown}:{line}: not UTF-8 text; give a CSV file") from None


def _shown(path: str | os.PathLike[str]) -> str:
    """The path on one line."""
    shown = os.fspath(path)
    return shown if shown.isprintable() else repr(shown)


# -- writing --------------------------------------------------------------------------------------


def line(iteration: int, learner: int, started: float, seconds: float, censored: bool) -> str:
    """One row of a file in our form, with its end of line, for a recorder."""
    # repr of a float is the shortest text from which the same float can be read.
    return f"{iteration},{learner},{started!r},{seconds!r},{int(censored)}\n"
