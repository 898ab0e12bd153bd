"""`train --groups`: what options and GROUPS.toml say together, and what machines have counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gadei_ps.classifier.counting import COUNTED, Counts, sources
from gadei_ps.classifier.grouped import combined
from gadei_ps.classifier.settings import Settings
from gadei_ps.cluster import config
from gadei_ps.errors import UsageError

FILE = {"name": "a", "every": 5, "groups": [{"machines": 2}]}


def settings(**given: Any) -> Settings:
    return Settings(Path("rows.csv"), groups=Path("GROUPS.toml"), **given)


def test_options_and_file_agree() -> None:
    run = config.from_mapping(FILE | {"learners": 3, "lr": 0.5, "sync": "bsp"}, "test")
    found = combined(settings(lr=0.5, optimizer="sgd"), ("lr", "optimizer"), run)
    assert (found.learners, found.lr, found.optimizer, found.sync) == (3, 0.5, "sgd", "bsp")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"learners": 2}, "--learners 2: GROUPS.toml says learners = 3; leave out one of them"),
        ({"job": "b"}, "--job cannot be combined with --groups: the run has the name that"),
        ({"gpus": "0"}, "--gpus cannot be combined with --groups: learners take the GPUs of"),
        ({"verbose": True}, "--verbose cannot be combined with --groups: each machine has a log"),
    ],
)
def test_what_cannot_be_combined(given: dict[str, Any], line: str) -> None:
    run = config.from_mapping(FILE | {"learners": 3}, "test")
    with pytest.raises(UsageError) as caught:
        combined(settings(**given), given, run)
    assert str(caught.value).startswith(line)


def row(machine: int, job: str, samples: int, done: int = 0, **more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(COUNTED, 0) | {"samples": samples}
    what = {"job_id": job, "work": {"epochs_done": done}, "model": {"values": 1}, **counts}
    told = {"machine": machine, "group": machine // 2, "agent": {"state": "member"}, "job": what}
    return told | more


def test_samples_of_lives_that_are_over_count() -> None:
    counts = Counts()
    counts.hear([row(0, "a", 10), row(1, "b", 7), {"machine": 2, "job": None}])
    counts.hear([row(0, "a", 12), row(1, "c", 1)])
    assert counts["samples"] == 20


def test_a_divided_pass_is_over_once_all_groups_have_answered_it() -> None:
    counts = Counts()
    counts.hear([row(0, "a", 0, done=3), row(1, "b", 0, done=2)])
    assert (counts.divided(1), counts.divided(2)) == (3, 0)
    counts.hear([row(0, "c", 0, done=0), row(2, "d", 0, done=1)])
    assert (counts.divided(1), counts.divided(2)) == (3, 1)


def test_whose_weights_are_measured() -> None:
    rows = [
        row(0, "a", 0, done=3, agent={"state": "joining"}),
        row(1, "b", 0, done=1),
        row(2, "c", 0, done=2),
        {"machine": 3, "job": {"model": None}},
        {"machine": 4, "job": None},
    ]
    assert sources(rows, 2) == [2, 1, 0]
