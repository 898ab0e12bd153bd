"""A learner as the driver of the synchronization model knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gadei_ps.server import kinds, units
from gadei_ps.server.rings import Mapped


@dataclass(eq=False)
class Member:
    """A learner whose ring is served."""

    mapped: Mapped
    reported: int = 0  # frames that were reported to the sync model, and assignments
    joined: bool = False
    leaving: bool = False
    granted: int = -1

    @property
    def row(self) -> int:
        return self.mapped.row

    @property
    def generation(self) -> int:
        return self.mapped.generation

    def next(self, slots: int) -> Next:
        """The next frame to report. slots: of the ring."""
        slot = self.mapped.slot(self.reported, slots)
        return Next(self, slot, self.mapped.header(slot))


class Next(NamedTuple):
    """A frame whose header was read once: its learner may write over it."""

    member: Member
    slot: int
    """Offset of the slot from the ring's begin (bytes)."""
    header: np.ndarray
    """FRAME, shape (1,)."""

    @property
    def writes(self) -> bool:
        """Whether it is a write, which is not reported to the synchronization model."""
        return bool(kinds.WRITES >> int(self.header[0]["kind"]) & 1)

    @property
    def started(self) -> float:
        return float(self.header[0]["started"])

    def check(self, part: np.ndarray) -> int:
        """Return why it must not be applied (layout.Reason). part: PART of any shard."""
        member = self.member
        return units.check_frame(
            self.header.ctypes.data,
            member.mapped.ring.address + self.slot,
            member.generation,
            member.reported,
            part.ctypes.data,
        )
