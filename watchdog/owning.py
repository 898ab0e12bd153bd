"""Batches that a job is to hand out, where it owns a part of them: as its agent says.

Each change is one store, after which it counts: a watchdog that dies before it has changed nothing,
and gets the request again. Each range has a number, so a request that comes twice counts once.
"""

from __future__ import annotations

from typing import Any

from gadei_ps import _native
from gadei_ps.errors import ControlError
from gadei_ps.job.control import Own
from gadei_ps.memory import layout, owned
from gadei_ps.memory.layout import CONTROL
from gadei_ps.watchdog.memory import JobMemory

ROOM = layout.OWNED - layout.AHEAD
"""Ranges that may wait. A server that dies in a transaction leaves `owned_range` lower by as many
batches as one learner may have, and then those ranges are read again."""


def own(memory: JobMemory, request: Own) -> dict[str, Any]:
    """Give ranges, or take all back; return how many were given so far, which may be less than
    was asked where there is no room. Raises ControlError."""
    control = memory.control.view(CONTROL)
    if not owned.is_on(control):
        raise ControlError("the job hands out all batches: write `owned = true` into its job file")
    wanted = [_words(control, *one) for one in request.ranges]
    given = int(control["owned_given"])
    before = given - request.number
    there = control["owned_ranges"]
    if not 0 <= before <= len(wanted) or any(
        tuple(there[(request.number + place) % layout.OWNED]) != one
        for place, one in enumerate(wanted[:before])
    ):
        raise ControlError(
            f"the job was given {given} ranges of batches, not {request.number}: somebody else "
            "gives it some; stop the other agent"
        )
    room = max(0, ROOM - (given - int(control["owned_range"])))
    for one in wanted[before : before + room]:
        there[given % layout.OWNED] = one
        given += 1
    _store(memory, "owned_given", given)
    if request.take_back:
        _store(memory, "owned_from", given)
    if request.passes > int(control["owned_passes"]):
        _store(memory, "owned_passes", request.passes)
    memory.ring_bells()
    return {"given": given}


def _words(control: Any, epoch: int, begin: int, end: int) -> tuple[int, int]:
    """A range as it is stored. Raises ControlError if the job has no such batches."""
    batches, epochs = int(control["batches"]), int(control["epochs"])
    if not (begin < end <= batches and epoch < epochs):
        raise ControlError(
            f"the job has {epochs} epochs of {batches} batches, and none from {begin} to {end} "
            f"of epoch {epoch}: a learner has to set their number first"
        )
    return owned.words(epoch, begin, end)


def _store(memory: JobMemory, word: str, value: int) -> None:
    _native.store(memory.control.word(CONTROL, word), value)  # SYNC POINT: owned ranges
