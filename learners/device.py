"""What a pipeline needs of the memory that a learner computes in; a file for each kind of it.

A device moves gradients from its own memory into a ring's slot and weights out of the segment. The
conformance suite runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gadei_ps.learners.client import Client
from gadei_ps.weights import FloatArray, Model


class Device(Protocol):
    """Memory that a learner computes in. Arrays are of the device's own kind."""

    name: str

    def buffer(self, elements: int) -> Any:
        """Room for all weights, float32 of shape (elements,), zero."""

    def load(self, source: FloatArray, buffer: Any) -> None:
        """Pull: copies the segment's weights into a buffer; returns once they are there."""

    def views(self, model: Model, buffer: Any) -> dict[str, Any]:
        """Each tensor by name, as a view of a buffer."""

    def store(self, client: Client, payload: int, gradients: Mapping[str, Any]) -> None:
        """Push: writes gradients into a claimed slot; returns once they are there.

        gradients: by name, arrays of the device; None and missing ones count as zero.
        """
