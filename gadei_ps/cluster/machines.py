"""The machines of a run as Ray knows them, and what is asked of them while they train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gadei_ps.agents import addresses
from gadei_ps.cluster import lease, placing
from gadei_ps.cluster.actor import NAMESPACE, names, of_machine
from gadei_ps.cluster.config import job_name
from gadei_ps.cluster.keeper import told
from gadei_ps.cluster.placing import Actors
from gadei_ps.errors import ClusterError, UsageError

ANSWER_S = 10.0
AWAY_S = 20.0
"""So long a command waits for an actor that Ray has lost: its machine may live."""
QUICK_S, GIVE_UP_S = 3.0, 30.0
"""For machines to answer where one does not; for its group to go on without that one."""
ENDING = ("ending", "leaving", "stopping")
POLL_S, AGAIN_S = 0.2, 1.0
"""Between two looks; until an order is given again that may be lost."""

Told = dict[str, Any]
_NOBODY: Told = {"hears": (), "doubts": (), "waits": ()}


def actors(run: str) -> Actors:
    """The actors of a run, by the numbers of their machines."""
    found: Actors = {}
    for name in names(run):
        with contextlib.suppress(ValueError):  # it has just ended
            found[int(name.rpartition(".")[2])] = ray.get_actor(name, NAMESPACE)
    return found


def statuses(found: Actors, wait_s: float = ANSWER_S) -> list[Told]:
    """What each machine is doing; of one whose actor does not answer, that it is away."""
    said = _answers({number: one.status.remote() for number, one in found.items()}, wait_s)
    away = {"state": "away", "ended": None}
    return [
        {"machine": number, "why": _why(one)} | away if isinstance(one, Exception) else one
        for number, one in said.items()
    ]


def placed(found: Actors, rows: Sequence[Told]) -> list[Told]:
    """These rows; a machine that is away is told with its group and host where others know it."""
    if all("group" in row for row in rows):
        return list(rows)
    there = {row["machine"] for row in rows if "host" in row}
    asked = {number: one.plan.remote() for number, one in found.items() if number in there}
    known: dict[int, Told] = {}
    for plan in _answers(asked).values():
        for number, where in plan["agent"]["agents"].items() if isinstance(plan, dict) else ():
            host, _ = addresses.parse(where)
            known[int(number)] = {"group": plan["group"], "host": host}
    return [known.get(row["machine"], {}) | row for row in rows]


def with_others(rows: Sequence[Told]) -> list[Told]:
    """These rows, and one for each machine of which they tell though Ray does not know it: it was
    given up for dead, say, and has come back."""
    known = {row["machine"] for row in rows}
    away = {"state": "away", "ended": None, "why": "Ray does not know it: start Ray on its host"}
    return [*rows, *({"machine": one} | away for one in sorted(_told_of(rows) - known))]


def _told_of(rows: Iterable[Told]) -> set[int]:
    """Machines that others hear, or that may live."""
    agents = [_agent(row) for row in rows]
    return {one for agent in agents for one in (*agent["hears"], *agent["doubts"])}


def _answers(asked: dict[int, Any], wait_s: float = ANSWER_S) -> dict[int, Any]:
    """What each actor says, or the error of one that does not answer in time."""
    until = time.monotonic() + wait_s
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


def kill(found: Actors, *, whole: bool = False) -> None:
    """Ends actors whose machines have ended. whole: they are all of a run."""
    _answers({number: one.clear.remote(whole=whole) for number, one in found.items()})
    for one in found.values():
        ray.kill(one, no_restart=True)


class _Unwanted(Exception):
    """Nobody wants the machine any more that is to join."""


def join(
    found: Actors, run: str, group: int, node: str | None, is_over: Callable[[], bool]
) -> Told:
    """Adds a machine to a group. Raises ClusterError, also once it is over.

    found: the run's actors. is_over: whether nobody wants the machine any more. It is asked for the
    last time once the machine has begun; before, what has been begun is taken back.
    """
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
    used = used_nodes(statuses(found))
    if is_over():
        raise ClusterError("interrupted: no machine has begun")
    try:
        one = placing.beside(run, number, used, node)
    except ValueError:  # Ray has an actor of this name: it is not ours to end
        raise ClusterError(
            f"run {run}: another join has just taken the number {number}: try again"
        ) from None
    has_begun = False
    try:
        facts = port, plan["directory"], plan["program"], plan["agent"].get("tls")
        place = _unless(is_over, one.prepare.remote(*facts))
        placing.check(place["host"], place)
        if mistake := place["mistake"] or place["taken"]:
            raise ClusterError(f"machine {number} at {place['host']}: {mistake}")
        address = addresses.written(place["host"], place["port"])
        known_to_all = told(plan["agent"], group, {str(number): address})
        made = of_machine(plan | {"agent": known_to_all}, number)
        data = found[plan["number"]].data.remote()
        has_begun = True
        _unless(is_over, one.start.remote(made, True, data))
    except BaseException as error:
        if has_begun and not take_back([one]):  # its actor goes on ending it
            raise ClusterError(
                f"{placing.told(error)}; machine {number} may have begun: end it (gadei-ps group "
                f"leave {run} {number})"
            ) from None
        lease.tell(run, {number: {"exit_code": 0, "asked": "leave"}})
        ray.kill(one, no_restart=True)
        if isinstance(error, _Unwanted):
            raise ClusterError(f"interrupted: machine {number} was taken back") from None
        raise
    for other in found.values():
        other.ask.remote("agents", group=group, agents={str(number): address})
    return {"run": run, "machine": number, "group": group, "host": place["host"]}


def _unless(is_over: Callable[[], bool], reference: Any) -> Any:
    """What a new actor answers. Raises _Unwanted once it is over, also where it has answered."""
    until = time.monotonic() + placing.ANSWER_S
    while True:
        try:
            answer = ray.get(reference, timeout=POLL_S)
        except GetTimeoutError:
            if time.monotonic() > until:
                raise
        else:
            if not is_over():
                return answer
        if is_over():
            raise _Unwanted("interrupted")


def take_back(begun: Iterable[Any]) -> bool:
    """Ends the machines that these new actors have begun, also where that is still under way.

    Returns whether all have ended.
    """
    asked = {place: one.abandon.remote() for place, one in enumerate(begun)}
    said = _answers(asked, placing.ANSWER_S)
    return not any(isinstance(one, Exception) for one in said.values())


def give_up(found: Actors, run: str, number: int) -> Told:
    """Somebody vouches that a machine is dead for good: its group goes on without it, and Ray does
    not begin it again.

    found: the run's actors. `untold` of what this returns are machines of its group that do not
    answer. Raises UsageError for one that lives, or that nobody knows; ClusterError.
    """
    rows = placed(found, statuses(found))
    _check_gone(run, number, rows, lease.missed(run))
    groups = {row.get("group") for row in rows if _knows(row, number)}
    last = {row["machine"]: row for row in rows}
    there = {one: found[one] for one, row in last.items() if row["state"] != "away"}
    mine = there.pop(number, None)
    until, again = time.monotonic() + GIVE_UP_S, 0.0
    while doubting := [row["machine"] for row in rows if number in _agent(row)["doubts"]]:
        if time.monotonic() > until:
            which = ", ".join(map(str, doubting))
            raise ClusterError(f"run {run}: machine {which} could not be told: try again")
        if time.monotonic() >= again:
            again = time.monotonic() + AGAIN_S
            for one in doubting:
                there[one].ask.remote("give_up", machine=number)
        time.sleep(POLL_S)
        rows = statuses(there, QUICK_S)
        last |= {one["machine"]: {"group": last[one["machine"]].get("group")} | one for one in rows}
    _check_unheard(run, number, rows)
    lease.tell(run, {number: {"exit_code": 0, "asked": "dead"}})
    if mine is not None:  # it has ended, and its host answers
        kill({number: mine})
    elif number in found:
        ray.kill(found[number], no_restart=True)
    last.pop(number, None)
    return {"run": run, "machine": number, "untold": _untold(last, groups)}


def _untold(last: Mapping[int, Told], groups: Set[int | None]) -> list[int]:
    """Machines of these groups that have not answered last, or that only others hear."""
    ours = [row for row in last.values() if row.get("group") in {None, *groups}]
    silent = {row["machine"] for row in ours if row["state"] in ("away", "silent")}
    heard = {one for row in ours for one in _agent(row)["hears"]}
    return sorted(silent | (heard - last.keys()))


def _agent(row: Told) -> Told:
    return row.get("agent") or _NOBODY


def _knows(row: Told, number: int) -> bool:
    """Whether this is the machine, or one of its group."""
    agent = _agent(row)
    return number in (row["machine"], *agent["hears"], *agent["doubts"], *agent["waits"])


def _check_gone(run: str, number: int, rows: Sequence[Told], missed: Collection[int] = ()) -> None:
    """Raises UsageError unless nothing is heard of this machine.

    missed: machines that `group run` waits for.
    """
    mine = next((row for row in rows if row["machine"] == number), None)
    is_missed = any(number in (*_agent(row)["doubts"], *_agent(row)["waits"]) for row in rows)
    if mine is None and not is_missed and number not in missed:
        numbers = ", ".join(str(row["machine"]) for row in rows)
        raise UsageError(f"run {run} has no machine {number}: it has {numbers}")
    is_gone = mine is None or mine["state"] == "away" or mine["ended"] is not None
    # Ray may have made a new actor elsewhere, which begins nothing while the old host is there.
    if mine is not None and not is_gone and not (is_missed and not mine["lives"]):
        raise UsageError(
            f"machine {number} of {run} is not dead: its host {mine['host']} answers; without "
            "--dead it leaves"
        )
    _check_unheard(run, number, rows)


def _check_unheard(run: str, number: int, rows: Sequence[Told]) -> None:
    """Raises UsageError if others hear this machine."""
    if hearers := [row["machine"] for row in rows if number in _agent(row)["hears"]]:
        which = ", ".join(map(str, hearers))
        raise UsageError(
            f"machine {number} of {run} is not dead: it is heard by {which}; end its processes "
            "first, on its host"
        )


def end(
    found: Actors,
    run: str,
    what: str,
    number: int | None,
    most_s: float,
    living: Collection[int] = (),
) -> Told:
    """Has one machine leave, or all stop; waits until they have. found: the run's actors.

    living: machines of the run that live. Raises ClusterError, also where one of them, or one that
    the others know of, could not be asked.
    """
    if number is not None and number not in found:
        numbers = ", ".join(map(str, sorted(found)))
        raise UsageError(f"run {run} has no machine {number}: it has {numbers}")
    wanted = found if number is None else {number: found[number]}
    for one in wanted.values():
        one.ask.remote(what)
    begin = time.monotonic()
    others = set(living)
    while True:
        rows = statuses(wanted)
        others |= _told_of(rows)
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
    lease.tell(run, {row["machine"]: row["ended"] or _unreached(what) for row in rows})
    missed = [row["machine"] for row in rows if row["ended"] is None]
    missed += sorted(others - found.keys()) if number is None else []
    hosts = _hosts(found, missed) if missed else {}
    kill(wanted, whole=number is None)
    if number is None:
        placing.drop(run)
    if missed:
        which = ", ".join(f"{one}{hosts[one]}" for one in missed)
        there = ", ".join(f"gadei-ps stop {job_name(run, one)}" for one in missed)
        raise ClusterError(
            f"run {run}: machine {which} could not be asked to {what}, for Ray does not reach it: "
            f"if it lives, end its job on its host ({there})"
        )
    return {
        "run": run,
        "machines": [{"machine": row["machine"], "host": row.get("host")} for row in rows],
    }


def _unreached(what: str) -> Told:
    return {"exit_code": 0, "asked": what, "unreached": True}


def _hosts(found: Actors, numbers: Collection[int]) -> dict[int, str]:
    """Where these machines are, in words; nothing where no other machine knows it."""
    rows = statuses(found, QUICK_S)
    new = [{"machine": one} for one in numbers if one not in found]
    hosts = {row["machine"]: row.get("host") for row in placed(found, [*rows, *new])}
    return {one: f" at {hosts[one]}" if hosts[one] else "" for one in numbers}
