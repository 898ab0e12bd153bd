"""Shape of a model, as the processes of the benchmark of virtual workers exchange it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A model, and its mini-batches. Each stage has so many layers, Linear and ReLU of one width.

    waits: for each stage, seconds that it waits in a forward and in a backward pass besides.
    """

    stages: int
    width: int = 64
    layers: int = 1
    samples: int = 8
    waits: Sequence[Sequence[float]] = ()

    def told(self) -> dict[str, Any]:
        """Return the shape as keywords, for another process."""
        return asdict(self)

    @property
    def weights(self) -> tuple[int, int, int]:
        """The same for all models that may work in one job."""
        return self.stages, self.width, self.layers

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} layers, mini-batch {self.samples}"
