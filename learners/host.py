"""The host's memory as a device: NumPy arrays, copied by a push thread and a pull thread.

A queue of size one joins each thread to the one that computes. They cannot deadlock, for the same
reason as in the paper: a thread holds no lock while it waits for another.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.memory.weights import FloatArray

CLOSED = "this pipeline is closed, or its client has detached"
POLL_S = 0.1  # how often a waiting thread looks whether it is to end
NEWER_S = 0.0005  # how often the pull thread looks whether there are newer weights
IN_FLIGHT = 3  # gradients: one being computed, one in the queue, one being copied


class Host:
    """Gradients go from NumPy arrays straight into the slot, without a staging copy."""

    name = "host"

    def link(self, client: Client) -> HostLink:
        return HostLink(client)


@dataclass
class _Push:
    gradients: Mapping[str, Any]
    version: int
    facts: dict[str, Any]


class HostLink:
    """See devices.Link."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.version = -1
        self._writes = -1  # client.writes before the last pull
        self._filled = -1  # the same, of the last fill
        self._room: list[dict[str, FloatArray]] = []
        self._next_room = 0
        self._to_push: queue.Queue[_Push] = queue.Queue(1)
        self._pulling = False  # a pull is in flight
        self._to_pull: queue.Queue[FloatArray] = queue.Queue(1)
        self._pulled: queue.Queue[tuple[int, int]] = queue.Queue(1)  # as _copy returns
        self._failure: BaseException | None = None
        self._raised = False
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for loop, name in ((self._push_loop, "push"), (self._pull_loop, "pull"))
        ]
        for thread in self._threads:
            thread.start()
        client.set_publisher(self)

    def buffer(self) -> FloatArray:
        return np.zeros(self._client.model.elements, np.float32)

    def views(self, buffer: FloatArray) -> dict[str, FloatArray]:
        return self._client.model.views(buffer)

    def fill(self, buffer: FloatArray) -> None:
        self._filled, self.version = self._copy(buffer)

    def pull(self, buffer: FloatArray) -> None:
        if not self._pulling:
            self._pulling = True
            self._to_pull.put(buffer)

    def pulled(self) -> bool:
        self.check()
        try:
            writes, version = self._pulled.get_nowait()
        except queue.Empty:
            return False
        self._pulling = False
        if writes < self._filled:
            return False  # it began before the last fill
        self.version = version
        return True

    def gradients(self) -> dict[str, FloatArray]:
        if not self._room:
            model = self._client.model
            self._room = [model.gradients(self.buffer()) for _ in range(IN_FLIGHT)]
        return self._room[self._next_room]

    def push(self, gradients: Mapping[str, Any], version: int, **facts: Any) -> None:
        item = _Push(gradients, version, facts)
        while True:
            self.check()
            if self._closing.is_set():
                raise UsageError(CLOSED)
            try:
                self._to_push.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            self._next_room = (self._next_room + 1) % IN_FLIGHT
            return

    def flush(self) -> None:
        if threading.current_thread() is self._threads[0]:
            return  # it publishes in turn: all before its current one is published
        while self._to_push.unfinished_tasks:
            self.check()
            if not self._threads[0].is_alive():
                raise UsageError(CLOSED)  # it was handed over while the link was closed
            self._closing.wait(0.001)

    def close(self) -> None:
        if self._closing.is_set():
            return
        if self._raised:
            self._end()
            return
        try:
            self.flush()
        except BaseException as error:
            self._failure = self._failure or error  # ends a push that waits
            raise
        finally:
            self._end()

    def abandon(self) -> None:
        self._failure = self._failure or JobStopped("the learner has failed")
        self._end()

    def _end(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._client.clear_publisher(self)

    def _run(self, loop: Any) -> None:
        try:
            loop()
        except BaseException as error:
            self._failure = self._failure or error

    def check(self) -> None:
        """Raise the error because of which what is in flight will never arrive."""
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _push_loop(self) -> None:
        while not self._closing.is_set():
            try:
                item = self._to_push.get(timeout=POLL_S)
            except queue.Empty:
                continue
            # Its waits end when the link fails: the client asks check().
            self._client.push(item.gradients, version=item.version, **item.facts)
            self._to_push.task_done()

    def _pull_loop(self) -> None:
        while not self._closing.is_set():
            try:
                buffer = self._to_pull.get(timeout=POLL_S)
            except queue.Empty:
                continue
            # Section 4.1: a pull is skipped while the weights are current.
            while self._client.writes == self._writes and not self._closing.is_set():
                self._closing.wait(NEWER_S)
            self._pulled.put(self._copy(buffer))

    def _copy(self, buffer: FloatArray) -> tuple[int, int]:
        """Copy the weights; return client.writes and the version from before."""
        self._writes = writes = self._client.writes
        version = self._client.base_version
        np.copyto(buffer, self._client.flat)
        return writes, version
