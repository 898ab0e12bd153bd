"""The actor that Ray places on each host of a run: it starts a replica, and restarts it.

The replica's process reaches the coordinator and Ray's object store through this actor. It has
nothing else that is needed: it may die at any time, and the next actor finds the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

import gadei_ps
from gadei_ps.commands import jobs
from gadei_ps.errors import (
    ControlError,
    GadeiError,
    JobNotFound,
    NoAnswer,
    UsageError,
    in_words,
)
from gadei_ps.job import paths
from gadei_ps.job.config import state_directory
from gadei_ps.machine import process
from gadei_ps.memory import shm
from gadei_ps.memory.weights import FloatArray
from gadei_ps.replicas import copies, rays, sockets
from gadei_ps.replicas.config import job_name
from gadei_ps.replicas.coordinator import coordinator_name
from gadei_ps.replicas.program import Bytes, Program, kept, opened

NAMESPACE = "gadei-ps"
START_S, ANSWER_S, FETCH_S = 60.0, 5.0, 100.0
FIRST_REST_S, MOST_REST_S = 0.2, 5.0
CALLS = 16
_KILLED = "its process was killed: it joins again"


def actor_name(run: str, number: int) -> str:
    """Return the name of a replica's actor."""
    return f"{run}.{number}"


def look(run: str) -> dict[str, Any]:
    """Return the facts on this host. living: settings of the run's replicas that live there."""
    here = sockets.here(run)
    return {
        "gadei_ps": gadei_ps.__version__,
        "ray": ray.__version__,
        "host": ray.util.get_node_ip_address(),
        "memory": shm.SHM.is_dir() and os.access(shm.SHM, os.W_OK),
        "living": {number: _settings(run, number) for number in here},
        "own": bool(here) and rays.own_address(run) is not None,
    }


def _settings(run: str, number: int) -> dict[str, Any]:
    """Return the settings of a living replica; empty if it does not answer."""
    with contextlib.suppress(GadeiError):
        found: dict[str, Any] = sockets.ask(run, number, "settings")
        return found
    return {}


class ReplicaActor:
    """One replica of a run, as Ray knows it."""

    def __init__(self, run: str, number: int, group: int) -> None:
        self._run, self._number, self._group = run, number, group
        self._data = ""
        """Path of the program's data."""
        self._summary: dict[str, Any] | None = None
        self._why: str | None = None
        self._is_ending = False
        self._asked: tuple[str, dict[str, Any]] | None = None
        """The last request to end, with its arguments."""
        self._starting, self._over = threading.Lock(), threading.Event()
        self._watcher: threading.Thread | None = None
        self._coordinator: Any = None
        self._server: sockets.Server | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._start_again, daemon=True).start()

    # -- for commands ----------------------------------------------------------------------------

    def prepare(self, directory: str, program: dict[str, Any] | None) -> dict[str, Any]:
        """Return the facts on this host; `mistake`: why no replica can run here, in one line."""
        found = look(self._run)
        return found | {"mistake": self._mistake(found, directory, program)}

    def _mistake(
        self, found: dict[str, Any], directory: str, program: dict[str, Any] | None
    ) -> str | None:
        if not found["memory"]:
            return "there is no /dev/shm that can be written: mount a tmpfs there"
        if not Path(directory).is_dir():
            return f"there is no directory {directory}: put the script at the same place everywhere"
        try:
            _make_directories()
        except (GadeiError, OSError) as error:
            return in_words(error)
        return Program(**program).mistake() if program is not None else None

    def start(self, data: Bytes | None = None) -> bool:
        """Start the replica, or adopt its process: then the answer is True. Raises UsageError.

        data: of the program, if the run brings one.
        """
        with self._starting:
            if self._watcher is not None or self._over.is_set():
                return False
            _make_directories()
            self._serve()
            if is_adopted := sockets.lives(self._run, self._number):
                self._adopt()
            else:
                if data is not None:
                    self._data = kept(data)
                self._begin()
            self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._watcher.start()
            return is_adopted

    def data(self) -> Bytes | None:
        """Return the data of the run's program, if it has one."""
        return np.fromfile(self._data, np.uint8) if self._data else None

    def weights(self) -> dict[str, FloatArray]:
        """Return a copy of its job's weights, by tensors' names. Raises GadeiError, OSError."""
        return copies.of_job(job_name(self._run, self._number))

    def status(self) -> dict[str, Any]:
        """Return the status of the replica, or how it has ended."""
        facts: dict[str, Any] = {
            "machine": self._number,
            "group": self._group,
            "actor_pid": os.getpid(),
            "host": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "ended": self._summary,
        }
        if self._summary is not None:
            return facts | {"state": self._summary.get("asked", "ended"), "why": None}
        try:
            reply: dict[str, Any] = sockets.ask(self._run, self._number, "status")
        except NoAnswer as error:
            return facts | {"state": "silent", "why": in_words(error)}
        except GadeiError:  # it has just ended, or is not there yet, or not again
            reply = {"state": "ending" if self._is_ending else "starting"}
        return facts | reply | {"why": self._why}

    def ask(self, what: str, **how: Any) -> None:
        """Have the replica's process end; without one, a stop or leave ends the actor.

        what: "leave", "stop" or "signal". An actor whose process was killed, and cannot
        begin again, ends.
        """
        self._asked = what, how
        with contextlib.suppress(JobNotFound):
            sockets.ask(self._run, self._number, what, **how)
            return
        if what in ("leave", "stop"):
            with self._starting:  # a start that is under way ends first
                if self._watcher is None:
                    self._finish({"exit_code": 0, "asked": what})
                    return
            with contextlib.suppress(JobNotFound):
                sockets.ask(self._run, self._number, what, **how)

    def end(self) -> dict[str, Any] | None:
        """Return the summary of a replica that has ended; wait for it, but not for ever."""
        self._over.wait(START_S)
        return self._summary

    def clear(self, *, whole: bool = False) -> None:
        """Remove what a killed process of the replica has left here. whole: the run has ended."""
        if self._server is not None:
            self._server.close()
        sockets.clear(self._run, self._number)
        if self._asked is not None:
            with contextlib.suppress(GadeiError, OSError):
                jobs.collect([job_name(self._run, self._number)])
        if whole and rays.own_address(self._run) is None:
            rays.forget(self._run)

    # -- the replica's process -------------------------------------------------------------------

    def _adopt(self) -> None:
        reply = sockets.ask(self._run, self._number, "settings", START_S)
        if reply["data"]:
            self._data = opened(reply["data"])

    def _begin(self) -> None:
        """Start the process. Raises UsageError."""
        plan = self._call("plan", START_S)
        if plan["program"] is not None and not self._data:
            self._data = self._others_data()
        settings = {name: plan[name] for name in ("run", "command", "program", "directory")}
        settings |= {
            "number": self._number,
            "group": self._group,
            "data": self._data,
            "log": str(state_directory() / f"{job_name(self._run, self._number)}.log"),
        }
        _spawn(settings)

    def _others_data(self) -> str:
        for number, other in actors(self._run).items():
            if number != self._number:
                with contextlib.suppress(Exception):  # another one may have them
                    data = ray.get(other.data.remote(), timeout=START_S)
                    if data is not None:
                        return kept(data)
        raise UsageError(f"replica {self._number} has no data for its learners")

    def _watch(self) -> None:
        """Wait for the end of the process; one that was killed is started again."""
        rest_s, why = FIRST_REST_S, _KILLED
        while True:
            begin = time.monotonic()
            try:
                reply = sockets.ask(self._run, self._number, "await", None)
                self._is_ending = True
                _wait_for_end(reply["pid"])
                self._lost()
                self._finish(reply["summary"])
                return
            except GadeiError:
                if sockets.lives(self._run, self._number):  # it was asked while it began
                    time.sleep(FIRST_REST_S)
                    continue
                self._why = why
            self._lost()
            rest_s = FIRST_REST_S if time.monotonic() - begin > MOST_REST_S else 2 * rest_s
            time.sleep(min(rest_s, MOST_REST_S))
            try:
                self._begin()  # even if it is to end: it ends what is left of its job, too
                self._why = why = _KILLED
                if self._asked is not None:
                    with contextlib.suppress(GadeiError):  # it was killed again
                        self.ask(self._asked[0], **self._asked[1])
            except Exception as error:
                if self._asked is not None:
                    self._finish(_ended_by(*self._asked))
                    return
                self._why = why = (
                    f"its process was killed, and cannot begin again: {in_words(error)}"
                )

    def _finish(self, summary: dict[str, Any]) -> None:
        self._summary = summary
        self._over.set()

    def _lost(self) -> None:
        with contextlib.suppress(Exception):  # it sees the silence
            self._call("lost", ANSWER_S, self._group, self._number)

    def _start_again(self) -> None:
        """Start again in place of an actor that has died."""
        while not (self._over.is_set() or self._watcher is not None):
            try:
                self.start()
            except Exception as error:  # the coordinator may be starting again, too
                self._why = in_words(error)
                time.sleep(FIRST_REST_S)

    # -- requests of the replica's process -------------------------------------------------------

    def _serve(self) -> None:
        if self._server is None:
            self._server = sockets.Server(sockets.actor_path(self._run, self._number), self._answer)

    def _answer(self, what: str, **how: Any) -> Any:
        if what == "report":
            reply = self._call("report", ANSWER_S, self._group, how["report"], how["seen"])
            return reply | {"host": ray.util.get_node_ip_address()}
        if what == "publish":
            reference = ray.put(np.frombuffer(how["data"], np.uint8))
            return self._call("publish", ANSWER_S, self._group, [reference])
        if what == "fetch":
            found = self._call("reference", ANSWER_S, how["group"], how["version"])
            if found is None:
                raise ControlError("the model is kept no more")
            try:
                return ray.get(found[0], timeout=FETCH_S).tobytes()
            except Exception as error:
                raise ControlError(rays.described(error)) from None
        raise ControlError(f"unknown request {what!r}")

    def _call(self, what: str, timeout_s: float, *how: Any) -> Any:
        """Return the answer of the coordinator. Raises ControlError."""
        try:
            if self._coordinator is None:
                self._coordinator = ray.get_actor(coordinator_name(self._run), NAMESPACE)
            return ray.get(getattr(self._coordinator, what).remote(*how), timeout=timeout_s)
        except Exception as error:  # ValueError: Ray does not know it
            if not isinstance(error, ControlError):  # that was its answer
                self._coordinator = None
            raise ControlError(
                f"the coordinator does not answer: {rays.described(error)}"
            ) from None


def _ended_by(what: str, how: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a replica without a process that was asked to end."""
    if what == "signal":
        number = how["signal"]
        return {"exit_code": 128 + number, "interrupted": process.signal_name(number)}
    return {"exit_code": 0, "asked": what}


def actors(run: str) -> dict[int, Any]:
    """Return the actors of a run that Ray knows, in the order of their replicas' numbers."""
    found = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        name, _, number = one["name"].rpartition(".")
        if (name, one["namespace"]) == (run, NAMESPACE):
            with contextlib.suppress(ValueError):  # it has just ended
                found[int(number)] = ray.get_actor(one["name"], NAMESPACE)
    return dict(sorted(found.items()))


def _make_directories() -> None:
    """Make the directories of replicas on this host. Raises GadeiError, or OSError."""
    paths.directory(make=True)
    state_directory().mkdir(parents=True, exist_ok=True)


def _environment() -> dict[str, str]:
    """Return the environment of a process that outlives Ray: without variables of its workers."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours.pop("OMP_NUM_THREADS", None)  # Ray's workers have 1
    return ours


def _spawn(settings: dict[str, Any]) -> None:
    """Start the process of a replica, and wait until it has begun. Raises UsageError."""
    number = settings["number"]
    try:
        done = subprocess.run(
            process.module_command("gadei_ps.replicas.replica"),
            input=json.dumps(settings),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=settings["directory"],
            env=_environment(),
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"replica {number} does not begin in {START_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it has ended"]
        raise UsageError(lines[-1].removeprefix("gadei-ps: "))
    print(f"replica {number} has begun", file=sys.stderr, flush=True)


def _wait_for_end(pid: int) -> None:
    """Wait until a process that is ending has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        process.gone(pidfd, ANSWER_S)
    finally:
        os.close(pidfd)
