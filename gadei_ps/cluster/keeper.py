"""Keeps the agent of a machine running, beside its job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gadei_ps.agents import addresses
from gadei_ps.errors import in_words
from gadei_ps.machine import process

FIRST_REST_S, MOST_REST_S = 0.1, 5.0
"""Between two lives of an agent."""
QUIET_S = 30.0
"""A life that was longer than this begins the rests anew."""
KILL_S = 3.0
MISTAKE, STOPPED = 2, 4
"""Exit codes of an agent: another try would fail as well; its job was stopped."""
_NOWHERE: dict[str, Any] = {"view": None, "waits": [], "stands": False}
_NOWHERE |= {"hears": [], "doubts": [], "refused": ""}
"""The standing of an agent that is no member."""


class Keeper(threading.Thread):
    """Starts the agent, and starts it again until it has left, or is not wanted any more.

    The agent's process dies with this thread.
    """

    def __init__(self, settings: dict[str, Any], failed: Callable[[str], None]) -> None:
        """settings: of the first life, as agents.agent has them. failed: is told why no other life
        will be tried, in this thread."""
        super().__init__(name="agent-keeper", daemon=True)
        self._settings, self._failed = settings, failed
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: int | None = None
        """Where the agent that lives reads orders."""
        self._early: list[dict[str, Any]] = []
        """Orders that have come before it had its settings."""
        self._word: tuple[int, int | None] | None = None
        """Who was given up last, and under which view of the group."""
        self._ending = threading.Event()
        self._leaves = False
        self._is_founded = False
        self.state = "starting"
        """starting, joining, member, left, ended, or failed."""
        self.told: dict[str, Any] = {"rounds": 0, "checksum": None, "address": None, "note": None}
        self.told |= _NOWHERE
        self.why: str | None = None
        """The last words of the life before, or of this one."""
        self.lives = 0
        """Agent processes that were started."""
        self.since: float | None = None
        """When the last round was written, by time.monotonic()."""

    def facts(self) -> dict[str, Any]:
        """What is known of the agent."""
        with self._lock:
            return self.told | {
                "state": self.state,
                "why": _waiting(self.told) or self.why,
                "lives": self.lives,
                "pid": self._process.pid if self._process is not None else None,
                "last_round_s": None if self.since is None else time.monotonic() - self.since,
            }

    @property
    def settings(self) -> dict[str, Any]:
        """Of the next life."""
        with self._lock:
            return dict(self._settings)

    def learn(self, group: int, agents: dict[str, str]) -> None:
        """Where agents of a group can be reached now, by their numbers."""
        with self._lock:
            self._settings = told(self._settings, group, agents)
        self._order({"group": group, "agents": agents})

    def found(self, founding: str, agents: dict[str, str]) -> None:
        """Begins its group anew together with these agents."""
        with self._lock:
            self._settings = founded(self._settings, founding, agents) | {"joins": False}
            self._is_founded = True
        self._signal(signal.SIGKILL)

    def go_on(self, generation: int) -> None:
        """Of the machines that live, none has a later view of the group than this."""
        self._order({"go_on": generation})

    def give_up(self, number: int) -> None:
        """Somebody vouches that this machine is dead. It is said again until the agent knows it."""
        word = number, self.told["view"]
        if word != self._word:
            self._word = word
            _log(f"machine {number} counts as dead unless it is heard: somebody vouches for it")
        self._order({"give_up": number})

    def leave(self) -> None:
        """Asks the agent to leave its group; the thread ends once it has."""
        with self._lock:
            self._leaves = True
        self._signal(signal.SIGTERM)

    def end(self, patience_s: float = KILL_S) -> None:
        """Ends the agent. patience_s: until it is killed; the end of its job ends it, too."""
        self._ending.set()
        if patience_s:
            self._signal(signal.SIGTERM)
            self.join(patience_s)
        self._signal(signal.SIGKILL)
        self.join()

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    def _order(self, told: dict[str, Any]) -> None:
        """To the agent that lives. One that does not read loses what there is no room for."""
        with self._lock, contextlib.suppress(BrokenPipeError, BlockingIOError):
            if self._orders is not None:
                os.write(self._orders, json.dumps(told).encode() + b"\n")
            elif self._process is not None:
                self._early.append(told)

    def run(self) -> None:
        """See the class."""
        rest_s = FIRST_REST_S
        while not (self._ending.is_set() or self._leaves):
            begin = time.monotonic()
            try:
                code = self._live()
            except OSError as error:
                code, self.why = 1, in_words(error)
            if code == 0 or self._leaves:
                self.state = "left"
                return
            if code == STOPPED:
                self.state = "ended"
                return
            if code == MISTAKE and not self._goes_elsewhere():
                self.state = "failed"
                if not self._ending.is_set():
                    self._failed(self.why or f"exit code {code}")
                return
            if time.monotonic() - begin > QUIET_S:
                rest_s = FIRST_REST_S
            self._ending.wait(rest_s)
            rest_s = min(2 * rest_s, MOST_REST_S)
        self.state = "left" if self._leaves else "ended"

    def _live(self) -> int:
        """One life; returns its exit code."""
        with self._lock:
            if self._ending.is_set() or self._leaves:
                return 0
            settings, self._is_founded = self._settings, False
            child = process.spawn(
                process.module_command("gadei_ps.agents.agent"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._process, self._early = child, []
            self.lives += 1
            self.state = "joining" if settings["joins"] else "starting"
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(settings).encode() + b"\n")
            child.stdin.flush()
        with self._lock:
            self._orders = child.stdin.fileno()
            os.set_blocking(self._orders, False)
            early, self._early = self._early, []
        for order in early:
            self._order(order)
        with child.stdout:
            for line in child.stdout:
                self._hear(line.decode(errors="replace").strip())
        code = child.wait()
        with self._lock:
            self._process = self._orders = None
            self.told |= _NOWHERE
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        if code < 0 and not self._ending.is_set():
            self.why = f"was killed by {process.signal_name(-code)}"
        return code

    def _hear(self, line: str) -> None:
        try:
            told = json.loads(line) if line.startswith("{") else None
        except ValueError:
            told = None
        if told is None:
            self.why = line.removeprefix("gadei-ps: ")
            _log(line)
            return
        if "note" in told:
            _log(told["note"])
        with self._lock:
            if "incarnation" in told:
                self._settings = self._settings | {"after": told["incarnation"]}
            if "address" in told and not self._is_founded:  # this life is over
                told["address"] = addresses.written(*told["address"])
                self._joins_from_now(told["address"])
            if "rounds" in told:
                self.state, self.why, self.since = "member", None, time.monotonic()
            self.told |= {name: told[name] for name in self.told if name in told}
        if told.get("waits"):
            _log(str(_waiting(self.told)))

    def _goes_elsewhere(self) -> bool:
        """Whether its port was taken meanwhile: then the next life listens at a free one."""
        with self._lock:
            host, _, port = self._settings["listen"].rpartition(":")
            if port == "0" or not (self.why or "").startswith("cannot listen at"):
                return False
            self._settings = self._settings | {"listen": f"{host}:0"}
            return True

    def _joins_from_now(self, address: str) -> None:
        """This life is known to others: the next one joins, at the same address if it can be had.

        Alone in its group, an agent begins it anew.
        """
        number = str(self._settings["number"])
        others = self._settings["agents"].keys() - {number}
        agents = self._settings["agents"] | {number: address}
        self._settings = self._settings | {"agents": agents, "listen": address}
        self._settings["joins"] = bool(others)


def _waiting(told: dict[str, Any]) -> str | None:
    """Why an agent exchanges nothing, and what to do; None: it does not wait."""
    which = ", ".join(map(str, told["waits"]))
    if told["stands"]:
        return f"machines {which} have died, most of its group: `group run` has the others go on"
    if not which:
        return None
    if told["refused"]:  # it lives, and nobody is to say that it is dead
        return f"hears nothing of {which}: {told['refused']}"
    hosts = "its host" if len(told["waits"]) == 1 else "their hosts"
    return f"hears nothing of {which}, which may live: bring back {hosts}, or `group leave --dead`"


def founded(settings: dict[str, Any], founding: str, agents: dict[str, str]) -> dict[str, Any]:
    """An agent's settings in a group that these begin anew."""
    listen = agents[str(settings["number"])]
    return settings | {"founding": founding, "agents": agents, "listen": listen}


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # no space is left for the log, say
        print(f"agent: {line}", file=sys.stderr, flush=True)


def told(settings: dict[str, Any], group: int, agents: dict[str, str]) -> dict[str, Any]:
    """An agent's settings that know where agents of this group can be reached."""
    if group == settings["group_number"]:
        return settings | {"agents": settings["agents"] | agents}
    sources = {int(one): known for one, known in settings["sources"].items()}
    if group in sources:
        sources[group] = sources[group] | agents
    return settings | {"sources": sources}


def environment() -> dict[str, str]:
    """Of what runs on after Ray: without what Ray has set for its own workers."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours.pop("OMP_NUM_THREADS", None)  # Ray's workers have 1
    return ours
