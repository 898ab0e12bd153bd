"""Status of a job, read from its control segment and rings."""

from __future__ import annotations

import math
from typing import Any

from gadei_ps.job import modes
from gadei_ps.memory import layout, owned, totals
from gadei_ps.memory.layout import Phase, Reason, Work
from gadei_ps.watchdog import changing, script
from gadei_ps.watchdog.memory import JobMemory


def report(memory: JobMemory) -> dict[str, Any]:
    """The status as plain values; counters only ever grow."""
    control = memory.control.view(layout.CONTROL)
    state = memory.state.view(layout.STATE) if memory.state is not None else None
    told = script.report(memory.config, memory.script, memory.changes, memory.model)
    in_force, wanted = modes.done(memory.control), modes.wanted(memory.control)
    learners = [_learner(memory, row) for row in sorted(memory.rings)]
    return {
        "job": memory.config.name,
        "job_id": memory.job_id.hex(),
        "phase": Phase(int(control["phase"])).name.lower(),
        "sync": modes.text(memory.control, in_force),
        "sync_wanted": modes.text(memory.control, wanted) if wanted != in_force else None,
        "optimizer": told["kind"],
        "settings": told,
        "history": str(memory.config.history_file()) if memory.config.history else None,
        "settings_pending": not changing.is_settled(memory),
        "when_idle": memory.config.when_idle,
        **totals.of_job(control, state),
        "failovers": max(0, int(control["lease_generation"]) - 1),
        "learners_attached": len(learners),
        "work": {
            "state": Work(int(control["work"])).name.lower(),
            "batches": int(control["batches"]),
            "epochs": int(control["epochs"]),
            "seed": int(control["seed"]),
            "epoch": int(control["next"]) >> 32,
            "next": int(control["next"]) & 0xFFFFFFFF,
            "epochs_done": int(control["epochs_done"]),
            "waits": owned.waits(control),
        },
        "learners": learners,
        "model": _model(memory),
        "watchdog_pid": int(control["watchdog_pid"]),
        "server_pid": int(control["lease_pid"]),
        "fork_server_pid": int(control["fork_server_pid"]),
        "shared_bytes": sum(
            part.size
            for part in (memory.control, memory.weights, memory.state, *memory.rings.values())
            if part is not None
        ),
    }


def _model(memory: JobMemory) -> dict[str, int] | None:
    if memory.model is None:
        return None
    return {
        "tensors": len(memory.model.tensors),
        "values": memory.model.values,
        "bytes": memory.model.elements * 4,
    }


def _learner(memory: JobMemory, row: int) -> dict[str, Any]:
    control = memory.control.view(layout.CONTROL)
    entry = control["roster"][row]
    ring = memory.rings[row].view(layout.RING)
    shards = int(control["shards"])  # the ring's own words may be anything
    applied = int(entry["applied"])
    return {
        "row": row,
        "generation": int(entry["generation"]),
        "name": entry["name"].decode(errors="replace"),
        "pid": int(entry["pid"]),
        "leaving": int(entry["wanted"]) != int(entry["generation"]),
        "published": int(ring["head"]),
        **totals.of_learner(entry),
        "refused_because": layout.REASON_TEXT[Reason(int(entry["reason"]))],
        "gradient_norm": float(entry["norm"]) if applied and math.isfinite(entry["norm"]) else None,
        "loss": float(entry["loss"]) if applied and math.isfinite(entry["loss"]) else None,
        "queue": max(0, int(ring["head"]) - int(ring["tail"]["value"][:shards].min())),
        "staleness_mean": int(entry["staleness_sum"]) / applied if applied else 0.0,
        "staleness_histogram": [int(count) for count in entry["histogram"]],
        "outstanding": int((entry["outstanding"] != layout.NO_BATCH).sum()),
        "paused": bool(int(ring["wants"]) & layout.WANTS_PAUSE),
        "others_stand_still": int(entry["stand"]) != 0,
    }
