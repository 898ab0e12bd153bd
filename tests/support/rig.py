"""A job's segments without its processes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.job.parameter_groups import grouped
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, FrameKind, Phase, Reason, WireType, Work
from gadei_ps.memory.weights import Model, Tensor, data
from gadei_ps.memory.weights import place as placed
from gadei_ps.watchdog.job_memory import JobMemory
from support.frames import claim, rows_payload
from support.jobs import config
from support.kept import keep, of_part
from support.memory import create_model, create_ring
from support.waiting import PATIENCE_S, eventually


class Rig:
    """A job's real segments without a daemon: this process serves the shards, or a child of it.

    Rows 0 to learners - 1 of the roster are taken, with generations from 1 on. Parameters are in
    the groups of the settings' optimizer, if it has any.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        values: dict[str, np.ndarray] | None = None,
        *,
        learners: int = 1,
        collect: bool = False,
        **settings: Any,
    ) -> None:
        # Here: the tests that need no shard are spared Numba.
        from gadei_ps import sync
        from gadei_ps.server import recover, shard, shards, units

        keep()
        self._recover, self._shard, self._shards, self.units = recover, shard, shards, units
        self.memory = JobMemory(config(name, **settings))
        self.memory.create_control(sync.parse("bsp" if collect else "asp"))
        try:
            groups = self.memory.config.optimizer.groups
            self._make(placed(grouped(tensors, groups) if groups else tensors), values, learners)
        except BaseException:
            self.memory.remove()
            raise

    def _make(self, model: Model, values: dict[str, np.ndarray] | None, learners: int) -> None:
        flat = np.zeros(model.elements, np.float32) if values is None else model.flatten(values)
        create_model(self.memory, model, flat)
        assert self.memory.weights
        assert self.memory.state
        self.model = model
        self.control_at = self.memory.control.address
        self.control = self.memory.control.view(layout.CONTROL)
        self.roster = self.control["roster"]
        self.state = self.memory.state.view(layout.STATE)
        self.weights = data(self.memory.weights)
        self.shards = int(self.control["shards"])
        self.slots = [
            self.memory.state.array(
                np.float32,
                model.elements,
                int(self.state["slots_at"]) + stream * int(self.state["slot_bytes"]),
            )
            for stream in range(int(self.state["streams"]))
        ]
        self._board = self._shards.new_board()
        self.board = self._board[0]
        self._parts = self._shards.Shards(
            self.memory.control, self.memory.weights, self.memory.state, self._board
        )
        for row in range(learners):
            self.add(row, row + 1)
        self.control["phase"] = Phase.SERVING

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.memory.remove()

    def add(self, row: int, generation: int) -> None:
        """A learner attaches."""
        ring = create_ring(self.memory, row, generation)
        ring.view(layout.RING)["wants"] = layout.WANTS_TURN | layout.WANTS_WORK
        head = ring.view(layout.RING)
        for field in ("generation", "wanted", "served"):
            self.roster[row][field] = generation
        self.roster[row]["grant"] = layout.UNBOUNDED
        self.control["ring_inode"][row] = ring.inode
        self.state["applied"][:, row] = 0
        for field in ("drained", "handed", "unasked"):
            self.roster[row][field] = 0
        self.roster[row]["outstanding"] = layout.NO_BATCH
        sizes = int(head["slot_bytes"]), int(head["slots_at"])
        self.board["ring"][row] = (ring.address, generation, *sizes, 0)
        self.board["table_version"] += 1
        self.bell()

    def forget(self, row: int) -> None:
        """A learner that has departed is detached; its row may be taken again."""
        self.board["ring"][row] = 0
        self.board["table_version"] += 1
        self.bell()
        seen = self.board["seen"][: self.shards]
        eventually(lambda: (seen == self.board["table_version"]).all())
        self.memory.remove_ring(row)

    def set_work(self, batches: int, epochs: int) -> None:
        """The job has so many batches, and every learner asks for them."""
        for row in self.memory.rings:
            self.ring(row)["wants"] = layout.WANTS_WORK
        self.control["batches"], self.control["epochs"] = batches, epochs
        _native.store32(self.word("work"), Work.WORKING)
        self.bell()

    def handed(self, row: int) -> list[int]:
        """The batches that a learner has to answer."""
        kept = self.roster[row]["outstanding"]
        return sorted(kept[kept != layout.NO_BATCH].tolist())

    def word(self, field: str) -> int:
        return self.control_at + layout.offset(layout.CONTROL, field)

    def bell(self) -> None:
        _native.bell(self.word("shard_bell"))

    def let_look(self) -> None:
        """Wait until the first shard, which serves, has looked at everything some times."""
        beats = self.control["shard"]["heartbeat"]
        for _ in range(3):
            before = int(beats[0])
            self.bell()
            eventually(lambda before=before: int(beats[0]) > before)

    def ring(self, row: int) -> np.void:
        return self.memory.rings[row].view(layout.RING)

    def range(self, index: int) -> tuple[int, int]:
        return layout.shard_range(self.model.elements, self.shards, index)

    def part(self, index: int) -> np.ndarray:
        """Return the context of a shard."""
        return self._parts.part(index)

    def kept(self) -> list[np.ndarray]:
        """Return copies of weights and slots."""
        return [part.copy() for part in (self.weights, *self.slots)]

    def undo(self, index: int, stream: int, chunk: int) -> np.ndarray:
        """A stream of a shard's undo log, as that chunk is logged."""
        at = int(self.state["undo_at"])
        at += index * layout.UNDO_BYTES + chunk % 2 * layout.UNDO_HALF + stream * layout.CHUNK * 4
        assert self.memory.state
        return self.memory.state.array(np.float32, layout.CHUNK, at)

    def recover(self) -> list[int]:
        """Return for each shard whether a gradient was in flight."""
        return [self._recover.recover(self.part(index)) for index in range(self.shards)]

    def can_recover(self, index: int) -> bool:
        """Return whether a shard has all rings that its recovery needs."""
        return bool(self._recover.can_recover(self.part(index)))

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Shard threads in this process."""
        self.units.load()  # here, where nobody waits yet
        self._shard.serve.compile(of_part())
        self.board["quit"] = 0
        threads = [
            threading.Thread(target=self._shard.serve, args=(self.part(index),))
            for index in range(self.shards)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.board["quit"] = 1
            self.bell()
            for thread in threads:
                thread.join()

    def publish(
        self,
        row: int,
        payload: np.ndarray,
        wire: WireType = WireType.FLOAT32,
        timeout_s: float = PATIENCE_S,
        slot: int | None = None,
        **fields: Any,
    ) -> int:
        """Publish a frame as a learner does; `fields` are written over what is right.

        slot: that was claimed before. Of a dense payload of all values, those of the parameters go.
        """
        if payload.size == self.model.elements and "kind" not in fields:
            payload = payload[: self.model.parameters]
        ring = self.memory.rings[row]
        if slot is None:
            slot = claim(ring.address, self.control_at, int(timeout_s * 1e9))
        assert slot >= 0, f"claim: {slot}"
        at = slot - ring.address
        ring.array(payload.dtype, payload.size, at + layout.PAYLOAD_AT)[:] = payload
        head = self.ring(row)
        sequence = int(head["head"])
        frame = ring.array(layout.FRAME, 1, at)
        frame[:] = 0
        good = {
            "sequence": sequence,
            "generation": int(head["header"]["generation"]),
            "clock": sequence,
            "version": int(self.control["version"]),
            "kind": FrameKind.DENSE,
            "dtype": wire,
            "payload_bytes": payload.nbytes,
            "flags": layout.CHECKED,
            "batch": layout.NO_BATCH,
            "samples": 1,
            "rate_scale": 1.0,
            "momentum": math.nan,
        }
        for field, value in (good | fields).items():
            frame[0][field] = value
        head_at = ring.word(layout.RING, "head")
        _native.store(head_at, sequence + 1)
        _native.futex_wake(head_at)
        return sequence

    def ones(self) -> np.ndarray:
        """The payload of a dense gradient of ones."""
        return np.ones(self.model.elements, np.float32)

    def apply(self, row: int, payload: np.ndarray, **fields: Any) -> None:
        """Publish a frame and wait until every shard is done with it."""
        self.wait_applied(row, self.publish(row, payload, **fields))

    def publish_rows(
        self,
        row: int,
        gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
        wire: WireType = WireType.FLOAT32,
        **fields: Any,
    ) -> int:
        """Publish a frame of rows: by tensor's number its indices and values, or all values."""
        payload, blocks = rows_payload(self.model, gradients, wire)
        fields = {"kind": FrameKind.ROWS, "blocks": blocks} | fields
        return self.publish(row, payload, wire, **fields)

    def superstep(self, actions: dict[int, Action]) -> None:
        """Act as the manager: set what becomes of these rows' oldest frames."""
        self.control["superstep_action"] = Action.SKIP
        for row, action in actions.items():
            self.control["superstep_action"][row] = action
            self.control["superstep_reason"][row] = (
                Reason.NOT_FINITE if action == Action.REFUSE else Reason.OK
            )
            self.control["superstep_upto"][row] = self.state["applied"][0, row] + 1
        _native.store(self.word("superstep"), int(self.control["superstep"]) + 1)
        self.bell()

    def superstep_done(self) -> bool:
        done = self.state["record"]["supersteps"][: self.shards]
        return bool((done == self.control["superstep"]).all())

    def wait_tail(self, row: int, tail: int) -> None:
        """Wait until every shard has released the frames below."""
        tails = self.ring(row)["tail"]["value"]
        eventually(lambda: (tails[: self.shards] == tail).all(), what=lambda: tails[: self.shards])

    def wait_applied(self, row: int, sequence: int, timeout_s: float = PATIENCE_S) -> None:
        result = _native.wait_applied(
            self.memory.rings[row].address, self.control_at, sequence, int(timeout_s * 1e9)
        )
        assert result == 0, f"wait_applied: {result}"
