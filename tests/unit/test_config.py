"""Job files: what is accepted, and the one line that says what is wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.classifier import dataset
from gadei_ps.errors import JobFailed, UsageError
from gadei_ps.job import config
from gadei_ps.job.config import JobConfig, from_mapping, load
from gadei_ps.kernels.optimizers import Kind, Schedule
from gadei_ps.memory import layout
from gadei_ps.run_times import traces
from gadei_ps.watchdog.initial_model import configured


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_come_from_the_files_name(tmp_path: Path) -> None:
    job = load(write(tmp_path / "demo.toml", ""))
    assert (job.name, job.sync, job.slots, job.nonfinite) == ("demo", "asp", 2, "refuse")
    assert job.optimizer.spec().kind is Kind.SGD
    assert job.resolved_shards(1) == 1
    assert job.resolved_spin_us() > 0


def test_a_whole_file(tmp_path: Path) -> None:
    text = """
        name = "mine"
        sync = { model = "ssp", s = 3 }
        shards = 4
        slots = 3
        ahead = 16
        nonfinite = "allow"
        spin_us = 0
        weights = "w.safetensors"
        [optimizer]
        kind = "adamw"
        lr = 0.002
        weight_decay = 0.1
        staleness_aware = true
        [optimizer.schedule]
        kind = "cosine"
        warmup_steps = 10
        total_steps = 100
    """
    job = load(write(tmp_path / "other.toml", text))
    assert (job.name, job.shards, job.slots, job.ahead) == ("mine", 4, 3, 16)
    assert job.sync == {"model": "ssp", "s": 3}
    assert job.weights == tmp_path / "w.safetensors", "relative to the job file"
    assert job.resolved_spin_us() == 0
    spec = job.optimizer.spec()
    assert (spec.kind, spec.schedule, spec.warmup_steps) == (Kind.ADAMW, Schedule.COSINE, 10)
    assert spec.staleness_aware
    # As it travels to the daemon.
    assert JobConfig.model_validate_json(job.model_dump_json()) == job


def test_updates_are_added_as_they_are_unless_a_rate_is_given(tmp_path: Path) -> None:
    rates = {"": 1.0, "lr = 0.5": 0.5}
    for line, lr in rates.items():
        file = write(tmp_path / "demo.toml", f"[optimizer]\nkind = 'add'\n{line}\n")
        spec = load(file).optimizer.spec()
        assert (spec.kind, spec.lr) == (Kind.ADD, lr)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("name = 'a b'", "name"),
        ("name = 3", "name"),
        ("shards = -1", "shards"),
        ("shards = 65", "shards"),
        ("shards = 1.5", "shards"),
        ("shards = true", "shards: give a number, not true"),
        ("[[optimizer.groups]]\nmatch = 'w'\nlr = true", "groups.0.lr: give a number, not true"),
        ("[[tensors]]\nname = 'w'\nshape = [true]", "tensors.0.shape.0: give a number, not true"),
        ("[learners]\ncommand = ['x']\ncount = true", "learners.count: give a number, not true"),
        ("slots = 0", "slots"),
        ("ahead = 17", "ahead"),
        ("spin_us = nan", "spin_us"),
        ("hang_s = 0.4", "hang_s: use 0.5 s or more"),
        ("hang_s = inf", "hang_s: Input should be a finite number"),
        ("[checkpoint]\nevery_s = inf", "checkpoint.every_s: Input should be a finite number"),
        ("nonfinite = 'maybe'", "nonfinite"),
        ("sync = 'ssp'", "s is missing"),
        ("sync = 'gossip'", "unknown model"),
        ("learners = 3", "learners"),
        ("[optimizer]\nkind = 'lion'", "optimizer.kind"),
        ("[optimizer]\nlr = -1", "lr must be at least 0"),
        ("[optimizer]\nlr = inf", "lr must be a finite number"),
        ("[optimizer.schedule]\nkind = 'step'", "step_size"),
        ("[[tensors]]\nname = 'w'\nshape = [-1]", "tensors.0.shape.0"),
        ("weights = 'x'\n[[tensors]]\nname = 'w'\nshape = [1]", "not both"),
        ("= 3", "Invalid"),
        ("name = 'x'\nname = 'y'", "overwrite"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", text)
    with pytest.raises(UsageError) as info:
        load(path)
    message = str(info.value)
    assert why in message
    assert "\n" not in message
    assert str(path) in message or "name" in text or "optimizer" in text


TABLES = {
    "": JobConfig,
    "optimizer": config.OptimizerConfig,
    "optimizer.schedule": config.ScheduleConfig,
    "checkpoint": config.CheckpointConfig,
    "stop_after": config.StopAfterConfig,
}


@pytest.mark.parametrize("table", TABLES)
def test_true_is_no_number(table: str) -> None:
    for name, field in TABLES[table].model_fields.items():
        if field.annotation is bool:
            continue
        values: dict[str, Any] = {name: True}
        for outer in reversed(table.split(".") if table else []):
            values = {outer: values}
        with pytest.raises(UsageError) as info:
            from_mapping({"name": "job"} | values, "test")
        assert str(info.value).startswith(f"test: {table and table + '.'}{name}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="directory"):
        load(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="UTF-8"):
        load(tmp_path / "bad.toml")
    with pytest.raises(UsageError, match="job name"):
        load(write(tmp_path / "a b.toml", ""))
    large = tmp_path / "large.toml"
    large.touch()
    os.truncate(large, config.MOST_BYTES + 1)
    for path, why in ((large, "more than 1048576 bytes"), (Path("/dev/null"), "it is a device")):
        with pytest.raises(UsageError, match=why):
            load(path)
        link = tmp_path / f"{path.stem}-link.toml"
        link.symlink_to(path)
        with pytest.raises(UsageError, match=why):
            load(link)
    os.mkfifo(tmp_path / "fifo.toml")  # nobody ever writes into it
    for use in (load, lambda path: configured(JobConfig(name="job", weights=path))):
        with pytest.raises(UsageError, match="it is a FIFO; name a regular file"):
            use(tmp_path / "fifo.toml")


@pytest.mark.parametrize("read", [dataset.read_table, traces.read])
def test_a_device_is_no_file_of_rows(read: Callable[[str], object]) -> None:
    """/dev/null ends at once; /dev/zero would not."""
    with pytest.raises(UsageError, match="it is a device"):
        read("/dev/null")


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_file_that_cannot_be_read_for_now(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the file's mistake: a service manager tries again."""
    path = write(tmp_path / "job.toml", "")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    job = JobConfig(name="job", weights=path)
    with monkeypatch.context() as failing:
        failing.setattr(os, "open", fail)
        with pytest.raises(JobFailed, match=os.strerror(number)):
            load(path)
        with pytest.raises(JobFailed, match=os.strerror(number)):
            configured(job)
    with pytest.raises(UsageError, match=str(path)):
        configured(job)
    with pytest.raises(UsageError, match="No such file"):
        configured(JobConfig(name="job", weights=tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("slots = 2\nlr = \nname = 'x'", ":2:6: ", "Invalid value; correct"),
        ("slots = 2\n[optimizer\nlr = 1", ":2:11: ", "Expected ']'"),
        ("slots = 2\nslots = 3\n", ":2:10: ", "Cannot overwrite a value: 'slots' has a value alr"),
        ("slots = 2\nslots = 3", ":2: ", "Cannot overwrite a value: 'slots' has a value already"),
        ("slots = 2\n[slots]\n", ":2:7: ", "Cannot overwrite a value: 'slots' has a value alr"),
        ("\n\nsync = 'asp", ":3: ", 'Expected "\'"'),
        ("slots = 1" + "0" * 5000, ": ", "limit"),
        ("slots = " + "[" * 5000, ": ", "nested"),
    ],
    ids=[
        "value",
        "table",
        "twice",
        "twice at the end",
        "table over value",
        "unclosed",
        "digits",
        "depth",
    ],
)
def test_a_mistake_in_toml_is_named_by_its_place(
    text: str, where: str, what: str, tmp_path: Path
) -> None:
    """Name it as in the other files that users write: file, line, and column if known."""
    path = write(tmp_path / "job.toml", text)
    with pytest.raises(UsageError) as info:
        load(path)
    assert str(info.value).startswith(f"{path}{where}")
    assert what in str(info.value)
    assert "(at " not in str(info.value)
    assert "\n" not in str(info.value)


def test_text_that_is_not_utf_8_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"slots = 2\nname = '\xff'")
    with pytest.raises(UsageError, match=r"job\.toml:2: not UTF-8 text; "):
        load(tmp_path / "job.toml")


@given(elements=st.integers(1, 10**7), shards=st.integers(0, layout.MAX_SHARDS))
def test_shards_share_the_values(elements: int, shards: int) -> None:
    count = JobConfig(name="x", shards=shards).resolved_shards(elements)
    assert 1 <= count <= layout.MAX_SHARDS
    if shards:
        assert count <= shards
    ranges = [layout.shard_range(elements, count, index) for index in range(count)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == elements
    for (low, high), (after, _) in zip(ranges, [*ranges[1:], (elements, 0)], strict=True):
        assert low < high == after, "each has a part, and none is left out"
        assert low % layout.CHUNK == 0


def test_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    job = from_mapping({"name": "x"}, "test")
    for cores, shards in [(1, 1), (4, 1), (16, 4), (256, 8)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert job.resolved_shards(10**7) == shards
        assert job.resolved_shards(1) == 1
    assert config.JobConfig(name="x", spin_us=7).resolved_spin_us() == 7
