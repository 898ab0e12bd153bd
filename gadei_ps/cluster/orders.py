"""What the commands ask of a cluster: through a process of its own, so that Ray cannot end them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from gadei_ps import errors
from gadei_ps.cluster import config, door, rays
from gadei_ps.cluster.config import Run
from gadei_ps.cluster.locks import Lock
from gadei_ps.commands.run import check_command
from gadei_ps.errors import (
    ClusterError,
    ClusterLost,
    ControlError,
    GadeiError,
    JobInUse,
    JobNotFound,
    NoAnswer,
    UsageError,
    in_words,
)
from gadei_ps.job import paths
from gadei_ps.job.diagnosis import locked
from gadei_ps.machine import interrupts, process

POLL_S = 0.2
END_S = 60.0
TAKE_BACK_S = 90.0
"""For a machine that was to join to end: it may be beginning, which takes up to a minute."""
GONE_S, LAST_S = 3.0, 100.0
"""For a cluster to end that has lost its run, or its command."""
MOST_BYTES = 1 << 16
LOOK_S, MOST_SILENT = 1.0, 3
"""How often to look whether the cluster is there, and how often it may be silent in a row."""
Told = dict[str, Any]
Say = Callable[[str, bool], None]
"""Is given a line, and whether it is one on how training goes."""


def run(
    file: Path, command: list[str], address: str | None, where: Path, say: Say
) -> dict[str, Any]:
    """Trains until all machines have ended; returns a summary with `exit_code`.

    file: GROUPS.toml. address: of a cluster; None: one of this host's own. where: directory of the
    learners, on each machine. The first signal is passed on to the learners of all machines; the
    second one ends them at once. Raises GadeiError.
    """
    wanted = config.load(file)
    check_command(command)
    order = to_run(wanted, file, address) | {
        "command": command,
        "directory": str(where.absolute()),
    }
    with Driven(order, say) as driven, interrupts.first_told() as signalled:
        return _followed(driven, signalled)


def to_run(wanted: Run, file: Path, address: str | None) -> Told:
    """What all orders of a run say. Raises UsageError if it cannot be in this cluster.

    address: of the cluster; None: one of this host's own.
    """
    if address is None:
        _check_own(wanted, file)
    else:
        _check_apart(wanted.name)
    return {
        "order": "run",
        "name": wanted.name,
        "run": wanted.model_dump(mode="json", exclude_unset=True),
        "where": str(file),
        "address": address,
        "token": None,
    }


def _check_own(wanted: Run, file: Path) -> None:
    for number, group in enumerate(wanted.groups):
        for name in ("nodes", "resources"):
            if getattr(group, name):
                raise UsageError(
                    f"{file}: groups.{number}.{name}: it needs the cluster of several machines "
                    "that --address names"
                )


def _there(name: str) -> str:
    return f"run {name!r} is on this host already"


def _stop_first(name: str) -> str:
    return f"{_there(name)}: stop it first (gadei-ps group stop {name})"


def _check_apart(name: str) -> None:
    """Raises UsageError if this host has the run in a cluster of its own, or what is left of it.

    Its machines listen where no other host reaches them.
    """
    own = rays.own_address(name)
    is_left = own is not None and (rays.answers(own) or door.here(name))
    if is_left or locked(rays.lock_path(name)):
        raise UsageError(_stop_first(name))


@contextlib.contextmanager
def _alone(name: str, say: Say) -> Iterator[None]:
    """In this block nobody else on this host starts a cluster for the run. Raises UsageError."""
    paths.directory(make=True)
    try:
        lock = Lock(rays.lock_path(name), _stop_first(name))
    except JobInUse as error:
        raise UsageError(str(error)) from None
    try:
        noted = rays.noted(name)
        where = noted["address"] if noted is not None else None
        if noted is None and door.here(name):  # `group run` is on another host
            where = rays.nearby()
        if where is not None and rays.answers(where):
            if noted is None or not noted["token"]:
                raise UsageError(f"run {name!r} is in the cluster at {where}: say --address")
            say(
                f"waiting for the end of the Ray cluster at {where}, whose command was killed",
                False,
            )
            if not _is_gone(where, LAST_S):
                note = rays.note_path(name)
                raise UsageError(
                    f"{_there(name)}, at {where}: end its Ray, or remove {note} if that is none"
                )
        rays.forget(name)
        yield
    finally:
        lock.release()


def _clear(name: str) -> None:
    """Removes the lock that a killed command has left."""
    with contextlib.suppress(JobInUse, FileNotFoundError, ControlError):
        Lock(rays.lock_path(name), "", create=False).release()


def ask(order: str, name: str, address: str | None, say: Say, **how: Any) -> dict[str, Any]:
    """What a command asks of a run that is there. Raises GadeiError.

    Where no cluster answers, `status` and `stop` are of the machines on this host.
    """
    config.check_name(name)
    noted = None if address is not None else rays.noted(name)
    found = address or (noted["address"] if noted is not None else rays.nearby())
    if found is None:
        return _here(order, name, noted, None, say)
    if address is None and not rays.answers(found):
        return _here(order, name, noted, f"the Ray cluster at {found} does not answer", say)
    token = noted["token"] if noted is not None else None
    try:
        return _of_cluster(order, name, found, token, say, how)
    except (JobNotFound, ClusterError) as error:  # it is a new cluster, or not that of this host
        is_mistake = error.exit_code == UsageError.exit_code and order == "status"
        is_known = isinstance(error, JobNotFound) or is_mistake
        if address is not None or token is not None or not is_known or not door.here(name):
            raise
        return _here(order, name, noted, in_words(error), say)


def _of_cluster(
    order: str, name: str, address: str, token: str | None, say: Say, how: Told
) -> Told:
    """By its cluster."""
    given = {"order": order, "name": name, "address": address, "token": token} | how
    here = [number for _, number in door.here(name)]
    try:
        with Driven(given, say, TAKE_BACK_S if order == "join" else 0.0) as driven:
            if order == "join":
                with interrupts.first_told() as signalled:
                    return _joined(driven, signalled, say)
            while (told := driven.hear()) is None:
                pass
        done = answered(told)
        if order == "stop":
            _clear(name)
        return done
    except ClusterLost:
        # A cluster of this host's own ends with its run, perhaps before the answer has come.
        if order != "stop" or token is None or not _is_gone(address, GONE_S):
            raise
        if door.here(name):
            return _here(
                order, name, rays.noted(name), f"the Ray cluster at {address} is gone", say
            )
        return {"run": name, "machines": [{"machine": one, "host": None} for one in here]}


def _is_gone(address: str, most_s: float) -> bool:
    """Whether a cluster has ended, or does so in this time."""
    until = time.monotonic() + most_s
    while rays.answers(address):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def _here(order: str, name: str, noted: Told | None, what: str | None, say: Say) -> Told:
    """Without a cluster: the machines on this host.

    noted: of the cluster, as rays.noted() says. what: why without it; None: none is known.
    """
    machines = [number for _, number in door.here(name)]
    if (not machines or order == "stop") and locked(rays.lock_path(name)):
        raise JobNotFound(f"run {name!r} begins or ends just now: try again in a moment")
    if not machines:
        if order == "stop":
            _sweep(name)
            if noted is not None and noted["token"]:  # otherwise other hosts may have its machines
                rays.forget(name)
        raise JobNotFound(
            f"no run {name!r} on this host: it has ended, or say --address of its Ray cluster"
            if what is None
            else f"no run {name!r}: {what}, and no machine is here"
        )
    what = what or "no cluster is known"
    if order not in ("status", "stop"):
        raise ClusterError(f"{what}: run {name} again to bring its machines together")
    say(f"{what}: these are the machines on this host", False)
    rows = [row for number in machines if (row := _row(name, number))]
    if order == "stop":
        for number in machines:
            with contextlib.suppress(JobNotFound):
                door.ask(name, number, "stop")
        until = time.monotonic() + END_S
        while late := [number for _, number in door.here(name)]:
            if time.monotonic() > until:
                raise ClusterError(f"run {name}: machine {late[0]} has not ended in {END_S:g} s")
            time.sleep(POLL_S)
        for row in rows:
            if "pid" in row:
                door.wait_for_end(row["pid"])
        _sweep(name)
        rays.forget(name)
    return {"run": name, "address": None, "machines": rows}


def _row(name: str, number: int) -> Told | None:
    """What a machine of this host is doing; None if it has just ended."""
    try:
        return door.ask(name, number, "status") | {"ended": None}
    except NoAnswer as error:
        return {"machine": number, "state": "silent", "why": str(error), "ended": None}
    except GadeiError:
        return None


def _sweep(name: str) -> None:
    """Removes what killed processes of the run have left on this host."""
    door.sweep(name)
    _clear(name)


class Driven:
    """The process that carries out an order."""

    def __init__(self, order: Told, say: Say, patience_s: float = 0.0) -> None:
        """patience_s: how long it may take to end what it has begun, once nobody listens to it."""
        self.begun = ""
        """The cluster's address, once the machines of a run have begun."""
        self._order, self._say, self.patience_s = order, say, patience_s
        self._lines: deque[Told] = deque()
        self._rest = b""
        self._looked, self._silent = time.monotonic(), 0
        with contextlib.ExitStack() as ours:
            if order["address"] is None:  # here, since Ray may end the process that uses them
                ours.enter_context(_alone(order["name"], say))
                order = order | {"files": str(ours.enter_context(rays.directory()))}
            self._child = process.spawn(
                process.module_command("gadei_ps.cluster.driver"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                how=None,  # it sees the end of its input, and ends what it has to end
            )
            self._ours = ours.pop_all()
        self.tell(order | {"command_pid": os.getpid()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with interrupts.held():  # it has ended, or nobody waits for what it does
            if self.patience_s:
                self._let_end()
            self._child.kill()
            self._child.wait()
            self._ours.close()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _let_end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        until = time.monotonic() + self.patience_s
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._child.stdin.close()
        while (left_s := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self._child.stdout], [], [], left_s)
            if not ready or not os.read(self._child.stdout.fileno(), MOST_BYTES):
                return

    def tell(self, line: Told) -> None:
        """One more line for it."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen
            self._child.stdin.write(json.dumps(line).encode() + b"\n")
            self._child.stdin.flush()

    def hear(self, wait_s: float = POLL_S) -> Told | None:
        """A line that is not for people; None if there is none within wait_s.

        Raises ClusterLost once the process, or the cluster of a run, is gone.
        """
        if not self._lines:
            self._read(wait_s)
        while self._lines:
            told = self._lines.popleft()
            if "begun" in told:
                self.begun = told["begun"]
            elif "say" in told or "progress" in told:
                self._say(told.get("say") or told["progress"], "progress" in told)
            else:
                return told
        return None

    def _read(self, wait_s: float) -> None:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], wait_s)
        if ready:
            with interrupts.held():
                data = os.read(self._child.stdout.fileno(), MOST_BYTES)
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._lines += [json.loads(line) for line in lines]
            if data:
                return
        elif not self.begun or time.monotonic() - self._looked <= LOOK_S:
            return
        else:
            self._silent = 0 if rays.answers(self.begun) else self._silent + 1
            self._looked = time.monotonic()
            if self._silent < MOST_SILENT:  # Ray itself would go on trying for long
                return
        self.patience_s = 0.0  # a driver without its cluster ends nothing
        raise ClusterLost(_lost(self._order))


def _followed(driven: Driven, signalled: Callable[[], int | None]) -> Told:
    """Passes signals on, until the run has ended."""
    passed: int | None = None
    while True:
        try:
            if passed is None and (passed := signalled()) is not None:
                driven.tell({"signal": passed})
            told = driven.hear()
        except interrupts.Interrupted as second:
            if not driven.begun:
                raise
            driven.tell({"signal": second.number})
            continue
        if told is None:
            continue
        if "error" in told and passed:
            raise interrupts.Interrupted(passed)
        done = answered(told) | {"interrupted": None}
        if passed:
            done |= {"exit_code": 128 + passed, "interrupted": signal.Signals(passed).name}
        return done


def _joined(driven: Driven, signalled: Callable[[], int | None], say: Say) -> Told:
    """After the first signal the machine is taken back, unless it has begun before. Other signals
    change nothing: without its driver, nobody would take the machine back."""
    told = None
    with contextlib.suppress(interrupts.Interrupted):
        while told is None and signalled() is None:
            told = driven.hear()
    if told is None:
        driven.tell({"signal": signalled()})
        until = time.monotonic() + TAKE_BACK_S
        with contextlib.suppress(interrupts.Interrupted), interrupts.held():
            while told is None and time.monotonic() < until:
                told = driven.hear()
        driven.patience_s = 0.0  # it has ended, or has had its time
    if (passed := signalled()) is not None and (told is None or "error" in told):
        if told is not None:
            say(told["error"], False)
        raise interrupts.Interrupted(passed)
    assert told is not None
    return answered(told)


def _lost(order: Told) -> str:
    if order["order"] != "run":
        return f"the Ray cluster at {order['address']} was lost meanwhile: try again"
    return (
        f"the Ray cluster of run {order['name']} is gone: its machines train on; run the same "
        f"command again to come back to them, or stop those of this host (gadei-ps group stop "
        f"{order['name']})"
    )


def answered(told: Told) -> Told:
    """The result that a line tells. Raises the GadeiError that it tells."""
    if "error" in told:
        error = errors.of_kind(told["kind"], told["error"], ClusterError)
        error.exit_code = told["exit_code"]
        raise error
    result: Told = told["result"]
    return result
