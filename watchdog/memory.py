"""The job's segments: made, filled and removed by the watchdog, their creator and owner."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

import numpy as np

from gadei_ps import _native, layout, process, segment, weights
from gadei_ps.config import JobConfig
from gadei_ps.errors import JobInUse
from gadei_ps.kernels import optimizers
from gadei_ps.layout import SegmentKind
from gadei_ps.segment import Segment
from gadei_ps.sync import SyncModel
from gadei_ps.weights import Model

RING_SLOTS_AT = layout.rounded(layout.RING.itemsize, layout.PAGE)


def clear_stale(job: str) -> list[str]:
    """Removes what a job of this name that is no more has left. Raises JobInUse if one lives."""
    found = segment.find(job)
    living = [one for one in found if not one.stale]
    if living:
        raise JobInUse(
            f"job {job!r} is in use: process {living[0].owner_pid} owns {living[0].name[1:]}; "
            "choose another name or stop it (gadei-ps stop)"
        )
    return [one.name for one in found if segment.unlink(one.name)]


@dataclass(eq=False)
class JobMemory:
    """All segments of a job, as the watchdog sees them."""

    config: JobConfig
    job_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    model: Model | None = None
    control: Segment = field(init=False)
    weights: Segment | None = field(default=None, init=False)
    state: Segment | None = field(default=None, init=False)
    rings: dict[int, Segment] = field(default_factory=dict, init=False)

    def create_control(self, sync: SyncModel) -> None:
        """Makes the control segment. Raises JobInUse or NoSharedMemory."""
        spec = self.config.optimizer.spec()
        try:
            self.control = segment.create(
                self.config.name,
                "control",
                SegmentKind.CONTROL,
                layout.CONTROL.itemsize,
                job_id=self.job_id,
            )
        except FileExistsError:
            raise JobInUse(f"job {self.config.name!r} has just been started by another") from None
        control = self.control.view(layout.CONTROL)
        control["slots"] = self.config.slots
        control["ahead"] = self.config.ahead
        control["collect"] = not sync.on_arrival
        control["report"] = sync.uses_pushes
        control["refuse_nonfinite"] = self.config.nonfinite == "refuse"
        control["staleness_aware"] = spec.staleness_aware
        control["optimizer"] = spec.kind
        control["spin_ns"] = int(self.config.resolved_spin_us() * 1e3)
        control["hyper"][: optimizers.HYPER] = spec.pack()
        control["watchdog_pid"] = os.getpid()
        control["watchdog_start"] = process.start_ticks(os.getpid())
        control["roster"]["outstanding"] = layout.NO_BATCH
        self.control.publish()

    def create_model(self, model: Model, values: np.ndarray) -> None:
        """Makes weights and state; values: float32 of shape (model.elements,).

        Raises NoSharedMemory; then nothing of it is left.
        """
        control = self.control.view(layout.CONTROL)
        streams = optimizers.slots(int(control["optimizer"]))
        try:
            self.weights = segment.create(
                self.config.name,
                "weights",
                SegmentKind.WEIGHTS,
                weights.segment_bytes(model),
                job_id=self.job_id,
            )
            weights.write_table(self.weights, model)
            weights.data(self.weights)[:] = values
            self.state = self._create_state(model, streams)
        except BaseException:
            self._drop_model()
            raise
        control["shards"] = self.config.resolved_shards(model.elements)
        self.weights.publish()
        self.state.publish()
        self.model = model

    def _create_state(self, model: Model, streams: int) -> Segment:
        undo_at = layout.rounded(layout.STATE.itemsize, layout.PAGE)
        undo_bytes = layout.MAX_SHARDS * layout.MAX_STREAMS * layout.CHUNK * 4
        slots_at = layout.rounded(undo_at + undo_bytes, layout.PAGE)
        slot_bytes = layout.rounded(model.elements * 4, layout.PAGE)
        state = segment.create(
            self.config.name,
            "state",
            SegmentKind.STATE,
            slots_at + streams * slot_bytes,
            job_id=self.job_id,
        )
        head = state.view(layout.STATE)
        head["streams"] = streams
        head["slots_at"] = slots_at
        head["slot_bytes"] = slot_bytes
        head["undo_at"] = undo_at
        head["record"]["cursor"] = layout.IDLE
        return state

    def _drop_model(self) -> None:
        for made in (self.weights, self.state):
            if made is not None:
                segment.unlink(made.name)
        self.weights = self.state = None

    def create_ring(self, row: int, generation: int) -> Segment:
        """Makes the ring of a new learner. Raises NoSharedMemory."""
        assert self.model is not None
        control = self.control.view(layout.CONTROL)
        capacity = layout.rounded(self.model.elements * 4, layout.PAGE)
        slot_bytes = layout.PAYLOAD_AT + capacity
        slots = int(control["slots"])
        ring = segment.create(
            self.config.name,
            f"ring.{row}",
            SegmentKind.RING,
            RING_SLOTS_AT + slots * slot_bytes,
            job_id=self.job_id,
            generation=generation,
            index=row,
        )
        head = ring.view(layout.RING)
        head["slots"] = slots
        head["shards"] = control["shards"]
        head["slot_bytes"] = slot_bytes
        head["slots_at"] = RING_SLOTS_AT
        head["capacity"] = capacity
        ring.publish()
        self.rings[row] = ring
        return ring

    def ring_bells(self) -> None:
        """Wakes the server: something in control has changed."""
        for word in ("manager_bell", "shard_bell"):
            _native.bell(self.control.address + layout.offset(layout.CONTROL, word))

    def remove_ring(self, row: int) -> None:
        ring = self.rings.pop(row, None)
        if ring is not None:
            segment.unlink(ring.name)

    def remove(self) -> None:
        """Removes every segment of the job, names first seen included."""
        for row in list(self.rings):
            self.remove_ring(row)
        self._drop_model()
        segment.unlink(self.control.name)
