"""`train --groups`: what options and GROUPS.toml say together, and what machines have counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gadei_ps.classifier.counting import COUNTED, Counts, Progress, sources
from gadei_ps.classifier.grouped import RESTARTS, _Launcher, combined, filled, raised
from gadei_ps.classifier.measuring import Best
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.errors import ClusterError, UsageError
from gadei_ps.replicas import config

FILE = {"name": "a", "every": 5, "groups": [{"machines": 2}]}


def settings(**given: Any) -> Settings:
    return Settings(Path("rows.csv"), groups=Path("GROUPS.toml"), **given)


def test_options_and_file_agree() -> None:
    run = config.from_mapping(FILE | {"learners": 3, "lr": 0.5, "sync": "bsp"}, "test")
    found = combined(settings(lr=0.5, optimizer="sgd"), ("lr", "optimizer"), run)
    assert (found.learners, found.lr, found.optimizer, found.sync) == (3, 0.5, "sgd", "bsp")


@pytest.mark.parametrize(
    ("machines", "given", "lr"),
    [
        (1, {}, 0.01),
        (2, {}, 0.02),
        (4, {}, 0.04),
        (9, {}, 0.04),
        (4, {"lr": 0.01}, 0.01),
        (4, {"optimizer": "adam"}, 0.01),
    ],
)
def test_the_rate_of_several_machines(machines: int, given: dict[str, Any], lr: float) -> None:
    plan = Plan(settings(**given), cast("Any", None), 1, 2, 0.01)
    assert raised(plan, machines).lr == lr


@pytest.mark.parametrize("fields", [{}, {"rule": "mix:0.5", "divide": False, "restart": 3}])
def test_what_the_file_does_not_say(fields: dict[str, Any]) -> None:
    run = config.from_mapping(FILE | fields, "test")
    found = filled(run, Plan(settings(), cast("Any", None), 1, 2, 0.02))
    wanted = {"rule": "outer:1:0", "divide": True, "restart": RESTARTS} | fields
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert (found.lr, found.learners, found.optimizer) == (0.02, 2, "adagrad")


def test_a_wrong_option_is_no_mistake_of_the_file() -> None:
    run = config.from_mapping(FILE, "test")
    with pytest.raises(UsageError, match=r"^train --groups GROUPS.toml: lr: "):
        filled(run, Plan(settings(), cast("Any", None), 1, 2, float("nan")))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"learners": 2}, "--learners 2: GROUPS.toml has learners = 3; leave out one of them"),
        ({"job": "b"}, "--job cannot be combined with --groups: the run has the name that"),
        ({"gpus": "0"}, "--gpus cannot be combined with --groups: learners take the GPUs of"),
        ({"verbose": True}, "--verbose cannot be combined with --groups: each replica has a log"),
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
    base = {"machine": machine, "group": machine // 2, "exchange": {"state": "member"}, "job": what}
    return base | more


def test_samples_of_lives_that_are_over_count() -> None:
    counts = Counts()
    counts.hear([row(0, "a", 10), row(1, "b", 7), {"machine": 2, "job": None}])
    counts.hear([row(0, "a", 12), row(1, "c", 1)])
    assert counts["samples"] == 20


def test_what_is_left_of_a_run_that_has_trained_before_this_command() -> None:
    progress = Progress(100, 10, None)
    progress.hear([], 0.0)
    assert progress.left_s is None
    progress.hear([row(0, "a", 400)], 500.0)
    assert (progress.begun, progress.passes, progress.left_s) == (4.0, 4, None)
    progress.hear([row(0, "a", 500)], 510.0)
    assert (progress.samples_per_s, progress.left_s) == (10.0, 50.0)
    assert progress.passes == 5
    progress.hear([row(0, "a", 2000)], 540.0)
    assert (progress.begun, progress.passes, progress.left_s) == (10.0, 10, 0.0)


def test_a_divided_pass_is_over_once_all_groups_have_answered_it() -> None:
    counts = Counts()
    begins = {"machine": 2, "job": None}
    counts.hear([row(0, "a", 0, done=3), row(1, "b", 0, done=2), begins])
    assert (counts.divided(1), counts.divided(2)) == (3, 0)
    counts.hear([row(0, "c", 0, done=0), row(2, "d", 0, done=1)])
    assert (counts.divided(1), counts.divided(2)) == (3, 1)


def test_a_pass_does_not_wait_for_a_group_that_has_left() -> None:
    """One whose machine is away, or starts again, comes back."""
    counts = Counts()
    counts.hear([row(0, "a", 0, done=5), row(2, "b", 0, done=2)])
    away = {"machine": 2, "state": "away", "ended": None}
    for other in (away, away | {"job": None}, row(2, "c", 0, done=0)):
        counts.hear([row(0, "a", 0, done=5), other])
        assert counts.divided(2) == 2
    counts.hear([row(0, "a", 0, done=6)])
    assert counts.divided(2) == 6
    over = {"machine": 2, "state": "ended", "ended": {"exit_code": 1}}
    counts.hear([row(0, "a", 0, done=7), over])
    assert counts.divided(2) == 7


def test_a_model_is_kept_though_its_machines_cannot_be_ended() -> None:
    def stop() -> None:
        raise ClusterError("the cluster is gone")

    launcher: Any = object.__new__(_Launcher)
    launcher.training = SimpleNamespace(summary=None, stop=stop)
    launcher.measuring = SimpleNamespace(best=Best())
    with pytest.raises(ClusterError):
        launcher.end()
    launcher.measuring.best.offer(0.5, 1.0, 1, {})
    assert str(launcher.end()) == "the cluster is gone"


def test_whose_weights_are_measured() -> None:
    rows = [
        row(0, "a", 0, done=3, exchange={"state": "joining"}),
        row(1, "b", 0, done=1),
        row(2, "c", 0, done=2),
        {"machine": 3, "job": {"model": None}},
        {"machine": 4, "job": None},
    ]
    assert sources(rows, 2) == [2, 1, 0]
