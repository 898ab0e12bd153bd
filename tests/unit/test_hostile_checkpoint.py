"""Checkpoints of somebody else: their checksums are right, and each of their values may be wrong.

A checkpoint is data. It cannot name programs, paths, users or sockets, and what is wrong with it is
one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import ESCAPE, MISSING, places, put
from support.snapshots import make_sums, one

from gadei_ps.commands import saved
from gadei_ps.errors import GadeiError
from gadei_ps.job import config
from gadei_ps.memory.layout import CONTROL, STATE
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.watchdog import initial_model, job_memory
from gadei_ps.watchdog import settings as job_settings
from gadei_ps.watchdog.script import Script

DEEP = json.loads("[" * 900 + "]" * 900)
HOSTILE = (
    *(MISSING, None, True, False, "", "x" * 10_000, ESCAPE, "\ud800", "../../etc", "/dev/zero"),
    *(0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**80, 10**400, -(2**63)),
    *(0.5, -0.5, 1e39, 1e-300, float("nan"), float("inf")),
    *([], {}, [[]], [{}], {"": ""}, ["x"] * 100, DEEP, {"match": "*"}, [{"match": "*"}] * 40),
    *([0], [2**63] * 9, {ESCAPE: ESCAPE}, {"lr": 10**400}, {"values": {"lr": 0.5}, "over": DEEP}),
)
EACH = 5  # all values at all places take half a minute


def written(directory: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint with something in each field of its manifest, and that manifest."""
    whole = one(9)
    values = config.from_mapping(
        {
            "name": "a-job",
            "optimizer": {
                "kind": "adam",
                "lr": 0.1,
                "momentum": 0.8,
                "alpha": 0.9,
                "eps": 1e-9,
                "beta1": 0.8,
                "beta2": 0.99,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "groups": [{"match": "block/*", "lr": 0.5}],
                "schedule": {"kind": "step", "step_size": 3, "step_gamma": 0.5},
            },
            "sync": {"model": "ssp", "s": 3},
            "checkpoint": {"directory": "/elsewhere", "keep": 1},
            "learners": {"command": ["touch", "/owned"], "count": 3},
            "buffers": ["mean"],
        },
        "test",
    ).model_dump(mode="json")
    changes = {"values": {"lr": 0.2, "groups.0.lr": 0.3}, "over": {"lr": 0.1, "groups.0.lr": 0.5}}
    path = checkpoint.write(
        directory, Snapshot(**vars(whole) | {"config": values, "changes": changes}), keep=1
    ).path
    fields: dict[str, Any] = json.loads((path / checkpoint.MANIFEST).read_text())
    fields["tensors"][0]["aliases"] = ["also"]
    return path, fields


def use(path: Path) -> config.JobConfig:
    """All that `restore` does with a checkpoint before it makes a job's memory."""
    found = saved.find(str(path))
    job = found.job_config()
    first = initial_model.from_checkpoint(job, path, mock.Mock())
    assert first is not None and first.snapshot is not None
    control, state = np.zeros(1, CONTROL)[0], np.zeros(1, STATE)[0]
    job_memory.restore(control, state, first.snapshot)
    job_settings.packed(first.changes.specs(job, first.script.settings))
    initial_model.check_fits(config.from_mapping({"name": "other"}, "test"), found.snapshot, path)
    assert isinstance(first.script, Script)
    return job


def rewrite(path: Path, fields: Any) -> None:
    (path / checkpoint.MANIFEST).write_text(json.dumps(fields))
    make_sums(path)


def test_each_field_of_a_manifest(tmp_path: Path) -> None:
    path, fields = written(tmp_path)
    rewrite(path, fields)
    use(path)
    everywhere = list(places(fields))
    tried = 0

    def one_line(at: tuple[Any, ...], value: Any) -> None:
        rewrite(path, put(fields, at, value))
        try:
            job = use(path)
        except GadeiError as error:
            assert "\n" not in str(error), (at, value)
            assert len(str(error)) < 1000, (at, value)
        else:
            assert job.learners is None and job.weights is None
            assert job.checkpoint is not None and job.checkpoint.directory == tmp_path
            assert "file" not in str(job.sync)

    for number, at in enumerate(everywhere):
        for value in HOSTILE[number % EACH :: EACH]:
            one_line(at, value)
            tried += 1
    assert tried > 800

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )

    @settings(max_examples=100, deadline=None)
    @given(at=st.sampled_from(everywhere), value=json_values)
    def holds(at: tuple[Any, ...], value: Any) -> None:
        one_line(at, value)

    holds()
