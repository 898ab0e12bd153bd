"""Worker groups in virtual time: examples worked out by hand, and what holds for all settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps.errors import UsageError
from gadei_ps.groups.compress import Wire
from gadei_ps.simulate import groups, groups_report, groups_setting, problems
from gadei_ps.simulate.groups import GroupSimulator
from gadei_ps.simulate.groups_outcome import GroupOutcome
from gadei_ps.simulate.groups_setting import GroupSetting, Links
from gadei_ps.simulate.groups_training import GroupTraining
from gadei_ps.simulate.run_times import RecordedTimes, parse


def simulate(
    sizes: Sequence[int],
    times: Sequence[Sequence[float]],
    rule: str = "replace",
    neighbours: str = "ring",
    training: GroupTraining | None = None,
    **how: Any,
) -> GroupOutcome:
    """A model of 512 bytes, links of 512 bytes a second, k = 2; times as in Recorded."""
    how = {"values": 128, "k": 2, "batch": 1, "links": Links((512.0,))} | how
    setting = GroupSetting(
        tuple(sizes),
        groups_setting.neighbours(neighbours, len(sizes)),
        RecordedTimes(np.array(times)),
        **how,
    )
    return GroupSimulator(rule, setting, training).run()


def counts(found: GroupOutcome) -> dict[str, int]:
    counted: dict[str, int] = found.as_dict()["broadcast"]
    return counted


# -- by hand --------------------------------------------------------------------------------------


def test_two_machines_train_and_aggregate() -> None:
    found = simulate([2], [[1.0, 1.0]], rounds=4)
    # 2 s for two mini-batches; each sends half a model twice, which takes 1 s.
    assert (found.seconds, found.rounds, found.samples) == (12.0, 4, 16)
    assert (found.training_s, found.waiting_s, found.exchange_s) == (16.0, 0.0, 8.0)
    report = found.as_dict()
    assert report["aggregation_bytes"] == 512 and report["aggregation_models"] == 1.0
    assert report["aggregation_models_paper"] == 1.0 and report["broadcast_models"] == 0.0
    assert report["speed_up"] == pytest.approx(16 / 12)


def test_the_slowest_machine_and_the_slowest_link_count() -> None:
    links = Links((512.0, 256.0), latency_s=0.25)
    found = simulate([2], [[1.0, 3.0]], rounds=1, links=links)
    assert (found.seconds, found.waiting_s) == (6.0 + 0.5 + 2.0, 4.0)


def test_the_newest_model_is_taken_and_others_are_lost() -> None:
    # Group 0 ends rounds at 2, 4, 6, ...; group 1 at 6 and 12. A transfer takes 1 s.
    found = simulate([1, 1], [[1.0, 3.0]], rounds=4, seed=1)
    assert (found.seconds, found.rounds) == (12.0, 8)
    # At 6 group 1 has those of 2 and 4, at 12 those of 6, 8 and 10; group 0 takes one at 8.
    assert counts(found) == {"taken": 3, "lost_in_buffers": 3, "given_up": 0, "waiting": 2}
    report = found.as_dict()
    assert report["staleness"]["max"] == 1 and report["staleness"]["mean_s"] == 2.0
    assert report["broadcast_models"] == 1.0


def test_a_slow_link_gives_up_what_a_newer_model_overtakes() -> None:
    found = simulate([1, 1], [[1.0, 50.0]], rounds=3, links=Links((512 / 5,)))
    # Sent at 2, 4, ..., 12; 5 s each. Begun: at 2, at 7 the one of 6, at 12 that of 12.
    assert counts(found)["given_up"] == 4 - 1


def test_mixing_keeps_one_model_for_each_neighbour() -> None:
    one = simulate([1, 1, 1], [[1.0, 1.0, 1.0]], neighbours="all", rounds=5)
    all_ = simulate([1, 1, 1], [[1.0, 1.0, 1.0]], "mix:0.5", neighbours="all", rounds=5)
    assert counts(one)["lost_in_buffers"] and counts(all_)["taken"] > counts(one)["taken"]


# -- for all settings -----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    who=st.sampled_from(["ring", "all", "none"]),
    rule=st.sampled_from(["replace", "mix:0.5"]),
    speed=st.sampled_from([1e2, 1e4]),
    whole=st.booleans(),
    seed=st.integers(0, 99),
)
def test_nothing_is_counted_twice_or_forgotten(
    sizes: list[int], who: str, rule: str, speed: float, whole: bool, seed: int
) -> None:
    setting = GroupSetting(
        tuple(sizes),
        groups_setting.neighbours(who, len(sizes)),
        parse("lognormal:mean=1,sigma=0.5", seed),
        values=640,
        k=3,
        rounds=6,
        seed=seed,
        whole=whole,
        links=Links((speed,)),
    )
    found = GroupSimulator(rule, setting).run().as_dict()
    again = GroupSimulator(rule, setting).run().as_dict()
    assert found.pop("wall_s") != 0 and again.pop("wall_s") != 0 and found == again
    assert (found["ended"], found["rounds"]) == ("done", 6 * len(sizes))
    assert found["broadcast"]["taken"] <= found["rounds"] * max(1, len(sizes) - 1)
    assert 0 < found["speed_up"] <= sum(sizes) * 1.5
    neighbours = {len(one) for one in setting.neighbours}
    assert len(neighbours) == 1
    assert sum(found["broadcast"].values()) == found["rounds"] * neighbours.pop()
    if len(set(sizes)) == 1:
        wanted = 2 * (sizes[0] - 1) / sizes[0]
        assert found["aggregation_models_paper"] == pytest.approx(wanted)
        assert found["aggregation_models"] == pytest.approx(wanted, rel=0.3)


@pytest.mark.parametrize("drawn", [1, 7, 20, 1000])
def test_run_times_do_not_depend_on_how_many_are_drawn_at_once(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds() -> float:
        times = parse("lognormal:mean=1,sigma=0.5", 3)
        setting = GroupSetting((3, 2), ((1,), (0,)), times, values=64, k=5, rounds=9)
        return GroupSimulator("replace", setting).run().seconds

    wanted = seconds()
    monkeypatch.setattr(groups, "DRAWN", drawn)
    assert seconds() == pytest.approx(wanted, rel=1e-12)


# -- training -------------------------------------------------------------------------------------


def trained(rule: str, sizes: Sequence[int], lr: float = 0.5, **how: Any) -> GroupOutcome:
    how = {"k": 8, "batch": 16, "rounds": 12} | how
    setting = GroupSetting(
        tuple(sizes),
        groups_setting.neighbours("ring", len(sizes)),
        parse("normal:mean=1,std=0.2", 0),
        **how,
    )
    problem = problems.Logistic(0, samples=1024)
    return groups_report.run(rule, setting, groups_report.Learning(problem, lr))


def test_one_machine_alone_descends_plainly() -> None:
    found = trained("replace", [1], k=64, rounds=1)
    assert found.training is not None and found.samples == 1024 and found.training["passes"] == 1
    problem = problems.Logistic(0, samples=1024)
    order = np.random.default_rng([0, 0]).permutation(1024)
    order = order[np.random.default_rng([0, 1, 0, 0]).permutation(1024)]
    weights = problem.initial().astype(np.float32)
    for begin in range(0, 1024, 16):
        gradient = problem.gradient(weights, order[begin : begin + 16])
        weights -= np.float32(0.5) * gradient.astype(np.float32)
    assert found.training["loss"] == pytest.approx(problem.loss(weights)["loss"], abs=1e-6)


@pytest.mark.parametrize("rule", ["replace", "mix:0.5", "outer:0.7:0.5"])
def test_groups_learn_by_every_rule(rule: str) -> None:
    found = trained(rule, [2, 2, 2])
    assert found.training is not None
    assert found.training["accuracy_least"] > 0.7
    for wire in (Wire.BFLOAT16, Wire.INT8):
        less = trained(rule, [2, 2, 2], wire=wire)
        assert less.training is not None
        assert less.training["loss"] == pytest.approx(found.training["loss"], abs=0.02)


@pytest.mark.parametrize("wire", list(Wire))
def test_weights_that_are_not_finite_end_a_run(wire: Wire) -> None:
    found = trained("outer:2:0.99:1", [2, 2], lr=1e30, wire=wire, rounds=100)
    assert "not finite any more" in found.ended and 0 < found.rounds < 200
    assert found.training is not None


def test_each_sample_is_trained_once_a_pass() -> None:
    problem = _Counting(0, samples=100)
    training = GroupTraining(
        problem,
        "replace",
        (3, 2),
        batch=4,
        lr=0.1,
        wire=Wire.FLOAT32,
        seed=0,
    )
    for _ in range(3):  # 8 samples for each of 3 replicas, and the last 4 of 20
        training.round(0, 2)
    assert training.samples == 60
    assert sorted(problem.seen) == sorted(set(problem.seen)) and len(problem.seen) == 60


class _Counting(problems.Logistic):
    """Notes the samples of all gradients."""

    def __init__(self, seed: int, samples: int) -> None:
        super().__init__(seed, samples)
        self.seen: list[int] = []

    def gradient(self, weights: Any, rows: Any) -> Any:
        self.seen += rows.tolist()
        return super().gradient(weights, rows)


# -- what is asked for ----------------------------------------------------------------------------


def test_groups_and_neighbours_are_read_from_text() -> None:
    assert groups_setting.sizes("3", 7) == (3, 2, 2)
    assert groups_setting.sizes("3,5,2", None) == (3, 5, 2)
    assert groups_setting.sizes("4", None) == (2, 2, 2, 2)
    assert groups_setting.neighbours("ring", 4)[0] == (1, 3)
    assert groups_setting.neighbours("ring", 2) == ((1,), (0,))
    assert groups_setting.neighbours("ring", 1) == ((),)
    assert groups_setting.neighbours("0-1, 1-2", 3) == ((1,), (0, 2), (1,))
    assert groups_setting.batches("7", None, 4, 32) == 7
    assert groups_setting.batches("2epochs", 1000, 4, 32) == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: groups_setting.sizes("0", None), "--groups 0: use 1 or more"),
        (lambda: groups_setting.sizes("x", None), "write numbers like 4 or 3,5,2"),
        (lambda: groups_setting.sizes("3,5", 9), "has 8 replicas; leave out --machines 9"),
        (lambda: groups_setting.neighbours("star", 3), "write ring, all, none, or pairs"),
        (lambda: groups_setting.neighbours("0-3", 3), "numbered from 0 to 2"),
        (lambda: groups_setting.batches("0", None, 1, 1), "write mini-batches like 100"),
        (lambda: groups_setting.batches("1epoch", None, 1, 1), "give --samples"),
        (lambda: GroupSetting((0,), ((),), parse("normal", 0)), "at least 1 replica"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert message in str(raised.value) and "\n" not in str(raised.value)
