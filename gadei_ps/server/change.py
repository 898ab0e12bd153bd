"""A change of the synchronization model while the job runs.

    freeze     every learner finishes its current iteration; no learner is granted another one
    barrier    all that was granted is pushed, applied or dropped
    hold       the shards let frames lie, and all have consumed the same
    finish     the mode of the new model, then its number: from here on it is in force

If the server dies in between, the number has not changed. The next server begins the change again,
without a barrier, because the old model's state is gone.
"""

from __future__ import annotations

import numpy as np

from gadei_ps import _native
from gadei_ps.job import modes, numbers
from gadei_ps.machine import log
from gadei_ps.memory.layout import CONTROL, Mode
from gadei_ps.memory.segment import Segment


def hold(control: Segment, changes: int, shards: int) -> bool:
    """Let the shards leave frames alone; return whether all do. changes: see modes.set_mode()."""
    mode = modes.set_mode(control, changes, Mode.HOLD)
    adopted = control.view(CONTROL)["shard"]["mode"][:shards]
    return bool((adopted == np.uint32(mode)).all())


class Freeze:
    """The last grants of learners: each finishes the current iteration, and begins no other."""

    def __init__(self) -> None:
        self._grants: dict[tuple[int, int], tuple[int, int]] = {}

    def last(self, row: int, generation: int, granted: int, most: int) -> int:
        """The last grant of a learner, in its own clock; the same in each call.

        granted: so far. most: what it may be at most.
        """
        key = row, generation
        if key not in self._grants:
            self._grants[key] = granted, min(granted, most)
        return self._grants[key][1]

    def before(self, row: int, generation: int) -> int | None:
        """Return the learner's earlier grant; None if it was not frozen."""
        found = self._grants.get((row, generation))
        return found[0] if found else None


class Change:
    """One change, by the manager of the active server."""

    def __init__(self, control: Segment, number: int, shards: int) -> None:
        """number: of the model that is wanted."""
        self.number = number
        self.at_barrier = False
        self._control = control
        self._shards = shards
        self.freeze = Freeze()
        self.model = modes.model(control, number)

    def shards_hold(self) -> bool:
        """Let the shards leave frames alone; return whether all do."""
        return hold(self._control, self.number + numbers.done(self._control), self._shards)

    def finish(self) -> None:
        """Put the new model in force. The grants of the old one are revoked before."""
        _native.store(self._control.word(CONTROL, "sync_done"), self.number)
        modes.enforce(self._control, self.number, self.model)
        log.get().info("synchronization model changed", sync=str(self.model))
