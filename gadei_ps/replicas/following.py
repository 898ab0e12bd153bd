"""Observation of the replicas of a run through their actors, from their start to their end."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gadei_ps.errors import ClusterError, ClusterLost
from gadei_ps.machine import process
from gadei_ps.memory.weights import FloatArray
from gadei_ps.replicas import copies, placing, rays
from gadei_ps.replicas.actor import NAMESPACE, actors
from gadei_ps.replicas.config import Run
from gadei_ps.replicas.coordinator import CALLS, FOLLOWED_S, Coordinator, coordinator_name
from gadei_ps.replicas.placing import Actors
from gadei_ps.replicas.program import Program
from gadei_ps.show.counts import counted
from gadei_ps.show.groups import how_ended

ANSWER_S, LOOK_S, STOP_S = 10.0, 0.3, 120.0
PROGRESS_S, SIGN_S = 5.0, 1.0
LOST_S = 3.0
"""Time without an answer of Ray's head after which its cluster is lost (s)."""
ENDING = ("ending", "leaving", "stopping")
LOST: dict[str, Any] = {"exit_code": 0, "asked": "lost"}
"""Summary of a replica that was lost: it may still train."""

JsonObject = dict[str, Any]
Say = Callable[[str, bool], None]
"""A function that prints a line; its second argument: whether the line is on progress."""


def coordinator_of(run: str) -> Any:
    """Return the coordinator of a run; None if there is none."""
    try:
        return ray.get_actor(coordinator_name(run), NAMESPACE)
    except ValueError:
        return None


def asked(reference: Any, timeout_s: float = ANSWER_S) -> Any:
    """Return an answer; None if there is none in time."""
    with contextlib.suppress(RayError, GetTimeoutError):
        return ray.get(reference, timeout=timeout_s)
    return None


def answers(references: dict[int, Any], timeout_s: float = ANSWER_S) -> dict[int, Any]:
    """Return the answer of each actor, or the error of one that does not answer in time."""
    until = time.monotonic() + timeout_s
    found: dict[int, Any] = {}
    for number, reference in references.items():
        try:
            found[number] = ray.get(reference, timeout=max(0.0, until - time.monotonic()))
        except (RayError, GetTimeoutError) as error:
            found[number] = error
    return found


def statuses(found: Actors) -> list[JsonObject]:
    """Return the status of each replica; it is away if its actor does not answer."""
    replies = answers({number: one.status.remote() for number, one in found.items()})
    away = {"state": "away", "ended": None}
    return [
        {"machine": number, "why": _why(one)} | away if isinstance(one, Exception) else one
        for number, one in replies.items()
    ]


def _why(error: Exception) -> str:
    if isinstance(error, GetTimeoutError):
        return "its actor does not answer"
    return "Ray has lost its actor, and starts another one where there is a place"


def kill(found: Actors, *, whole: bool = False) -> None:
    """End actors whose replicas have ended. whole: they are all of a run."""
    answers({number: one.clear.remote(whole=whole) for number, one in found.items()})
    for one in found.values():
        ray.kill(one, no_restart=True)


def end_run(run: str, found: Actors) -> None:
    """Leave nothing of a run in Ray, once its replicas have ended."""
    kill(found, whole=True)
    if (coordinator := coordinator_of(run)) is not None:
        ray.kill(coordinator, no_restart=True)
    placing.drop(run)


class Following:
    """A run, from its beginning or from where it is, until all its replicas have ended."""

    def __init__(
        self,
        run: Run,
        address: str,
        command: list[str],
        directory: str,
        say: Say,
        program: Program | None = None,
    ) -> None:
        """Prepare to follow a run.

        command: of a learner. directory: where learners run, on each host.
        program: learners that replace a command.
        """
        self.run, self._address, self._say = run, address, say
        self._rows: dict[int, JsonObject] = {}
        self.summary: JsonObject | None = None
        """Result of the run, once it has ended."""
        self.stops = False
        """Whether this object ends all replicas."""
        self._plan: JsonObject = {
            "run": run.model_dump(mode="json", exclude_unset=True),
            "command": command,
            "directory": directory,
            "program": program.as_dict() if program is not None else None,
        }
        self._found: Actors = {}
        self._coordinator: Any = None
        self._is_new = False
        self._looking = threading.Lock()
        self._applied: dict[int, int] = {}
        self._shown: dict[int, str] = {}
        self._logs: set[int] = set()
        self._token = secrets.token_hex(8)
        self._other: str | None = None
        """Another command that follows the run in place of this one."""
        self._answered = self._progress = self._signed = time.monotonic()

    # -- beginning -------------------------------------------------------------------------------

    def begin(self, data: Any = None) -> None:
        """Place and start the replicas, or adopt those that are there. Raises ClusterError.

        data: of the program, as an array of bytes.
        """
        run = self.run
        self._found = actors(run.name)
        self._is_new = not self._found
        if not self._is_new:
            there = counted(len(self._found), "replica")
            self._line(f"run {run.name} is there: {there}, whose settings stay")
        node = ray.get_runtime_context().get_node_id()
        self._coordinator = placing.detached(
            Coordinator,
            coordinator_name(run.name),
            CALLS,
            NodeAffinitySchedulingStrategy(node, soft=True),
            self._plan,
            get_if_exists=True,
        )
        if self._is_new:
            self._found = placing.place(run)
        try:
            ray.get(self._coordinator.followed.remote(), timeout=placing.ANSWER_S)
        except (RayError, GetTimeoutError) as error:
            raise ClusterError(f"the coordinator does not start: {placing.line(error)}") from None
        if self._sign(placing.ANSWER_S):
            raise ClusterError(
                f"run {run.name} has its group run already, at {self._other}: end that command "
                "first, its replicas continue"
            )
        places = self._prepare()
        self._check_program(places)
        reference = None if data is None else ray.put(data)
        replies = answers(
            {number: one.start.remote(reference) for number, one in self._found.items()},
            placing.ANSWER_S,
        )
        for number, one in replies.items():
            if isinstance(one, Exception):
                if self._is_new:
                    raise ClusterError(f"replica {number}: {placing.line(one)}")
                self._line(f"replica {number}: {placing.line(one)} Continuing without it.")
        if living := sorted(number for number, one in places.items() if number in one["living"]):
            self._line(f"replicas that train are adopted: {', '.join(map(str, living))}")

    def _sign(self, timeout_s: float = ANSWER_S) -> str | None:
        """Report that this command follows the run. Returns another one that already does."""
        begin = time.monotonic()
        who = f"{ray.util.get_node_ip_address()}, process {os.getpid()}"
        self._other = asked(self._coordinator.follow.remote(who, self._token), timeout_s)
        self._signed = begin
        return self._other

    def _prepare(self) -> dict[int, JsonObject]:
        """Return the facts on the hosts of the actors. Raises ClusterError for a mistake."""
        facts = self._plan["directory"], self._plan["program"]
        replies = answers(
            {number: one.prepare.remote(*facts) for number, one in self._found.items()},
            placing.ANSWER_S,
        )
        places = {}
        for number, one in replies.items():
            if isinstance(one, Exception):
                if self._is_new:
                    raise ClusterError(f"replica {number}: {placing.line(one)}")
                self._line(f"replica {number} does not answer: the others are adopted without it")
                self._found.pop(number)
                continue
            placing.check(one["host"], one)
            if one["mistake"]:
                raise ClusterError(f"replica {number} at {one['host']}: {one['mistake']}")
            places[number] = one
        if not places:
            raise ClusterError(
                f"run {self.run.name} is there, and no replica answers: bring back their hosts, or "
                f"end it (gadei-ps group stop {self.run.name})"
            )
        return places

    def _check_program(self, places: dict[int, JsonObject]) -> None:
        ours = (self._plan["program"] or {}).get("digest")
        for number, one in places.items():
            settings = one["living"].get(number)
            if settings and (settings["program"] or {}).get("digest") != ours:
                raise ClusterError(
                    f"run {self.run.name} is there, and its learners have other data or another "
                    f"program: stop it first (gadei-ps group stop {self.run.name}), or give this "
                    "one another name"
                )

    def abandon(self) -> None:
        """End the replicas that this object has started, after a failed start."""
        if self._is_new:
            for one in self._found.values():
                one.ask.remote("stop")
            answers({number: one.end.remote() for number, one in self._found.items()}, 90.0)
            end_run(self.run.name, self._found)

    # -- following -------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Pass a signal on to the learners of all replicas, unless another command follows them."""
        if time.monotonic() - self._signed > FOLLOWED_S and self._sign():
            return  # look() raises
        for one in self._found.values():
            one.ask.remote("signal", signal=number)

    @property
    def rows(self) -> list[JsonObject]:
        """Status of each replica that has not ended, as in `group status`; then of all."""
        rows = list(self._rows.values())
        return [row for row in rows if row["ended"] is None] or rows

    def weights(self, numbers: Iterable[int]) -> dict[str, FloatArray] | None:
        """Return a copy of the weights of the first of these replicas that has one.

        The keys are the names of the tensors. Raises ClusterLost.
        """
        found: dict[str, FloatArray] | None = self._in_time(lambda: self._copy(numbers))
        return found

    def _copy(self, numbers: Iterable[int]) -> dict[str, FloatArray] | None:
        for number in numbers:
            if number in self._found:
                arrays = asked(self._found[number].weights.remote(), copies.COPY_S)
                if arrays is not None:
                    return {name: one.copy() for name, one in arrays.items()}
        return None

    def look(self) -> bool:
        """Wait a moment, and update the status of each replica. Returns whether all have ended.

        Then Ray has nothing of them. Raises ClusterLost if the cluster is gone.
        """
        time.sleep(LOOK_S)
        if self._in_time(self._look):
            self.summary = self.result()
        return self.summary is not None

    def stop(self) -> None:
        """End all replicas, and wait until they have ended. Raises ClusterError."""
        self.stops = True
        until = time.monotonic() + STOP_S
        while self.summary is None:
            if time.monotonic() > until:
                raise ClusterError(f"its replicas have not ended in {STOP_S:g} s")
            self.look()

    def _in_time(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`. Raises ClusterLost if the cluster ends meanwhile.

        Without its head, Ray answers some calls only after a minute, and then ends this process.
        """
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                with self._looking:
                    answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name=process.FOREIGN, daemon=True).start()
        while not wait([answer], LOOK_S).done:
            self._check_cluster()
        return answer.result()

    def _look(self) -> bool:
        self._check_cluster()
        if self._other is None and time.monotonic() - self._signed > SIGN_S:
            self._sign()  # through the coordinator that is there now
        if self._other is not None:  # this command was silent for too long
            raise ClusterError(
                f"another group run, at {self._other}, follows run {self.run.name} now: this one "
                "ends, the replicas continue"
            )
        now = actors(self.run.name)
        rows = statuses(now)
        for row in rows:
            self._note(row)
        for number in self._rows.keys() - now.keys():
            self._note_gone(number, is_last=not now)
        self._report_progress(rows)
        self._found = now
        if all(row["ended"] is not None for row in self._rows.values()):
            end_run(self.run.name, now)
            return True
        for row in rows if self.stops else ():
            if row["ended"] is None and row["state"] not in ENDING:
                now[row["machine"]].ask.remote("stop")
        return False

    def _check_cluster(self) -> None:
        if rays.answers(self._address):
            self._answered = time.monotonic()
        elif time.monotonic() - self._answered > LOST_S:
            raise ClusterLost(
                f"the Ray cluster of run {self.run.name} is gone: its replicas train on; run the "
                "same command again to come back to them, or stop those of this host (gadei-ps "
                f"group stop {self.run.name})"
            )

    def _note_gone(self, number: int, *, is_last: bool) -> None:
        """Note a replica that Ray has lost: another command has ended it, or its node died."""
        row = self._rows[number]
        if row["ended"] is not None:
            return
        state = row["state"]
        if state == "stopping" or (is_last and state not in ("leaving", "away")):
            ended = {"exit_code": 0, "asked": "stop"}
        elif state in ("leaving", "starting"):
            ended = {"exit_code": 0, "asked": "leave"}
        else:
            ended = LOST
        self._note(row | {"ended": ended})

    def _note(self, row: JsonObject) -> None:
        """Print what has changed."""
        number, before = row["machine"], self._rows.get(row["machine"], {})
        self._rows[number] = row
        if row["ended"] is not None:
            if number in self._applied:  # a replica may have ended too soon to know it
                row["ended"] = {"gradients_applied": self._applied[number]} | row["ended"]
            if before.get("ended") is None:
                is_stopped = row["ended"].get("asked") == "stop"
                if not (self.stops and is_stopped):
                    self._line(f"replica {number} {how_ended(row['ended'])}")
            return
        if row.get("job"):
            self._applied[number] = row["job"]["gradients_applied"]
        if row["state"] == "ending" or (self.stops and row["state"] == "stopping"):
            return
        if row["state"] != self._shown.get(number):
            self._shown[number] = row["state"]
            where = f" at {row['host']}" if "host" in row else ""
            log = f", log {row['log']}" if "log" in row and number not in self._logs else ""
            self._logs |= {number} if log else set()
            self._line(f"replica {number}{where}: {row['state']}{log}")
        for what, old in ((row, before), (row.get("exchange") or {}, before.get("exchange") or {})):
            for key in ("why", "note"):
                if what.get(key) and what[key] != old.get(key):
                    self._line(f"replica {number}: {what[key]}")

    def _report_progress(self, rows: list[JsonObject]) -> None:
        if time.monotonic() - self._progress < PROGRESS_S:
            return
        self._progress = time.monotonic()
        there = [row for row in rows if row.get("job")]
        if there:
            rounds = max(row["exchange"]["rounds"] for row in there)
            gradients = sum(row["job"]["gradients_applied"] for row in there)
            what = f"{counted(len(there), 'replica')}, {counted(gradients, 'gradient')}"
            self._say(f"round {rounds:,}: {what}", True)

    def _line(self, line: str) -> None:
        self._say(line, False)

    def result(self) -> JsonObject:
        """Return how the run has ended, with a row for each replica."""
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
