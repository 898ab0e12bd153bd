"""The coordinator of a run: an actor of Ray around the decisions of `groups/coordinator.py`.

There is one for each run, at most: Ray starts it again if it dies. It also has the run's settings,
and references to the newest models.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from typing import Any

import ray

from gadei_ps.errors import ControlError
from gadei_ps.groups import reading
from gadei_ps.groups.coordinator import Group, Report
from gadei_ps.replicas import rays
from gadei_ps.replicas.config import Run, from_mapping

BEGIN_S = 600.0
"""Time limit until all replicas of a new run have models; the others begin without them."""
RECOVER_S = 10.0
"""The same, where a coordinator has died, for the members of the last state."""
TICK_S, WAIT_S = 0.2, 0.3
FOLLOWED_S = 5.0
"""Time limit between two heartbeats of the command that follows a run (s)."""
CALLS = 10_000
KEPT = 2
"""Models of a group that may still be fetched."""

JsonObject = dict[str, Any]


def coordinator_name(run: str) -> str:
    """Return the name of a run's coordinator."""
    return f"{run}:coordinator"


class Coordinator:
    """The coordinator of one run."""

    def __init__(self, plan: JsonObject) -> None:
        """Make the groups of a run. plan: its settings, for its replicas."""
        context = ray.get_runtime_context()
        self._plan = plan
        self._run: Run = from_mapping(plan["run"], "run")
        self._gcs, self._host = context.gcs_address, ray.util.get_node_ip_address()
        self._began = secrets.randbits(48)
        again = context.was_current_actor_reconstructed
        rule = reading.parse(self._run.rule)
        until = time.monotonic() + (RECOVER_S if again else BEGIN_S)
        count, numbers = len(self._run.groups), list(enumerate(self._run.numbers()))
        self._groups = {
            group: Group(
                (group, count) if self._run.divide else None,
                rule.takes_all,
                self._run.sources(group),
                [] if again else [str(number) for number, of in numbers if of == group],
                until,
            )
            for group in range(count)
        }
        self._references: dict[int, dict[int, Any]] = {group: {} for group in self._groups}
        """References to the models of each group, by version."""
        self._reached = True
        """Whether Ray's head was reached at the last try: only then, anything is decided."""
        self._changes = 0
        self._changed = asyncio.Condition()
        self._follower: tuple[str, str, float] | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            reached = self._reached = await asyncio.to_thread(rays.answers, self._gcs)
            now = time.monotonic()
            # Reports may wait where this process itself has been stopped.
            is_late, before = now - before > self._run.silence_s / 2, now
            for group in self._groups.values():
                if reached and not is_late:
                    group.expire(now, self._run.silence_s)
                else:  # another coordinator may be started elsewhere
                    group.refresh(now)
            if reached:
                await self._step()
            await asyncio.sleep(TICK_S)

    async def _step(self) -> None:
        if not self._reached:
            return
        changed = False
        for group in self._groups.values():
            while group.step(time.monotonic(), self._published):
                changed = True
        if changed:
            await self._note_change()

    @property
    def _published(self) -> dict[int, int]:
        """Newest version of each group that has published a model."""
        return {group: max(kept) for group, kept in self._references.items() if kept}

    async def _note_change(self) -> None:
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def report(self, group: int, report: Report, seen: int | None) -> JsonObject:
        """Take a report of a replica; return the answer to it.

        seen: number of the state that it knows: the reply waits a moment for another one. Raises
        ControlError while Ray's head is not reached.
        """
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        if not self._reached:
            raise ControlError("the coordinator does not reach Ray's head")
        one = self._groups[group]
        one.report(report, time.monotonic())
        await self._step()
        if seen is not None and seen == self._changes:
            async with self._changed:
                try:
                    async with asyncio.timeout(WAIT_S):
                        await self._changed.wait_for(lambda: self._changes != seen)
                except TimeoutError:
                    pass
        return {"reply": one.reply(report), "changes": self._changes, "began": self._began}

    async def lost(self, group: int, number: int) -> None:
        """Remove a replica whose process has ended."""
        self._groups[group].lost(str(number))
        await self._step()

    async def publish(self, group: int, references: list[Any]) -> None:
        """Publish a model, which other groups may take."""
        # After those that a group has taken from a coordinator before this one.
        taken = (one.state.taken.values() for one in self._groups.values())
        version = 1 + max(itertools.chain(self._published.values(), *taken), default=0)
        kept = self._references[group]
        kept[version] = references
        aims = {one.aims.get(group) for one in self._groups.values()}
        for old in sorted(kept)[:-KEPT]:
            if old not in aims:
                del kept[old]
        await self._step()

    async def reference(self, group: int, version: int) -> list[Any] | None:
        """Return the reference to a model; None: it is no longer kept."""
        return self._references[group].get(version)

    async def plan(self) -> JsonObject:
        """Return the settings of the run."""
        return self._plan

    async def state(self) -> JsonObject:
        """Return the state of all groups, for `status`."""
        groups = {number: group.state.as_dict() for number, group in self._groups.items()}
        return {"host": self._host, "pid": os.getpid(), "groups": groups}

    async def follow(self, who: str, token: str) -> str | None:
        """Record a command that follows the run. Returns another one that already does.

        The other one may have been killed: its next heartbeat is awaited.
        """
        before = self._follower
        while await self.followed() and self._follower is not None and self._follower[1] != token:
            if self._follower != before:
                return self._follower[0]
            await asyncio.sleep(TICK_S)
        self._follower = who, token, time.monotonic()
        return None

    async def followed(self) -> bool:
        """Return whether a command follows the run."""
        return self._follower is not None and time.monotonic() - self._follower[2] < FOLLOWED_S
