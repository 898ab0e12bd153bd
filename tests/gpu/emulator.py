"""A CUDA device in software, as far as gadei_ps.learners.cuda goes, in place of CuPy.

It is for what no machine without a GPU could test: that every transfer and kernel waits for what
it needs. Streams are threads that dawdle at random, so that whatever is not ordered by an event is
soon done in the wrong order. Memory is told apart: what is neither allocated on the device nor
registered is refused, as is a transfer into memory that was registered to be read. Kernels are
the real ones, compiled for the host. It says nothing about speed, nor about CUDA itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.machinery
import itertools
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"
READ_ONLY = 8
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
NOT_READY = 600
DAWDLE_S = 0.002
MODULES = (
    "gadei_ps.learners.cuda",
    "gadei_ps.learners.cuda.link",
    "gadei_ps.learners.cuda.kernels",
)


class CudaError(RuntimeError):
    pass


class OutOfMemory(MemoryError):
    pass


class CompileError(Exception):
    pass


class Device:
    """The one device; its state goes with it."""

    def __init__(self) -> None:
        self.total = 1 << 30
        self.used = 0
        self.read_only_supported = True
        self.foreign = False  # whether arrays of other libraries count as the device's
        self.allocated: dict[int, int] = {}
        self.registered: dict[int, tuple[int, int]] = {}
        self.failure: BaseException | None = None
        self.handles: dict[int, Any] = {}
        self.numbers = itertools.count(1)
        self.null = Inline(self)
        self.handles[0] = self.null

    def check(self) -> None:
        if self.failure is not None:
            raise CudaError(f"cudaErrorUnknown: {self.failure!r}")

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
    """A thread that does one thing after the other, each after a while."""

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
    """For a library that computes at once, on the thread that asks."""

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


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class ndarray(np.ndarray):  # CuPy's name
    """Memory of the device, which the host can look into for once."""

    @property
    def data(self) -> Pointer:  # type: ignore[override]
        return Pointer(self.ctypes.data)

    def fill(self, value: float) -> None:
        """In the order of the current stream, as everything that is computed."""
        plain = self.view(np.ndarray)
        _current(_device()).add(lambda: plain.fill(value))


_the_device: list[Device] = []
_compute: dict[int, Any] = {}


def _device() -> Device:
    return _the_device[-1]


def _current(device: Device) -> Any:
    return _compute.get(id(device), device.null)


def _zeros(device: Device, size: int) -> np.ndarray:
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


def _is_writable(at: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= at < end:
            return line.split()[1][1] == "w"
    raise CudaError("cudaErrorInvalidValue: no such memory")


def _runtime(device: Device) -> types.ModuleType:
    module = types.ModuleType("cupy.cuda.runtime")

    def stream(handle: int) -> Any:
        return device.handles[handle]

    def host_register(at: int, size: int, flags: int) -> None:
        for begin, (room, _) in device.registered.items():
            if begin < at + size and at < begin + room:
                raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
        if flags & READ_ONLY and not device.read_only_supported:
            raise CudaError("cudaErrorNotSupported")
        if not flags & READ_ONLY and not _is_writable(at):
            raise CudaError("cudaErrorInvalidValue: read-only memory")
        device.registered[at] = size, flags

    def host_unregister(at: int) -> None:
        if at not in device.registered:
            raise CudaError("cudaErrorHostMemoryNotRegistered")
        del device.registered[at]

    def memcpy_async(to: int, source: int, size: int, kind: int, handle: int) -> None:
        def copy() -> None:
            ours = device.on_device
            there = device.pinned(to, size, to_write=True)
            here = device.pinned(source, size, to_write=False)
            assert there if kind == DEVICE_TO_HOST else ours(to, size), "transfer to where"
            assert here if kind == HOST_TO_DEVICE else ours(source, size), "transfer from where"
            ctypes.memmove(to, source, size)

        stream(handle).add(copy)

    def memset_async(to: int, value: int, size: int, handle: int) -> None:
        def clear() -> None:
            assert device.on_device(to, size)
            ctypes.memset(to, value, size)

        stream(handle).add(clear)

    def event_record(event: int, handle: int) -> None:
        reached = device.handles[event].reached = threading.Event()
        stream(handle).add(reached.set)

    def stream_wait_event(handle: int, event: int) -> None:
        reached = device.handles[event].reached
        if reached is not None:
            stream(handle).add(functools.partial(_wait, device, reached))

    def event_query(event: int) -> int:
        device.check()
        reached = device.handles[event].reached
        return 0 if reached is None or reached.is_set() else NOT_READY

    def event_synchronize(event: int) -> None:
        reached = device.handles[event].reached
        if reached is not None:
            _wait(device, reached)

    def device_synchronize() -> None:
        for one in list(device.handles.values()):
            if isinstance(one, Stream):
                one.synchronize()

    module.__dict__.update(
        CUDARuntimeError=CudaError,
        cudaDevAttrHostRegisterReadOnlySupported=113,
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        deviceGetAttribute=lambda attribute, index: int(device.read_only_supported),
        deviceSynchronize=device_synchronize,
        memGetInfo=lambda: (device.total - device.used, device.total),
        hostRegister=host_register,
        hostUnregister=host_unregister,
        pointerGetAttributes=lambda at: types.SimpleNamespace(devicePointer=at),
        memcpyAsync=memcpy_async,
        memsetAsync=memset_async,
        eventRecord=event_record,
        eventQuery=event_query,
        eventSynchronize=event_synchronize,
        streamWaitEvent=stream_wait_event,
        streamSynchronize=lambda handle: stream(handle).synchronize(),
    )
    return module


def _wait(device: Device, reached: threading.Event) -> None:
    while not reached.wait(0.05):
        device.check()


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """Kernels as functions of the host: launch_NAME(blocks, threads, struct), size_NAME()."""
    pairs = re.findall(r"__global__ void (\w+)\(const (\w+) a\)", source)
    launchers = "".join(f"LAUNCHER({name}, {args})\n" for name, args in pairs)
    text = f'#include "{HERE / "host.hpp"}"\n{source}\n{launchers}'
    number = hashlib.sha256(text.encode() + (HERE / "host.hpp").read_bytes()).hexdigest()[:16]
    path = BUILD / f"kernels-{number}.so"
    if not path.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
            file.write(text)
            file.flush()
            made = path.with_suffix(f".{os.getpid()}")
            options = [
                "-std=c++17",
                "-O1",
                "-Wno-unknown-pragmas",
                "-fPIC",
                "-shared",
                "-ffp-contract=off",
            ]
            subprocess.run(["g++", *options, "-o", made, file.name], check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


def _driver(device: Device, library: Callable[[], ctypes.CDLL]) -> types.ModuleType:
    def launch_kernel(name: str, *rest: int) -> None:
        blocks, _, _, threads, _, _, _, handle, parameters, _ = rest
        at = ctypes.c_uint64.from_address(parameters).value
        size = getattr(library(), f"size_{name}")()
        argument = ctypes.create_string_buffer(ctypes.string_at(at, size), size)
        launch = getattr(library(), f"launch_{name}")
        device.handles[handle].add(lambda: launch(blocks, threads, argument))

    module = types.ModuleType("cupy.cuda.driver")
    module.__dict__.update(launchKernel=launch_kernel)
    return module


class Libcuda:
    """What is called of libcuda.so.1."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def cuLaunchHostFunc(self, handle: int, function: int, argument: int) -> int:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._device.handles[handle].add(lambda: call(argument))
        return 0


def _module(device: Device) -> dict[str, types.ModuleType]:
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    library: list[ctypes.CDLL] = []

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            library[:] = [compiled(code)]

        def compile(self) -> None:
            pass

        def get_function(self, name: str) -> Any:
            return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=name))

    def zeros(shape: int | tuple[int, ...], dtype: Any) -> ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return _zeros(device, size).view(dtype).reshape(shape).view(ndarray)

    def asarray(given: Any) -> ndarray:
        plain = np.asarray(given)
        made = zeros(plain.shape, plain.dtype)
        made.view(np.ndarray)[...] = plain
        return made

    def asnumpy(given: ndarray) -> np.ndarray:
        _current(device).synchronize()
        return np.array(given.view(np.ndarray))

    def ascontiguousarray(given: ndarray, dtype: Any) -> ndarray:
        plain = given.view(np.ndarray)
        if plain.flags.c_contiguous and plain.dtype == dtype:
            return given
        return asarray(np.ascontiguousarray(plain, dtype))

    def pinned(size: int) -> Pointer:
        room = np.zeros(size, np.uint8)
        pointer = Pointer(room.ctypes.data)
        pointer.room = room  # type: ignore[attr-defined]
        device.registered[room.ctypes.data] = size, 0
        weakref.finalize(room, device.registered.pop, room.ctypes.data, None)
        return pointer

    class Here(contextlib.AbstractContextManager[Any]):
        def __init__(self, index: int = 0) -> None:
            self.id = index

        def __exit__(self, *exc: object) -> None:
            return None

    cuda.__dict__.update(
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        compiler=types.SimpleNamespace(CompileException=CompileError),
        runtime=_runtime(device),
        driver=_driver(device, lambda: library[0]),
        Stream=lambda non_blocking: Stream(device),
        Event=lambda block, disable_timing: Event(device),
        Device=Here,
        get_current_stream=lambda: _current(device),
        get_local_runtime_version=lambda: 13000,
        alloc_pinned_memory=pinned,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemory),
    )
    cupy.__dict__.update(
        cuda=cuda,
        ndarray=ndarray,
        zeros=zeros,
        asarray=asarray,
        asnumpy=asnumpy,
        ascontiguousarray=ascontiguousarray,
        from_dlpack=lambda given: np.from_dlpack(given).view(ndarray),
        RawModule=RawModule,
    )
    return {"cupy": cupy, "cupy.cuda": cuda}


@contextlib.contextmanager
def installed(*, inline: bool = False) -> Iterator[Device]:
    """Lets gadei_ps.learners.cuda find this device; inline: where another library computes."""
    device = Device()
    hidden = {name: sys.modules.pop(name, None) for name in (*MODULES, "cupy", "cupy.cuda")}
    sys.modules.update(_module(device))
    _the_device.append(device)
    if not inline:
        _compute[id(device)] = Stream(device)
    try:
        from gadei_ps.learners.cuda import link as cuda

        cuda._loaded.append(Libcuda(device))
        yield device
        device.check()
        assert not any(flags for _, flags in device.registered.values()), "memory left registered"
    finally:
        _compute.pop(id(device), None)
        _the_device.pop()
        for name, module in hidden.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        learners = sys.modules["gadei_ps.learners"]
        for name in MODULES:
            learners.__dict__.pop(name.rpartition(".")[2], None)
