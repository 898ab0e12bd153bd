"""Words of shared memory with a meaning, and their values at each line of code."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np

READINGS = 12
"""Words that are read at most, if nothing is read again."""


def words(record: np.void | np.ndarray) -> dict[str, Any]:
    """All words of a struct that are not zero, by their paths, as in "header.kind".

    Of a field with many: the value that all of them have, or by index those that are not zero.
    """
    found: dict[str, Any] = {}
    assert record.dtype.names is not None
    for name in record.dtype.names:
        part = record[name]
        if part.dtype.names:
            found |= {f"{name}.{rest}": value for rest, value in words(part).items()}
            continue
        flat = np.asarray(part).reshape(-1)
        places = np.flatnonzero(flat != np.zeros((), flat.dtype))
        if len(places) == len(flat) and (flat == flat[0]).all():
            found[name] = flat[0].item()
        elif len(places):
            found[name] = {int(at): flat[at].item() for at in places}
    return found


class Changing:
    """A struct that another process writes meanwhile.

    before: called with the name of a word before it is read.
    """

    def __init__(self, record: Any, before: Callable[[str], object]) -> None:
        self._record, self._before = record, before

    def __getitem__(self, name: str) -> Any:
        self._before(name)
        return self._record[name]


Step = Callable[[], object]


class Schedule:
    """Steps of another process, each before the reading of a word with this number."""

    def __init__(self, places: Iterable[int]) -> None:
        self._places = list(places)
        self._readings = 0
        self.steps: list[Step] = []

    def __call__(self, _: str) -> None:
        while self._places and self._places[0] <= self._readings:
            self.steps.pop(0)()
            self._places.pop(0)
        self._readings += 1


def interleaved(make: Callable[[Schedule], tuple[Callable[[], Any], list[Step]]]) -> list[Any]:
    """Return the results of a reading, for every order of its readings and another one's steps.

    make: makes new words, which are Changing by the schedule, and returns the reading and the
    steps.
    """
    found = []
    count = len(make(Schedule(()))[1])
    for places in itertools.combinations_with_replacement(range(READINGS), count):
        schedule = Schedule(places)
        read, schedule.steps = make(schedule)
        found.append(read())
    return found


@contextlib.contextmanager
def at_each_line(look: Callable[[], object], *modules: ModuleType) -> Iterator[None]:
    """Call `look` before each line of these modules that this thread executes, and at its end.

    So it sees the memory as a death at any line would leave it.
    """
    files = {one.__file__ for one in modules}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        look()
