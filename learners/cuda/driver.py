"""What CuPy does not offer of the driver's interface."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from gadei_ps.errors import DeviceError


@functools.cache
def libcuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
    return library


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Calls a function of C behind all that the stream was given. Raises DeviceError.

    CuPy's own launchHostFunc calls Python, and so waits for the interpreter's lock.
    """
    status = libcuda().cuLaunchHostFunc(stream, function, argument)
    if status:
        raise DeviceError(f"the driver refuses to publish a gradient (CUDA error {status})")
