"""The NVIDIA GPUs of this machine, as launchers see them: without CUDA, CuPy or torch.

A launcher that used CUDA itself would hold memory on a GPU as long as it runs, and would hang with
the driver. So nvidia-smi lists the GPUs, and code that needs CUDA runs in a process of its own,
which may be killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.machine import cuda, process

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
TOOL = "nvidia-smi"
PROC = Path("/proc/driver/nvidia/gpus")
PROBE = tuple(process.module_command("gadei_ps.machine.cuda_probe"))
CHECK = (*PROBE, "--check")
LIST_TIMEOUT_S = 20.0  # a driver that is not kept loaded takes seconds for each GPU
CHECK_TIMEOUT_S = 60.0  # to load CuPy from a cold disk and to initialize CUDA
PROBE_TIMEOUT_S = 120.0
REAP_TIMEOUT_S = 1.0
NO_GPU = "No devices were found"
GPU_LINE = re.compile(r"GPU (?P<index>\d+): (?P<name>.*) \(UUID: GPU-[^)]*\)")
MIG_LINE = re.compile(r"\s+MIG (?P<name>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
ENTRY = re.compile(r"[0-9]+|GPU-\S+|MIG-\S+")
LONGEST_ENTRY = 100


@dataclass(frozen=True)
class Gpu:
    """Device for one learner: a GPU, or a part of one that is divided (MIG).

    entry: its name in CUDA_VISIBLE_DEVICES; a number counts in the order of the bus, as nvidia-smi
    does. name: of the product.
    """

    entry: str
    name: str


def listed(timeout_s: float = LIST_TIMEOUT_S, proc: Path = PROC) -> list[Gpu]:
    """All GPUs that the driver shows here. Raises DeviceError where it does not answer.

    proc: read where there is no nvidia-smi, as in a container without the driver's tools.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        return [
            Gpu(str(index), _model(card)) for index, card in enumerate(sorted(proc.glob("*:*")))
        ]
    try:
        text = _answer([tool, "-L"], timeout_s)
    except DeviceError as error:
        if NO_GPU in str(error):
            return []
        raise
    found: list[Gpu] = []
    divided = ""
    for line in text.splitlines():
        if match := GPU_LINE.match(line):
            found.append(Gpu(match["index"], match["name"]))
        elif (match := MIG_LINE.match(line)) and found:
            # CUDA computes on the parts of a divided GPU only.
            if found[-1].entry.isdecimal():
                divided = found.pop().name
            found.append(Gpu(match["uuid"], f"{divided} MIG {match['name']}"))
    if text.strip() and not found and NO_GPU not in text:
        raise DeviceError(f"{TOOL} shows no GPU, but: {_short(' '.join(text.split()))}")
    return found


def has_driver() -> bool:
    """Return whether this machine has NVIDIA's driver, or the driver's tool."""
    return PROC.parent.exists() or shutil.which(TOOL) is not None


def _model(card: Path) -> str:
    with contextlib.suppress(OSError):
        for line in (card / "information").read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "GPU"


def driver() -> str:
    """Return the driver's version, such as 580.65.06; empty if nvidia-smi does not print it."""
    if (tool := shutil.which(TOOL)) is None:
        return ""
    try:
        text = _answer(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], LIST_TIMEOUT_S
        )
    except DeviceError:
        return ""
    return text.partition("\n")[0].strip()


def visible() -> tuple[str, ...]:
    """The GPUs that processes started from here may use, by their names in CUDA_VISIBLE_DEVICES.

    The variable is taken as it is, up to its first invalid entry, as CUDA does; without it, all.
    Raises DeviceError.
    """
    variable = os.environ.get(VISIBLE)
    if variable is None:
        return tuple(one.entry for one in listed())
    entries = (one.strip() for one in variable.split(","))
    return tuple(itertools.takewhile(ENTRY.fullmatch, entries))


def choose(
    asked: str, found: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Those of the visible GPUs that --gpus names; one may come twice.

    By nvidia-smi's numbers, or the UUIDs of parts of divided GPUs; where CUDA_VISIBLE_DEVICES is
    set, by places in it from 0. Raises UsageError if the text is not a list of these, DeviceError
    for a GPU that does not exist.
    """
    names = [one.strip() for one in asked.split(",")]
    if not all(ENTRY.fullmatch(one) and len(one) < LONGEST_ENTRY for one in names):
        raise UsageError(f"--gpus {_short(asked)!r}: give numbers of GPUs, as in --gpus 0,1")
    places = VISIBLE in environ
    known = {str(at): entry for at, entry in enumerate(found)} if places else {}
    known |= {entry: entry for entry in found if not (places and entry.isdecimal())}
    for one in names:
        if one not in known:
            raise DeviceError(f"--gpus {asked}: there is no GPU {one}; {_there_is(found, environ)}")
    return tuple(known[one] for one in names)


def _short(text: str) -> str:
    return text if len(text) < 2 * LONGEST_ENTRY else f"{text[:LONGEST_ENTRY]}..."


def _there_is(found: Sequence[str], environ: Mapping[str, str]) -> str:
    if VISIBLE in environ:
        return f"{VISIBLE}={environ[VISIBLE]} shows {len(found) or 'none'}, numbered from 0"
    where = TOOL if shutil.which(TOOL) else str(PROC)
    return f"{where} shows {', '.join(found) or 'none'}"


def least_used(gpus: Sequence[str], pids: Iterable[int]) -> tuple[str, ...]:
    """The same GPUs, sorted by how many of these processes have been given each."""
    given: Counter[str] = Counter()
    for pid in pids:
        with contextlib.suppress(OSError):  # gone, or another user's
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name.decode(errors="replace") == VISIBLE:
                    given.update(value.decode(errors="replace").split(","))
    for gpu in gpus:  # named twice, it is to have twice as many
        given[gpu] -= gpus.count(gpu) - 1
    return tuple(sorted(gpus, key=lambda gpu: given[gpu]))


def assign(
    gpus: Sequence[str], index: int, environ: Mapping[str, str] = os.environ, each: int = 1
) -> dict[str, str]:
    """Environment variables that give learner `index` its GPUs: so many of `gpus`, in turn.

    environ: that of the launcher, to which these are added. each: at most as many as there are
    different ones.
    """
    if not gpus:
        return {}
    first = index * each % len(gpus)
    dealt = list(dict.fromkeys([*gpus[first:], *gpus[:first]]))[:each]  # no learner has one twice
    return {VISIBLE: ",".join(dealt)} | order(environ)


def order(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that makes CUDA number GPUs as nvidia-smi does, unless the user has set it."""
    if VISIBLE in environ or ORDER in environ:
        return {}
    return {ORDER: "PCI_BUS_ID"}  # else the fastest is 0


def missing(
    found: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    command: Sequence[str] = CHECK,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> str:
    """Explain in one line why learners with this environment cannot use CUDA; empty if they can.

    found: the visible GPUs. command: prints the same as cuda_probe --check.
    """
    if not found:
        lacks = "" if cuda.has_cupy() else ", and CuPy is not installed"
        hidden = f" ({VISIBLE}={environ[VISIBLE]})" if environ.get(VISIBLE) is not None else ""
        return f"no GPU was found{hidden}{lacks}"
    if not cuda.has_cupy():
        return cuda.missing()
    try:
        return str(probe(command, timeout_s, environ)["missing"])
    except DeviceError as error:
        return str(error)


def probe(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The result of cuda_probe, run in a process of its own. Raises DeviceError if that fails."""
    text = _answer(command, timeout_s, environ)
    try:
        found = json.loads(text.strip().rpartition("\n")[2])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DeviceError(f"{_name(command)} has printed no result")
    return found


def _name(command: Sequence[str]) -> str:
    """The module or program that a command runs."""
    if "-m" in command:
        return command[command.index("-m") + 1]
    return Path(command[0]).name


def _answer(
    command: Sequence[str], timeout_s: float, environ: Mapping[str, str] = os.environ
) -> str:
    """Return the output of a command. Raises DeviceError with its message if it fails or hangs."""
    name = _name(command)
    try:
        child = process.spawn(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise DeviceError(f"{name} cannot be started: {error.strerror}") from None
    try:
        out, err = (one.decode(errors="replace") for one in child.communicate(timeout=timeout_s))
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"{name} gives no answer within {timeout_s:g} s: the GPU or its driver may hang"
        ) from None
    finally:
        if child.returncode is None:
            _end(child)
    if child.returncode < 0:
        raise DeviceError(f"{name} was killed by {process.signal_name(-child.returncode)}")
    if child.returncode:
        # Of a traceback the last line says what; nvidia-smi complains on stdout.
        last = err.strip().rpartition("\n")[2] or " ".join(out.split())
        raise DeviceError(f"{name} fails: {last or f'exit code {child.returncode}'}")
    return out


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its children; a process that hangs in the driver cannot be killed."""
    process.kill_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(REAP_TIMEOUT_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
