"""Agents as processes beside jobs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from typing import Any

EVERY = 200
CALM_S = 4.0  # so long one may be silent: none hangs, and on a busy host each may be late
TOKEN = "a token of the tests"


class Agent:
    """The agent's process, and what it tells."""

    def __init__(self, job: str, number: int, agents: dict[int, str], **others: Any) -> None:
        settings: dict[str, Any] = {"job": job, "group": "g", "number": number, "token": TOKEN}
        settings |= {"agents": agents, "listen": agents.get(number, "127.0.0.1:0")}
        settings |= {"rule": "outer:1:0", "every": EVERY, "silence_s": CALM_S} | others
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gadei_ps.agents.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        self.orders = self.process.stdin
        self.order(settings)
        self.rounds: dict[int, int] = {}
        self.notes: list[str] = []

    def order(self, told: dict[str, Any]) -> None:
        """Tells it something; its settings come first."""
        self.orders.write(json.dumps(told) + "\n")
        self.orders.flush()

    def next(self) -> dict[str, Any]:
        assert self.process.stdout and self.process.stderr
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        told: dict[str, Any] = json.loads(line)
        if "rounds" in told:
            assert told["rounds"] not in self.rounds
            self.rounds[told["rounds"]] = told["checksum"]
        if "note" in told:
            self.notes.append(told["note"])
        return told

    def go_on(self, rounds: int) -> None:
        """Returns after this many rounds more."""
        until = max(self.rounds, default=0) + rounds
        while max(self.rounds, default=0) < until:
            self.next()

    def hears(self, note: str) -> None:
        """Returns once people are to know something with these words."""
        while not any(note in one for one in self.notes):
            self.next()

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        assert self.process.stdout and self.process.stderr
        # Not by communicate(), which leaves out what next() has read ahead, perhaps half a line.
        for line in self.process.stdout:
            told = json.loads(line)
            if "rounds" in told:
                self.rounds[told["rounds"]] = told["checksum"]
        for stream in (self.orders, self.process.stdout, self.process.stderr):
            stream.close()
        return self.process.wait()


def alike(*agents: Agent) -> None:
    """What several of them have written is the same."""
    common = set.intersection(*(set(one.rounds) for one in agents))
    assert common
    for rounds in common:
        assert len({one.rounds[rounds] for one in agents}) == 1


def ports(count: int) -> list[int]:
    """Free ones, now."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [door.getsockname()[1] for door in doors]
