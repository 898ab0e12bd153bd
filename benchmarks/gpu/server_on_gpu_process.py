"""A process of the experiment, see server_on_gpu: DEVICE learnerN|owner [COUNTERS LEARNERS]

With COUNTERS, a file that all processes map, it takes part in the prototype, else in a job. For
each learner there is a line of two counters: `head` counts the gradients in its slots, `tail` those
whose update the owner has queued:

    learner                                       owner
    wait until tail > n - 2: queued               wait until head > n
    stream waits for applied[n % 2]               stream waits for copied[n % 2]
    gradient from the weights, copy into slot     weights -= lr * slot
    record copied[n % 2]                          record applied[n % 2]
    head = n + 1                                  tail = n + 1

So an event is recorded before it is waited for, and waited for before it is recorded again.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gadei_ps.benchmarks.peers import LR, answer, orders
from gadei_ps.learners import devices  # and not torch, whose import takes seconds
from gadei_ps.learners.client import Client
from gadei_ps.learners.pipeline import Pipeline

SLOTS = 2
LINE = 64
HEAD, TAIL = 0, 1
ALIGNED = 2 << 20  # CUDA shares whole blocks of this size only
PATIENCE_S = 10.0
SHRINK = np.float32(1e-3)
"""The gradient is the weights times this: a computation that reads and writes all of it."""


class Side(Protocol):
    """Answers the orders that a process gets after "job" or "open"."""

    def run(self, times: int) -> dict[str, float]:
        """Make or apply `times` gradients. A learner returns its start and end."""

    def close(self) -> None:
        """Release all resources."""


class OnHost:
    """A learner of a job; with --device host it computes on the host."""

    def __init__(self, device: str, name: str) -> None:
        self._client = Client(name)
        self._pipeline = Pipeline(self._client, devices.choose(device))

    def run(self, times: int) -> dict[str, float]:
        """See Side."""
        begin = time.perf_counter()
        for _ in range(times):
            weights, gradient = self._pipeline.weights()["w"], self._pipeline.gradients()["w"]
            _compute(weights, gradient)
            self._pipeline.push({"w": gradient})
        self._pipeline.flush()
        self._client.wait_applied(timeout_s=PATIENCE_S)
        return {"begin": begin, "end": time.perf_counter()}

    def close(self) -> None:
        """See Side."""
        self._pipeline.close()
        self._client.detach()


def _compute(weights: Any, gradient: Any) -> None:
    """Compute a gradient on the current stream."""
    module = np if isinstance(weights, np.ndarray) else _cupy()
    module.multiply(weights, SHRINK, out=gradient)


def _cupy() -> Any:
    import cupy

    return cupy


class Counters:
    """head and tail of each learner, in a file that all processes map."""

    def __init__(self, path: Path, learners: int) -> None:
        size = LINE * learners
        with open(path, "a+b") as file:
            if path.stat().st_size < size:
                file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self.words = np.frombuffer(self._map, np.uint64).reshape(learners, LINE // 8)

    def wait(self, learner: int, word: int, least: int) -> None:
        """Wait until a word is at least this. Raises TimeoutError if the other side is gone."""
        until = 0.0
        words = self.words[learner]
        while words[word] < least:
            now = time.monotonic()
            until = until or now + PATIENCE_S
            if now > until:
                raise TimeoutError("the other process of the prototype does not answer")


class Memory:
    """The block of a GPU's memory: the weights, then the slots of each learner in turn."""

    def __init__(self, at: int, size: int, learners: int) -> None:
        """size: bytes of the model."""
        cupy = _cupy()
        self._stride = _rounded(size, 512)
        block = cupy.cuda.UnownedMemory(at, self.total(size, learners), self, 0)

        def part(number: int) -> Any:
            pointer = cupy.cuda.MemoryPointer(block, number * self._stride)
            return cupy.ndarray((size // 4,), cupy.float32, pointer)

        self.weights = part(0)
        self.slots = [
            [part(1 + SLOTS * learner + slot) for slot in range(SLOTS)]
            for learner in range(learners)
        ]

    @staticmethod
    def total(size: int, learners: int) -> int:
        """Return the size of the block (bytes)."""
        return _rounded(_rounded(size, 512) * (1 + SLOTS * learners), ALIGNED)


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


class Owner:
    """Has the memory and applies gradients."""

    def __init__(self, counters: Counters, learners: int, size: int) -> None:
        cupy = _cupy()
        runtime = cupy.cuda.runtime
        self._counters, self._learners = counters, learners
        counters.words[:] = 0
        self._at = runtime.malloc(Memory.total(size, learners))
        self.memory = Memory(self._at, size, learners)
        self.memory.weights.fill(1)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._events = [
            [[_interprocess() for _ in range(SLOTS)] for _ in range(learners)]
            for _ in ("copied", "applied")
        ]
        self._update = cupy.ElementwiseKernel(
            "float32 gradient, float32 rate",
            "float32 weight",
            "weight -= rate * gradient",
            "gadei_ps_prototype",
        )
        # Compiles it now, so that no measurement contains that.
        self._update(cupy.zeros(4, cupy.float32), np.float32(LR), cupy.zeros(4, cupy.float32))
        runtime.deviceSynchronize()
        self.handles = {
            "bytes": size,
            "memory": runtime.ipcGetMemHandle(self._at).hex(),
            "events": [
                [[runtime.ipcGetEventHandle(one.ptr).hex() for one in slots] for slots in kind]
                for kind in self._events
            ],
        }

    def run(self, times: int) -> dict[str, float]:
        """See Side: applies `times` gradients of each learner."""
        words = self._counters.words
        copied, applied = self._events
        done = [int(line[TAIL]) for line in words]
        ends = [one + times for one in done]
        unfinished = self._learners
        until = time.monotonic() + PATIENCE_S
        with self._stream:
            while unfinished:
                for learner in range(self._learners):
                    number = done[learner]
                    if number == ends[learner] or words[learner, HEAD] <= number:
                        continue
                    slot = number % SLOTS
                    self._stream.wait_event(copied[learner][slot])
                    gradient = self.memory.slots[learner][slot]
                    self._update(gradient, np.float32(LR), self.memory.weights)
                    applied[learner][slot].record(self._stream)
                    done[learner] = number + 1
                    words[learner, TAIL] = number + 1
                    unfinished -= number + 1 == ends[learner]
                    until = time.monotonic() + PATIENCE_S
                if time.monotonic() > until:
                    raise TimeoutError("no gradient arrives")
        self._stream.synchronize()
        return {}

    def close(self) -> None:
        """See Side. All learners must have closed before."""
        runtime = _cupy().cuda.runtime
        runtime.deviceSynchronize()
        runtime.free(self._at)


def _interprocess() -> Any:
    return _cupy().cuda.Event(disable_timing=True, interprocess=True)


class Learner:
    """Computes from the owner's weights and copies into its slots."""

    def __init__(
        self, counters: Counters, learners: int, number: int, handles: dict[str, Any]
    ) -> None:
        cupy = _cupy()
        runtime = cupy.cuda.runtime
        self._counters, self._number = counters, number
        self._at = runtime.ipcOpenMemHandle(bytes.fromhex(handles["memory"]))
        self._memory = Memory(self._at, handles["bytes"], learners)
        self._copied, self._applied = (
            [runtime.ipcOpenEventHandle(bytes.fromhex(one)) for one in kind[number]]
            for kind in handles["events"]
        )
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._gradient = cupy.zeros(handles["bytes"] // 4, cupy.float32)
        runtime.deviceSynchronize()

    def run(self, times: int) -> dict[str, float]:
        """See Side."""
        runtime = _cupy().cuda.runtime
        stream, words = self._stream.ptr, self._counters.words[self._number]
        begin = time.perf_counter()
        first = int(words[HEAD])
        with self._stream:
            for number in range(first, first + times):
                slot = number % SLOTS
                _compute(self._memory.weights, self._gradient)
                if number >= SLOTS:
                    self._counters.wait(self._number, TAIL, number - SLOTS + 1)
                    runtime.streamWaitEvent(stream, self._applied[slot])
                to = self._memory.slots[self._number][slot]
                runtime.memcpyAsync(
                    to.data.ptr,
                    self._gradient.data.ptr,
                    to.nbytes,
                    runtime.memcpyDeviceToDevice,
                    stream,
                )
                runtime.eventRecord(self._copied[slot], stream)
                words[HEAD] = number + 1
        last = first + times
        self._counters.wait(self._number, TAIL, last)
        runtime.eventSynchronize(self._applied[(last - 1) % SLOTS])
        return {"begin": begin, "end": time.perf_counter()}

    def close(self) -> None:
        """See Side."""
        runtime = _cupy().cuda.runtime
        runtime.deviceSynchronize()
        for one in (*self._copied, *self._applied):
            runtime.eventDestroy(one)
        runtime.ipcCloseMemHandle(self._at)


def main() -> None:
    """Carry out commands: {"job"}, or {"bytes"} to the owner and then {"open"}; {"times"}: run.

    The prototype ends by {"close"}, then {"free"} to the owner: memory must not be freed while
    others have it mapped.
    """
    device, role = sys.argv[1:3]
    learners = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    counters = Counters(Path(sys.argv[3]), learners) if learners else None
    side: Side | None = None
    for order in orders():
        if "times" in order:
            assert side is not None
            answer(side.run(order["times"]))
            continue
        if "bytes" in order:
            assert counters is not None
            side = owner = Owner(counters, learners, order["bytes"])
            answer(owner.handles)
            continue
        if "open" in order:
            if role != "owner":
                assert counters is not None
                number = int(role.removeprefix("learner"))
                side = Learner(counters, learners, number, order["open"])
        elif "close" not in order or role != "owner":
            if side is not None:
                side.close()
            side = OnHost(device, order["job"]) if order.get("job") else None
        answer({})
    if side is not None:
        side.close()


if __name__ == "__main__":
    main()
