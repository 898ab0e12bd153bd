"""Machines that live though Ray does not know them: they were given up for dead, and came back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
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

    @property
    def numbers(self) -> set[int]:
        """Of these machines."""
        return set(self._groups)

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

    def give_up(self, number: int) -> None:
        """Somebody vouches that this machine is dead: nobody waits for it, unless it is heard."""
        self._groups.pop(number, None)

    def adopt(self, known: Collection[int], groups: Collection[int]) -> bool:
        """Makes new actors for machines of these groups that live on nodes of the cluster.

        known: machines that have actors. Returns whether there are any that answer.
        """
        there = living(self._run)
        ours = {one: host for one, (host, group) in there.items() if group in groups}
        return _adopt_all(self._run, {one: ours[one] for one in ours.keys() - known})


def gather(run: str) -> dict[int, str]:
    """Has Ray know all machines of a run that live on nodes of the cluster. Returns their hosts."""
    hosts = {one: host for one, (host, _) in living(run).items()}
    _adopt_all(run, {one: hosts[one] for one in hosts.keys() - actors(run)})
    return hosts


def living(run: str) -> dict[int, tuple[str, int]]:
    """As placing.living(), on the nodes that can be asked."""
    return placing.living(run, all_hosts=False)


def _adopt_all(run: str, hosts: Mapping[int, str]) -> bool:
    """Whether any of these machines has an actor now that answers. hosts: by their numbers."""
    found = False
    for number in sorted(hosts):
        with contextlib.suppress(ClusterError):  # its node has just been lost, say
            found = _adopt(run, number, hosts[number]) or found
    return found


def _adopt(run: str, number: int, host: str) -> bool:
    try:
        one = placing.beside(run, number, used_nodes(statuses(actors(run))), host)
    except ValueError:  # it has just got one
        return True
    try:
        ray.get(one.adopt.remote(), timeout=placing.ANSWER_S)
        return True
    except (RayError, GetTimeoutError):
        ray.kill(one, no_restart=True)
        return False
