"""`gadei-ps group status` for people."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gadei_ps.show.groups import how_ended, machines, ran
from gadei_ps.show.tables import PIPE_WIDTH

WHY = "agent 1 at 10.0.0.12:40123: Connection refused; this has lasted for 10 s and more"


def row(number: int, group: int, **more: Any) -> dict[str, Any]:
    """Return the row of a replica that has trained for long."""
    exchange = {"state": "member", "rounds": 12_345, "last_round_s": None, "why": None}
    job = {
        "gradients_applied": 123_456_789,
        "samples": 3_950_617_248,
        "learners": [{"name": "learner 0", "loss": 0.25}],
    }
    facts = {"machine": number, "group": group, "host": "192.168.100.200", "state": "training"}
    return facts | {"exchange": exchange, "job": job, "why": None} | more


def shown(rows: list[dict[str, Any]], width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(machines(rows))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, PIPE_WIDTH])
def test_no_word_is_cut_where_lines_are_short(width: int) -> None:
    rows = [row(0, 0), row(31, 5), {"machine": 2, "state": "away", "ended": None, "why": WHY}]
    head, first, second, third, *notes = shown(rows, width)
    assert len(first) <= width
    assert head.split()[:2] == ["replica", "group"]
    assert first.split()[:2] == ["0", "0"] and second.split()[:2] == ["31", "5"]
    assert "training" in first and "12,345" in first and third.split() == ["2", "away"]
    assert " ".join(one.strip() for one in notes) == f"replica 2: {WHY}"


def test_what_is_said_of_a_machine() -> None:
    """Not how it has come back, once it trains again; but how it has ended."""
    why = "was killed by SIGKILL: it joins again"
    exchange = {"state": "joining", "rounds": 0, "last_round_s": None, "why": None}
    assert shown([row(0, 0, why=why, exchange=exchange)], 80)[2:] == [f"replica 0: {why}"]
    assert not shown([row(0, 0, why=why)], 80)[2:]
    exchange |= {"state": "member", "note": "its weights hold a NaN"}
    assert shown([row(0, 0, exchange=exchange)], 80)[2:] == ["replica 0: its weights hold a NaN"]
    over = {"exit_code": 1, "reason": "no data", "log": "a-0.log"}
    ended = {"machine": 0, "host": "h", "state": "ended", "why": None, "ended": over}
    line = "replica 0: has ended with exit code 1: no data; see its log, a-0.log"
    assert shown([ended], 80)[2:] == [line]


def test_how_a_run_has_ended() -> None:
    """A signal that was passed on to all machines is not their failure."""
    passed = {"exit_code": 130, "interrupted": "SIGINT", "gradients_applied": 1_000}
    failed = {"machine": 1, "exit_code": 1, "interrupted": None, "gradients_applied": 1}
    summary = {"run": "a", "machines": [{"machine": 0} | passed, failed], "stopped": False}
    line = "run a: 2 replicas, 1,001 gradients applied"
    assert (
        ran(summary | {"interrupted": "SIGINT"})
        == f"{line}; it was interrupted by SIGINT; failed: 1"
    )
    assert ran(summary | {"interrupted": None}) == f"{line}; failed: 0, 1"
    assert ran(summary | {"interrupted": None, "stopped": True}) == f"{line}; it was stopped"
    lost = {"machine": 2, "exit_code": 0, "asked": "lost"}
    ended = {"run": "a", "machines": [lost], "stopped": False, "interrupted": None}
    assert ran(ended) == "run a: 1 replica, 0 gradients applied; replica 2 may train on"
    ended |= {"machines": [lost, lost | {"machine": 3}], "stopped": True}
    assert ran(ended).endswith("; it was stopped; replicas 2, 3 may train on")
    assert how_ended(passed) == "was interrupted by SIGINT: 1,000 gradients applied"
    assert how_ended(passed | {"asked": "stop"}) == "was stopped"


def test_all_columns_are_there_where_lines_are_long() -> None:
    head, line = shown([row(7, 1)], PIPE_WIDTH)
    assert "last round" in head and "note" not in head
    assert line.split() == [
        *("7", "1", "192.168.100.200", "training", "member", "12,345", "1"),
        *("123,456,789", "3,950,617,248", "0.2500"),
    ]
