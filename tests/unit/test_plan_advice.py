"""The display of a plan: its width, and its advice."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from gadei_ps.show import pipeline_plan

MS = 1e-3


def display_of(
    total_s: float = 10 * MS, devices: str = "host:1", stages: int = 2, cores: int = 2, **other: Any
) -> str:
    """Return the display of a plan of equal stages. other: fields of the plan."""
    stage = {
        **dict.fromkeys(("forward_s", "backward_s"), total_s / 2),
        "device": devices,
        "first_layer": 0,
        "end_layer": 7,
        "parameters": 1_049_600,
        "transfer_s": 0,
        "total_s": total_s,
        "idle_share": 1,
        "memory_bytes": 124_100_000,
        "memory_limit_bytes": 512_000_000,
    }
    made = {
        "stages": [stage] * stages,
        "in_flight": 4,
        "full_in_flight": 4,
        "left_out": [],
        "mini_batches_per_s": 1 / total_s,
        "bubble_share": 0,
        "learner_bytes": 1,
        "copy_s": total_s / 9,
        "step_s": total_s / 9,
        **other,
    }
    console = Console(width=200)
    with console.capture() as shown:
        console.print(pipeline_plan.plan(made, [], cores))
    return shown.get()


def test_a_good_plan_needs_no_advice() -> None:
    assert "note" not in display_of()


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        ({"left_out": ["host:2"]}, "host:2 left out: nothing fits there"),
        ({"step_s": 10 * MS}, "the learner's own thread takes longer than the slowest stage"),
        ({"bubble_share": 0.5, "full_in_flight": 7}, "--sync wsp:D=1,s_local=6 fills"),
        ({"total_s": 0.5 * MS}, "stages this short wait for each other's Python"),
        ({"devices": "host:2"}, "the stages on the host have 4 threads for 2 cores"),
    ],
)
def test_advice(made: dict[str, Any], advice: str) -> None:
    text = display_of(**made)
    assert text.count("note") == 1
    assert advice in text


def test_one_short_stage_waits_for_no_other() -> None:
    assert "note" not in display_of(0.5 * MS, stages=1)


@pytest.mark.parametrize("total_s", [1e-6, 99 * MS, 0.25, 20.0])
def test_the_stages_are_narrower_than_80_columns(total_s: float) -> None:
    """A busy machine has longer times, which must not need more columns."""
    assert max(map(len, display_of(total_s).splitlines()[:3])) < 80
