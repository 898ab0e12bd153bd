"""The learners' rings as a server process has them mapped, and how its shards learn of them.

Every server has a table of its own, the standby too, so that a failover has nothing to map.
Addresses are shown to the shards last and removed first. A ring is unmapped when no shard of this
process can be looking at it.

A ring is broken if its memory is lost, if it cannot be mapped, or if its head cannot be. The shards
read no frame of it any more (arrival.settle_broken), and the manager evicts its learner.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from gadei_ps import _native
from gadei_ps.memory import layout, ring
from gadei_ps.memory.layout import RING
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import segment_name
from gadei_ps.server.structs import BOARD, NOT_READING, RING_LINE


def _holders(control: np.void) -> list[int]:
    """Return other processes that may have mapped a ring whose name is lost. control: CONTROL."""
    pids = [control["watchdog_pid"], *control["server"]["pid"]]
    return [int(pid) for pid in pids if int(pid) not in (0, os.getpid())]


@dataclass(eq=False)
class Mapped:
    """A ring of this process' table."""

    row: int
    generation: int
    ring: Segment
    slot_bytes: int
    slots_at: int
    noted: bool = False
    """Whether the shards are notified that it is broken."""

    @property
    def head(self) -> int:
        """Frames published."""
        return _native.load(self.ring.word(RING, "head"))

    @property
    def wants(self) -> int:
        return _native.load32(self.ring.word(RING, "wants"))

    @property
    def exclusive(self) -> int:
        """Return the number of the learner's request for a global pause; 0: there is none."""
        word = _native.load(self.ring.word(RING, "exclusive"))  # SYNC POINT: exclusive
        # Not what a stray write has left there.
        return word if word & 0xFFFFFFFF == self.generation & 0xFFFFFFFF else 0

    @property
    def has_detached(self) -> bool:
        """Whether the learner has noted its end in the ring, for want of a watchdog."""
        return _native.load(self.ring.word(RING, "detached")) != 0

    def slot(self, sequence: int, slots: int) -> int:
        """Return the offset of the frame of that number from the ring's begin (bytes)."""
        # Not by the words in the ring: the learner can write over them.
        return self.slots_at + sequence % slots * self.slot_bytes

    def header(self, slot: int) -> np.ndarray:
        """Return a copy of a frame's header, FRAME of shape (1,): its learner may write over it."""
        return self.ring.array(layout.FRAME, 1, slot).copy()


@dataclass(eq=False)
class Rings:
    """The table of one server process."""

    job: str
    sizes: ring.Sizes
    board: np.ndarray
    """BOARD, shape (1,)."""
    shards: int
    shard_bell: int
    """Address."""
    mapped: dict[int, Mapped] = field(default_factory=dict)
    _forgotten: list[tuple[int, Mapped]] = field(default_factory=list)

    def map(self, row: int, generation: int, control: np.void, *, populate: bool) -> Mapped:
        """Map a ring, not yet shown to the shards. populate: so that no access to it faults.

        control: CONTROL. Raises FileNotFoundError, or SegmentError if its learner has truncated it.
        """
        name, inode = segment_name(self.job, f"ring.{row}"), int(control["ring_inode"][row])
        found = ring.attach(name, self.sizes.bytes, inode, _holders(control))
        ring.guard(found, self._broken_at(row), generation, self.board)
        if populate:
            _native.populate(found.address, found.size)
        return Mapped(row, generation, found, self.sizes.slot_bytes, ring.SLOTS_AT)

    def replace(self, row: int, generation: int) -> Mapped:
        """Map zeros in the place of a ring that cannot be mapped; it counts as broken."""
        found = ring.lost(segment_name(self.job, f"ring.{row}"), self.sizes.bytes)
        self.break_(row, generation)
        return Mapped(row, generation, found, self.sizes.slot_bytes, ring.SLOTS_AT)

    def _broken_at(self, row: int) -> int:
        line = self._word("ring") + row * RING_LINE.itemsize
        return line + layout.offset(RING_LINE, "broken")

    def break_(self, row: int, generation: int) -> None:
        """Have no shard read this ring any more."""
        _native.store(self._broken_at(row), generation)

    def notify_broken(self, one: Mapped) -> bool:
        """Notify the shards that a shown ring is broken; return True once every shard has seen it.

        Until then a shard may still be about to begin a frame, having looked just before.
        """
        if not one.noted:
            self.break_(one.row, one.generation)
            self._changed()
            one.noted = True
        return self.seen_by_all()

    def is_broken(self, one: Mapped) -> bool:
        """Return whether its memory is lost, or its words are impossible."""
        return _native.load(self._broken_at(one.row)) == one.generation

    def show(self, one: Mapped) -> None:
        """Let the shards use it from now on."""
        self.mapped[one.row] = one
        shown = self.board[0]["ring"][one.row]
        shown["address"] = 0
        for field_ in ("generation", "slot_bytes", "slots_at"):
            shown[field_] = getattr(one, field_)
        # The address last: a shard may be reading the table because of another row.
        line = self._word("ring") + one.row * RING_LINE.itemsize
        _native.store(line + layout.offset(RING_LINE, "address"), one.ring.address)
        self._changed()

    def forget(self, row: int) -> None:
        """Have the shards stop using it; tidy() unmaps it."""
        one = self.mapped.pop(row)
        # The address only: a shard that is a table behind compares the generation.
        self.board[0]["ring"][row]["address"] = 0
        self._changed()
        self._forgotten.append((self._version, one))

    def all(self) -> list[Mapped]:
        """Return the rings that are mapped; for any thread."""
        return list(self.mapped.values())

    @property
    def forgotten(self) -> set[int]:
        """Rows of rings that a shard may still read."""
        return {one.row for _, one in self._forgotten}

    def tidy(self) -> None:
        """Unmap forgotten rings that no shard can be reading."""
        if self._forgotten:
            seen = self._seen()
            # One that does not read yet looks at the table before it begins.
            slowest = int(seen.min(initial=NOT_READING))
            self._forgotten = [one for one in self._forgotten if one[0] > slowest]

    def seen_by_all(self) -> bool:
        """Return whether every shard serves, and by the newest table."""
        return bool((self._seen() == self._version).all())

    @property
    def begun(self) -> bool:
        """Whether a shard has got its lease."""
        return bool((self._seen() != NOT_READING).any())

    @property
    def held(self) -> int:
        """Shards that serve with their leases."""
        return int(self.board[0]["holds"][: self.shards].sum())

    @property
    def _version(self) -> int:
        return int(self.board[0]["table_version"])

    def _word(self, field: str) -> int:
        return self.board.ctypes.data + layout.offset(BOARD, field)

    def _seen(self) -> np.ndarray:
        seen: np.ndarray = self.board[0]["seen"][: self.shards]
        return seen

    def _changed(self) -> None:
        _native.store(self._word("table_version"), self._version + 1)  # SYNC POINT: ring table
        _native.bell(self.shard_bell)
        _native.futex_wake(self._word("table_version"))  # the watcher threads
