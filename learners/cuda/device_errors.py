"""A device while it is used: its failures become errors of one line."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from gadei_ps.errors import DeviceError
from gadei_ps.machine.cuda import first_line


class Guard:
    """Makes a device the current one inside a `with`; raises DeviceError for what fails there."""

    def __init__(self, index: int, model_bytes: int) -> None:
        self._index = index
        self._model_bytes = model_bytes
        self._device = cupy.cuda.Device(index)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._device.__exit__(kind, error, trace)
        if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            raise self._too_small(error) from None
        if isinstance(error, runtime.CUDARuntimeError):
            raise DeviceError(f"GPU {self._index} has failed ({first_line(error)})") from None

    def _too_small(self, error: Exception) -> DeviceError:
        with self._device:
            free, total = runtime.memGetInfo()
        return DeviceError(
            f"GPU {self._index} is out of memory: a learner needs {mib(4 * self._model_bytes)} "
            f"for weights and gradients of {mib(self._model_bytes)}, twice each, and "
            f"{mib(free)} of {mib(total)} are free ({first_line(error)}); end other processes on "
            "it, or use --device host"
        )


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
