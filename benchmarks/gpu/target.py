"""Device that a part measures on: a GPU, or the host, to try all that is not CUDA's.

Times of a GPU are those of its stream, by events; on the host they are the clock's.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch

from gadei_ps.benchmarks.common import Report
from gadei_ps.benchmarks.gang import Failed, Gang
from gadei_ps.benchmarks.gpu import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import GadeiError
from gadei_ps.job.config import from_mapping
from gadei_ps.learners import devices
from gadei_ps.learners.devices import Device
from gadei_ps.machine import gpus
from gadei_ps.machine.cuda import first_line
from gadei_ps.machine.cuda import missing as cuda_missing

FAILURES = (RuntimeError, OSError, ValueError, AttributeError, GadeiError, Failed)
"""Errors of one contender or size; CuPy's and torch's are RuntimeErrors."""
SPIN_CYCLES_PER_S = 2e9
"""Approximate clock of a GPU, by which torch's waiting kernel counts (cycles/s)."""


@dataclass(frozen=True)
class Target:
    """device: cuda or host. quick: tiny sizes, which the host always has. until: end of the part's
    time, by time.monotonic()."""

    device: str
    quick: bool
    until: float = math.inf

    def left(self) -> float:
        """Return the rest of the part's time (s)."""
        return self.until - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> str:
        """The device's name for torch; the first GPU that this process sees."""
        return "cuda:0" if self.on_gpu else "cpu"

    def sizes(self, part: str) -> dict[str, Any]:
        """Return the sizes of a part."""
        return sizes.of(self.device, quick=self.quick)[part]

    def learner_device(self) -> Device:
        """The device of a learner without torch."""
        return devices.choose(self.device)

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A moment in the order of what is computed, for seconds()."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks, when both have passed: see wait()."""
        if not self.on_gpu:
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3

    def spin(self, seconds: float) -> None:
        """Keep the compute stream busy for about `seconds`. Later work waits in its queue."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * SPIN_CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def count(self) -> int:
        """The number of GPUs; on the host 1."""
        return torch.cuda.device_count() if self.on_gpu else 1


class HeadStart:
    """A kernel that only waits, so that the host can queue work before the GPU begins it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._end: Any = None

    def begin(self, seconds: float, streams: Sequence[int] = ()) -> None:
        """Launch the kernel, which takes about `seconds`, on torch's stream.

        streams: CUDA's handles of others that wait for it.
        """
        self._target.spin(seconds)
        self._end = self._target.mark()
        for handle in streams:
            torch.cuda.ExternalStream(handle).wait_event(self._end)  # type: ignore[no-untyped-call]

    def suffices(self) -> bool:
        """Return whether the kernel still waits: what the host has queued has not begun."""
        return not (self._target.on_gpu and self._end.query())


@contextlib.contextmanager
def noted(report: Report, what: str) -> Iterator[None]:
    """Note the failure of a block, so that the part continues with what comes next."""
    try:
        yield
    except FAILURES as error:
        traceback.print_exc()
        report.notes.append(f"{what}: not measured: {first_line(error)}")


def started(
    report: Report, stack: contextlib.ExitStack, makers: Mapping[str, Callable[[], Gang]]
) -> dict[str, Gang]:
    """Start gangs at once, because their imports take seconds, and note those that fail.

    stack: ends them.
    """
    found = {}
    with futures.ThreadPoolExecutor(len(makers)) as pool:
        coming = {name: pool.submit(make) for name, make in makers.items()}
    for name, future in coming.items():
        with noted(report, name):
            found[name] = stack.enter_context(future.result())
    return found


def why_not(device: str) -> str:
    """Name in one line what is missing to measure on the device; empty if nothing is."""
    if device == "host":
        return ""
    if why := cuda_missing():
        return why
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU; install a build with CUDA"
    return ""


def facts(target: Target) -> dict[str, Any]:
    """Return the names and versions that figures of a GPU depend on."""
    if not target.on_gpu:
        return {"device": target.device}
    import cupy
    from cupy.cuda import runtime

    return {
        "device": target.device,
        "gpus": [torch.cuda.get_device_name(number) for number in range(target.count())],
        "driver": gpus.driver(),
        "driver_cuda": _version(runtime.driverGetVersion()),
        "cuda": _version(cupy.cuda.get_local_runtime_version()),
        "cupy": cupy.__version__,
        "torch_cuda": torch.version.cuda,
    }


def _version(number: int) -> str:
    """CUDA's 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


@contextlib.contextmanager
def job(name: str, **values: Any) -> Iterator[str]:
    """Run a job with plain SGD and two slots for each learner; yield its name.

    values: further entries of the job's file.
    """
    name = f"gpu-{name}-{os.getpid()}"
    settings: Mapping[str, Any] = {"name": name, "optimizer": {"kind": "sgd", "lr": 1e-6}, **values}
    with Daemon(from_mapping(settings, name), silent=True):
        yield name
