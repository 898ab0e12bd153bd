"""The metrics of a job that are words of shared memory (gadei_ps/metrics.py), read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from gadei_ps import metrics
from gadei_ps.memory import layout
from gadei_ps.metrics import Metric, Place, Values

_SUMMED: Final = tuple(one for one in metrics.JOB if one.place is Place.ROSTER)
_WHOLE: Final = tuple(one for one in _SUMMED if one.values is Values.COUNT)
SUMMED: Final = tuple(one.word for one in _SUMMED)
"""Words that each row of the roster has for its learner, and `past_...` for those that are gone."""
COUNTED: Final = tuple(one.word for one in _WHOLE)
"""Those of SUMMED that are whole numbers."""

TRIES: Final = 20  # to read two words between two gradients

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
    assert set(layout.PAST) == set(SUMMED), "a word past_... and its metric go together"
    for table in (metrics.JOB, metrics.LEARNER):
        names = [one.name for one in table]
        assert len(set(names)) == len(names), "two metrics have one name"


check()


def total(control: np.void, what: str, state: np.void | None = None) -> int:
    """One of COUNTED, of all learners. control: CONTROL. state: STATE, see _parts()."""
    return int(_total(control, what, state))


def _total(control: np.void, what: str, state: Any = None) -> Any:
    return sum(_parts(control, what, state))


def _parts(control: np.void, what: str, state: Any = None) -> tuple[Any, Any]:
    """Return a word of the learners that have left, and its sum over the others.

    A server adds the count of a learner that leaves to the first one, and then clears it in the
    roster, in one transaction. The first one is read before and after the roster, so that no count
    is missing. With `state`, which is STATE, none is in both: no transaction is open in between.
    """
    for _ in range(TRIES):
        past = control[f"past_{what}"].item()
        is_idle = state is None or not int(state["journal"]["used"])
        there = control["roster"][what].sum().item()
        if is_idle and control[f"past_{what}"].item() == past:
            break
    return past, there


def losses(control: np.void, state: np.void) -> tuple[int, float]:
    """Return `loss_count` and `loss_sum` of the same gradients. control, state: CONTROL, STATE.

    A server changes both in one transaction. So they belong together if no transaction is open
    after the sum is read, and the counts are the same as before. If a server has died in a
    transaction, one loss may be in one of them only.
    """
    for _ in range(TRIES):
        counted = _parts(control, "loss_count")
        summed = _total(control, "loss_sum", state)
        if not int(state["journal"]["used"]) and _parts(control, "loss_count") == counted:
            break
    return sum(counted), summed


def row(control: np.void, state: np.void | None, number: int) -> np.void:
    """Copy a learner's row of the roster, with its losses and their count of the same gradients.

    control: CONTROL. state: STATE; None before it is there.
    """
    for _ in range(TRIES):
        entry: np.void = control["roster"][number].copy()
        is_idle = state is None or not int(state["journal"]["used"])
        if is_idle and control["roster"][number]["loss_count"] == entry["loss_count"]:
            break
    return entry


def counts(control: np.void) -> dict[str, Any]:
    """All of SUMMED, under the names of status: `gradients_applied`, ... and `samples`."""
    return {one.name: _total(control, one.word) for one in _SUMMED}


def named(counts: Iterable[int]) -> dict[str, int]:
    """Return the numbers in the order of COUNTED, under the names of status."""
    return {one.name: count for one, count in zip(_WHOLE, counts, strict=True)}


def _read(one: Metric, control: np.void, state: Any) -> Any:
    match one.place:
        case Place.ROSTER:
            return _total(control, one.word, state)
        case Place.RECORDS:
            return 0 if state is None else int(state["record"][one.word].sum())
        case _:
            return control[one.word].item()


def of_job(control: np.void, state: np.void | None) -> dict[str, Any]:
    """Return a job's metrics in memory.

    control: CONTROL. state: STATE; None before it is there. The version is read first: a gradient
    is among those applied before it is in the version, so that only assignments make it higher.
    """
    version = control["version"].item()
    found = {one.name: _read(one, control, state) for one in metrics.JOB if one.word}
    found["version"] = version
    if state is not None:
        found["loss_count"], found["loss_sum"] = losses(control, state)
    return found


def of_learner(entry: np.void) -> dict[str, Any]:
    """Return a learner's metrics in its row of the roster. entry: ENTRY."""
    return {one.name: entry[one.word].item() for one in metrics.LEARNER if one.word}


def in_ring(ring: np.void, shards: int) -> tuple[int, int]:
    """Return the gradients that were pushed into a ring, and those still in it.

    ring: RING. shards: those of the job, as the ring's own words may be anything.
    """
    published = int(ring["head"])
    tails = ring["tail"]["value"][: max(1, shards)].tolist()
    return published, max(0, published - min(tails))  # a tail may have been read later


def in_history(control: np.void, state: np.void) -> dict[str, Any]:
    """Return the values of a point of a job's history. control, state: CONTROL and STATE."""
    return {
        one.name: one.possible(_read(one, control, state)) for one in metrics.JOB if one.in_history
    }


def saved(control: np.void) -> dict[str, int]:
    """Return the values that a checkpoint keeps, by word. control: CONTROL."""
    return {one.word: _read(one, control, None) for one in metrics.JOB if one.is_saved}


def restore(control: np.void, counts: dict[str, int]) -> None:
    """Enter what saved() has returned into new memory. control: CONTROL."""
    for one in metrics.JOB:
        if one.is_saved:
            word = f"past_{one.word}" if one.place is Place.ROSTER else one.word
            control[word] = counts[one.word]
