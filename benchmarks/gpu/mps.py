"""NVIDIA's Multi-Process Service: kernels of several processes on one GPU at the same time.

Without it, processes on a GPU take turns. The service started here has a directory of its own, so
that no other process uses it, and ends with the with-block that it is started for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from gadei_ps.errors import DeviceError
from gadei_ps.machine import gpus, process

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
READY_S = 10.0
END_S = 10.0
CHECK_S = 25.0


def running() -> bool:
    """Return whether a service that others have started runs on this machine."""
    return any(one.info["name"] in (CONTROL, CONTROL[:15]) for one in psutil.process_iter(["name"]))


def missing() -> str:
    """Explain why the service cannot be started; empty if it may."""
    return "" if _tool() else f"{CONTROL} is not installed"


def _tool() -> str:
    """Return the path of the service's program; empty if it is missing."""
    tool = shutil.which(CONTROL)
    if tool is None and (beside := shutil.which(gpus.TOOL)):
        tool = shutil.which(CONTROL, path=str(Path(beside).resolve().parent))
    return tool or ""


@contextlib.contextmanager
def directories() -> Iterator[dict[str, str]]:
    """Make the directories of a service; yield the environment variables that name them.

    A process looks for the service at its first use of CUDA, and uses the GPU itself if none runs.
    """
    with tempfile.TemporaryDirectory(prefix="gps-mps-", ignore_cleanup_errors=True) as scratch:
        variables = {PIPES: f"{scratch}/pipe", LOGS: f"{scratch}/log"}
        for path in variables.values():
            Path(path).mkdir()
        yield variables


@contextlib.contextmanager
def started(variables: Mapping[str, str]) -> Iterator[None]:
    """Start a service. variables: see directories().

    Raises DeviceError if the service is missing or CUDA does not work with it.
    """
    if why := missing():
        raise DeviceError(why)
    env = os.environ | dict(variables)
    # In the foreground, so that it is a child of this process and ends with it.
    child = process.spawn(
        [_tool(), "-f"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        how=signal.SIGTERM,
    )
    try:
        _wait_ready(child, Path(variables[PIPES]))
        if why := gpus.missing(gpus.visible(), env, gpus.CHECK, CHECK_S):
            raise DeviceError(f"CUDA does not work with {CONTROL}: {why}")
        yield
    finally:
        _end(child, variables)


def _wait_ready(child: subprocess.Popen[bytes], pipes: Path) -> None:
    until = time.monotonic() + READY_S
    while not (pipes / "control").exists():
        if child.poll() is not None:
            raise DeviceError(f"{CONTROL} ends with exit code {child.returncode}")
        if time.monotonic() > until:
            raise DeviceError(f"{CONTROL} is not ready within {READY_S:g} s")
        time.sleep(0.01)


def ask(variables: Mapping[str, str], command: str) -> str:
    """Return the answer of a service to a command. Raises OSError and SubprocessError."""
    answer = subprocess.run(
        [_tool()],
        input=f"{command}\n",
        env=os.environ | dict(variables),
        capture_output=True,
        timeout=END_S,
        check=False,
        text=True,
    )
    return answer.stdout


def _end(child: subprocess.Popen[bytes], variables: Mapping[str, str]) -> None:
    """Ask it to quit, which ends its servers too; kill them if they have not ended."""
    with contextlib.suppress(psutil.Error):
        servers = psutil.Process(child.pid).children(recursive=True)
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            ask(variables, "quit -t 1")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
        for server in servers:
            with contextlib.suppress(psutil.Error):
                server.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
