"""The modules of CuPy and the functions of libcuda that gadei_ps.learners.cuda calls."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from emulator_device import (
    READ_ONLY,
    CudaError,
    Device,
    DriverError,
    Event,
    OutOfMemory,
    Stream,
    zeros,
)
from emulator_kernels import compiled

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
NOT_READY = 600


class CompileError(Exception):
    pass


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


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

    def mem_get_info() -> tuple[int, int]:
        device.need_context()
        return device.total - device.used, device.total

    def host_register(at: int, size: int, flags: int) -> None:
        device.need_context()
        for begin, (room, _) in device.registered.items():
            if begin < at + size and at < begin + room:
                raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
        if flags & READ_ONLY and not device.read_only_supported:
            raise CudaError("cudaErrorNotSupported")
        if flags & READ_ONLY and not device.read_only_works:
            raise CudaError("cudaErrorInvalidValue: read-only memory")
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
        if reached is None:
            return

        def wait() -> None:
            device.waiting.add(handle)
            _wait(device, reached)
            device.waiting.remove(handle)

        stream(handle).add(wait)

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
        memGetInfo=mem_get_info,
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


def _driver(device: Device, library: Callable[[], ctypes.CDLL]) -> types.ModuleType:
    def launch_kernel(name: str, *rest: int) -> None:
        blocks, _, _, threads, _, _, _, handle, parameters, _ = rest
        if not blocks:
            raise DriverError("CUDA_ERROR_INVALID_VALUE: no blocks")
        at = ctypes.c_uint64.from_address(parameters).value
        size = getattr(library(), f"size_{name}")()
        argument = ctypes.create_string_buffer(ctypes.string_at(at, size), size)
        launch = getattr(library(), f"launch_{name}")
        try:
            device.handles[handle].add(lambda: launch(blocks, threads, argument))
        except CudaError as error:
            raise DriverError(str(error)) from None

    module = types.ModuleType("cupy.cuda.driver")
    module.__dict__.update(CUDADriverError=DriverError, launchKernel=launch_kernel)
    return module


class Libcuda:
    """libcuda.so.1."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def cuLaunchHostFunc(self, handle: int, function: int, argument: int) -> int:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._device.handles[handle].add(lambda: call(argument))
        return 0


def modules(device: Device) -> dict[str, types.ModuleType]:
    """CuPy's, by name."""
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    library: list[ctypes.CDLL] = []

    class ndarray(np.ndarray):  # CuPy's name
        """Memory of the device; here the host can read it as well."""

        @property
        def data(self) -> Pointer:  # type: ignore[override]
            return Pointer(self.ctypes.data)

        def fill(self, value: float) -> None:
            """Fill in the order of the current stream, as everything that is computed."""
            plain = self.view(np.ndarray)
            device.compute.add(lambda: plain.fill(value))

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            library[:] = [compiled(code)]

        def compile(self) -> None:
            pass

        def get_function(self, name: str) -> Any:
            return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=name))

    def cupy_zeros(shape: int | tuple[int, ...], dtype: Any) -> ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return zeros(device, size).view(dtype).reshape(shape).view(ndarray)

    def asarray(given: Any) -> ndarray:
        plain = np.asarray(given)
        made = cupy_zeros(plain.shape, plain.dtype)
        made.view(np.ndarray)[...] = plain
        return made

    def asnumpy(given: ndarray) -> np.ndarray:
        device.compute.synchronize()
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
            device.check()  # it makes another device the current one

    cuda.__dict__.update(
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        compiler=types.SimpleNamespace(CompileException=CompileError),
        runtime=_runtime(device),
        driver=_driver(device, lambda: library[0]),
        Stream=lambda non_blocking: Stream(device),
        Event=lambda block, disable_timing: Event(device),
        Device=Here,
        get_current_stream=lambda: device.compute,
        get_local_runtime_version=lambda: 13000,
        alloc_pinned_memory=pinned,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemory),
    )
    cupy.__dict__.update(
        cuda=cuda,
        ndarray=ndarray,
        zeros=cupy_zeros,
        asarray=asarray,
        asnumpy=asnumpy,
        ascontiguousarray=ascontiguousarray,
        from_dlpack=lambda given: np.from_dlpack(given).view(ndarray),
        RawModule=RawModule,
    )
    return {"cupy": cupy, "cupy.cuda": cuda}
