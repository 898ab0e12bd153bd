"""The machines of a run as Ray knows them, and what is asked of them while they train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gadei_ps.agents import addresses
from gadei_ps.cluster import placing
from gadei_ps.cluster.actor import NAMESPACE, names, of_machine
from gadei_ps.cluster.config import job_name
from gadei_ps.cluster.keeper import told
from gadei_ps.cluster.placing import Actors
from gadei_ps.errors import ClusterError, JobNotFound, UsageError

ANSWER_S = 10.0
AWAY_S = 20.0
"""So long a command waits for an actor that Ray has lost: its machine may live."""
ENDING = ("ending", "leaving", "stopping")
POLL_S = 0.2

Told = dict[str, Any]


def actors(run: str) -> Actors:
    """The actors of a run, by the numbers of their machines."""
    found: Actors = {}
    for name in names(run):
        with contextlib.suppress(ValueError):  # it has just ended
            found[int(name.rpartition(".")[2])] = ray.get_actor(name, NAMESPACE)
    return found


def statuses(found: Actors) -> list[Told]:
    """What each machine is doing; of one whose actor does not answer, that it is away."""
    said = _answers({number: one.status.remote() for number, one in found.items()})
    away = {"state": "away", "ended": None}
    return [
        {"machine": number, "why": _why(one)} | away if isinstance(one, Exception) else one
        for number, one in said.items()
    ]


def _answers(asked: dict[int, Any]) -> dict[int, Any]:
    """What each actor says, or the error of one that does not answer in time."""
    until = time.monotonic() + ANSWER_S
    found: dict[int, Any] = {}
    for number, reference in asked.items():
        try:
            found[number] = ray.get(reference, timeout=max(0.0, until - time.monotonic()))
        except (RayError, GetTimeoutError) as error:
            found[number] = error
    return found


def _why(error: Exception) -> str:
    if isinstance(error, GetTimeoutError):
        return "its actor does not answer"
    return "Ray has lost its actor, and starts another one where there is a place"


def used_nodes(rows: Sequence[Told]) -> set[str]:
    """Nodes that have machines; one whose machine has ended can get another one."""
    return {row["node"] for row in rows if "node" in row and row["ended"] is None}


def kill(found: Actors) -> None:
    """Ends actors whose machines have ended."""
    for one in found.values():
        with contextlib.suppress(RayError):
            ray.get(one.clear.remote(), timeout=ANSWER_S)
        ray.kill(one, no_restart=True)


def _there(run: str) -> Actors:
    found = actors(run)
    if not found:
        raise JobNotFound(f"the cluster has no run {run!r}")
    return found


def join(run: str, group: int, node: str | None) -> Told:
    """Adds a machine to a group. Raises ClusterError if there is no node for it."""
    found = _there(run)
    said = _answers({number: one.plan.remote() for number, one in found.items()})
    plans = [plan for plan in said.values() if isinstance(plan, dict)]
    ours = [plan for plan in plans if plan["group"] == group]
    if not ours:
        numbers = ", ".join(str(one) for one in sorted({plan["group"] for plan in plans}))
        raise UsageError(f"--group {group}: the groups of run {run} that have machines: {numbers}")
    plan = ours[0]
    known = {int(one) for other in plans for one in other["agent"]["agents"]}
    number = max(known | found.keys()) + 1
    port = plan["port"] + number if plan["port"] else 0
    one = placing.beside(run, number, used_nodes(statuses(found)), node)
    try:
        place = ray.get(
            one.prepare.remote(port, plan["directory"], plan["program"]), timeout=placing.ANSWER_S
        )
        placing.check(place["host"], place)
        if mistake := place["mistake"] or place["taken"]:
            raise ClusterError(f"machine {number} at {place['host']}: {mistake}")
        address = addresses.written(place["host"], place["port"])
        known_to_all = told(plan["agent"], group, {str(number): address})
        made = of_machine(plan | {"agent": known_to_all}, number)
        data = found[plan["number"]].data.remote()
        ray.get(one.start.remote(made, True, data), timeout=placing.ANSWER_S)
    except BaseException:
        ray.kill(one, no_restart=True)
        raise
    for other in found.values():
        other.ask.remote("agents", group=group, agents={str(number): address})
    return {"run": run, "machine": number, "group": group, "host": place["host"]}


def end(run: str, what: str, number: int | None, most_s: float) -> Told:
    """Has one machine leave, or all stop; waits until they have. Raises ClusterError."""
    found = _there(run)
    if number is not None and number not in found:
        numbers = ", ".join(map(str, sorted(found)))
        raise UsageError(f"run {run} has no machine {number}: it has {numbers}")
    wanted = found if number is None else {number: found[number]}
    for one in wanted.values():
        one.ask.remote(what)
    begin = time.monotonic()
    while True:
        rows = statuses(wanted)
        passed_s = time.monotonic() - begin
        late = [row for row in rows if row["ended"] is None]
        if passed_s > AWAY_S:
            late = [row for row in late if row["state"] != "away"]
        if not late:
            break
        if passed_s > most_s:
            which = ", ".join(str(row["machine"]) for row in late)
            raise ClusterError(f"run {run}: machine {which} has not ended in {most_s:g} s")
        for row in late:
            if row["state"] not in ENDING:  # another actor has its machine now
                wanted[row["machine"]].ask.remote(what)
        time.sleep(POLL_S)
    kill(wanted)
    if number is None:
        placing.drop(run)
    if away := [row["machine"] for row in rows if row["ended"] is None]:
        which = ", ".join(map(str, away))
        raise ClusterError(
            f"run {run}: machine {which} could not be asked, for Ray has lost its actor; if its "
            f"host lives, end its job there (gadei-ps stop {job_name(run, away[0])})"
        )
    return {
        "run": run,
        "machines": [{"machine": row["machine"], "host": row.get("host")} for row in rows],
    }
