"""Copies of the weights of a job on this host."""

from __future__ import annotations

import os

import numpy as np

from gadei_ps.job.control import Connection, Copy, memory_file
from gadei_ps.memory import segment, shm, weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.weights import FloatArray

COPY_S = 60.0
"""Time limit until a job has made its copy (s)."""


def of_job(job: str) -> dict[str, FloatArray]:
    """Return a job's weights on this host between two gradients, by the names of its tensors.

    Raises JobNotFound, ControlError, SegmentError or FileNotFoundError.
    """
    mapped = segment.attach(shm.segment_name(job, "weights"), SegmentKind.WEIGHTS, writable=False)
    model = weights.read_table(mapped)
    with os.fdopen(memory_file(model.elements * 4, ()), "rb") as file:
        with Connection(job, COPY_S) as connection:
            connection.request(Copy(slots=False), [file.fileno()])
        return model.views(np.fromfile(file, np.float32, model.elements))
