"""The host's memory as a device: NumPy arrays, copied by the processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gadei_ps.learners.client import Client
from gadei_ps.weights import FloatArray, Model


class Host:
    """Gradients go from NumPy arrays straight into the slot; there is no staging copy."""

    name = "host"

    def buffer(self, elements: int) -> FloatArray:
        return np.zeros(elements, np.float32)

    def load(self, source: FloatArray, buffer: FloatArray) -> None:
        np.copyto(buffer, source)

    def views(self, model: Model, buffer: FloatArray) -> dict[str, FloatArray]:
        return model.views(buffer)

    def store(self, client: Client, payload: int, gradients: Mapping[str, Any]) -> None:
        client.write_named(payload, gradients)
