"""Capabilities of CUDA: python -m gadei_ps.machine.cuda_probe [--check] prints a JSON object.

With --check only whether learners can use it. A program of its own, because a broken driver can
hang or crash a process that uses it. Failures that Python sees are returned as text.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gadei_ps.machine import cuda

BYTES = 64 << 20  # of one copy
COPIES = 16  # in each direction, for each figure
REGISTERED_BYTES = 1 << 20
TO_DEVICE, TO_HOST = 0, 1
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
PINNED, READ_ONLY = 1 | 2, 8  # flags of cudaHostRegister: portable and mapped


def missing() -> str:
    """Explain in one line why learners cannot compute with CUDA here; empty if they can."""
    try:
        return cuda.missing()
    except Exception as error:  # a broken installation fails in any way
        return f"CuPy cannot be used: {_one_line(error)}"


def examine() -> dict[str, Any]:
    """Everything that can be found out about CUDA.

    cupy: its version. missing: as missing() says. driver, runtime: the highest version of CUDA that
    the driver offers, and that of the runtime library in use. devices: an object for each GPU.
    errors: reasons of what could not be found out, by name.
    """
    report: dict[str, Any] = {
        "cupy": None,
        "missing": missing(),
        "driver": None,
        "runtime": None,
        "devices": [],
        "errors": {},
    }
    try:
        import cupy
        from cupy.cuda import runtime
    except Exception as error:  # a broken installation fails in any way
        report["errors"]["cupy"] = _one_line(error)
        return report
    report["cupy"] = cupy.__version__
    _measure(report, "driver", lambda: _version(runtime.driverGetVersion()))
    _measure(report, "runtime", lambda: _version(cupy.cuda.get_local_runtime_version()))
    _measure(report, "devices", lambda: [_device(one) for one in range(runtime.getDeviceCount())])
    return report


def _measure(report: dict[str, Any], name: str, measurement: Callable[[], Any]) -> None:
    """Put the result into the report, or the reason into its errors."""
    try:
        report[name] = measurement()
    except Exception as error:  # CuPy raises classes of its own, by library
        report["errors"][name] = _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _version(number: int) -> str:
    """CUDA's 12040 is 12.4; without a driver CUDA answers 0."""
    if not number:
        raise RuntimeError("there is no driver")
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(index: int) -> dict[str, Any]:
    """One GPU, as CUDA numbers it.

    Bytes: memory_total, memory_free. GB/s, 10^9 bytes a second, of pinned memory: to_device,
    to_host, and both_ways for the sum of both at once. peers: GPUs whose memory it can reach.
    """
    from cupy import cuda
    from cupy.cuda import runtime

    report: dict[str, Any] = {"index": index, "errors": {}}

    def properties() -> dict[str, Any]:
        known: dict[str, Any] = runtime.getDeviceProperties(index)
        return known

    def read_only() -> bool:
        attribute = runtime.cudaDevAttrHostRegisterReadOnlySupported
        return bool(runtime.deviceGetAttribute(attribute, index))

    def peers() -> list[int]:
        others = (one for one in range(runtime.getDeviceCount()) if one != index)
        return [one for one in others if runtime.deviceCanAccessPeer(index, one)]

    _measure(report, "name", lambda: properties()["name"].decode())
    _measure(
        report, "compute_capability", lambda: f"{properties()['major']}.{properties()['minor']}"
    )
    _measure(report, "registers_read_only", read_only)
    _measure(report, "peers", peers)
    try:
        with cuda.Device(index):
            _measure(report, "memory_free", lambda: runtime.memGetInfo()[0])
            _measure(report, "memory_total", lambda: runtime.memGetInfo()[1])
            _measure(report, "registers", lambda: _registers(WRITABLE, PINNED))
            if report.get("registers_read_only"):
                with contextlib.suppress(runtime.CUDARuntimeError):
                    report["registers_read_only"] = False  # learners then pin a writable mapping
                    report["registers_read_only"] = _registers(mmap.PROT_READ, PINNED | READ_ONLY)
            bandwidths: dict[str, Any] = {"errors": report["errors"]}
            _measure(bandwidths, "bandwidth", _bandwidths)
            report |= bandwidths.get("bandwidth", {})
    except Exception as error:  # a GPU that another process holds exclusively
        report["errors"]["device"] = _one_line(error)
    return report


def _registers(protection: int, flags: int) -> bool:
    """Pin shared memory that is mapped like a learner's. Returns True, or raises CUDA's error."""
    from cupy.cuda import runtime

    fd = os.memfd_create("gadei-ps-probe")
    try:
        os.ftruncate(fd, REGISTERED_BYTES)
        memory = mmap.mmap(fd, REGISTERED_BYTES, mmap.MAP_SHARED, protection)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        runtime.hostRegister(address, REGISTERED_BYTES, flags)
        runtime.hostUnregister(address)
    finally:
        os.close(fd)
    return True


def _bandwidths() -> dict[str, float]:
    """Measure the bandwidths of the current device (GB/s)."""
    from cupy import cuda
    from cupy.cuda import runtime

    host = [cuda.alloc_pinned_memory(BYTES) for _ in range(2)]
    device = [cuda.alloc(BYTES) for _ in range(2)]
    streams = [cuda.Stream(non_blocking=True) for _ in range(2)]

    def copy(way: int) -> None:
        kind = (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)[way]
        source, target = (host, device) if way == TO_DEVICE else (device, host)
        runtime.memcpyAsync(target[way].ptr, source[way].ptr, BYTES, kind, streams[way].ptr)

    def rate(ways: Sequence[int]) -> float:
        for way in ways:
            copy(way)  # the first copy of all is slower
            streams[way].synchronize()
        first = streams[ways[0]]
        begin, end = cuda.Event(), cuda.Event()
        begin.record(first)
        for way in ways[1:]:
            streams[way].wait_event(begin)
        for _ in range(COPIES):
            for way in ways:
                copy(way)
        for way in ways[1:]:
            done = cuda.Event(disable_timing=True)
            done.record(streams[way])
            first.wait_event(done)
        end.record(first)
        end.synchronize()
        milliseconds: float = cuda.get_elapsed_time(begin, end)
        return round(len(ways) * COPIES * BYTES / milliseconds / 1e6, 2)

    return {
        "to_device": rate([TO_DEVICE]),
        "to_host": rate([TO_HOST]),
        "both_ways": rate([TO_DEVICE, TO_HOST]),
    }


def main() -> None:
    found = {"missing": missing()} if "--check" in sys.argv[1:] else examine()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
