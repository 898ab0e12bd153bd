"""Machines that live though Ray does not know them: they were given up for dead, and came back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gadei_ps.cluster import placing
from gadei_ps.cluster.machines import actors, statuses, used_nodes
from gadei_ps.errors import ClusterError

STRAY_S, AGAIN_S = 3.0, 30.0
"""So long others hear a machine, before Ray is told of it; between two tries."""

Told = dict[str, Any]


class Strays:
    """Those of a run, as the machines that Ray knows tell of them."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._groups: dict[int, int] = {}
        self._at: float | None = None
        """When to adopt them."""

    def look(self, rows: Sequence[Told]) -> None:
        """Has Ray know those again that it can reach."""
        self._hear(rows)
        now = time.monotonic()
        if not self._groups or self._at is None:
            self._at = now + STRAY_S if self._groups else None
        elif now > self._at:
            self._at = now + AGAIN_S
            self.adopt({row["machine"] for row in rows}, self._groups.values())

    def _hear(self, rows: Sequence[Told]) -> None:
        agents = [(row["group"], row["agent"]) for row in rows if row.get("agent")]
        heard = {one: group for group, agent in agents for one in agent["hears"]}
        members = {group for group, agent in agents if agent["view"] is not None}
        # A group without members tells nothing of whether those live that it had.
        kept = {one: group for one, group in self._groups.items() if group not in members}
        known = {row["machine"] for row in rows}
        self._groups = {one: of for one, of in (kept | heard).items() if one not in known}

    def rows(self, group: int) -> list[Told]:
        """As of machines that do not answer: they may know more than the others of their group."""
        ours = [one for one, of in self._groups.items() if of == group]
        return [{"machine": one, "state": "away", "ended": None} for one in ours]

    def adopt(self, known: Collection[int], groups: Iterable[int]) -> bool:
        """Makes new actors for machines of these groups that live on nodes of the cluster.

        known: machines that have actors. Returns whether there are any that answer.
        """
        wanted, found = set(groups), False
        with contextlib.suppress(ClusterError):  # a node that cannot be asked, say
            for number, (host, group) in placing.living(self._run).items():
                if group in wanted and number not in known:
                    found = self._adopt(number, host) or found
        return found

    def _adopt(self, number: int, host: str) -> bool:
        try:
            one = placing.beside(self._run, number, used_nodes(statuses(actors(self._run))), host)
        except ValueError:  # it has just got one
            return True
        try:
            ray.get(one.adopt.remote(), timeout=placing.ANSWER_S)
            return True
        except (RayError, GetTimeoutError):
            ray.kill(one, no_restart=True)
            return False
