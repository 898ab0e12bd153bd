"""Choice of the device that a learner computes on."""

from __future__ import annotations

import os
import sys

from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.learners.device_interface import Device
from gadei_ps.learners.host import Host
from gadei_ps.machine import cuda
from gadei_ps.machine.launch import DEVICE_VARIABLE

NAMES = ("auto", "cuda", "host")


def choose(name: str | None = None) -> Device:
    """Return the device of this name; by default that of `gadei-ps run --device`, else auto.

    auto: CUDA if it can be used, else the host, with a line on stderr. Raises DeviceError, which
    names what is missing, and UsageError for an unknown name.
    """
    if name is None:
        name = os.environ.get(DEVICE_VARIABLE) or "auto"
    if name not in NAMES:
        raise UsageError(f"device {name!r}: use {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    why = "" if name == "host" else cuda.missing()
    if name == "cuda" and why:
        raise DeviceError(f"device cuda: {why}")
    if why:
        print(f"gadei-ps: this learner computes on the host: {why}", file=sys.stderr)
    if name == "host" or why:
        return Host()
    from gadei_ps.learners.cuda import Cuda

    return Cuda()
