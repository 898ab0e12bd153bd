"""Places of the stages of a virtual worker: devices of one learner, and its cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gadei_ps.errors import UsageError
from gadei_ps.machine import process
from gadei_ps.machine.gpus import VISIBLE
from gadei_ps.machine.launch import DEVICE_VARIABLE, DEVICES_VARIABLE


@dataclass(frozen=True)
class StageDevice:
    """Device and cores of a stage."""

    device: torch.device
    cores: int
    """Threads of a computation on the host."""

    @property
    def has_own_memory(self) -> bool:
        """Whether weights have to be copied there."""
        return self.device.type != "cpu"

    @property
    def name(self) -> str:
        """Name as parse() takes it, with the number of cores or of the GPU."""
        return str(self.device) if self.has_own_memory else f"host:{self.cores}"

    @property
    def kind(self) -> str:
        """Devices of one kind are equally fast."""
        return torch.cuda.get_device_name(self.device) if self.has_own_memory else self.name

    @property
    def memory(self) -> str:
        """Devices with the same memory pass tensors on without a copy."""
        return str(self.device) if self.has_own_memory else "host"

    def use(self) -> None:
        """Have the calling thread compute here from now on."""
        if self.device.type == "cpu":
            # A thread's first question takes over what any thread has set last; ask it before.
            torch.get_num_threads()
            torch.set_num_threads(self.cores)
        else:
            torch.cuda.set_device(self.device)


def cores() -> int:
    """Return the cores of this learner: its share of the machine's, if its launcher has set one."""
    share = os.environ.get("OMP_NUM_THREADS", "")
    there = process.cores()
    return min(int(share), there) if re.fullmatch(r"[1-9]\d{0,3}", share) else there


def devices_from_launcher() -> list[str]:
    """Return the devices that `gadei-ps run` and `attach` have given this learner.

    GPUs if PyTorch sees as many; else, with --device auto, equal parts of the learner's cores.
    Raises UsageError where there are none.
    """
    count_given = os.environ.get(DEVICES_VARIABLE, "")
    if not re.fullmatch(r"[1-9]\d{0,2}", count_given):
        raise UsageError(
            'devices: give one for each stage, as ["host", "host"], or start the script with '
            "gadei-ps run --devices-per-learner N"
        )
    count, device = int(count_given), os.environ.get(DEVICE_VARIABLE) or "auto"
    seen = torch.cuda.device_count() if device != "host" else 0
    if device == "cuda" or seen >= count:
        return [f"cuda:{number}" for number in range(count)]
    if device == "auto" and os.environ.get(VISIBLE):
        print(
            f"gadei-ps: this learner computes on the host: of its GPUs ({os.environ[VISIBLE]}) "
            f"PyTorch {torch.__version__} sees {seen}, and {count} are needed",
            file=sys.stderr,
        )
    return [f"host:{max(1, cores() // count)}"] * count


def parse(devices: Sequence[str | torch.device] | None) -> list[StageDevice]:
    """Return where the stages compute: "host", "host:CORES" or a CUDA device, one for each stage.

    Stages of "host" share the cores that others do not name. None: see devices_from_launcher().
    Raises UsageError for a device that is not there.
    """
    if devices is None:
        devices = devices_from_launcher()
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise UsageError('devices: give a list, one for each stage: ["host", "host"]')
    names = [str(one) for one in devices]
    hosts = [re.fullmatch(r"host(?::([1-9]\d*))?", name) for name in names]
    fixed = [int(one[1]) if one and one[1] else 0 for one in hosts]
    for name, own in zip(names, fixed, strict=True):
        if own > process.cores():
            raise UsageError(f"device {name!r}: this process may use {process.cores()} cores")
    sharing = sum(one is not None and one[1] is None for one in hosts)
    share = max(1, (cores() - sum(fixed)) // max(1, sharing))
    return [
        StageDevice(torch.device("cpu"), own or share) if one else StageDevice(_cuda(name), share)
        for name, one, own in zip(names, hosts, fixed, strict=True)
    ]


def remaining_threads(where: Sequence[StageDevice]) -> int:
    """Return threads for the learner's own computations: of its cores that stages leave, at least
    one.

    With more, it and the stages would wait for each other at the end of each computation.
    """
    taken = sum(one.cores for one in where if one.device.type == "cpu")
    return max(1, min(torch.get_num_threads(), cores() - taken))


def _cuda(name: str) -> torch.device:
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise UsageError(f"device {name!r}: give 'host', 'host:CORES', 'cuda' or 'cuda:NUMBER'")
    if not torch.cuda.is_available():
        raise UsageError(
            f"device {name!r}: PyTorch {torch.__version__} sees no GPU here; give 'host'"
        )
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UsageError(f"device {name!r}: PyTorch sees {count} GPUs; the first is 'cuda:0'")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
