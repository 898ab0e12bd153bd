"""What a group needs that cannot go on by itself, from what its machines say. Without Ray."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EMPTY_S = 3.0
"""So long a group is seen without any machine, before it begins anew."""
LOST_S = 2.0
"""And three times the silence: so long it needs anything else, before it gets it."""
_UNKNOWN = ("away", "silent")

Told = dict[str, Any]


class Kind(enum.Enum):
    """What is to be done.

    MACHINES: all have died, and their new actors know nothing: they begin anew. AGENTS: all join,
    so that no agent has the group's state: they begin anew with their jobs' weights. FEW: fewer
    than half of a view live, and no machine has a later one: they go on. BEHIND: these wait under a
    view that others have left behind: they join again.
    """

    MACHINES = enum.auto()
    AGENTS = enum.auto()
    FEW = enum.auto()
    BEHIND = enum.auto()


@dataclass(frozen=True)
class Need:
    """numbers: of the machines concerned. view: the newest one's generation."""

    kind: Kind
    numbers: tuple[int, ...]
    view: int = -1


def need(rows: Sequence[Told]) -> Need | None:
    """What the group of these machines needs; they are all that have not ended.

    Nothing is decided while one does not answer: it may know more than the others.
    """
    if is_lost(rows):
        return Need(Kind.MACHINES, _numbers(rows))
    if not rows or any(row["state"] in _UNKNOWN for row in rows):
        return None
    there = [row for row in rows if row.get("agent")]
    views = [row["agent"]["view"] for row in there if row["agent"]["view"] is not None]
    if not views:
        agents = [row["agent"] for row in there]
        joining = all(one["state"] == "joining" and one["address"] for one in agents)
        return Need(Kind.AGENTS, _numbers(rows)) if joining and there == list(rows) else None
    newest = max(views)
    ours = [row for row in there if row["agent"]["view"] == newest]
    if any(row["agent"]["stands"] for row in ours):
        return Need(Kind.FEW, _numbers(ours), newest)
    behind = [row for row in there if row not in ours and row["agent"]["waits"]]
    if behind and any(_trains(row["agent"]) for row in ours):
        return Need(Kind.BEHIND, _numbers(behind), newest)
    return None


def is_lost(rows: Sequence[Told]) -> bool:
    """Whether these machines, all of a group, have died, and their new actors know nothing."""
    return bool(rows) and all(row["state"] == "starting" and not row["lives"] for row in rows)


def _trains(agent: Told) -> bool:
    """Whether it has the group's state, and goes on."""
    return agent["state"] == "member" and not agent["waits"]


def _numbers(rows: Sequence[Told]) -> tuple[int, ...]:
    return tuple(sorted(row["machine"] for row in rows))


class Needs:
    """Of all groups: what each has needed for long enough."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._since: dict[int, tuple[Need, float]] = {}

    def due(self, group: int, rows: Sequence[Told]) -> Need | None:
        """What this group is to be given now. It is not said again for as long."""
        found, now = need(rows), time.monotonic()
        before, since = self._since.get(group, (None, now))
        if found is None or found != before:
            since = now
        patience_s = LOST_S + 3 * self._silence_s
        if found is not None and found.kind == Kind.MACHINES:
            patience_s = EMPTY_S
        is_due = found is not None and now - since >= patience_s
        if found is None or is_due:
            self._since.pop(group, None)
        else:
            self._since[group] = found, since
        return found if is_due else None
