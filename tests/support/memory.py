"""A model and rings in a job's memory, made and entered at once."""

from __future__ import annotations

import numpy as np

from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model
from gadei_ps.watchdog import model_segments
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.model_segments import InitialModel


def create_model(memory: JobMemory, model: Model, values: np.ndarray) -> None:
    """values: float32 of shape (model.elements,). Raises NoSharedMemory."""
    first = InitialModel(model, model_segments.copied(values))
    memory.enter_model(first, memory.make_model(first))


def create_ring(memory: JobMemory, row: int, generation: int) -> Segment:
    """Raise NoSharedMemory."""
    ring = memory.make_ring(row, generation)
    memory.enter_ring(row, ring)
    return ring
