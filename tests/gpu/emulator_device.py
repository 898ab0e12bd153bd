"""The emulated device: its memory, streams and events."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

READ_ONLY = 8
DAWDLE_S = 0.002
CONTEXT_BYTES = 1 << 16  # a GPU's are some hundred MiB
OUT_OF_MEMORY, UNKNOWN = 2, 999
CONTEXT = 7  # a handle


class CudaError(RuntimeError):
    """An error of CUDA's runtime."""

    def __init__(self, message: str, status: int = UNKNOWN) -> None:
        super().__init__(message)
        self.status = status


class DriverError(RuntimeError):
    """An error of CUDA's driver, another class, as with CuPy."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_UNKNOWN: error {status}")
        self.status = status


class OutOfMemory(MemoryError):
    pass


class Contexts(threading.local):
    """The contexts of a thread, as CUDA's driver keeps them; a thread begins without one."""

    def __init__(self) -> None:
        self._stack = [0]

    @property
    def current(self) -> int:
        return self._stack[-1]

    def push(self, context: int) -> None:
        self._stack.append(context)

    def pop(self) -> None:
        self._stack.pop()


class Device:
    """A device: its memory, what it has registered of the host's, and its streams."""

    def __init__(self) -> None:
        self.total = 1 << 30
        self.used = 0
        self.read_only_supported = True
        self.read_only_works = True
        self.foreign = False  # whether arrays of other libraries count as the device's
        self.allocated: dict[int, int] = {}
        self.registered: dict[int, tuple[int, int]] = {}
        self.failure: BaseException | None = None
        self.has_context = False
        self.contexts = Contexts()
        self.fails: Callable[[str], int] = lambda name: 0
        """Returns the error of a function of the driver, or 0 if it works."""
        self.functions: list[tuple[str, Any]] = []
        """Kernels. Their handles count from 1."""
        self.waiting: set[int] = set()
        """Handles of the streams that wait for an event."""
        self.handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Streams and events that exist."""
        self.numbers = itertools.count(1)
        self.compute: Stream | Inline = Inline(self)
        """The stream that is computed on: CuPy's current one."""
        self.handles[0] = self.compute

    def check(self) -> None:
        if self.failure is not None:
            raise CudaError(f"cudaErrorUnknown: {self.failure!r}")

    def stream(self, handle: int) -> Any:
        found = self.handles.get(handle)
        assert isinstance(found, Stream | Inline), f"no stream: {handle}"
        return found

    def event(self, handle: int) -> Any:
        found = self.handles.get(handle)
        assert isinstance(found, Event), f"no event: {handle}"
        return found

    def need_context(self) -> None:
        """Make this process's context at the first call that needs one."""
        self.check()
        if not self.has_context and self.total - self.used < CONTEXT_BYTES:
            raise CudaError("cudaErrorMemoryAllocation: out of memory", OUT_OF_MEMORY)
        self.has_context = True

    def on_device(self, at: int, size: int) -> bool:
        return self.foreign or any(
            begin <= at and at + size <= begin + room for begin, room in self.allocated.items()
        )

    def pinned(self, at: int, size: int, *, to_write: bool) -> bool:
        return any(
            begin <= at and at + size <= begin + room and not (to_write and flags & READ_ONLY)
            for begin, (room, flags) in self.registered.items()
        )


class Stream:
    """A thread that does one thing after the other, each after a random while."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ptr = next(device.numbers)
        device.handles[self.ptr] = self
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._random = random.Random(self.ptr)
        self._thread = threading.Thread(target=_work, args=(weakref.ref(self), self._work))
        self._thread.daemon = True
        self._thread.start()
        weakref.finalize(self, self._work.put, None)

    def add(self, call: Callable[[], None]) -> None:
        self.device.check()
        self._work.put(call)

    def synchronize(self) -> None:
        self._work.join()
        self.device.check()

    def pause(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * DAWDLE_S)


def _work(stream: weakref.ref[Stream], work: queue.Queue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        alive = stream()
        try:
            if alive is not None:
                alive.pause()
            call()
        except BaseException as error:
            if alive is not None:
                alive.device.failure = alive.device.failure or error
        finally:
            del alive
            work.task_done()
    work.task_done()


class Inline:
    """The stream of a library that computes at once, on the calling thread."""

    ptr = 0

    def __init__(self, device: Device) -> None:
        self.device = device

    def add(self, call: Callable[[], None]) -> None:
        self.device.check()
        call()

    def synchronize(self) -> None:
        self.device.check()


class Event:
    def __init__(self, device: Device) -> None:
        self.ptr = next(device.numbers)
        device.handles[self.ptr] = self
        self.reached: threading.Event | None = None


def zeros(device: Device, size: int) -> np.ndarray:
    if device.used + size > device.total:
        raise OutOfMemory(f"Out of memory allocating {size:,} bytes")
    room = np.zeros(size + 512, np.uint8)
    begin = -room.ctypes.data % 512
    made = room[begin : begin + size]
    device.used += size
    device.allocated[made.ctypes.data] = size
    weakref.finalize(room, _freed, device, made.ctypes.data, size)
    return made


def _freed(device: Device, at: int, size: int) -> None:
    device.used -= size
    device.allocated.pop(at, None)
