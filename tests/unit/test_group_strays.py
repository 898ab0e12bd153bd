"""Machines that others hear though Ray does not know them: nothing is decided without them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

from gadei_ps.cluster import needs, strays
from gadei_ps.cluster.strays import Strays

NEW = {"machine": 1, "state": "starting", "lives": 0, "ended": None}


def row(number: int, view: int | None = 7, group: int = 0, **agent: Any) -> dict[str, Any]:
    facts = {"view": view, "hears": [], "waits": [], "stands": False, "state": "member"}
    there = {"machine": number, "group": group, "state": "training", "lives": 1, "ended": None}
    return there | {"agent": facts | agent}


def test_a_group_does_not_begin_anew_while_a_machine_of_it_may_live() -> None:
    """Ray does not know it, and all others of the group have died."""
    known = Strays("a")
    known.look([row(0, group=1), row(1, hears=[2])])
    assert not known.rows(1)
    known.look([row(0, group=1), NEW])
    assert needs.is_lost([NEW]) and needs.need([NEW, *known.rows(0)]) is None
    known.look([row(1, hears=[])])
    assert not known.rows(0), "its group tells that it has ended"
    known.look([row(1, hears=[2])])
    known.look([row(1, None), row(2, hears=[1])])
    assert not known.rows(0), "Ray knows it again"


def test_machines_are_adopted_once_they_have_been_heard_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[set[int], set[int]]] = []
    now = [0.0]
    monkeypatch.setattr(strays.time, "monotonic", lambda: now[0])
    known = Strays("a")
    monkeypatch.setattr(known, "adopt", lambda have, of: asked.append((set(have), set(of))))
    for at in (0.0, 2.9, 3.1, 4.0, 33.0, 34.0):
        now[0] = at
        known.look([row(0, group=1), row(1, hears=[2])])
    assert asked == [({0, 1}, {0}), ({0, 1}, {0})]
