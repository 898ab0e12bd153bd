"""Which device a learner computes on."""

from __future__ import annotations

import importlib.util
import os
import sys

from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.learners.device import Device
from gadei_ps.learners.host import Host

NAMES = ("auto", "cuda", "host")
EXTRAS = "pip install 'gadei-ps[cuda13]', or [cuda12] for a driver of CUDA 12"
DEVICE_VARIABLE = "GADEI_PS_DEVICE"


def choose(name: str | None = None) -> Device:
    """The device of this name; by default that of `gadei-ps run --device`, else auto.

    auto: CUDA where it can be used, else the host, which stderr is told. Raises DeviceError naming
    what is missing, and UsageError for an unknown name.
    """
    if name is None:
        name = os.environ.get(DEVICE_VARIABLE) or "auto"
    if name not in NAMES:
        raise UsageError(f"device {name!r}: use {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    why = "" if name == "host" else missing()
    if name == "cuda" and why:
        raise DeviceError(f"device cuda: {why}")
    if why:
        print(f"gadei-ps: this learner computes on the host: {why}", file=sys.stderr)
    if name == "host" or why:
        return Host()
    from gadei_ps.learners.cuda import Cuda

    return Cuda()


def missing() -> str:
    """Why learners cannot compute with CUDA here, and what to do; empty if they can."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed ({EXTRAS})"
    try:
        from gadei_ps.learners import cuda
    except Exception as error:  # a broken installation fails in any way
        said = str(error).strip() or type(error).__name__
        return f"CuPy cannot be loaded ({said.splitlines()[0]}); {EXTRAS}"
    return cuda.missing()
