"""Synchronization models one by one, and how they are read from text and mappings."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, cast

import pytest

import gadei_ps.sync as sync
from gadei_ps.sync import UNBOUNDED, Commit, SpecError, SyncModel, parse
from gadei_ps.sync.bsp import BSP
from gadei_ps.sync.ssp import SSP


def joined(spec: str, *learners: int) -> SyncModel:
    model = parse(spec)
    for learner in learners:
        model.join(learner, 0.0)
    return model


def push(model: SyncModel, *learners: int, refused: bool = False) -> list[Commit]:
    return [commit for learner in learners for commit in model.push(learner, 0.0, refused=refused)]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("asp", "asp"),
        ("bsp", "bsp"),
        ("ssp:s=3", "ssp:s=3"),
        ("ssp:3", "ssp:s=3"),
        (" ssp:s = 0 ", "ssp:s=0"),
        ({"model": "bsp"}, "bsp"),
        ({"model": "ssp", "s": 3}, "ssp:s=3"),
        ({"model": "ssp", "s": "3"}, "ssp:s=3"),
    ],
)
def test_parse_reads_text_and_mappings(spec: Any, text: str) -> None:
    assert str(parse(spec)) == text
    assert str(parse(str(parse(spec)))) == text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown model ''; the models are asp, ssp, bsp, elastic-bsp, cutoff, wsp"),
        ("SSP:3", "unknown model 'SSP'"),
        ("ssp : 3", "unknown model 'ssp '"),
        ("hogwild", "unknown model 'hogwild'"),
        ("asp:3", "asp: cannot read '3'; allowed: asp"),
        ("asp:", "asp: cannot read ''; allowed: asp"),
        ("bsp:s=3", "bsp: unknown parameter 's'; allowed: bsp"),
        ("ssp", "ssp: s is missing; allowed: ssp:s=3 or ssp:3"),
        ("ssp:", "ssp: cannot read ''"),
        ("ssp:s=", "ssp: s must be a whole number from 0 to 2147483647, not ''"),
        ("ssp:-1", "ssp: s must be a whole number from 0 to 2147483647, not '-1'"),
        ("ssp:1.5", "not '1.5'"),
        ("ssp:1_0", "not '1_0'"),
        ("ssp:٣", "not '٣'"),
        ("ssp:2147483648", "not '2147483648'"),
        ("ssp:" + "9" * 5000, "not '9999"),
        ("ssp:s=1,s=2", "ssp: s is given twice"),
        ("ssp:1,2", "ssp: cannot read '2'"),
        ("ssp:s=1,t=2", "ssp: unknown parameter 't'"),
        ("ssp:1\n2", "not '1\\n2'"),
        ({}, "model is missing; the models are asp, ssp, bsp, elastic-bsp, cutoff, wsp"),
        ({"model": 3}, "unknown model 3"),
        ({"model": "ssp"}, "ssp: s is missing"),
        ({"model": "ssp", "s": True}, "not True"),
        ({"model": "ssp", "s": 3.0}, "not 3.0"),
        ({"model": "ssp", "s": -1}, "not -1"),
        ({"model": "asp", "s": 1}, "asp: unknown parameter 's'; allowed: asp"),
        (None, "a model is text or a mapping, not None"),
    ],
)
def test_parse_errors_are_one_line_and_name_what_is_wrong(spec: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(spec)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert len(text) < 160


def test_parse_leaves_the_mapping_alone() -> None:
    given = {"model": "ssp", "s": 3}
    parse(given)
    assert given == {"model": "ssp", "s": 3}


def test_names_are_those_that_parse_knows() -> None:
    assert sync.names() == ("asp", "ssp", "bsp", "elastic-bsp", "cutoff", "wsp")
    for name in sync.names():
        with_defaults = {"ssp": "ssp:1", "cutoff": "cutoff:1", "wsp": "wsp:0"}.get(name, name)
        assert parse(with_defaults).name == name


@pytest.mark.parametrize("s", [-1, 1.0, True, None, 2**31])
def test_ssp_refuses_a_bad_staleness(s: Any) -> None:
    with pytest.raises(ValueError, match="whole number"):
        SSP(s)


def test_commit_is_a_value() -> None:
    assert Commit((1, 2)) == Commit((1, 2), ())
    with pytest.raises(FrozenInstanceError):
        cast(Any, Commit((1,))).apply = ()


@pytest.mark.parametrize("spec", ["asp", "bsp", "ssp:1"])
def test_errors_are_typed_and_change_nothing(spec: str) -> None:
    model = joined(spec, 7)
    for call in (model.grant, model.clock, model.obsolete_below):
        with pytest.raises(sync.LearnerError, match=r"^learner 8 is not a member$"):
            call(8)
    with pytest.raises(sync.LearnerError, match="is not a member"):
        model.leave(8, 0.0)
    with pytest.raises(sync.LearnerError, match="is not a member"):
        model.push(8, 0.0)
    with pytest.raises(KeyError, match="learner 7 has joined already"):
        model.join(7, 0.0)
    assert list(model.learners) == [7]
    assert model.clock(7) == 0


def test_asp_never_waits() -> None:
    model = joined("asp", 0, 1)
    assert push(model, *[0] * 1000) == []
    assert (model.clock(0), model.clock(1)) == (1000, 0)
    assert model.grant(0) == model.grant(1) == UNBOUNDED
    assert not model.uses_pushes


def test_ssp_holds_the_fastest_until_the_slowest_goes_on() -> None:
    model = joined("ssp:2", 0, 1)
    push(model, 0, 0, 0)
    assert model.clock(0) == model.grant(0) == 3
    with pytest.raises(sync.NotGranted, match="learner 0 pushed iteration 3 without a grant"):
        push(model, 0)
    assert model.clock(0) == 3
    before = model.releases
    push(model, 1)
    assert model.grant(0) == 4
    assert model.releases == before + 1


def test_ssp_newcomer_starts_at_the_slowest_clock() -> None:
    model = joined("ssp:2", 0, 1)
    push(model, 0, 1, 0, 0)
    assert model.join(2, 1.0) == 1
    assert model.grant(0) == 4


def test_ssp_slowest_leaves() -> None:
    model = joined("ssp:5", 0, 1, 2)
    push(model, 0, 0, 0, 1)
    assert model.leave(2, 1.0) == []
    assert model.grant(0) == 7
    model.leave(1, 1.0)
    assert model.grant(0) == 9


def test_ssp_empty_job_keeps_its_clock() -> None:
    model = joined("ssp:0", 0)
    push(model, 0, 0, 0)
    model.leave(0, 1.0)
    assert list(model.learners) == []
    assert model.join(1, 2.0) == 3
    assert model.grant(1) == 4


def test_bsp_commits_the_mean_of_all_in_ascending_order() -> None:
    model = joined("bsp", 0, 1, 2)
    assert push(model, 2, 0) == []
    assert model.grant(2) == model.clock(2) == 1
    assert push(model, 1) == [Commit((0, 1, 2))]
    assert [model.grant(learner) for learner in range(3)] == [2, 2, 2]


def test_bsp_may_await_its_first_learners() -> None:
    """Count all that join before start(); one that dies leaves its gradient."""
    model = sync.parse("bsp")
    model.await_others()
    model.join(2, 0.0)
    assert model.push(2, 0.0) == []
    assert model.join(0, 0.0) == 0
    assert model.push(0, 0.0) == []
    assert model.leave(2, 0.0) == []
    assert model.join(2, 0.0) == 1, "its gradient is held"
    assert model.join(1, 0.0) == 0
    assert model.start() == []
    assert model.push(1, 0.0) == [Commit((0, 1, 2))]
    assert model.grant(0) == 2


def test_bsp_learner_may_not_push_twice_in_a_superstep() -> None:
    model = joined("bsp", 0, 1)
    push(model, 0)
    with pytest.raises(sync.NotGranted):
        push(model, 0)


def test_bsp_barrier_completes_when_the_last_straggler_leaves() -> None:
    model = joined("bsp", 0, 1, 2)
    push(model, 0, 1)
    assert model.leave(2, 1.0) == [Commit((0, 1))]
    assert model.grant(0) == 2


def test_bsp_gradient_of_one_that_left_stays_in_the_mean() -> None:
    model = joined("bsp", 0, 1)
    push(model, 0)
    assert model.leave(0, 1.0) == []
    assert push(model, 1) == [Commit((0, 1))]
    assert push(model, 1) == [Commit((1,))]


def test_bsp_everybody_leaves() -> None:
    model = joined("bsp", 0, 1)
    push(model, 0)
    assert model.leave(0, 1.0) == []
    assert model.leave(1, 1.0) == [Commit((0,))]
    assert model.join(2, 2.0) == 1
    assert push(model, 2) == [Commit((2,))]


def test_bsp_leaving_before_anything_is_pushed_ends_no_superstep() -> None:
    model = joined("bsp", 0, 1)
    assert model.leave(0, 1.0) == []
    assert model.leave(1, 1.0) == []
    assert model.join(2, 2.0) == 0


def test_bsp_newcomer_takes_part_until_the_first_arrival() -> None:
    model = joined("bsp", 0, 1)
    assert model.join(2, 1.0) == 0
    push(model, 0)
    assert model.join(3, 1.0) == 1
    assert model.grant(3) == 1
    assert push(model, 1, 2) == [Commit((0, 1, 2))]
    assert push(model, 3, 2, 1, 0) == [Commit((0, 1, 2, 3))]


def test_bsp_stream_of_newcomers_puts_off_no_barrier() -> None:
    """Each joins before the one before it leaves, and none ever pushes."""
    model = joined("bsp", 0, 100)
    supersteps = 0
    for newcomer in range(101, 200):
        if model.clock(0) < model.grant(0):
            push(model, 0)
        model.join(newcomer, 1.0)
        supersteps += len(model.leave(newcomer - 1, 1.0))
    assert supersteps >= 49


def test_bsp_returning_learner_has_one_gradient_held() -> None:
    model = joined("bsp", 0, 1)
    push(model, 0)
    model.leave(0, 1.0)
    assert model.join(0, 2.0) == model.grant(0) == 1
    assert push(model, 1) == [Commit((0, 1))]
    assert model.grant(0) == 2


def test_bsp_refused_gradient_is_dropped_and_counts_as_arrived() -> None:
    model = joined("bsp", 0, 1)
    assert push(model, 0, refused=True) == [Commit((), (0,))]
    assert model.grant(0) == model.clock(0) == 1
    assert push(model, 1) == [Commit((1,))]
    assert push(model, 0, 1, refused=True) == [Commit((), (0,)), Commit((), (1,))]
    assert model.grant(0) == 3


def test_bsp_of_one_learner_commits_each_push() -> None:
    model = joined("bsp", 5)
    assert push(model, 5, 5) == [Commit((5,)), Commit((5,))]
    assert isinstance(model, BSP)


def test_models_import_nothing_but_pure_modules() -> None:
    allowed = {"abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq"}
    allowed |= {"__future__", "itertools", "math", "random", "statistics", "types", "typing"}
    # Arrays, and the reader of the run-time model's file.
    allowed |= {"contextlib", "json", "numpy", "pathlib", "safetensors"}
    for file in Path(sync.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or "."]
            else:
                continue
            for module in imported:
                pure = module.split(".")[0] in allowed or module.startswith("gadei_ps.sync")
                pure |= (file.name, module) == ("run_time_file.py", "gadei_ps.machine")
                assert pure, f"{file.name} imports {module}"
