"""What Ray places on each machine of a run: an actor that starts its process, and starts it again.

The actor has nothing of its own that is needed. It may die at any time: the machine goes on, and
the next actor finds its process. If the machine has died, it begins again, and joins its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

import gadei_ps
from gadei_ps.agents import addresses, tls
from gadei_ps.cluster import copies, door, keeper, rays
from gadei_ps.cluster.config import job_name
from gadei_ps.cluster.program import Bytes, Data, Program
from gadei_ps.errors import GadeiError, JobNotFound, NoAnswer, UsageError, in_words
from gadei_ps.job import paths
from gadei_ps.job.config import state_directory
from gadei_ps.machine import process
from gadei_ps.memory import shm
from gadei_ps.memory.weights import FloatArray

NAMESPACE = "gadei-ps"
START_S = 60.0
FIRST_REST_S, MOST_REST_S = 0.2, 5.0
ELSEWHERE_S = 5.0
"""How long a machine must be silent before it is begun on another host."""
CALLS = 16
"""Of an actor at a time; one of them may wait for the end of its machine."""

Plan = dict[str, Any]


def actor_name(run: str, number: int) -> str:
    """Of a machine's actor."""
    return f"{run}.{number}"


def look() -> dict[str, Any]:
    """What this host has, before anything is started there."""
    directory = ""
    with contextlib.suppress(GadeiError):
        directory = str(paths.directory())
    return {
        "gadei_ps": gadei_ps.__version__,
        "ray": ray.__version__,
        "host": ray.util.get_node_ip_address(),
        "memory": shm.SHM.is_dir() and os.access(shm.SHM, os.W_OK),
        "directory": directory,
        "living": [(*one, _group(*one)) for one in door.here()],
        "own": sorted({run for run, _ in door.here() if rays.own_address(run)}),
    }


def _group(run: str, number: int) -> int:
    """That a living machine belongs to; 0 if it does not answer."""
    with contextlib.suppress(GadeiError):
        return int(door.ask(run, number, "plan")["group"])
    return 0


class MachineActor:
    """One machine of a run, as Ray sees it."""

    def __init__(self, run: str, number: int) -> None:
        self._run, self._number = run, number
        self._plan: Plan | None = None
        self._data: Data | None = None
        self._has_begun = self._is_abandoned = self._is_ending = False
        self._summary: dict[str, Any] | None = None
        self._starting = threading.Lock()
        self._over = threading.Event()
        self._why: str | None = None
        self._lives = 0
        if ray.get_runtime_context().was_current_actor_reconstructed:
            threading.Thread(target=self._take_up, name="take-up", daemon=True).start()

    def prepare(
        self,
        port: int,
        directory: str,
        program: dict[str, Any] | None,
        pem: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What the host has, and where an agent can listen on it. port: 0 for a free one.

        program: of learners, if the run brings it. pem: files of [tls]. The `mistake` of what this
        returns says in one line why no machine can be here, its `taken` why none can listen.
        """
        found = look() | {"alive": door.lives(self._run, self._number), "pid": os.getpid()}
        found["mistake"] = self._mistake(found, directory, program, pem)
        found["port"], found["taken"] = port, None
        if not port:
            found["port"] = _free_port(found["host"])
        elif not found["alive"]:
            found["taken"] = _taken(found["host"], port)
        if found["alive"]:
            with contextlib.suppress(GadeiError):
                found["plan"] = door.ask(self._run, self._number, "plan")
        return found

    def _mistake(
        self,
        found: dict[str, Any],
        directory: str,
        program: dict[str, Any] | None,
        pem: dict[str, str] | None = None,
    ) -> str | None:
        if not found["memory"]:
            return "there is no /dev/shm that can be written: mount a tmpfs there"
        if not Path(directory).is_dir():
            return f"there is no directory {directory}: put the script at the same place everywhere"
        try:
            _make_directories()
            if pem is not None and not found["alive"]:
                files = (Path(pem[name]) for name in ("certificate", "key", "authority"))
                tls.checked(*files, host=found["host"])
        except (GadeiError, OSError) as error:
            return in_words(error)
        return Program(**program).mistake() if program is not None else None

    def start(self, plan: Plan, joins: bool, data: Bytes | None = None) -> None:
        """Starts the machine, or adopts the process that has it. Raises UsageError in one line.

        data: of the program, if the run brings one.
        """
        with self._starting:
            if self._plan is not None or self._over.is_set() or self._is_abandoned:
                return
            _make_directories()  # the host may be another one than was prepared
            log = state_directory() / f"{job_name(self._run, self._number)}.log"
            agent = plan["agent"] | {"joins": joins}
            plan = plan | {"agent": agent, "log": str(log)}
            try:
                plan = self._living()
            except JobNotFound:
                self._data = Data.of(data) if data is not None else None
                self._begin(plan)
            self._look_after(plan)

    def adopt(self) -> None:
        """Looks after the process that has the machine. Raises JobNotFound if there is none."""
        with self._starting:
            if self._plan is None:
                self._look_after(self._living())

    def _living(self) -> Plan:
        plan = door.ask(self._run, self._number, "plan")
        if plan["program"] is not None:
            self._data = Data.at(plan["data"])
        return plan

    def _look_after(self, plan: Plan) -> None:
        self._plan = plan
        self._lives += 1
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def plan(self) -> Plan | None:
        """Settings of the machine, if it has been started."""
        return self._plan

    def data(self) -> Bytes | None:
        """Of its program, if it has one."""
        return self._data.read() if self._data is not None else None

    def weights(self) -> dict[str, FloatArray]:
        """A copy of those of its job, by the names of the tensors. Raises GadeiError, OSError."""
        return copies.of_job(job_name(self._run, self._number))

    def status(self) -> dict[str, Any]:
        """What the machine is doing, or how it has ended."""
        facts = {"machine": self._number, "host": ray.util.get_node_ip_address()}
        facts |= {"node": ray.get_runtime_context().get_node_id()}
        facts |= {"actor_pid": os.getpid(), "lives": self._lives, "ended": self._summary}
        if self._summary is not None:
            return facts | {"state": self._summary.get("asked", "ended"), "why": None}
        try:
            return facts | door.ask(self._run, self._number, "status") | {"why": self._why}
        except NoAnswer as error:
            return facts | {"state": "silent", "why": in_words(error)}
        except GadeiError:  # it has just ended, or is not there yet, or not again
            return facts | {"state": "ending" if self._is_ending else "starting", "why": self._why}

    def ask(self, what: str, **how: Any) -> dict[str, Any]:
        """A request to the machine's process; nothing if there is none."""
        if what in ("agents", "found") and self._plan is not None:
            changed = keeper.told if what == "agents" else keeper.founded
            self._plan = self._plan | {"agent": changed(self._plan["agent"], **how)}
        with contextlib.suppress(JobNotFound):
            return door.ask(self._run, self._number, what, **how)
        if what not in ("leave", "stop"):
            return {}
        with self._starting:  # a start that is under way ends first
            if self._plan is None:  # who was to begin the machine is gone: it has ended
                self._summary = {"exit_code": 0, "asked": what}
                self._over.set()
        with contextlib.suppress(JobNotFound):
            return door.ask(self._run, self._number, what, **how)
        return {}

    def abandon(self) -> None:
        """Ends the machine if this actor has begun it, and begins it no more. Others are told that
        it has left: its run goes on."""
        self._is_abandoned = True
        with self._starting:
            has_begun = self._has_begun
        if has_begun:
            self.ask("stop", told="leave")
            self.end()

    def end(self) -> dict[str, Any] | None:
        """The summary once the machine has ended; waits for it, but not for ever."""
        self._over.wait(START_S)
        return self._summary

    def clear(self, *, whole: bool = False) -> None:
        """Removes what a killed process of the machine has left here.

        whole: the run has ended. Another command may have noted its cluster here.
        """
        door.clear(self._run, self._number)
        if whole and (noted := rays.noted(self._run)) is not None and noted["token"] is None:
            rays.forget(self._run)

    # -- threads ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Waits for the end of the process; one that was killed is started again."""
        rest_s = FIRST_REST_S
        while True:
            begin = time.monotonic()
            try:
                told = door.ask(self._run, self._number, "await", timeout_s=None)
                self._is_ending = True
                door.wait_for_end(told["pid"])
                self._summary = told["summary"]
                self._over.set()
                return
            except GadeiError as error:
                if door.lives(self._run, self._number):  # it was asked while it began
                    continue
                self._why = f"{in_words(error)}: it joins again"
            if time.monotonic() - begin > MOST_REST_S:
                rest_s = FIRST_REST_S
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, MOST_REST_S)
            self._again()

    def _again(self) -> None:
        assert self._plan is not None
        agent = self._plan["agent"]
        joins = bool(agent["agents"].keys() - {str(agent["number"])})
        with contextlib.suppress(GadeiError, OSError):
            self._begin(self._plan | {"agent": agent | {"joins": joins}})
            self._lives += 1

    def _begin(self, plan: Plan) -> None:
        if plan["program"] is not None:
            if self._data is None:
                raise UsageError(f"machine {self._number} has no data for its learners")
            plan = plan | {"data": self._data.path}
        _start(plan)
        self._has_begun = True

    def _take_up(self) -> None:
        """The actor before this one has died: what its machine is to do is known to the others."""
        while self._plan is None and not self._over.is_set():
            for name in names(self._run):
                if self._plan is None and name != actor_name(self._run, self._number):
                    self._learn_from(name)
            with contextlib.suppress(GadeiError):  # alone, or all others are new, too
                self.start(door.ask(self._run, self._number, "plan"), True)
            time.sleep(FIRST_REST_S)

    def _learn_from(self, name: str) -> None:
        try:
            other = ray.get_actor(name, NAMESPACE)
            plan = ray.get(other.plan.remote(), timeout=door.ANSWER_S)
            if plan is None or (plan := of_machine(plan, self._number)) is None:
                return
            where = plan["agent"]["listen"]
            if not door.lives(self._run, self._number) and _listens(where):
                self._why = f"it trains on at {where}, where Ray does not reach it"
                return
            data = None
            if plan["program"] is not None:
                data = ray.get(other.data.remote(), timeout=START_S)
            self.start(plan, True, data)
        except Exception as error:  # another try is made, whatever Ray says
            self._why = in_words(error)


def of_machine(plan: Plan, number: int) -> Plan | None:
    """The settings of another machine of the same group, from those of one.

    None for a machine that they do not know.
    """
    agents = plan["agent"]["agents"]
    if str(number) not in agents:
        return None
    agent = plan["agent"] | {"number": number, "listen": agents[str(number)]}
    agent["job"] = job_name(plan["run"], number)
    return plan | {"number": number, "agent": agent}


def names(run: str) -> list[str]:
    """The actors of a run that Ray knows, in the order of the machines' numbers."""
    found = ray.util.list_named_actors(all_namespaces=True)
    ours = [one["name"] for one in found if one["namespace"] == NAMESPACE]
    ours = [one for one in ours if one.rpartition(".")[0] == run]
    return sorted(ours, key=lambda one: int(one.rpartition(".")[2]))


def _make_directories() -> None:
    """Of machines, on this host. Raises GadeiError, or OSError."""
    paths.directory(make=True)
    state_directory().mkdir(parents=True, exist_ok=True)


def _free_port(host: str) -> int:
    with addresses.listening((host, 0)) as found:
        return int(found.getsockname()[1])


def _taken(host: str, port: int) -> str | None:
    """Why nobody can listen there, in one line."""
    try:
        addresses.listening((host, port)).close()
    except OSError as error:
        return f"port {port}: {in_words(error)}: choose another `port`"
    return None


def _listens(address: str) -> bool:
    """Whether an agent is there: one that is just starting again is waited for."""
    until = time.monotonic() + ELSEWHERE_S
    while time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(addresses.parse(address), 1),
        ):
            return True
        time.sleep(FIRST_REST_S)
    return False


def _start(plan: Plan) -> None:
    """Starts the process of a machine, and waits until it has begun. Raises UsageError."""
    try:
        done = subprocess.run(
            process.module_command("gadei_ps.cluster.machine"),
            input=json.dumps(plan),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=plan["directory"],
            env=keeper.environment(),
            timeout=START_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"machine {plan['number']} does not begin in {START_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it has ended"]
        raise UsageError(lines[-1].removeprefix("gadei-ps: "))
    print(f"machine {plan['number']} has begun", file=sys.stderr, flush=True)
