"""The commands `gadei-ps group run`, `status`, `join`, `leave` and `stop`."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gadei_ps.commands.run import check_command
from gadei_ps.errors import (
    ClusterError,
    ClusterLost,
    ControlError,
    GadeiError,
    JobNotFound,
    UsageError,
    in_words,
)
from gadei_ps.job import paths
from gadei_ps.job.diagnosis import locked
from gadei_ps.job.lock_file import LockFile
from gadei_ps.machine import interrupts, process
from gadei_ps.replicas import config, rays, sockets
from gadei_ps.replicas.config import Run, job_name
from gadei_ps.show.counts import counted

if TYPE_CHECKING:  # Ray takes a second to load
    from gadei_ps.replicas.following import Following, Say
    from gadei_ps.replicas.program import Bytes, Program

POLL_S = 0.3
END_S, AWAY_S = 90.0, 20.0
"""Time limits until replicas end, and until one that Ray has lost ends (s)."""
LAST_S = 60.0
"""Time limit until a cluster ends whose command was killed (s)."""
DISCONNECT_S = 5.0

JsonObject = dict[str, Any]


def run(file: Path, command: list[str], address: str | None, where: Path, say: Say) -> JsonObject:
    """Train until all replicas have ended; return a summary with `exit_code`.

    file: GROUPS.toml. address: of a cluster; None: one of this host's own. where: directory of the
    learners, on each host. The first signal is passed on to the learners of all replicas; the
    second one ends them at once. Raises GadeiError.
    """
    wanted = config.load(file)
    check_command(command)
    given = command, str(where.absolute())
    with (
        _started(wanted, file, address, say, *given) as following,
        interrupts.first_told() as signalled,
    ):
        return _followed(following, signalled)


@contextlib.contextmanager
def program_run(
    wanted: Run, file: Path, address: str | None, program: Program, data: Bytes, say: Say
) -> Iterator[Following]:
    """Train with a program on all replicas, which end with the block at the latest.

    file: of the run, for messages. address: of a cluster; None: one of this host's own. data: what
    learners are given. Raises GadeiError.
    """
    with contextlib.ExitStack() as stack:
        following = stack.enter_context(
            _started(wanted, file, address, say, [], "/", program, data)
        )
        ending = stack.pop_all()
    try:
        yield following
    finally:
        # It may be lost, or a replica be away.
        with interrupts.held(), ending, contextlib.suppress(ClusterError):
            following.stop()


@contextlib.contextmanager
def _started(
    wanted: Run,
    file: Path,
    address: str | None,
    say: Say,
    command: list[str],
    where: str,
    program: Program | None = None,
    data: Bytes | None = None,
) -> Iterator[Following]:
    """Begin a run; end what was started if that fails."""
    with _cluster_of(wanted, file, address, say) as found:
        from gadei_ps.replicas.following import Following

        following = Following(wanted, found, command, where, say, program)
        try:
            following.begin(data)
        except BaseException:
            with interrupts.held():
                following.abandon()
            raise
        yield following


def _followed(following: Following, signalled: Callable[[], int | None]) -> JsonObject:
    """Pass signals on, until the run has ended."""
    passed: int | None = None
    while True:
        try:
            if passed is None and (passed := signalled()) is not None:
                following.signal(passed)
            if following.look():
                break
        except interrupts.Interrupted as second:
            following.signal(second.number)
    done = following.result() | {"interrupted": None}
    if passed:
        done |= {"exit_code": 128 + passed, "interrupted": signal.Signals(passed).name}
    return done


@contextlib.contextmanager
def _cluster_of(wanted: Run, file: Path, address: str | None, say: Say) -> Iterator[str]:
    """Connect to the cluster of a run until the end of the block; None: to one of this host's own.

    Raises UsageError if the run cannot be in this cluster.
    """
    if address is not None:
        _check_apart(wanted.name)
        with _connected(address, None):
            rays.note(wanted.name, address, None)
            yield address
            rays.forget(wanted.name, address)
        return
    _check_own(wanted, file)
    with _alone(wanted.name, say):
        say("starting Ray on this host", False)
        if (there := rays.nearby()) is not None and rays.answers(there):
            say(f"Ray runs already, at {there}: give --address to train on its hosts", False)
        with rays.own(wanted.machines) as made, _connected(made.address, made.token):
            rays.note(wanted.name, made.address, made.token, made.files)
            yield made.address
        rays.forget(wanted.name, made.address)


@contextlib.contextmanager
def _connected(address: str, token: str | None) -> Iterator[Any]:
    ray = rays.connect(address, token)
    interrupts.install()  # Ray has handlers of its own
    limit_s = DISCONNECT_S
    try:
        with contextlib.redirect_stdout(None):  # Ray prints a line there when an actor dies
            yield ray
    except ClusterLost:
        limit_s = 0.0
        raise
    finally:
        ended = threading.Thread(target=ray.shutdown, name=process.FOREIGN, daemon=True)
        ended.start()
        ended.join(limit_s)
        if ended.is_alive():  # it waits for a cluster that is gone: nobody waits for that
            atexit.unregister(ray.shutdown)


def _check_own(wanted: Run, file: Path) -> None:
    for number, group in enumerate(wanted.groups):
        for name in ("nodes", "resources"):
            if getattr(group, name):
                raise UsageError(
                    f"{file}: groups.{number}.{name}: it needs the cluster of several hosts that "
                    "--address names"
                )


def _there(name: str) -> str:
    return f"run {name!r} is on this host already"


def _stop_first(name: str) -> str:
    return f"{_there(name)}: stop it first (gadei-ps group stop {name})"


def _check_apart(name: str) -> None:
    """Raise UsageError if this host has the run in its own cluster, or the remains of one."""
    own = rays.own_address(name)
    is_left = own is not None and (rays.answers(own) or sockets.here(name))
    if is_left or locked(rays.lock_path(name)):
        raise UsageError(_stop_first(name))


@contextlib.contextmanager
def _alone(name: str, say: Say) -> Iterator[None]:
    """Keep others on this host from starting a cluster for the run. Raises UsageError."""
    paths.directory(make=True)
    try:
        lock = LockFile(rays.lock_path(name))
    except BlockingIOError:
        raise UsageError(_stop_first(name)) from None
    try:
        noted = rays.noted(name)
        if noted is not None and rays.answers(where := noted.address):
            if not noted.token:
                raise UsageError(f"run {name!r} is in the cluster at {where}: give --address")
            say(
                f"waiting for the end of the Ray cluster at {where}, whose command was killed",
                False,
            )
            until = time.monotonic() + LAST_S
            while rays.answers(where):
                if time.monotonic() > until:
                    raise UsageError(f"{_there(name)}, at {where}: end its Ray")
                time.sleep(POLL_S)
        rays.forget(name)
        yield
    finally:
        lock.release()


# -- other commands -------------------------------------------------------------------------------


def ask(order: str, name: str, address: str | None, say: Say, **how: Any) -> JsonObject:
    """Carry out a command for a run that exists. Raises GadeiError.

    Where no cluster answers, `status` and `stop` are of the replicas on this host.
    """
    config.check_name(name)
    noted = rays.noted(name) if address is None else None
    found = address if noted is None else noted.address
    if found is None and (found := rays.nearby()) is None:
        return _here(order, name, "no cluster is known", say)
    if address is None and not rays.answers(found):
        return _here(order, name, f"the Ray cluster at {found} does not answer", say)
    token = noted.token if noted is not None else None
    if order == "stop" and token is not None:  # the cluster ends with it, and would end a client
        own = f"the Ray cluster at {found} is this host's own"
        return _here(order, name, own, lambda _, __: None)
    try:
        with _connected(found, token):
            done = _in_cluster(order, name, found, how)
    except (JobNotFound, ClusterError) as error:
        if address is not None or token is not None or not sockets.here(name):
            raise
        return _here(order, name, in_words(error), say)
    if order == "stop":
        rays.forget(name, found)
        sockets.clear(name)
    return done


def _in_cluster(order: str, name: str, address: str, how: JsonObject) -> JsonObject:
    """Carry out an order. Raises GadeiError, ClusterLost if the cluster ends meanwhile."""
    from ray.exceptions import RayError

    try:
        return _ORDERS[order](name, address, **how)
    except (RayError, RuntimeError, ConnectionError) as error:  # RuntimeError: of its head
        raise ClusterLost(
            f"the Ray cluster at {address} was lost meanwhile: {rays.described(error)}"
        ) from None


def _found(name: str, address: str) -> Any:
    from gadei_ps.replicas import actor

    if not (found := actor.actors(name)):
        raise JobNotFound(
            f"the cluster at {address} has no run {name!r}: it has not begun there, or has ended"
        )
    return found


def _status(name: str, address: str) -> JsonObject:
    """Return a row for each replica."""
    from gadei_ps.replicas import following

    rows = following.statuses(_found(name, address))
    coordinator = following.coordinator_of(name)
    state = following.asked(coordinator.state.remote()) if coordinator is not None else None
    return {"run": name, "address": address, "coordinator": state, "machines": rows}


def _join(name: str, address: str, group: int, node: str | None) -> JsonObject:
    """Start one more replica; none if the command is interrupted before it has begun."""
    import ray

    from gadei_ps.replicas import following, placing

    found = _found(name, address)
    coordinator = following.coordinator_of(name)
    plan = following.asked(coordinator.plan.remote()) if coordinator is not None else None
    if plan is None:
        raise ClusterError(f"run {name}: its coordinator does not answer: try again")
    wanted = config.from_mapping(plan["run"], "run")
    if group >= len(wanted.groups):
        there = counted(len(wanted.groups), "group")
        raise UsageError(f"--group {group}: run {name} has {there}, numbered from 0")
    number = max(max(found) + 1, wanted.machines)
    rows = following.statuses(found)
    used = {row["node"] for row in rows if "node" in row and row["ended"] is None}
    if rays.own_address(name) is not None:
        used = set()  # its one node is for all replicas
    try:
        one = placing.beside(name, number, group, used, node)
    except ValueError:  # Ray has an actor of this name
        raise ClusterError(
            f"run {name}: another join has just taken the number {number}: try again"
        ) from None
    try:
        facts = plan["directory"], plan["program"]
        place = ray.get(one.prepare.remote(*facts), timeout=placing.ANSWER_S)
        placing.check(place["host"], place)
        if place["mistake"]:
            raise ClusterError(f"replica {number} at {place['host']}: {place['mistake']}")
        ray.get(one.start.remote(), timeout=placing.ANSWER_S)
    except BaseException as error:
        with interrupts.held():
            following.asked(one.ask.remote("stop"))
            following.asked(one.end.remote(), END_S)
            following.kill({number: one})
        if isinstance(error, GadeiError | interrupts.Interrupted):
            raise
        raise ClusterError(f"replica {number}: {placing.line(error)}") from None
    return {"run": name, "machine": number, "group": group, "host": place["host"]}


def _end(name: str, address: str, what: str, machine: int | None = None) -> JsonObject:
    """Have one replica leave, or all stop; wait until they have. Raises ClusterError."""
    from gadei_ps.replicas import actor, following

    found = _found(name, address)
    if machine is not None and machine not in found:
        numbers = ", ".join(map(str, sorted(found)))
        raise UsageError(f"run {name} has no replica {machine}: it has {numbers}")
    wanted = found if machine is None else {machine: found[machine]}
    begin = time.monotonic()
    while True:
        rows = following.statuses(wanted)
        # Ray keeps what it has lost: the command that follows the run has ended all others.
        there = actor.actors(name)
        missed = [row for row in rows if row["ended"] is None and row["machine"] in there]
        late, passed_s = missed, time.monotonic() - begin
        if passed_s > AWAY_S:
            late = [row for row in late if row["state"] != "away"]
        if not late:
            break
        if passed_s > END_S:
            which = ", ".join(str(row["machine"]) for row in late)
            raise ClusterError(f"run {name}: replica {which} has not ended in {END_S:g} s")
        for row in late:
            if row["state"] not in following.ENDING:
                wanted[row["machine"]].ask.remote(what)
        time.sleep(POLL_S)
    _clean_up(name, wanted, is_whole=machine is None)
    if missed:
        silent = [int(row["machine"]) for row in missed]
        commands = ", ".join(f"gadei-ps stop {job_name(name, each)}" for each in silent)
        raise ClusterError(
            f"run {name}: replica {', '.join(map(str, silent))} could not be asked to {what}, for "
            f"Ray does not reach it: if it lives, end its job on its host ({commands})"
        )
    hosts = [{"machine": row["machine"], "host": row.get("host")} for row in rows]
    return {"run": name, "machines": hosts}


_ORDERS: dict[str, Callable[..., JsonObject]] = {
    "status": _status,
    "join": _join,
    "leave": partial(_end, what="leave"),
    "stop": partial(_end, what="stop"),
}


def _clean_up(name: str, wanted: Any, *, is_whole: bool) -> None:
    """End the actors, unless the command that follows the run does."""
    from gadei_ps.replicas import actor, following

    coordinator = following.coordinator_of(name)
    is_followed = coordinator is not None and following.asked(coordinator.followed.remote())
    until = time.monotonic() + (following.ANSWER_S if is_followed and is_whole else 0)
    while is_whole and time.monotonic() < until:
        if not actor.actors(name):
            return
        time.sleep(POLL_S)
    if is_whole:
        following.end_run(name, wanted)
    else:
        time.sleep(2 * POLL_S)  # the command that follows the run sees how it has ended
        following.kill(wanted)


def _here(order: str, name: str, what: str, say: Say) -> JsonObject:
    """Carry out a command for the replicas on this host, without a cluster."""
    numbers = sockets.here(name)
    if not numbers and locked(rays.lock_path(name)):
        raise JobNotFound(f"run {name!r} begins or ends just now: try again in a moment")
    if not numbers:
        if order == "stop":
            _sweep(name)
        raise JobNotFound(f"no run {name!r}: {what}, and no replica is here")
    if order not in ("status", "stop"):
        raise ClusterError(f"{what}: run {name} again to bring its replicas together")
    say(f"{what}: these are the replicas on this host", False)
    rows = [row for number in numbers if (row := _row(name, number))]
    if order == "stop":
        _stop_here(name)
        _sweep(name)
    return {"run": name, "address": None, "machines": rows}


def _stop_here(name: str) -> None:
    """End all replicas of this host, and wait for them and for a cluster of its own."""
    own = rays.own_address(name)
    until = time.monotonic() + END_S
    while (left := sockets.here(name)) or (own is not None and rays.answers(own)):
        for number in left:
            with contextlib.suppress(JobNotFound, ControlError):
                sockets.ask(name, number, "stop")
        if time.monotonic() > until:
            which = "".join(f": replica {number}" for number in left[:1])
            raise ClusterError(f"run {name} has not ended in {END_S:g} s{which}")
        time.sleep(POLL_S)


def _row(name: str, number: int) -> JsonObject | None:
    """Return the status of a replica of this host; None if it has just ended."""
    try:
        row: JsonObject = sockets.ask(name, number, "status") | {"ended": None}
        return row
    except GadeiError as error:
        if not sockets.lives(name, number):
            return None
        return {"machine": number, "state": "silent", "why": str(error), "ended": None}


def _sweep(name: str) -> None:
    """Remove what killed processes of the run have left on this host."""
    sockets.clear(name)
    own = rays.own_address(name)
    if own is None or not rays.answers(own):
        rays.forget(name)
    with contextlib.suppress(BlockingIOError, FileNotFoundError, ControlError):
        LockFile(rays.lock_path(name), create=False).release()
