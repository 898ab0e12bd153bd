"""Device that a part measures on: a GPU, or the host, to try all that is not CUDA's.

Times of a GPU are those of its stream, by events; on the host they are the clock's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gadei_ps.benchmarks.gpu.sizes import FULL, QUICK
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.learners import devices
from gadei_ps.learners.device_interface import Device
from gadei_ps.machine import gpus
from gadei_ps.machine.cuda import missing as cuda_missing

SPIN_CYCLES_PER_S = 2e9
"""Approximate clock of a GPU, by which torch's waiting kernel counts (cycles/s)."""


@dataclass(frozen=True)
class Target:
    """device: cuda or host. quick: tiny sizes, which the host always has."""

    device: str
    quick: bool

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
        return (QUICK if self.quick or not self.on_gpu else FULL)[part]

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
