"""The words about real servers, from their start to the job's stop: all combinations are legal."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
from support import daemon, eventually, status

from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, lifecycle, segment, shm
from gadei_ps.memory.lifecycle import ACTIVE, Stage

VALUES = 3000
Words = tuple[tuple[tuple[int, int, bool], ...], int, int, int, int, int]


class Watcher(threading.Thread):
    """Collects what the words about a job's servers are, from its first instant on.

    Not one word after the other: what is collected twice in a row was there at one instant.
    """

    def __init__(self, job: str) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._ended = threading.Event()
        self.seen: set[Words] = set()

    def stages(self) -> set[tuple[Stage, ...]]:
        """The stages of both servers together."""
        return {
            tuple(
                lifecycle.of_words(pid=pid, state=state, confirmed=confirmed, active=words[1])
                for pid, state, confirmed in words[0]
            )
            for words in list(self.seen)
        }

    def run(self) -> None:
        control: np.void | None = None
        before: Words | None = None
        while not self._ended.is_set():
            if control is None:
                name = shm.segment_name(self._job, "control")
                try:
                    kind = layout.SegmentKind.CONTROL
                    self._segment = segment.attach(name, kind, writable=False)
                except (FileNotFoundError, segment.SegmentError):
                    continue
                control = self._segment.view(layout.CONTROL)
            now = self._collect(control)
            if now == before:
                self.seen.add(now)
            before = now
            self._ended.wait(1e-4)

    @staticmethod
    def _collect(control: np.void) -> Words:
        servers = tuple(
            (int(one["pid"]), int(one["state"]), bool(one["confirmed"]))
            for one in control["server"]
        )
        names = ("lease_pid", "lease_generation", "lease_state", "lease_shards", "model_ready")
        return (servers, *(int(control[name]) for name in names))  # type: ignore[return-value]

    def end(self) -> None:
        self._ended.set()
        self.join()


def check(words: Words) -> None:
    servers, active, generation, serves, shards, model = words
    stages = [
        lifecycle.of_words(pid=pid, state=state, confirmed=confirmed, active=active)
        for pid, state, confirmed in servers
    ]
    assert Stage.ILLEGAL not in stages, words
    assert sum(one in ACTIVE for one in stages) <= 1, words
    assert generation or not (serves or shards), words
    assert model or not shards, words


def test_start_failover_stop(job_name: str) -> None:
    watcher = Watcher(job_name)
    watcher.start()
    weights, gradient = ({"w": np.full(VALUES, one, np.float32)} for one in (0, 1))

    found: dict[str, Any] = {}

    def both_are_there() -> bool:
        found.update(status(job_name))
        return found["server_pid"] > 0 and found["standby_pid"] > 0

    try:
        with daemon(job_name, standby=True), Client(job_name, tensors=weights) as client:
            for killed in ((), ("server_pid",), ("standby_pid",), ("server_pid", "standby_pid")):
                eventually(both_are_there)
                for name in killed:
                    os.kill(found[name], signal.SIGKILL)
                client.push(gradient)
                client.wait_applied()
            eventually(both_are_there)
    finally:
        watcher.end()
    assert watcher.seen
    for words in watcher.seen:
        check(words)
    each = {one for stages in watcher.stages() for one in stages}
    assert {Stage.STARTING, Stage.STANDBY, Stage.SERVING} <= each
    assert (Stage.SERVING, Stage.STANDBY) in watcher.stages()
    assert any(words[2] >= 3 for words in watcher.seen), "servers have followed each other"
