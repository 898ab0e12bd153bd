"""A CUDA device in software, as far as gadei_ps.learners.cuda uses one, in place of CuPy.

It tests what no machine without a GPU could: that every transfer and kernel waits for what it
needs. Streams are threads that dawdle at random, so that whatever no event orders is soon done in
the wrong order. Memory is distinguished: what is neither allocated on the device nor registered is
refused, and so is a transfer into memory that was registered as read-only. Kernels are the real
ones, compiled for the host. It says nothing about speed, nor about CUDA itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator
from types import ModuleType

import emulator_cupy
from emulator_device import OUT_OF_MEMORY as OUT_OF_MEMORY
from emulator_device import UNKNOWN as UNKNOWN
from emulator_device import CudaError as CudaError
from emulator_device import Device as Device
from emulator_device import Stream
from emulator_kernels import compiled as compiled

PACKAGE = "gadei_ps.learners.cuda"


@contextlib.contextmanager
def installed(*, inline: bool = False) -> Iterator[Device]:
    """Let gadei_ps.learners.cuda find this device.

    inline: another library computes, at once.
    """
    device = Device()
    if not inline:
        device.compute = Stream(device)
    modules = emulator_cupy.modules(device)
    hidden = _taken_out(modules)
    sys.modules.update(modules)
    try:
        from gadei_ps.learners.cuda import link

        libcuda = emulator_cupy.Libcuda(device)
        link.libcuda = lambda: libcuda
        yield device
        device.check()
        assert not any(flags for _, flags in device.registered.values()), "memory left registered"
    finally:
        _taken_out(modules)
        sys.modules.update(hidden)


def _taken_out(names: Container[str]) -> dict[str, ModuleType]:
    """Import these modules, and those of the package, again; return the old ones."""
    found = {
        name: module
        for name, module in sys.modules.items()
        if name in names or name == PACKAGE or name.startswith(f"{PACKAGE}.")
    }
    for name in found:
        del sys.modules[name]
    room, _, package = PACKAGE.rpartition(".")
    if room in sys.modules:
        vars(sys.modules[room]).pop(package, None)
    return found
