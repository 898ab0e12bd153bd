"""Looks after the machines of a run through their actors: begins them, watches them, ends them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from gadei_ps.agents import addresses
from gadei_ps.cluster import copies, lease, placing
from gadei_ps.cluster.config import Run, job_name
from gadei_ps.cluster.machines import ENDING, actors, kill, statuses, take_back
from gadei_ps.cluster.needs import Kind, Need, Needs
from gadei_ps.cluster.placing import Actors
from gadei_ps.cluster.program import Program
from gadei_ps.cluster.strays import Strays
from gadei_ps.cluster.waits import Waits
from gadei_ps.errors import ClusterError
from gadei_ps.show.counts import counted
from gadei_ps.show.groups import how_ended

PROGRESS_S = 5.0
LOST: dict[str, Any] = {"exit_code": 0, "asked": "lost"}
"""How a machine has ended of which nobody knows whether it has."""

Told = dict[str, Any]


class Conductor:
    """A run, from its beginning or from where it is, until all its machines have ended."""

    def __init__(
        self,
        run: Run,
        command: list[str],
        directory: str,
        out: Callable[..., None],
        program: Program | None = None,
    ) -> None:
        """command: of a learner. directory: where learners run, on each machine.

        program: what learners are in the place of a command; its data are to be brought.
        """
        self.run, self.command, self.directory, self._out = run, command, directory, out
        self.program = program.told() if program is not None else None
        self._data: ray.ObjectRef | None = None
        self._stops = self._was_stopped = False
        """Whether this object ends all machines, and whether another command has."""
        self._rows: dict[int, Told] = {}
        self._applied: dict[int, int] = {}
        """Gradients, as they were last seen of each machine."""
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._begun: set[int] = set()
        self._said: dict[int, str] = {}
        """The state that was said last of each machine; some states are not said."""
        self._found: Actors = {}
        self._agents: dict[int, dict[str, str]] = {}
        """Where agents can be reached, by groups, then by the agents' numbers."""
        self._token = ""
        self._foundings: dict[int, str] = {}
        self._groups: dict[int, int] = {}
        """Of machines whose group is known."""
        self._needs = Needs(run.silence_s)
        self._is_new = False
        self._progress = time.monotonic()
        self._lease: lease.Lease | None = None
        self._strays = Strays(run.name)
        self._waits = Waits(run.name, run.silence_s, lambda line: self._out(say=line))
        self._told: dict[int, Told] = {}
        """How other commands have ended machines that Ray is about to forget."""

    def bring(self, data: str) -> None:
        """Has Ray carry the data of the program to each machine. data: path of a file here."""
        self._data = ray.put(np.fromfile(data, np.uint8))

    def begin(self) -> None:
        """Places and starts the machines, or adopts those that are there. Raises ClusterError."""
        run = self.run
        self._lease = lease.take(run.name, lambda line: self._out(say=line))
        self._found = actors(run.name)
        self._is_new, away = not self._found, set[int]()
        if self._found:
            self.has_begun()
            there = counted(len(self._found), "machine")
            self._out(say=f"run {run.name} is there: {there}, whose settings stay")
            away = self._away(self._found)
            self._found = {one: self._found[one] for one in sorted(self._found.keys() - away)}
        else:
            self._found = placing.place(run)
        if not (places := self._prepare(self._found)):
            raise ClusterError(f"run {run.name} has just been ended by another command: try again")
        self._check_program(places)
        for number, one in places.items():
            if self._is_new and one["taken"]:
                raise ClusterError(f"machine {number} at {one['host']}: {one['taken']}")
        of = dict(enumerate(self.run.numbers()))
        groups: dict[int, dict[int, Told]] = {place: {} for place in range(len(self.run.groups))}
        for number, one in places.items():
            # Machines that have joined later say themselves where they belong. One of them that has
            # just died is begun again by its actor.
            group = one["plan"]["group"] if "plan" in one else of.get(number)
            if group is None:
                continue
            groups.setdefault(group, {})[number] = one
            self._groups[number] = group
            if "plan" in one:
                self._foundings[group] = one["plan"]["agent"].get("founding", "")
        plans = [one["plan"] for one in places.values() if "plan" in one]
        if away and not plans:
            raise ClusterError(
                f"run {run.name} is there, and no machine that trains answers: bring back the "
                f"hosts of the others, or end it (gadei-ps group stop {run.name})"
            )
        self._token = plans[0]["agent"]["token"] if plans else secrets.token_hex(32)
        self._agents = {group: _agents(members) for group, members in groups.items()}
        for group, members in groups.items():
            # One that does not answer may have the state of a group in which nobody trains.
            if not away or any("plan" in one for one in members.values()):
                self._begin_group(group, members)

    def _away(self, found: Actors) -> set[int]:
        """Machines that do not answer. The others know them, and they come back by themselves.

        Only an actor that has begun does so; a new one may need longer to begin than to answer.
        """
        if away := _away(statuses(found)):
            which = ", ".join(map(str, sorted(away)))
            self._out(say=f"waiting for machine {which}, which does not answer yet")
            away = _away(statuses({one: found[one] for one in away}, placing.ANSWER_S))
        if away:
            which = ", ".join(map(str, sorted(away)))
            self._out(say=f"machine {which} does not answer: the others are taken over without it")
        return away

    def has_begun(self) -> None:
        """The caller takes nothing back from here on, also if the command is killed."""
        if self.program is None and self._lease is not None:
            self._lease.begun()

    def _prepare(self, found: Actors) -> dict[int, Told]:
        """What the hosts of these actors say. Raises ClusterError for a mistake."""
        run = self.run
        facts = self.directory, self.program, self._pem()
        asked = {
            number: one.prepare.remote(run.port + number if run.port else 0, *facts)
            for number, one in found.items()
        }
        places = self._answers(asked)
        for number, place in places.items():
            placing.check(place["host"], place)
            if place["mistake"]:
                raise ClusterError(f"machine {number} at {place['host']}: {place['mistake']}")
        return places

    def _answers(self, asked: dict[int, Any]) -> dict[int, Any]:
        """Return what actors answer. Raises ClusterError.

        In a run that was there, an actor may be gone: `group leave --dead` ends it at any time. The
        other machines are taken over without it.
        """
        answers = {}
        for number, reference in asked.items():
            try:
                answers[number] = ray.get(reference, timeout=placing.ANSWER_S)
            except Exception as error:
                line = f"machine {number}: {placing.told(error)}"
                if self._is_new or not isinstance(error, RayActorError):
                    raise ClusterError(line) from None
                self._out(say=f"{line} Continuing without it.")
                self._found.pop(number, None)
        return answers

    def _check_program(self, places: dict[int, Told]) -> None:
        ours = (self.program or {}).get("digest")
        for one in places.values():
            if "plan" in one and (one["plan"]["program"] or {}).get("digest") != ours:
                raise ClusterError(
                    f"run {self.run.name} is there, and its learners have other data or another "
                    f"program: stop it first (gadei-ps group stop {self.run.name}), or give this "
                    "one another name"
                )

    def _begin_group(self, group: int, members: dict[int, Told]) -> None:
        alive = [number for number, one in members.items() if "plan" in one]
        if alive:
            which = ", ".join(map(str, sorted(alive)))
            self._out(say=f"machines that train on are taken over: {which}")
        asked = {
            number: self._found[number].start.remote(
                self._plan(number, group), bool(alive), self._data
            )
            for number in members
        }
        for number in sorted(self._answers(asked).keys() & set(alive)):
            for place, agents in self._agents.items():
                self._found[number].ask.remote("agents", group=place, agents=agents)

    def _pem(self) -> dict[str, str] | None:
        """Files of [tls]."""
        return None if self.run.tls is None else self.run.tls.model_dump(mode="json")

    def _plan(self, number: int, group: int) -> Told:
        run = self.run
        agents = self._agents[group]
        sources = run.sources(group) if group < len(run.groups) else []
        agent: Told = {
            "job": job_name(run.name, number),
            "group": run.name,
            "group_number": group,
            "founding": self._foundings.get(group, ""),
            "sources": {one: self._agents[one] for one in sources if self._agents.get(one)},
            "number": number,
            "agents": agents,
            "listen": agents[str(number)],
            "token": self._token,
            "rule": run.rule,
            "every": run.every,
            "overlap": run.overlap,
            "wire": run.wire,
            "silence_s": run.silence_s,
            "divides": len(run.groups) if run.divide else None,
        }
        if (pem := self._pem()) is not None:
            agent["tls"] = pem
        return {
            "run": run.name,
            "number": number,
            "group": group,
            "machines": run.machines,
            "port": run.port,
            "command": self.command,
            "program": self.program,
            "learners": run.learners,
            "restart": run.restart,
            "overrides": run.overrides(),
            "directory": self.directory,
            "agent": agent,
        }

    def abandon(self) -> bool:
        """After a failed beginning: ends what this object has started.

        Returns whether Ray has nothing of the run.
        """
        if not self._is_new:
            return False
        take_back(self._found.values())
        kill(self._found, whole=True)
        placing.drop(self.run.name)
        return True

    def signal(self, number: int) -> None:
        """Passes a signal on to the learners of all machines."""
        for one in self._found.values():
            one.ask.remote("signal", signal=number)

    def stop(self) -> None:
        """From here on, all machines are told to end."""
        self._stops = True

    def copy(self, machines: Iterable[int], path: Path) -> copies.Table | None:
        """Writes the weights of the first of these machines that can give them; tells what lies in
        the file, or None."""
        for number in machines:
            if number in self._found:
                # OSError: the launcher was ended meanwhile, and its file with it.
                with contextlib.suppress(RayError, GetTimeoutError, OSError):
                    asked = self._found[number].weights.remote()
                    return copies.write(ray.get(asked, timeout=copies.COPY_S), path)
        return None

    def watch(self) -> Iterator[list[Told]]:
        """What each machine is doing, from time to time until all have ended; then Ray has nothing
        of them."""
        while True:
            now = actors(self.run.name)
            rows = statuses(now)
            for row in rows:
                self._hear(row)
            self._learn_of_others(now)
            for number in self._rows.keys() - now.keys():
                self._hear_no_more(number, is_last=not now)
            self._tell_progress(rows)
            self._found = now
            self._strays.look(rows)
            self._look_after(rows)
            self._waits.end(rows)
            if all(row["ended"] is not None for row in rows) and not self._has_more(now):
                break
            for row in rows if self._stops else ():
                if row["ended"] is None and row["state"] not in ENDING:
                    now[row["machine"]].ask.remote("stop")
            yield rows
        kill(self._found, whole=True)
        placing.drop(self.run.name)

    def _has_more(self, now: Actors) -> bool:
        """Whether Ray knows a machine again, while all others have ended."""
        strays = self._strays.numbers
        groups = set(self._groups.values())
        if strays and not self._was_stopped and self._strays.adopt(now, groups):
            return True
        for number in sorted(strays - self._rows.keys()):
            self._hear({"machine": number, "state": "away", "ended": LOST})
        return False

    def _learn_of_others(self, now: Actors) -> None:
        """What other commands have done to machines of the run."""
        if self._lease is None:
            return
        running = {one for one, row in self._rows.items() if row["ended"] is None}
        if self._strays.numbers or running - now.keys():
            for number, ended in self._lease.told().items():
                self._was_stopped |= ended.get("asked") == "stop"
                if ended.get("asked") == "dead":
                    self._strays.give_up(number)
                if number in running:
                    self._told[number] = ended
        self._lease.miss(self._strays.numbers)

    def _hear_no_more(self, number: int, *, is_last: bool) -> None:
        """Ray does not know a machine any more: another command has ended it, or its node is gone.

        is_last: whether Ray knows none of the run.
        """
        row = self._rows[number]
        if row["ended"] is not None:
            return
        self._hear(row | {"ended": self._told.pop(number, _guess(row["state"], is_last=is_last))})

    def _hear(self, row: Told) -> None:
        """Says what has changed."""
        number, before = row["machine"], self._rows.get(row["machine"], {})
        if row["ended"] is not None:
            if before.get("ended") is None:
                self._said.pop(number, None)
                if number in self._applied:  # a machine may have ended too soon to know it
                    seen = {"gradients_applied": self._applied[number]}
                    row = row | {"ended": seen | row["ended"]}
                self._rows[number] = row
                is_stopped = row["ended"].get("asked") == "stop"
                self._was_stopped |= is_stopped and not self._stops
                if not (self._stops and is_stopped):
                    self._out(say=f"machine {number} {how_ended(row['ended'])}")
            return
        self._rows[number] = row
        if row.get("job"):
            self._applied[number] = row["job"]["gradients_applied"]
        if row["state"] == "ending" or (self._stops and row["state"] == "stopping"):
            return
        if row["state"] != self._said.get(number):
            self._said[number] = row["state"]
            where = f" at {row['host']}" if "host" in row else ""
            log = f", log {row['log']}" if "log" in row and number not in self._begun else ""
            self._begun |= {number} if log else set()
            self._out(say=f"machine {number}{where}: {row['state']}{log}")
        for what, old in ((row, before), (row.get("agent") or {}, before.get("agent") or {})):
            for key in ("why", "note"):
                if what.get(key) and what[key] != old.get(key):
                    self._out(say=f"machine {number}: {what[key]}")

    def _tell_progress(self, rows: list[Told]) -> None:
        if time.monotonic() - self._progress < PROGRESS_S:
            return
        self._progress = time.monotonic()
        there = [row for row in rows if row.get("job")]
        if there:
            rounds = max(row["agent"]["rounds"] for row in there)
            gradients = sum(row["job"]["gradients_applied"] for row in there)
            what = f"{counted(len(there), 'machine')}, {counted(gradients, 'gradient')}"
            self._out(progress=f"round {rounds:,}: {what}")

    def _look_after(self, rows: list[Told]) -> None:
        """Helps groups that cannot go on by themselves."""
        self._groups |= {row["machine"]: row["group"] for row in rows if "group" in row}
        for group in sorted({*self._agents, *self._groups.values()}):
            ours = [row for row in rows if self._groups.get(row["machine"], group) == group]
            ours = [row for row in ours if row["ended"] is None]
            strays = self._strays.rows(group)
            self._waits.group(group, ours, [row["machine"] for row in strays])
            need = self._needs.due(group, ours + strays)
            known = {row["machine"] for row in rows}
            if need is not None and not self._strays.adopt(known, [group]):
                self._help(group, need, ours)

    def _help(self, group: int, need: Need, rows: list[Told]) -> None:
        which = ", ".join(map(str, need.numbers))
        if need.kind in (Kind.FEW, Kind.BEHIND):
            few = f"most machines of group {group} have died: it goes on with {which}"
            behind = f"machines {which} join group {group} again, which has gone on without them"
            self._out(say=few if need.kind == Kind.FEW else behind)
            for number in need.numbers:
                self._found[number].ask.remote("go_on", generation=need.view)
            return
        self._foundings[group] = secrets.token_hex(4)
        if need.kind == Kind.MACHINES:
            self._out(say=f"machines {which}, all of group {group}, have died: they begin anew")
            places = self._prepare({number: self._found[number] for number in need.numbers})
            self._agents[group] = _agents(places)
            self._begin_group(group, places)
        else:
            self._out(say=f"no machine has the state of group {group}: it begins anew with {which}")
            known = {str(row["machine"]): row["agent"]["address"] for row in rows}
            self._agents[group] = known
            founding = self._foundings[group]
            for number in need.numbers:
                self._found[number].ask.remote("found", founding=founding, agents=known)
        for number, other in self._groups.items():
            if other != group and number in self._found:
                asked = self._found[number].ask
                asked.remote("agents", group=group, agents=self._agents[group])

    def summary(self) -> Told:
        """How it has ended, with a row for each machine."""
        rows = [self._rows[number] for number in sorted(self._rows)]
        ended = [row["ended"] for row in rows]
        stopped = [one for one in ended if one.get("asked") == "stop"]
        codes = [one["exit_code"] for one in ended]
        return {
            "run": self.run.name,
            "machines": [
                {"machine": row["machine"], "host": row.get("host")} | one
                for row, one in zip(rows, ended, strict=True)
            ],
            "stopped": bool(stopped),
            "exit_code": 4 if stopped else next((code for code in codes if code), 0),
        }


def _away(rows: list[Told]) -> set[int]:
    return {row["machine"] for row in rows if row["state"] == "away"}


def _guess(state: str, *, is_last: bool) -> Told:
    """How a machine has ended that Ray does not know any more, if nobody has told it."""
    if state == "stopping" or (is_last and state not in ("leaving", "away")):
        return {"exit_code": 0, "asked": "stop"}
    if state in ("leaving", "starting"):  # a join that was interrupted takes it back
        return {"exit_code": 0, "asked": "leave"}
    return LOST


def _agents(members: dict[int, Told]) -> dict[str, str]:
    """Where the agents of a group's machines listen."""
    return {
        str(number): one["plan"]["agent"]["agents"][str(number)]
        if "plan" in one
        else addresses.written(one["host"], one["port"])
        for number, one in members.items()
    }
