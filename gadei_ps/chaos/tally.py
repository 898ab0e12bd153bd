"""Counts how often each gradient of `gadei-ps chaos` is in the weights, without any counter.

The number of published gradients is the head of a ring, which only its learner writes. The number
of applied gradients is in the ledger tensor (gadei_ps/chaos/counted_learner.py); under another
optimizer than SGD it is the number of the optimizer's steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.chaos.counted_learner import BODY, LANES, sign
from gadei_ps.memory import segment, weights
from gadei_ps.memory.layout import CONTROL, RING, STATE, SegmentKind
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.shm import segment_name


@dataclass(frozen=True)
class Count:
    """torn: number of values of weights, optimizer state or ledger that are wrong."""

    published: int
    applied: int
    lost: int
    applied_twice: int
    torn: int

    @property
    def clean(self) -> bool:
        """Whether gradients were counted, and all of them are in the weights once."""
        return self.published > 0 and not (self.lost or self.applied_twice or self.torn)


class Ring:
    """A learner's ring, mapped read-only. It can be read after its name is removed."""

    def __init__(self, job: str, row: int, generation: int) -> None:
        """Map the ring. Raises FileNotFoundError or SegmentError if it or the learner is gone."""
        name = segment_name(job, f"ring.{row}")
        self._segment = segment.attach(name, SegmentKind.RING, writable=False)
        if int(self._segment.header["generation"]) != generation:
            raise FileNotFoundError(name)

    @property
    def published(self) -> int:
        return _native.load(self._segment.word(RING, "head"))


@dataclass
class Tally:
    """The count of one job. Keeps weights and state mapped."""

    job: str
    _published: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        def attach(part: str, kind: SegmentKind) -> Segment:
            return segment.attach(segment_name(self.job, part), kind, writable=False)

        self._weights = attach("weights", SegmentKind.WEIGHTS)
        self._state = attach("state", SegmentKind.STATE)
        control = attach("control", SegmentKind.CONTROL)
        self._shards = int(control.view(CONTROL)["shards"])
        model = weights.read_table(self._weights)
        self._model = model
        views = model.views(weights.data(self._weights))
        self._w, self._ledger = views["w"], views.get("ledger")

    def add(self, generation: int, published: int) -> None:
        """Add what a dead learner of this generation has published."""
        self._published[generation % LANES] += published

    def count(self, dropped: int) -> Count:
        """The count, when all rings are empty. dropped: gradients that the sync model dropped."""
        published = np.zeros(LANES)
        for lane, number in self._published.items():
            published[lane] = number
        if self._ledger is None:
            return self._by_steps(int(published.sum()), dropped)
        applied = self._ledger[:LANES].astype(np.float64)
        signs = np.array([sign(lane) for lane in range(LANES)])
        lost = int(np.maximum(0, published - applied).sum())
        return Count(
            int(published.sum()),
            int(applied.sum()),
            max(0, lost - dropped),
            int(np.maximum(0, applied - published).sum()),
            self._torn(float((signs * applied).sum())),
        )

    def _torn(self, total: float) -> int:
        """Number of values in chunks that got more or fewer gradients than the others."""
        assert self._ledger is not None
        body = self._ledger[LANES:]
        assert body.size == BODY
        return int((body != np.float32(total)).sum() + (self._w != np.float32(-total)).sum())

    def _by_steps(self, published: int, dropped: int) -> Count:
        """All values of `w` get the same, equal gradients, so they and their state stay equal to
        the last bit; each shard counts its steps."""
        steps = self._state.view(STATE)["record"]["steps"][: self._shards]
        least, most = int(steps.min()), int(steps.max())
        torn = sum(_odd_ones(values) for values in (self._w, *self._slots()))
        lost, twice = published - dropped - least, most - published + dropped
        return Count(published, least, max(0, lost), max(0, twice), torn)

    def _slots(self) -> list[np.ndarray]:
        """The optimizer's state of `w`."""
        state = self._state.view(STATE)
        starts = [
            int(state["slots_at"]) + stream * int(state["slot_bytes"])
            for stream in range(int(state["streams"]))
        ]
        return [self._state.array(np.float32, self._w.size, at) for at in starts]


def _odd_ones(values: np.ndarray) -> int:
    """Number of values whose bits differ from those of the last value."""
    bits: Any = values.view(np.uint32)
    return int((bits != bits[-1]).sum())
