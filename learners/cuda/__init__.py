"""A CUDA device, by CuPy: compute, push and pull on three streams (GaDei, Figures 4 and 5).

The weights segment and the ring's slots are registered as pinned memory. So a push is one transfer
from the device's staging buffer into the slot, and a pull is one from the segment into the device's
weights. The DMA engines make both; the host copies nothing. Staging and weights are
double-buffered.

    compute   ... backward | stage |  forward, backward ...      continues at once
    push                           | transfer | publish
    pull           transfer of newer weights    |

`stage` (kernels.cu) puts the gradients where the slot will have them and converts them. For
PyTorch, whose parameters stay where they are, it also copies weights that have been pulled. Behind
the transfer the driver calls ps_land() (native/ps_land.h), which makes the frame visible to the
server. That needs no thread of Python, and nothing waits for the interpreter's lock.

The host waits in push() only: for the push before, so that it is at most one step ahead of the
device, and for a free slot. The compute stream never waits for the host.

    link.py       registers the segments with the driver; push and pull, in the order of the streams
    staging.py    memory of the gradients in flight
    kernels.cu    what computes on the device; kernels.py compiles it

native/ps_cuda.c lays frames out and calls CUDA's driver in each step.
"""

from __future__ import annotations

import functools

import cupy
from cupy.cuda import runtime

from gadei_ps.errors import DeviceError
from gadei_ps.learners.client import Client
from gadei_ps.learners.cuda.link import CudaLink, Stream
from gadei_ps.machine import cuda


def current_stream(index: int) -> int:
    """Return CuPy's stream of a device, which need not be the current one, as CUDA's handle."""
    return int(cupy.cuda.get_current_stream(index).ptr)


class Cuda:
    """One GPU, by default CuPy's current one. Raises DeviceError if it cannot be used."""

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        if why := cuda.missing():
            raise DeviceError(f"device cuda: {why}")
        self.index = int(runtime.getDevice()) if index is None else index

    def link(self, client: Client, compute: Stream | None = None) -> CudaLink:
        """Connect a client. compute: returns the stream that another library computes on."""
        compute = compute or functools.partial(current_stream, self.index)
        return CudaLink(client, self.index, compute)
