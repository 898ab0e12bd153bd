"""Registers a job's memory with the driver, so that the DMA engines of a device reach it."""

from __future__ import annotations

import contextlib

from cupy.cuda import runtime

from gadei_ps.errors import DeviceError
from gadei_ps.learners.client import Client
from gadei_ps.learners.cuda.guard import mib
from gadei_ps.machine.cuda import told
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.segment import Segment

PORTABLE, MAPPED, READ_ONLY = 1, 2, 8  # flags of cudaHostRegister


def register_weights(client: Client, index: int, undo: contextlib.ExitStack) -> int:
    """Returns the address of the weights for device `index`. Raises DeviceError."""
    mapping: Segment = client.place.weights
    flags = PORTABLE | MAPPED
    attribute = runtime.cudaDevAttrHostRegisterReadOnlySupported
    if runtime.deviceGetAttribute(attribute, index):
        flags |= READ_ONLY
    else:  # the driver needs a mapping that can be written; nothing else uses this one
        job_id = mapping.header["job_id"].tobytes()
        mapping = segment.attach(
            mapping.name,
            SegmentKind.WEIGHTS,
            writable=True,
            job_id=job_id,
            owner=mapping.owner,
        )
    at = mapping.address + int(mapping.view(layout.WEIGHTS)["data_at"])
    _register(at, mapping.address + mapping.size - at, flags, mapping, index, undo)
    return int(runtime.pointerGetAttributes(at).devicePointer)


def register_slots(client: Client, index: int, undo: contextlib.ExitStack) -> None:
    """Raises DeviceError."""
    ring = client.place.ring
    head = ring.view(layout.RING)
    at, size = int(head["slots_at"]), int(head["slots"]) * int(head["slot_bytes"])
    _register(ring.address + at, size, PORTABLE | MAPPED, ring, index, undo)


def _register(
    at: int, size: int, flags: int, mapping: Segment, index: int, undo: contextlib.ExitStack
) -> None:
    try:
        runtime.hostRegister(at, size, flags)
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"GPU {index} cannot register {mib(size)} of {mapping.name[1:]} "
            f"({told(error)}); gadei-ps doctor shows how much it can"
        ) from None
    undo.callback(lambda: mapping)  # keeps it mapped until this is undone:
    undo.callback(runtime.hostUnregister, at)
