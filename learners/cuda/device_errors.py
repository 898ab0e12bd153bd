"""A device while it is used: its failures become errors of one line."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import driver, runtime

from gadei_ps.errors import DeviceError
from gadei_ps.machine.cuda import first_line

FAILURES = (runtime.CUDARuntimeError, driver.CUDADriverError)
OUT_OF_MEMORY = 2  # of the runtime and of the driver


def is_full(error: BaseException | None) -> bool:
    """Return whether an error means that the device lacks memory."""
    if isinstance(error, FAILURES):
        return bool(error.status == OUT_OF_MEMORY)
    return isinstance(error, cupy.cuda.memory.OutOfMemoryError)


class Guard:
    """Makes a device the current one inside a `with`; raises DeviceError for what fails there."""

    def __init__(self, index: int, model_bytes: int) -> None:
        self._index = index
        self._model_bytes = model_bytes
        self._device = cupy.cuda.Device(index)

    def __enter__(self) -> None:
        try:
            self._device.__enter__()
        except FAILURES as error:
            raise self.failure(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        try:
            self._device.__exit__(kind, error, trace)
        except FAILURES as failure:  # CUDA cannot leave a device that has failed
            error = error or failure
        if error is not None and (is_full(error) or isinstance(error, FAILURES)):
            raise self.failure(error) from None

    def failure(self, error: Exception) -> DeviceError:
        """Return what an error of CUDA means."""
        if is_full(error):
            return self._too_small(error)
        return DeviceError(f"GPU {self._index} has failed ({first_line(error)})")

    def _too_small(self, error: Exception) -> DeviceError:
        try:
            with self._device:
                free, total = runtime.memGetInfo()
            there = f"and {mib(free)} of {mib(total)} are free"
        except FAILURES:
            there = "and there is no room for CUDA's own context, which needs some hundred MiB"
        return DeviceError(
            f"GPU {self._index} is out of memory: a learner needs {mib(4 * self._model_bytes)} "
            f"for weights and gradients of {mib(self._model_bytes)}, twice each, {there} "
            f"({first_line(error)}); end other processes on it, or use --device host"
        )


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
