"""The paper's learner (GaDei, section 4.1 and Figure 5): compute, push and pull overlap.

The main thread computes. A push thread and a pull thread move data; each is joined to it by a queue
of size one (the paper's pushCnt and pullCnt, 0 or 1). Gradients and weights are double-buffered:
one is computed with while the other is on its way. Buffers are swapped, never copied.

    with Pipeline(client, Host()) as pipeline:
        while ...:
            weights = pipeline.weights()             # the newest that have arrived
            pipeline.push(gradients, loss=...)       # returns at once unless the last still waits

Deadlock-free as the paper's is: the threads hold no lock while they wait for one another.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gadei_ps import layout
from gadei_ps.errors import JobStopped, PushTimeout, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.device import Device

_POLL_S = 0.1  # a thread that waits for the main one looks this often whether it is to end


@dataclass
class _Push:
    gradients: Mapping[str, Any]
    version: int
    facts: dict[str, Any]


@dataclass
class _Copy:
    """Weights on the device, and the version they had."""

    buffer: Any
    version: int
    views: dict[str, Any] = field(default_factory=dict)


class Pipeline:
    """Push and pull threads around a client.

    From now on the pipeline alone pushes and pulls; batches are still taken from the client.
    """

    def __init__(self, client: Client, device: Device) -> None:
        if client.waits_for_others:
            raise UsageError(
                'a pipeline computes ahead of the barrier: use it in a job with sync = "asp"'
            )
        self.client = client
        self.device = device
        self._front, self._back = (
            _Copy(device.buffer(client.model.elements), -1) for _ in range(2)
        )
        for copy in (self._front, self._back):
            copy.views = device.views(client.model, copy.buffer)
        self._to_push: queue.Queue[_Push] = queue.Queue(1)
        self._to_pull: queue.Queue[_Copy] = queue.Queue(1)
        self._pulled: queue.Queue[_Copy] = queue.Queue(1)
        self._failure: BaseException | None = None
        self._closing = threading.Event()
        self._pull_into(self._front)
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for loop, name in ((self._push_loop, "push"), (self._pull_loop, "pull"))
        ]
        for thread in self._threads:
            thread.start()
        self._to_pull.put(self._back)

    def weights(self) -> dict[str, Any]:
        """The newest weights that have arrived, by name; valid until the next call.

        Starts the next pull. Raises what a thread has met.
        """
        self._raise_failure()
        try:
            arrived = self._pulled.get_nowait()
        except queue.Empty:
            return self._front.views
        self._front, used = arrived, self._front
        self._to_pull.put(used)
        return self._front.views

    @property
    def version(self) -> int:
        """Version of the weights that weights() returned last."""
        return self._front.version

    def push(self, gradients: Mapping[str, Any], **facts: Any) -> None:
        """Hands gradients over; they must not be changed afterwards. Waits while the last one,
        handed over before, has not begun its way. `facts`: loss, samples, rate_scale, batch."""
        item = _Push(gradients, self._front.version, facts)
        while True:
            self._raise_failure()
            try:
                self._to_push.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def flush(self) -> None:
        """Waits until all that was handed over is published."""
        while self._to_push.unfinished_tasks:
            self._raise_failure()
            self._closing.wait(0.001)

    def close(self) -> None:
        """Publishes what was handed over and ends the threads."""
        try:
            self.flush()
        finally:
            self._closing.set()
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:  # do not hide the error behind another one
            self._failure = self._failure or JobStopped("the learner has failed")
            self._closing.set()
            for thread in self._threads:
                thread.join()
            return
        self.close()

    def _run(self, loop: Any) -> None:
        try:
            loop()
        except BaseException as error:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _push_loop(self) -> None:
        while not self._closing.is_set():
            try:
                item = self._to_push.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            slot = self._claim()
            self.device.store(self.client, slot + layout.PAYLOAD_AT, item.gradients)
            self.client.publish(version=item.version, **item.facts)
            self._to_push.task_done()

    def _claim(self) -> int:
        while True:
            try:
                return self.client.claim(timeout_s=_POLL_S)
            except PushTimeout:
                if self._closing.is_set():
                    raise

    def _pull_loop(self) -> None:
        while not self._closing.is_set():
            try:
                copy = self._to_pull.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            # Section 4.1: a pull is skipped while the weights are current.
            while self._current_version() == self._front.version and not self._closing.is_set():
                self._closing.wait(0.0005)
            self._pull_into(copy)
            self._pulled.put(copy)

    def _current_version(self) -> int:
        return self.client.current_version

    def _pull_into(self, copy: _Copy) -> None:
        copy.version = self._current_version()
        self.device.load(self.client.flat, copy.buffer)
