"""Batches that a job hands out: set by its learners, or given by its replica.

Learners of a job may begin together, so that each run of it gives the same weights: learner 0 makes
the model, and batches are handed out once all learners ask for them, in the order of rows. The
server awaits them as well (`Start` of server/driver.py). Learners that have ended for good are not
awaited, and what does not come within the learners' time limit is awaited no longer.

Externally assigned batches come in ranges. Each change is one store, after which it takes effect: a
watchdog that dies before it has changed nothing, and gets the request again. Each range has a
number, so a request that comes twice counts once.
"""

from __future__ import annotations

import time
from typing import Any

from gadei_ps import _native, sync
from gadei_ps.errors import ControlError
from gadei_ps.job import sync_change
from gadei_ps.job.control import Own, SetWork
from gadei_ps.memory import finished, layout, owned
from gadei_ps.memory.layout import CONTROL, Work
from gadei_ps.watchdog.job_memory import JobMemory

MOST_WAITING = layout.OWNED - layout.AHEAD
"""Ranges that may wait. A server that dies in a transaction leaves `owned_range` lower by as many
batches as one learner may have, and then those ranges are read again."""


class Batches:
    """Batches of one job. learners: how many are to begin together."""

    def __init__(self, memory: JobMemory, learners: int) -> None:
        self._memory = memory
        self._learners = learners
        self._since = 0.0

    @property
    def awaits(self) -> bool:
        """Whether learners of this job begin together, and have not begun yet."""
        return self._learners > 1 and sync_change.awaits_start(self._memory.control)

    @property
    def awaits_first(self) -> bool:
        """Whether learner 0, which makes the model, is awaited."""
        return self.awaits and not finished.has(self._memory.words, 0)

    @property
    def _awaited(self) -> int:
        return max(1, self._learners - finished.count(self._memory.words))

    def leave_out(self, number: int) -> None:
        """The learner of this number has ended for good."""
        finished.add(self._memory.words, number)
        self._memory.ring_bells()

    def report(self) -> dict[str, int] | None:
        """Return attached and awaited learners for the status; None once begun."""
        if not self.awaits:
            return None
        return {"learners": min(self._asking(0xFFFFFFFF), self._awaited), "of": self._awaited}

    def is_late(self, since: float) -> bool:
        """Return whether a learner that has waited since then has waited long enough."""
        limit_s = self._memory.config.learner_timeout_s
        return bool(limit_s) and time.monotonic() - since > limit_s

    def hand_out(self, stopping: bool) -> None:
        """Let batches that learners have set be handed out, once all learners ask for them."""
        control = self._memory.words
        if int(control["work"]) != Work.NONE or not int(control["batches"]):
            return
        self._since = self._since or time.monotonic()
        all_ask = self._asking(layout.WANTS_WORK) >= self._awaited
        if self.awaits and not all_ask and not stopping and not self.is_late(self._since):
            return
        at = self._memory.control.word(CONTROL, "work")
        _native.store32(at, Work.WORKING)  # SYNC POINT: work
        self._memory.ring_bells()

    def _asking(self, what: int) -> int:
        """Count the attached learners that have asked for any of this."""
        rings = self._memory.rings.values()
        return sum(bool(int(one.view(layout.RING)["wants"]) & what) for one in rings)

    def set_work(self, request: SetWork) -> dict[str, bool]:
        """Set the batches of a job that has none yet. Raises ControlError."""
        control = self._memory.words
        wanted = (request.batches, request.epochs, request.seed)
        if int(control["work"]) != Work.NONE or int(control["batches"]):
            have = tuple(int(control[name]) for name in ("batches", "epochs", "seed"))
            if have != wanted:
                raise ControlError(
                    "the job hands out work already: batches, epochs, seed are "
                    f"{have}, not {wanted}"
                )
            if request.ahead > int(control["ahead"]):
                control["ahead"] = request.ahead
                self._memory.ring_bells()
            return {"set": False}
        memory = self._memory.control
        if sync_change.requested(memory) != sync_change.in_force(memory):
            coming = sync.parse(sync_change.text(memory, sync_change.requested(memory)))
            if coming.wave != int(control["wave"]):
                raise ControlError(
                    f"the job is just changing to {coming}, with waves of {coming.wave}; ask again"
                )
        control["ahead"] = max(int(control["ahead"]), request.ahead)
        control["next"] = 0
        control["epochs_done"] = 0
        control["epochs"], control["seed"] = wanted[1:]
        control["batches"] = wanted[0]  # last: with it the next watchdog continues from here
        self.hand_out(stopping=False)
        return {"set": True}

    def assign(self, request: Own) -> dict[str, int]:
        """Give ranges, or take all back. Raises ControlError.

        Returns how many were given so far, which may be less than requested if there is no room.
        """
        control = self._memory.words
        if not owned.is_on(control):
            raise ControlError(
                "the job hands out all batches: write `owned = true` into its job file"
            )
        wanted = [_words(control, *one) for one in request.ranges]
        given = int(control["owned_given"])
        before = given - request.number
        there = control["owned_ranges"]
        if not 0 <= before <= len(wanted) or any(
            tuple(there[(request.number + place) % layout.OWNED]) != one
            for place, one in enumerate(wanted[:before])
        ):
            raise ControlError(
                f"the job was given {given} ranges of batches, not {request.number}: another "
                "program assigns them too; stop the other replica"
            )
        room = max(0, MOST_WAITING - (given - int(control["owned_range"])))
        for one in wanted[before : before + room]:
            there[given % layout.OWNED] = one
            given += 1
        self._store("owned_given", given)
        if request.take_back:
            self._store("owned_from", given)
        if request.passes > int(control["owned_passes"]):
            self._store("owned_passes", request.passes)
        self._memory.ring_bells()
        return {"given": given}

    def _store(self, word: str, value: int) -> None:
        _native.store(self._memory.control.word(CONTROL, word), value)  # SYNC POINT: owned ranges


def _words(control: Any, epoch: int, begin: int, end: int) -> tuple[int, int]:
    """A range as it is stored. Raises ControlError if the job has no such batches."""
    batches, epochs = int(control["batches"]), int(control["epochs"])
    if not (begin < end <= batches and epoch < epochs):
        raise ControlError(
            f"the job has {epochs} epochs of {batches} batches, and none from {begin} to {end} "
            f"of epoch {epoch}: a learner has to set their number first"
        )
    return owned.words(epoch, begin, end)
