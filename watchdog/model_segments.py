"""The segments of a model and of a learner's ring: their sizes, and how they are filled.

Nothing here looks at a job that runs, so any thread may call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gadei_ps.errors import ControlError
from gadei_ps.job.changes import NO_CHANGES, Changes
from gadei_ps.memory import layout, segment, weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.reserve import Progress
from gadei_ps.memory.ring import Sizes, sizes
from gadei_ps.memory.segment import Fill, Segment
from gadei_ps.memory.weights import FloatArray, Model
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.watchdog.script import NOT_SET, Script

VALUE = 4  # bytes
UNDO_AT = layout.rounded(layout.STATE.itemsize, layout.PAGE)
STREAMS_AT = layout.rounded(UNDO_AT + layout.MAX_SHARDS * layout.UNDO_BYTES, layout.PAGE)

Values = Callable[[FloatArray, int], None]
"""Writes a model's values from number `start` on into an array; (array, start). Any thread."""


@dataclass(frozen=True)
class InitialModel:
    """A model, what its values are (zeros if None), and the checkpoint that it comes from.

    script: settings of the optimizer that came with it; none if no learner brings it. changes:
    of `gadei-ps set`, from the checkpoint.
    """

    model: Model
    values: Values | None
    snapshot: Snapshot | None = None
    script: Script = NOT_SET
    changes: Changes = NO_CHANGES


def copied(values: np.ndarray) -> Values:
    """Return an array as values, float32 of shape (model.words,); a slot (model.elements,)."""

    def copy(out: FloatArray, start: int) -> None:
        out[:] = values[start : start + out.size]

    return copy


def placed_anew(first: InitialModel, model: Model) -> InitialModel:
    """The same tensors and values, where `model` has them."""
    if model == first.model:
        return first
    values = _moved(first.values, first.model, model) if first.values is not None else None
    return replace(first, model=model, values=values)


def _moved(values: Values, source: Model, target: Model) -> Values:
    """Return the values of the model `source` as the model `target` has them."""
    begin_of = {tensor.name: tensor.start for tensor in source.every}

    def move(out: FloatArray, start: int) -> None:
        end = start + out.size
        for tensor in target.every:
            low = max(start, tensor.start)
            high = min(end, tensor.start + tensor.count)
            if low < high:
                values(out[low - start : high - start], begin_of[tensor.name] + low - tensor.start)

    return move


def read_from(fd: int, model: Model) -> Values:
    """Read the values of a learner's file. It is not mapped: the learner could shrink it.

    Raises ControlError at once if its size is wrong, and later if it cannot be read.
    """
    size = os.fstat(fd).st_size
    if size != model.words * VALUE:
        raise ControlError(f"initial values: a file of {size} bytes, not {model.words * VALUE}")

    def read(out: FloatArray, start: int) -> None:
        view, at = out.data.cast("B"), start * VALUE
        while view:
            try:
                count = os.preadv(fd, [view], at)
            except OSError as error:
                raise ControlError(f"initial values: {error.strerror}") from None
            if not count:
                raise ControlError(f"initial values: the file ends at {at} bytes")
            view, at = view[count:], at + count

    return read


# -- sizes ----------------------------------------------------------------------------------------


def ring_shape(model: Model, slots: int) -> Sizes:
    """Return the sizes (bytes) of a ring, of its slots, and of the largest payload of a slot."""
    return sizes(weights.payload_bytes(model), slots)


def state_bytes(model: Model, streams: int) -> int:
    """Size of the state segment; streams: optimizer slots."""
    return STREAMS_AT + streams * _slot_bytes(model)


def _slot_bytes(model: Model) -> int:
    return layout.rounded(model.elements * VALUE, layout.PAGE)


# -- segments -------------------------------------------------------------------------------------


def weights_segment(
    job: str, job_id: bytes, first: InitialModel, progress: Progress | None
) -> Segment:
    """The weights with the model's table and values, not published yet.

    Raises NoSharedMemory, reserve.Cancelled and what first.values raises.
    """
    model = first.model
    data_at = weights.data_at(weights.rows_of(model))
    made = segment.create(
        job,
        "weights",
        SegmentKind.WEIGHTS,
        weights.segment_bytes(model),
        job_id=job_id,
        progress=progress,
        fill=_filling([(data_at, first.values)] if first.values else [], model.words),
    )
    weights.write_table(made, model)
    return made


def state_segment(
    job: str, job_id: bytes, first: InitialModel, streams: int, progress: Progress | None
) -> Segment:
    """The optimizer's state, from the checkpoint if there is one; not published yet.

    Raises NoSharedMemory and reserve.Cancelled.
    """
    slot_bytes = _slot_bytes(first.model)
    slots: list[Values] = []
    if first.snapshot is not None:
        slots = [copied(slot) for slot in first.snapshot.slots]
        if first.snapshot.model != first.model:
            slots = [_moved(slot, first.snapshot.model, first.model) for slot in slots]
    filled = [(STREAMS_AT + number * slot_bytes, slot) for number, slot in enumerate(slots)]
    made = segment.create(
        job,
        "state",
        SegmentKind.STATE,
        state_bytes(first.model, streams),
        job_id=job_id,
        progress=progress,
        fill=_filling(filled, first.model.elements),
    )
    head = made.view(layout.STATE)
    head["streams"] = streams
    head["slots_at"] = STREAMS_AT
    head["slot_bytes"] = slot_bytes
    head["undo_at"] = UNDO_AT
    head["record"]["cursor"] = layout.IDLE
    return made


def _filling(parts: Sequence[tuple[int, Values]], count: int) -> Fill | None:
    """Write arrays of `count` values that begin at these bytes of a segment, piece by piece."""

    def fill(made: Segment, at: int, size: int) -> None:
        for begin, values in parts:
            first = max(at, begin)
            last = min(at + size, begin + count * VALUE)
            if first < last:
                out = made.array(np.float32, (last - first) // VALUE, first)
                values(out, (first - begin) // VALUE)

    return fill if parts else None
