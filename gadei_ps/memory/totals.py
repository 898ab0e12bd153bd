"""The metrics of a job that are words of shared memory (gadei_ps/metrics.py), read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from gadei_ps import metrics
from gadei_ps.memory import layout
from gadei_ps.metrics import Metric, Place

_SUMMED: Final = tuple(one for one in metrics.JOB if one.place is Place.ROSTER)
COUNTED: Final = tuple(one.word for one in _SUMMED)
"""Words that each row of the roster has for its learner, and `past_...` for those that are gone."""

_STRUCTS: Final = {
    Place.CONTROL: layout.CONTROL,
    Place.ROSTER: layout.ENTRY,
    Place.RECORDS: layout.RECORD,
}


def check() -> None:
    """Check the table against the layout. Raises AssertionError."""
    for one in (*metrics.JOB, *metrics.LEARNER):
        struct = _STRUCTS.get(one.place)
        assert bool(one.word) == (struct is not None), one.name
        if struct is not None:
            assert struct.fields is not None and one.word in struct.fields, one.name
            assert struct[one.word].kind in "uif", one.name
    # layout.PAST is what a server adds up when a learner leaves (server/statistics.py).
    assert set(layout.PAST) == set(COUNTED), "a word past_... and its metric go together"
    for table in (metrics.JOB, metrics.LEARNER):
        names = [one.name for one in table]
        assert len(set(names)) == len(names), "two metrics have one name"


check()


def total(control: np.void, what: str) -> int:
    """One of COUNTED, of all learners. control: CONTROL."""
    return int(control[f"past_{what}"]) + int(control["roster"][what].sum())


def counts(control: np.void) -> dict[str, int]:
    """All of COUNTED, under the names of status: `gradients_applied`, ... and `samples`."""
    return named([total(control, what) for what in COUNTED])


def named(counts: Iterable[int]) -> dict[str, int]:
    """Return the numbers in the order of COUNTED, under the names of status."""
    return {one.name: count for one, count in zip(_SUMMED, counts, strict=True)}


def _read(one: Metric, control: np.void, state: np.void | None) -> int:
    match one.place:
        case Place.ROSTER:
            return total(control, one.word)
        case Place.RECORDS:
            return 0 if state is None else int(state["record"][one.word].sum())
        case _:
            return int(control[one.word])


def of_job(control: np.void, state: np.void | None) -> dict[str, int]:
    """Return a job's metrics in memory. control, state: CONTROL, and STATE once it is there."""
    return {one.name: _read(one, control, state) for one in metrics.JOB if one.word}


def of_learner(entry: np.void) -> dict[str, int]:
    """Return a learner's metrics in its row of the roster. entry: ENTRY."""
    return {one.name: int(entry[one.word]) for one in metrics.LEARNER if one.word}


def in_history(control: np.void, state: np.void) -> dict[str, int]:
    """Return the values of a point of a job's history. control, state: CONTROL and STATE."""
    return {one.name: _read(one, control, state) for one in metrics.JOB if one.in_history}


def saved(control: np.void) -> dict[str, int]:
    """Return the values that a checkpoint keeps, by word. control: CONTROL."""
    return {one.word: _read(one, control, None) for one in metrics.JOB if one.is_saved}


def restore(control: np.void, counts: dict[str, int]) -> None:
    """Enter what saved() has returned into new memory. control: CONTROL."""
    for one in metrics.JOB:
        if one.is_saved:
            word = f"past_{one.word}" if one.place is Place.ROSTER else one.word
            control[word] = counts[one.word]
