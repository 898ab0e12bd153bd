"""Writes of a script in place to parameters that lie in memory of the learner's own.

Torch counts writes in Tensor._version, which is not public and does not change with
`parameter.data.clamp_()`. So the bytes are compared by checksums, which need no memory.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from gadei_ps.learners.torch.model import Trained


class Writes:
    """Finds the parameters whose values have changed since note().

    A table with max_norm is left out: each forward pass writes to it, in each learner.
    """

    def __init__(self, trained: Trained) -> None:
        modules = trained.module.modules()
        left_out = {
            id(getattr(one, "weight", None)) for one in modules if getattr(one, "max_norm", None)
        }
        self._parameters = {
            name: one for name, one in trained.parameters.items() if id(one) not in left_out
        }
        self._bytes: dict[str, tuple[int, np.ndarray]] = {}
        self._sums: list[int] = []

    def note(self) -> None:
        """Record the values as they should be."""
        self._sums = self._sums_now()

    def names(self) -> list[str]:
        """Return the parameters with other values."""
        now = self._sums_now()
        if now == self._sums:
            return []
        each = zip(self._parameters, now, self._sums, strict=True)
        return [name for name, one, before in each if one != before]

    def _sums_now(self) -> list[int]:
        return [zlib.crc32(self._bytes_of(*one).data) for one in self._parameters.items()]

    def _bytes_of(self, name: str, parameter: torch.nn.Parameter) -> np.ndarray:
        """Return the memory in which a parameter lies."""
        at, found = self._bytes.get(name, (-1, None))
        if found is None or parameter.data_ptr() != at:
            with torch.inference_mode(False):
                storage = parameter.data.untyped_storage()
                found = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._bytes[name] = parameter.data_ptr(), found
        return found
