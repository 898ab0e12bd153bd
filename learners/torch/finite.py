"""Gradients that hold a NaN or an infinity, which the job refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from gadei_ps.learners.client import Client

LEFT_OUT = (
    "gadei-ps: a gradient of this learner holds a NaN or an infinity: it is left out, as the job "
    "would refuse what comes of it; if this continues, lower the learning rate (shown once)"
)


class FiniteGradients:
    """Finds gradients to leave out: those that are not finite, if the job refuses such.

    A learner's own optimizer that stepped with one would make its weights and the optimizer's state
    NaN for good, while the job refuses all that the learner pushes from then on. In a sum it would
    take the other mini-batches of the wave with it.
    """

    def __init__(self, client: Client) -> None:
        self._refuses = client.refuses_nonfinite
        self._printed = False

    def are_good(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether the gradients of these may be used. Prints a line once if not."""
        if not self._refuses or _finite(parameters):
            return True
        if not self._printed:
            print(LEFT_OUT, file=sys.stderr, flush=True)
            self._printed = True
        return False


def _finite(parameters: Iterable[torch.Tensor]) -> bool:
    largest: dict[torch.device, list[torch.Tensor]] = {}
    for one in parameters:
        if one.grad is None:
            continue
        values = one.grad.coalesce().values() if one.grad.is_sparse else one.grad
        if values.numel():
            # NaN, or the largest by absolute value, which no square overflows.
            norm = torch.linalg.vector_norm(values, torch.inf)
            largest.setdefault(values.device, []).append(norm)
    return all(bool(torch.stack(some).isfinite().all()) for some in largest.values())
