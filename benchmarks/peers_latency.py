"""A learner that pushes 4 KB and waits until they are applied. Its server is a child process.

python -m gadei_ps.benchmarks.peers_latency pipe|queue|zmq|iceoryx2 spinning|asleep SCRATCH
python -m gadei_ps.benchmarks.peers_latency gadei-ps MODE JOB, with the server of the job

Servers apply in numpy and answer with one byte. In the mode spinning, contenders that can spin do
so. The others block in the kernel.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.benchmarks.peers import Floats, Numpy, answer, die_with, gradient, orders

BYTES = 4096
WARM_UP = 20
# This long after the last push, a spinning server releases its core for other contenders.
SPIN_S = 1e-3
DOZE_S = 1e-3
READY_S = 10.0
DONE = b"\1"

Push = Callable[[], None]


class Pipe:
    """multiprocessing.Pipe, one for each direction: one-way pipes are faster."""

    def __init__(self, spin: bool, scratch: str) -> None:
        self.to, self.by = mp.Pipe(duplex=False), mp.Pipe(duplex=False)

    def gradients(self) -> Iterator[Floats]:
        """Server: yields gradients as they arrive. Answers one when the next is requested."""
        buffer = np.empty(BYTES // 4, np.float32)
        while True:
            self.to[0].recv_bytes_into(buffer)
            yield buffer
            self.by[1].send_bytes(DONE)

    def learner(self) -> Push:
        """Learner: a function that pushes and waits for the answer."""
        pushed = gradient(BYTES // 4).tobytes()

        def push() -> None:
            self.to[1].send_bytes(pushed)
            self.by[0].recv_bytes()

        return push


class Queue:
    """multiprocessing.Queue."""

    def __init__(self, spin: bool, scratch: str) -> None:
        self.to: Any = mp.Queue()
        self.by: Any = mp.Queue()

    def gradients(self) -> Iterator[Floats]:
        """See Pipe."""
        while True:
            yield self.to.get()
            self.by.put(DONE)

    def learner(self) -> Push:
        """See Pipe."""
        pushed = gradient(BYTES // 4)

        def push() -> None:
            self.to.put(pushed)
            self.by.get()

        return push


class ZeroMQ:
    """A pair of ZeroMQ sockets over ipc://."""

    def __init__(self, spin: bool, scratch: str) -> None:
        import zmq

        self.zmq: Any = zmq
        self.address = f"ipc://{scratch}/zmq-{os.getpid()}"

    def gradients(self) -> Iterator[Floats]:
        """See Pipe."""
        socket = self.zmq.Context().socket(self.zmq.PAIR)
        socket.connect(self.address)
        while True:
            yield np.frombuffer(socket.recv(), np.float32)
            socket.send(DONE)

    def learner(self) -> Push:
        """See Pipe."""
        socket = self.zmq.Context().socket(self.zmq.PAIR)
        socket.linger = 0
        socket.bind(self.address)
        pushed = gradient(BYTES // 4)

        def push() -> None:
            socket.send(pushed)
            socket.recv()

        return push


class Iceoryx2:
    """Publish-subscribe in both directions, with busy loops or with events that wake."""

    def __init__(self, spin: bool, scratch: str) -> None:
        import iceoryx2

        self.iox: Any = iceoryx2
        self.spin, self.scratch = spin, scratch
        self.ready = mp.Event()  # earlier publications have no subscriber
        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)

    def _open(self) -> None:
        """Open the services. Each process has its own node."""
        config = self.iox.config.default()
        # Own names and files, which can be removed after any end of this process.
        config.global_cfg.prefix = self.iox.FileName.new(Path(self.scratch).name + "_")
        config.global_cfg.root_path = self.iox.Path.new(self.scratch)
        self.node = self.iox.NodeBuilder.new().config(config).create(self.iox.ServiceType.Ipc)

        def service(name: str) -> Any:
            return self.node.service_builder(self.iox.ServiceName.new(name))

        self.to = service("gradient").publish_subscribe(ctypes.c_uint8 * BYTES).open_or_create()
        self.by = service("done").publish_subscribe(ctypes.c_uint8).open_or_create()
        self.pushed = service("pushed").event().open_or_create()
        self.applied = service("applied").event().open_or_create()

    def gradients(self) -> Iterator[Floats]:
        """See Pipe."""
        self._open()
        subscriber = self.to.subscriber_builder().create()
        publisher = self.by.publisher_builder().create()
        listener = self.pushed.listener_builder().create()
        notifier = self.applied.notifier_builder().create()
        self.ready.set()
        last = time.perf_counter()
        while True:
            while (sample := subscriber.receive()) is None:
                if not self.spin:
                    listener.blocking_wait()
                elif time.perf_counter() - last > SPIN_S:
                    time.sleep(DOZE_S)
            yield np.frombuffer(sample.payload().contents, np.float32)
            sample.delete()
            publisher.loan_uninit().write_payload(ctypes.c_uint8(1)).send()
            if not self.spin:
                notifier.notify()
            last = time.perf_counter()

    def learner(self) -> Push:
        """See Pipe."""
        self._open()
        publisher = self.to.publisher_builder().create()
        subscriber = self.by.subscriber_builder().create()
        notifier = self.pushed.notifier_builder().create()
        listener = self.applied.listener_builder().create()
        self.ready.wait(READY_S)
        values = gradient(BYTES // 4)
        source, spin = values.ctypes.data, self.spin

        def push() -> None:
            sample = publisher.loan_uninit()
            ctypes.memmove(sample.payload_ptr, source, values.nbytes)
            sample.assume_init().send()
            if not spin:
                notifier.notify()
            while (reply := subscriber.receive()) is None:
                if not spin:
                    listener.blocking_wait()
            reply.delete()

        return push


WAYS: dict[str, type[Pipe | Queue | ZeroMQ | Iceoryx2]] = {
    "pipe": Pipe,
    "queue": Queue,
    "zmq": ZeroMQ,
    "iceoryx2": Iceoryx2,
}


def served_by_child(way: Pipe | Queue | ZeroMQ | Iceoryx2) -> Push:
    """Start the server. Returns the learner's push."""
    parent = os.getpid()

    def serve() -> None:
        die_with(parent)
        update, weights = Numpy(), np.zeros(BYTES // 4, np.float32)
        for pushed in way.gradients():
            update(weights, pushed)
            del pushed  # it may lie in memory that is released now

    child = mp.get_context("fork").Process(target=serve, daemon=True)
    child.start()
    return way.learner()


def by_gadei_ps(job: str) -> Push:
    """The push of a learner of `job`."""
    from gadei_ps.learners.client import Client

    client = Client(job)
    pushed = gradient(client.model.elements)

    def push() -> None:
        client.push(pushed)
        client.wait_applied()

    return push


def timed(push: Push, times: int, pause_s: float) -> list[float]:
    """Return the time (s) of each push, in order."""
    taken = []
    for number in range(WARM_UP + times):
        if pause_s:
            time.sleep(pause_s)
        begin = time.perf_counter()
        push()
        if number >= WARM_UP:
            taken.append(time.perf_counter() - begin)
    return sorted(taken)


def quantiles(taken: list[float]) -> dict[str, float]:
    """The answer: the median and the 99th percentile of sorted seconds."""
    return {"p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100]}


def main() -> None:
    """Order {"times", "pause_s"}: push `times` times, with a pause before each push."""
    kind, mode, where = sys.argv[1:]
    if kind == "gadei-ps":
        push = by_gadei_ps(where)
    else:
        push = served_by_child(WAYS[kind](mode == "spinning", where))
    for order in orders():
        answer(quantiles(timed(push, order["times"], order["pause_s"])))


if __name__ == "__main__":
    main()
