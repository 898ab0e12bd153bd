"""Every word that a watchdog stores in the memory of a new job, before others look at it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import support
from support.memory import create_ring
from support.words import at_each_line, words

from gadei_ps import _native, sync
from gadei_ps.job.control import SetWork
from gadei_ps.kernels.optimizers import PACKED, Kind
from gadei_ps.machine import log, process
from gadei_ps.memory import build, layout, shm
from gadei_ps.memory.layout import CONTROL, RING, STATE, WEIGHTS, Mode, Role, SegmentKind, Work
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor, place, read_table
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.watchdog import batches, initial_model, model_segments, script, settings
from gadei_ps.watchdog.batches import Batches
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.model_segments import InitialModel

MODEL = place([Tensor("w", (3000, 2)), Tensor("b", (5,)), Tensor("mean", (7,), Role.BUFFER)])
VALUES = {
    "optimizer": {"kind": "adam", "lr": 0.25, "staleness_aware": True},
    "slots": 3,
    "ahead": 5,
    "owned": True,
    "shards": 2,
    "spin_us": 12.0,
    "nonfinite": "refuse",
    "checkpoint": {},
}


@pytest.fixture
def memory(job_name: str) -> Iterator[JobMemory]:
    """A new job, before its model is there."""
    made = JobMemory(support.config(job_name, **VALUES))
    made.create_control(sync.parse("bsp"))
    yield made
    made.remove()


def enter(memory: JobMemory, snapshot: Snapshot | None = None) -> np.void:
    """The model comes, from the checkpoint if there is one. Returns the control segment."""
    first = InitialModel(
        MODEL, model_segments.copied(np.ones(MODEL.elements, np.float32)), snapshot
    )
    initial_model.enter(memory, first, memory.make_model(first), log.get())
    return memory.control.view(CONTROL)


def begin(made: Segment, memory: JobMemory, kind: SegmentKind, **rest: int) -> dict[str, object]:
    """Return the first bytes of a segment."""
    return {
        "header.magic": layout.MAGIC,
        "header.layout_version": layout.LAYOUT_VERSION,
        "header.kind": kind,
        "header.job_id": dict(enumerate(memory.job_id)),
        "header.bytes": shm.path_of(made.name).stat().st_size,
        "header.owner_pid": os.getpid(),
        "header.owner_start": process.start_ticks(os.getpid()),
        "header.job_name": memory.config.name.encode(),
        "header.owner_namespace": process.namespace(),
    } | {f"header.{name}": value for name, value in rest.items()}


def text(raw: str) -> dict[int, int]:
    return dict(enumerate(raw.encode()))


def test_every_word_of_a_new_job(job_name: str) -> None:
    before = int(time.time())
    memory = JobMemory(support.config(job_name, **VALUES), job_id=bytes(range(1, 17)))
    memory.create_control(sync.parse("bsp"))
    try:
        fields = words(enter(memory))
        assert before <= fields.pop("started") <= time.time()
        assert fields.pop("manager_bell") and fields.pop("shard_bell")
        spec = memory.config.optimizer.spec()
        hyper = fields.pop("hyper")
        assert [hyper.get(at, 0) for at in range(PACKED)] == spec.pack().tolist()
        digests = settings.digests(memory.config).values()
        assert fields == begin(memory.control, memory, SegmentKind.CONTROL) | {
            "shards": 2,
            "groups": 1,
            "script_word": script.PLACE | script.OPEN,
            "slots": 3,
            "ahead": 5,
            "owned": 1,
            "mode": Mode.COLLECT,
            "report": 1,
            "refuse_nonfinite": 1,
            "staleness_aware": 1,
            "optimizer": Kind.ADAM,
            "spin_ns": 12_000,
            "build": _native.BUILD,
            "server_build": build.of_server(),
            "model_ready": 1,
            "watchdog_pid": os.getpid(),
            "watchdog_start": process.start_ticks(os.getpid()),
            "watchdog_starts": 1,
            "saves": 1,
            "wave": 1,
            "config": dict(enumerate(digests)),
            "sync_text": text("bsp"),
            "roster.outstanding": layout.NO_BATCH,
        }
        assert memory.weights and memory.state
        assert words(memory.weights.view(WEIGHTS)) == begin(
            memory.weights, memory, SegmentKind.WEIGHTS
        ) | {
            "tensors": 3,
            "table_at": WEIGHTS.itemsize,
            "data_at": layout.PAGE,
            "elements": MODEL.elements,
            "parameters": MODEL.parameters,
            "values": 6012,
            "trained": 2,
            "words": MODEL.words,
        }
        slot_bytes = layout.rounded(4 * MODEL.elements, layout.PAGE)
        head = memory.state.view(STATE)
        undo = layout.MAX_SHARDS * layout.UNDO_BYTES
        fields = words(head)
        assert fields == begin(memory.state, memory, SegmentKind.STATE) | {
            "streams": 2,
            "slots_at": int(head["undo_at"]) + undo,
            "slot_bytes": slot_bytes,
            "undo_at": layout.rounded(STATE.itemsize, layout.PAGE),
            "record.cursor": layout.IDLE,
        }
        assert fields["slots_at"] + 2 * slot_bytes == fields["header.bytes"]
        ring = create_ring(memory, 4, generation=9)
        fields = words(ring.view(RING))
        capacity = fields.pop("capacity")
        assert capacity >= 4 * MODEL.elements
        assert fields == begin(ring, memory, SegmentKind.RING, generation=9, index=4) | {
            "slots": 3,
            "shards": 2,
            "slot_bytes": layout.PAYLOAD_AT + capacity,
            "slots_at": layout.rounded(RING.itemsize, layout.PAGE),
        }
        assert fields["slots_at"] + 3 * fields["slot_bytes"] <= fields["header.bytes"]
    finally:
        memory.remove()


def test_every_word_of_a_checkpoint(memory: JobMemory) -> None:
    work = {"batches": 10, "epochs": 3, "seed": 7, "next": 1 << 32 | 4, "epochs_done": 1}
    before = words(enter(memory))
    assert memory.state
    state = words(memory.state.view(STATE))
    memory._drop_model()
    counts = {"applied": 5, "dropped": 4, "refused": 3, "samples": 200, "requeued_total": 2}
    counts["loss_count"] = 4
    slots = tuple(np.full(MODEL.elements, value, np.float32) for value in (2, 3))
    snapshot = Snapshot(
        job=memory.config.name,
        config=memory.config.model_dump(mode="json"),
        model=MODEL,
        weights=np.ones(MODEL.elements, np.float32),
        slots=slots,
        version=60,
        steps=50,
        supersteps=40,
        work=work | {"state": int(Work.WORKING)},
        requeue=np.array([1 << 32 | 2, 1 << 32 | 3], np.uint64),
        counts=counts,
        clocks={},
        loss_sum=1.5,
    )
    after = words(enter(memory, snapshot))
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    for name in ("script_word", "manager_bell", "shard_bell"):
        del changed[name]
    assert changed == work | {
        "work": Work.WORKING,
        "superstep": 40,
        "supersteps_done": 40,
        "version": 60,
        "checkpoint_version": 60,
        "requeued": 2,
        "requeue": {0: 1 << 32 | 2, 1: 1 << 32 | 3},
        "past_applied": 5,
        "past_dropped": 4,
        "past_refused": 3,
        "past_samples": 200,
        "past_loss_count": 4,
        "past_loss_sum": 1.5,
        "requeued_total": 2,
    }
    assert words(memory.state.view(STATE)) == state | {
        "record.steps": 50,
        "record.supersteps": 40,
        "record.gradients": 60,
    }
    at, size = state["slots_at"], state["slot_bytes"]
    for stream, slot in enumerate(slots):
        kept = memory.state.array(np.float32, MODEL.elements, at + stream * size)
        np.testing.assert_array_equal(kept, slot)


def test_work_begins_at_its_begin(memory: JobMemory) -> None:
    """Whatever a ledger without work says, as of a checkpoint; and none counts until all does."""
    control = enter(memory)
    control["next"] = control["epochs_done"] = 5
    seen: list[dict[str, object]] = []

    def look() -> None:
        seen.append({name: int(control[name]) for name in ("work", *wanted)})

    wanted = {"next": 0, "epochs_done": 0, "epochs": 3, "seed": 7, "batches": 10}
    made = Batches(memory, 0)
    request = SetWork(batches=10, epochs=3, seed=7, ahead=6)
    with at_each_line(look, batches):
        assert made.set_work(request) == {"set": True}
    assert seen[-1] == wanted | {"work": Work.WORKING}
    for one in seen:
        if one["batches"]:  # the next watchdog hands out what is there
            assert one | {"work": 0} == wanted | {"work": 0}
        if one["work"]:
            assert one["batches"]
    assert made.set_work(request) == {"set": False}
    for ahead, most in ((2, 6), (7, 7)):
        assert made.set_work(request.model_copy(update={"ahead": ahead})) == {"set": False}
        assert control["ahead"] == most


def test_the_table_of_a_model(memory: JobMemory) -> None:
    model = place(
        [
            Tensor("w", (3000, 2)),
            Tensor("tied", (5,), aliases=("a", "b")),
            Tensor("mean", (7,), Role.BUFFER),
            Tensor("fixed", (11,), Role.FROZEN, aliases=("c",)),
        ]
    )
    first = InitialModel(model, None)
    initial_model.enter(memory, first, memory.make_model(first), log.get())
    assert memory.weights
    head = memory.weights.view(WEIGHTS)
    names = ("tensors", "trained", "aliases", "frozen", "elements", "words")
    assert [int(head[name]) for name in names] == [3, 2, 3, 1, model.elements, model.words]
    assert read_table(memory.weights) == model


def test_the_job_file_changes(memory: JobMemory) -> None:
    """Each store is the last of a watchdog that dies; the next one enters all of it again."""
    before = words(enter(memory))
    new = support.config(
        memory.config.name,
        **VALUES | {"optimizer": {"kind": "momentum", "lr": 0.5}, "checkpoint": None, "slots": 2},
    )
    settings.enter(memory.control, new, memory.script)
    after = words(memory.control.view(CONTROL))
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"hyper", "optimizer", "staleness_aware", "saves", "config"}
    assert after["optimizer"] == Kind.MOMENTUM
    assert after["config"] == dict(enumerate(settings.digests(new).values()))
    spec = new.optimizer.spec(memory.script.settings)
    assert [after["hyper"].get(at, 0) for at in range(PACKED)] == spec.pack().tolist()
