"""The table of a server's stages: complete, and it rejects what no order of stores leads to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.lease_stages import STAGES

from gadei_ps.memory import layout, lifecycle
from gadei_ps.memory.layout import ServerState
from gadei_ps.memory.lifecycle import Leases, Stage

# Stores in the order of their writers: the watchdog's in servers._started and _clear, a server's in
# manager._try_leases and _report_ready, and code.is_ready when a model comes.
BORN = [("state", 1), ("confirmed", 0), ("pid", "own")]
CLEARED = [("pid", 0), ("state", 0)]
READY = [("state", 2)]
TAKES = [("active", "own")]
CONFIRMED = [("state", 2), ("confirmed", 1)]
COMPILES = [("state", 1), ("state", 2)]
OTHER = [("active", "other")]
LIVES = [
    [BORN, TAKES, CONFIRMED, COMPILES, OTHER, CLEARED],
    [BORN, READY, TAKES, CONFIRMED, OTHER, CLEARED],
    [BORN, READY, OTHER, CLEARED],
    [BORN, TAKES, OTHER, CLEARED],
    [BORN, TAKES, CONFIRMED, CLEARED],
    [BORN, READY, TAKES, CLEARED],
    [BORN, COMPILES, TAKES, CONFIRMED, [("state", 1)], OTHER, CLEARED],
]


def test_no_store_of_a_life_leaves_the_table() -> None:
    seen = set()
    for before, life in itertools.product(LIVES, LIVES):
        words: dict[str, int] = {"pid": 0, "state": 0, "confirmed": 0, "active": 0}
        pids = {"own": 7, "other": 8}
        for name, value in itertools.chain(*before, *life):
            words[name] = pids[value] if isinstance(value, str) else value
            if words["active"] == 7 and not words["pid"]:
                words["active"] = 8  # another process has the next life
            stage = lifecycle.of_words(**words | {"confirmed": bool(words["confirmed"])})  # type: ignore[arg-type]
            assert stage is not Stage.ILLEGAL, (words, life)
            seen.add(stage)
    assert seen == set(Stage) - {Stage.ILLEGAL}, "a stage that no life has"


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("active", [7, 8])
def test_a_named_server_has_a_state(confirmed: bool, active: int) -> None:
    words = {"pid": 7, "confirmed": confirmed, "active": active}
    assert lifecycle.of_words(state=ServerState.NONE, **words) is Stage.ILLEGAL  # type: ignore[arg-type]
    assert lifecycle.of_words(state=3, **words) is Stage.ILLEGAL  # type: ignore[arg-type]


def test_stages_of_a_control_segment() -> None:
    control = np.zeros(1, layout.CONTROL)[0]
    assert lifecycle.stage(control, 0) is lifecycle.stage(control, 1) is Stage.ABSENT
    control["server"][1]["pid"], control["server"][1]["state"] = 9, ServerState.READY
    assert lifecycle.stage(control, 1) is Stage.STANDBY
    control["lease_pid"] = 9
    assert lifecycle.stage(control, 1) is Stage.RECOVERING
    control["server"][1]["confirmed"] = 1
    assert lifecycle.stage(control, 1) is Stage.SERVING
    assert lifecycle.stage(control, 0) is Stage.ABSENT


def test_each_number_of_leases_has_stages() -> None:
    assert set(STAGES) == set(Leases)
    living = set().union(*STAGES.values())
    assert living == set(Stage) - {Stage.ILLEGAL, Stage.ABSENT, Stage.REPLACED}
    for leases, stages in STAGES.items():
        assert (stages <= lifecycle.ACTIVE) == (leases >= Leases.MANAGERS)
