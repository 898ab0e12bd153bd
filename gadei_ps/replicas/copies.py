"""Copies of a replica's weights: made beside its job, and handed on through files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gadei_ps.job.control import Connection, Copy
from gadei_ps.memory import segment, shm, weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.weights import FloatArray

COPY_S = 60.0
"""Time limit until a job has made its copy (s)."""

Table = list[tuple[str, list[int]]]
"""Names and shapes of tensors, in the order in which their values lie in a file."""


def of_job(job: str) -> dict[str, FloatArray]:
    """Return a job's weights on this host between two gradients, by the names of its tensors.

    Raises JobNotFound, ControlError, SegmentError or FileNotFoundError.
    """
    mapped = segment.attach(shm.segment_name(job, "weights"), SegmentKind.WEIGHTS, writable=False)
    model = weights.read_table(mapped)
    file = os.memfd_create("gadei-ps-copy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, model.elements * 4)
        with Connection(job, COPY_S) as connection:
            connection.request(Copy(slots=False), [file])
        with os.fdopen(os.dup(file), "rb") as stream:
            flat = np.fromfile(stream, np.float32, model.elements)
    finally:
        os.close(file)
    return model.views(flat)


def write(tensors: Mapping[str, FloatArray], path: Path) -> Table:
    """Write the values of all tensors, one after the other; return their names and shapes."""
    with path.open("wb") as stream:
        for one in tensors.values():
            stream.write(np.ascontiguousarray(one, np.float32).data)
    return [(name, list(one.shape)) for name, one in tensors.items()]


def read(path: Path, table: Sequence[tuple[str, Sequence[int]]]) -> dict[str, FloatArray]:
    """Read the tensors that `write()` has written."""
    flat = np.fromfile(path, np.float32)
    ends = np.cumsum([math.prod(shape) for _, shape in table])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(table, parts, strict=True)}
