"""Checks of GPUs, their driver, and CuPy."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gadei_ps.commands.doctor.memory import SHM
from gadei_ps.commands.doctor.result import Found, Level
from gadei_ps.errors import DeviceError
from gadei_ps.machine import gpus
from gadei_ps.machine.cuda import has_cupy

# The first drivers that run CUDA 13 and CUDA 12 (CUDA Compatibility, minor version compatibility).
DRIVER_OF_EXTRA = {"cuda13": 580, "cuda12": 525}
BROKEN_GPU = "see nvidia-smi and dmesg; until then, --device host does not use the GPU"


def driver_shows() -> Found:
    return gpu(gpus.LIST_TIMEOUT_S)


def gpu(timeout_s: float) -> Found:
    """Check the GPUs that the driver shows."""
    try:
        found = gpus.listed(timeout_s)
    except DeviceError as error:
        return Level.WARNING, f"{error}; learners compute on the host", BROKEN_GPU
    if not found:
        return Level.OK, "none found; learners compute on the host", ""
    names = [one.name for one in found]
    told = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if version := gpus.driver():
        told += f", driver {version}"
    if (hidden := os.environ.get(gpus.VISIBLE)) is not None:
        told += f"; {gpus.VISIBLE}={hidden}"
    return Level.OK, told, ""


def cupy_works() -> Found:
    if not has_cupy():
        return without_cupy(gpus.LIST_TIMEOUT_S)
    return cuda(gpus.PROBE, gpus.PROBE_TIMEOUT_S)


def without_cupy(timeout_s: float) -> Found:
    """A hint for machines with a GPU."""
    try:
        found = bool(gpus.listed(timeout_s))
    except DeviceError:
        found = False  # the check of the GPU reports it
    if not found:
        return Level.OK, "CuPy not installed; only learners on a GPU need it", ""
    return (
        Level.WARNING,
        "CuPy not installed: learners compute on the host",
        cupy_for(gpus.driver()),
    )


def cupy_for(driver: str) -> str:
    """Return the command that installs CuPy for a driver of this version; empty if unknown."""
    if not driver.partition(".")[0].isdecimal():
        return "pip install 'gadei-ps[cuda13]', or [cuda12] for a driver before 580"
    major = int(driver.partition(".")[0])
    for extra, first in DRIVER_OF_EXTRA.items():
        if major >= first:
            return f"pip install 'gadei-ps[{extra}]'"
    return f"update the NVIDIA driver to {first} or newer, then pip install 'gadei-ps[{extra}]'"


def cuda(command: Sequence[str], timeout_s: float) -> Found:
    """Check CuPy and the speed of memory by the probe that `command` starts."""
    try:
        found = gpus.probe(command, timeout_s, os.environ | gpus.order())
    except DeviceError as error:
        return Level.WARNING, str(error), BROKEN_GPU
    if not found["cupy"]:
        return (
            Level.WARNING,
            f"CuPy cannot be loaded: {found['errors']['cupy']}",
            f"{cupy_for(gpus.driver())}, and no other CuPy beside it",
        )
    told = [f"CuPy {found['cupy']}"]
    if found["runtime"]:
        told[0] += f" with CUDA {found['runtime']}"
    if found["driver"]:
        told[0] += f", driver for CUDA {found['driver']}"
    told += [_transfers(one) for one in found["devices"]]
    if found["missing"]:
        try:
            level = Level.WARNING if gpus.listed() else Level.OK
        except DeviceError:
            level = Level.OK  # the check of the GPU reports it
        why = str(found["missing"]).removesuffix("; run gadei-ps doctor for details")
        told.append(f"learners compute on the host: {why}")
        return level, "; ".join(told), _remedy(found) if level != Level.OK else ""
    told += [f"{name} fails: {why}" for name, why in found["errors"].items()]
    told.append(_pinned())
    failed = found["errors"] or any(one["errors"] for one in found["devices"])
    return Level.WARNING if failed else Level.OK, "; ".join(told), BROKEN_GPU if failed else ""


def _remedy(found: Mapping[str, Any]) -> str:
    """Advise on GPUs that CuPy cannot use: often it is made for a newer driver."""
    version = gpus.driver()
    first = DRIVER_OF_EXTRA.get(f"cuda{str(found['runtime']).partition('.')[0]}", 0)
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < first:
        return f"the driver is {version}, this CuPy wants {first}: {cupy_for(version)}"
    return BROKEN_GPU


def _transfers(device: Mapping[str, Any]) -> str:
    """One GPU's part of the finding."""
    parts = [f"GPU {device['index']}:"]
    if "both_ways" in device:
        parts.append(
            f"{device['to_device']:.1f} GB/s to it, {device['to_host']:.1f} from it, "
            f"{device['both_ways']:.1f} both ways"
        )
    if "memory_free" in device and "memory_total" in device:
        free, total = (device[name] / 2**30 for name in ("memory_free", "memory_total"))
        parts.append(f"({free:,.1f} of {total:,.1f} GiB free)")
    if not device.get("registers_read_only", True):
        parts.append("(pins no read-only memory)")
    if device.get("peers"):
        parts.append(f"(reaches GPU {', '.join(map(str, device['peers']))})")
    parts += [f"{name} fails: {why}" for name, why in device["errors"].items()]
    return " ".join(parts)


def _pinned() -> str:
    """Describe the memory that learners on a GPU pin, and the limit that some set-ups apply."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"
    return f"{to_pin(SHM) / 2**20:,.1f} MiB in {SHM} to pin for running jobs (ulimit -l: {shown})"


def to_pin(directory: Path) -> int:
    """Return the size of the weights and rings in this directory (bytes)."""
    from gadei_ps.memory import shm

    sizes = []
    for path in directory.iterdir():
        match = shm.SEGMENT_NAME.fullmatch(path.name)
        if match and match["part"].startswith(("weights", "ring")):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.lstat().st_size)
    return sum(sizes)
