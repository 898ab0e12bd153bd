"""The configuration in a job's memory, whatever instant its writer dies at."""

from __future__ import annotations

import pytest
from support import config

from gadei_ps.job import recorded
from gadei_ps.job.changes import NAMES, NO_CHANGES, Changes
from gadei_ps.job.config import JobConfig
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.segment import Segment


def _made(job: JobConfig, request: pytest.FixtureRequest) -> Segment:
    size = layout.CONTROL.itemsize + recorded.room(job)
    made = segment.create(job.name, "control", SegmentKind.CONTROL, size, job_id=bytes(16))
    request.addfinalizer(lambda: segment.unlink(made.name))
    return made


def test_the_last_whole_one_counts(job_name: str, request: pytest.FixtureRequest) -> None:
    commands = ["./train"], ["./train", "--all"], ["./learn", "--for", "ever"]
    configs = [config(job_name, learners={"command": one}) for one in commands]
    control = _made(configs[0], request)
    assert recorded.read(job_name) is None
    for one in configs:
        before = bytes(control.memory[recorded.AT :])
        recorded.write(control, one, NO_CHANGES)
        assert recorded.read(job_name) == one
    after = bytes(control.memory[recorded.AT :])
    changed = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    text_first = sorted(changed, key=lambda at: at < recorded.HEAD.size)
    assert text_first != changed
    for order in (changed, text_first):
        control.memory[recorded.AT :] = before
        for at in order:
            assert recorded.read(job_name) == configs[1], at  # it died here
            control.memory[recorded.AT + at] = after[at]
        assert recorded.read(job_name) == configs[2]


def test_no_record(job_name: str, request: pytest.FixtureRequest) -> None:
    """There is no memory; it has grown too long; it is of a version that has other fields."""
    assert recorded.read(job_name) is None
    job = config(job_name)
    control = _made(job, request)
    recorded.write(control, job, NO_CHANGES)
    long = config(job_name, learners={"command": ["x" * 100_000]})
    recorded.write(control, long, NO_CHANGES)
    assert recorded.read(job_name) is None
    recorded.write(control, job, NO_CHANGES)
    assert recorded.read(job_name) == job
    recorded.write(control, job.model_copy(update={"sync": "of another version"}), NO_CHANGES)
    assert recorded.read(job_name) is None


def test_what_set_has_changed(job_name: str, request: pytest.FixtureRequest) -> None:
    """It comes with the configuration, has room, and is dropped if nothing changes."""
    job = config(job_name)
    control = _made(job, request)
    assert recorded.read_changes(control) == NO_CHANGES
    values = {"lr": 0.25, "schedule": "step", "step_size": 5, "staleness_aware": True}
    some = NO_CHANGES.with_(values, job)
    recorded.write(control, job, some)
    assert recorded.read_changes(control) == some
    assert recorded.read(job_name) == job
    all_ = dict.fromkeys(NAMES, 1.2345678901234567e-123)
    all_ |= {"schedule": "constant", "staleness_aware": False, "spike_compensation": False}
    all_ |= dict.fromkeys(("warmup_steps", "step_size", "total_steps"), 2**53)
    recorded.write(control, job, Changes(values=all_, over=all_))
    assert recorded.read_changes(control).values == all_
    recorded.write(control, job, Changes(values={"nosuch": 1.0}))
    assert recorded.read_changes(control) == NO_CHANGES
