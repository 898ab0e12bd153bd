"""The modules of CuPy and the functions of libcuda that gadei_ps.learners.cuda calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from emulator_device import (
    CONTEXT,
    READ_ONLY,
    UNKNOWN,
    CudaError,
    Device,
    DriverError,
    Event,
    OutOfMemory,
    Stream,
    zeros,
)
from emulator_kernels import compiled

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NOT_READY = 600
MOST_THREADS = 1024  # of a block
ELSEWHERE = 1 << 40  # handle of a stream of another device
TYPES = {"p": ctypes.c_uint64, "i": ctypes.c_uint32, "c": ctypes.c_uint8}


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

    def device_synchronize() -> None:
        for one in list(device.handles.values()):
            if isinstance(one, Stream):
                one.synchronize()

    module.__dict__.update(
        CUDARuntimeError=CudaError,
        cudaDevAttrHostRegisterReadOnlySupported=113,
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        deviceGetAttribute=lambda attribute, index: int(device.read_only_supported),
        deviceSynchronize=device_synchronize,
        memGetInfo=mem_get_info,
        hostRegister=host_register,
        hostUnregister=host_unregister,
        pointerGetAttributes=lambda at: types.SimpleNamespace(devicePointer=at),
        streamSynchronize=lambda handle: device.stream(handle).synchronize(),
    )
    return module


class Libcuda:
    """The functions of libcuda.so.1 that C calls in a step.

    They return CUDA's numbers of errors, and want the device's context to be the current one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._add("cuCtxGetCurrent", self._get_context, "p", any_context=True)
        self._add("cuCtxPushCurrent_v2", self._push_context, "p", any_context=True)
        self._add("cuCtxPopCurrent_v2", lambda to: device.contexts.pop(), "p")
        self._add("cuLaunchKernel", self._launch, "piiiiiiippp")
        for name, kind in (
            ("cuMemcpyHtoDAsync_v2", HOST_TO_DEVICE),
            ("cuMemcpyDtoHAsync_v2", DEVICE_TO_HOST),
        ):
            self._add(name, functools.partial(self._copy, kind), "pppp")
        self._add("cuMemsetD8Async", self._set, "pcpp")
        self._add("cuEventRecord", self._record, "pp")
        self._add("cuStreamWaitEvent", self._wait_event, "ppi")
        self._add("cuEventQuery", self._query, "p")
        self._add("cuEventSynchronize", self._synchronize, "p")
        self._add("cuLaunchHostFunc", self._call, "ppp")

    def _add(
        self, name: str, call: Callable[..., int | None], types: str, *, any_context: bool = False
    ) -> None:
        device = self._device

        def called(*arguments: int) -> int:
            if status := device.fails(name):
                return status
            try:
                assert any_context or device.contexts.current == CONTEXT, "of another device"
                return call(*arguments) or 0
            except BaseException as error:  # ctypes would drop it
                device.failure = device.failure or error
                return UNKNOWN

        made = ctypes.CFUNCTYPE(ctypes.c_int, *(TYPES[one] for one in types))(called)
        setattr(self, name, made)

    def _get_context(self, to: int) -> None:
        ctypes.c_uint64.from_address(to).value = self._device.contexts.current

    def _push_context(self, context: int) -> None:
        assert context == CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"
        self._device.contexts.push(context)

    def _launch(self, function: int, blocks: int, *rest: int) -> None:
        y_blocks, z_blocks, threads, y_threads, z_threads, shared, handle, parameters, _ = rest
        assert 1 <= blocks < 1 << 31 and 1 <= threads <= MOST_THREADS, "CUDA_ERROR_INVALID_VALUE"
        assert (y_blocks, z_blocks, y_threads, z_threads, shared) == (1, 1, 1, 1, 0)
        assert 1 <= function <= len(self._device.functions), "CUDA_ERROR_INVALID_HANDLE"
        name, library = self._device.functions[function - 1]
        at = ctypes.c_uint64.from_address(parameters).value
        size = getattr(library, f"size_{name}")()
        argument = ctypes.create_string_buffer(ctypes.string_at(at, size), size)
        launch = getattr(library, f"launch_{name}")
        self._add_work(handle, lambda: launch(blocks, threads, argument))

    def _add_work(self, handle: int, work: Callable[[], None]) -> None:
        """Add what a device that has failed does no more. It calls functions of the host even so:
        CUDA's documentation denies that, but others have seen it."""
        self._device.stream(handle).add(lambda: None if self._device.failure else work())

    def _copy(self, kind: int, to: int, source: int, size: int, handle: int) -> None:
        device = self._device

        def copy() -> None:
            ours = device.on_device
            there = device.pinned(to, size, to_write=True)
            here = device.pinned(source, size, to_write=False)
            assert there if kind == DEVICE_TO_HOST else ours(to, size), "transfer to where"
            assert here if kind == HOST_TO_DEVICE else ours(source, size), "transfer from where"
            ctypes.memmove(to, source, size)

        self._add_work(handle, copy)

    def _set(self, to: int, value: int, size: int, handle: int) -> None:
        def clear() -> None:
            assert self._device.on_device(to, size)
            ctypes.memset(to, value, size)

        self._add_work(handle, clear)

    def _record(self, event: int, handle: int) -> None:
        reached = self._device.event(event).reached = threading.Event()
        self._device.stream(handle).add(reached.set)

    def _wait_event(self, handle: int, event: int, flags: int) -> None:
        device = self._device
        reached = device.event(event).reached
        if reached is None:
            return

        def wait() -> None:
            device.waiting.add(handle)
            _wait(device, reached)
            device.waiting.remove(handle)

        self._device.stream(handle).add(wait)

    def _query(self, event: int) -> int:
        self._device.check()
        reached = self._device.event(event).reached
        return 0 if reached is None or reached.is_set() else NOT_READY

    def _synchronize(self, event: int) -> None:
        reached = self._device.event(event).reached
        if reached is not None:
            _wait(self._device, reached)

    def _call(self, handle: int, function: int, argument: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._device.stream(handle).add(lambda: call(argument))


def _wait(device: Device, reached: threading.Event) -> None:
    while not reached.wait(0.05):
        device.check()


def modules(device: Device) -> dict[str, types.ModuleType]:
    """CuPy's, by name."""
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    driver = types.ModuleType("cupy.cuda.driver")
    driver.CUDADriverError = DriverError  # type: ignore[attr-defined]

    class ndarray(np.ndarray):  # CuPy's name
        """Memory of the device; here the host can read it as well."""

        @property
        def data(self) -> Pointer:  # type: ignore[override]
            return Pointer(self.ctypes.data if self.size else 0)  # as CuPy's

        def fill(self, value: float) -> None:
            """Fill in the order of the current stream, as everything that is computed."""
            plain = self.view(np.ndarray)
            device.compute.add(lambda: plain.fill(value))

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self._library = compiled(code)

        def compile(self) -> None:
            pass

        def get_function(self, name: str) -> Any:
            device.functions.append((name, self._library))
            return types.SimpleNamespace(kernel=Pointer(len(device.functions)))

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

    def get_current_stream(device_id: int = -1) -> Any:
        """Return the stream of the current device unless another one is given."""
        is_ours = device_id == 0 or device.contexts.current in (0, CONTEXT)
        return device.compute if is_ours else types.SimpleNamespace(ptr=ELSEWHERE)

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

        def __enter__(self) -> None:
            device.contexts.push(CONTEXT)

        def __exit__(self, *exc: object) -> None:
            device.contexts.pop()
            device.check()  # it makes another device the current one

    cuda.__dict__.update(
        nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        compiler=types.SimpleNamespace(CompileException=CompileError),
        runtime=_runtime(device),
        driver=driver,
        Stream=lambda non_blocking: Stream(device),
        Event=lambda block, disable_timing: Event(device),
        Device=Here,
        get_current_stream=get_current_stream,
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
