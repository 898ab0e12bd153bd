"""The learners' rings as a server process has them mapped, and how its shards learn of them.

Every server keeps its own table, the one that stands by too: at a take-over nothing is mapped.
Addresses are shown to the shards last and taken back first; a mapping goes when no shard of this
process can be looking at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import SegmentError
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import RING, SegmentKind
from gadei_ps.memory.segment import Segment, segment_name
from gadei_ps.server import places as place


@dataclass(eq=False)
class Mapped:
    """A ring of this process' table."""

    row: int
    generation: int
    ring: Segment
    slot_bytes: int
    slots_at: int

    @property
    def head(self) -> int:
        """Frames published."""
        return _native.load(self.ring.address + layout.offset(RING, "head"))

    @property
    def wants(self) -> int:
        return _native.load32(self.ring.address + layout.offset(RING, "wants"))

    @property
    def left(self) -> bool:
        return _native.load(self.ring.address + layout.offset(RING, "detached")) != 0

    def slot(self, sequence: int, slots: int) -> int:
        """Where the frame of that number is, bytes from the ring's begin."""
        # Not by the words in the ring: the learner can write over them.
        return self.slots_at + sequence % slots * self.slot_bytes

    def frame(self, slot: int) -> np.void:
        return self.ring.view(layout.FRAME, slot)


@dataclass(eq=False)
class Rings:
    """The table of one server process."""

    job: str
    job_id: bytes
    slots: int
    shards: int
    payload: int
    """Bytes of the largest payload: what a slot must hold."""
    shard_bell: int
    """Address."""
    table: np.ndarray = field(
        default_factory=lambda: np.zeros((layout.MAX_LEARNERS, place.TABLE), np.uint64)
    )
    words: np.ndarray = field(default_factory=lambda: np.zeros(place.WORDS, np.uint64))
    mapped: dict[int, Mapped] = field(default_factory=dict)
    _forgotten: list[tuple[int, Mapped]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words[place.SEEN : place.HOLDS] = place.NOT_READING

    def map(self, row: int, generation: int, *, populate: bool) -> Mapped:
        """Maps a ring, not yet shown to the shards. populate: so that no access to it faults.

        Raises FileNotFoundError, or SegmentError where it is not this generation's or its learner
        has written over it.
        """
        name = segment_name(self.job, f"ring.{row}")
        ring = segment.attach(name, SegmentKind.RING, writable=True, job_id=self.job_id)
        if int(ring.header["generation"]) != generation:
            raise SegmentError(f"{name}: generation {int(ring.header['generation'])}")
        head = ring.view(RING)
        # Read once: the learner can write there.
        slot_bytes, slots_at = int(head["slot_bytes"]), int(head["slots_at"])
        end = slots_at + self.slots * slot_bytes
        if (
            slots_at < RING.itemsize
            or slot_bytes < layout.PAYLOAD_AT + self.payload
            or end > ring.size
        ):
            raise SegmentError(f"{name}: sizes that cannot be")
        if populate:
            _native.populate(ring.address, ring.size)
        return Mapped(row, generation, ring, slot_bytes, slots_at)

    def show(self, one: Mapped) -> None:
        """The shards may use it from now on."""
        self.mapped[one.row] = one
        self.table[one.row] = (0, one.generation, one.slot_bytes, one.slots_at)
        # The address last: a shard may be looking at the table for the sake of another row.
        address = self.table.ctypes.data + one.row * self.table.strides[0]
        _native.store(address + 8 * place.RING_ADDRESS, one.ring.address)
        self._changed()

    def forget(self, row: int) -> None:
        """The shards shall not use it any more; tidy() lets the mapping go."""
        one = self.mapped.pop(row)
        # The address only: a shard that is a table behind compares the generation.
        self.table[row, place.RING_ADDRESS] = 0
        self._changed()
        self._forgotten.append((int(self.words[place.TABLE_VERSION]), one))

    @property
    def forgotten(self) -> set[int]:
        """Rows of rings that a shard may still be looking at."""
        return {one.row for _, one in self._forgotten}

    def tidy(self) -> None:
        """Lets go of forgotten rings that no shard can be looking at."""
        if self._forgotten:
            seen = self._seen()
            # One that does not read yet looks at the table before it begins.
            slowest = int(seen.min(initial=place.NOT_READING))
            self._forgotten = [one for one in self._forgotten if one[0] > slowest]

    def seen_by_all(self) -> bool:
        """Whether every shard serves, and by the newest table."""
        return bool((self._seen() == self.words[place.TABLE_VERSION]).all())

    @property
    def begun(self) -> bool:
        """Whether a shard has got its lease."""
        return bool((self._seen() != place.NOT_READING).any())

    @property
    def held(self) -> int:
        """Shards that serve with their leases."""
        return int(self.words[place.HOLDS : place.HOLDS + self.shards].sum())

    def _seen(self) -> np.ndarray:
        return self.words[place.SEEN : place.SEEN + self.shards]

    def _changed(self) -> None:
        address = self.words.ctypes.data + 8 * place.TABLE_VERSION
        _native.store(address, int(self.words[place.TABLE_VERSION]) + 1)
        _native.bell(self.shard_bell)
