"""Steps of a learner's own optimizer, only by gradients that are finite."""

from __future__ import annotations

import sys

import torch

from gadei_ps.learners.client import Client

LEFT_OUT = (
    "gadei-ps: a gradient of this learner holds a NaN or an infinity: its optimizer does not step "
    "with it, as the job would refuse the update; if this goes on, lower the learning rate (shown "
    "once)"
)


class FiniteSteps:
    """Steps an optimizer, unless a gradient holds a NaN or an infinity and the job refuses such.

    One such step would make the learner's weights and the optimizer's state NaN for good, while the
    job refuses all that the learner pushes from then on.
    """

    def __init__(self, client: Client, optimizer: torch.optim.Optimizer) -> None:
        self._refuses = client.refuses_nonfinite
        self._optimizer = optimizer
        self._told = False

    def step(self) -> None:
        """Steps, or says once that it has not."""
        if not self._refuses or self._finite():
            self._optimizer.step()
        elif not self._told:
            print(LEFT_OUT, file=sys.stderr, flush=True)
            self._told = True

    def _finite(self) -> bool:
        largest: dict[torch.device, list[torch.Tensor]] = {}
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                values = one.grad.coalesce().values() if one.grad.is_sparse else one.grad
                if values.numel():
                    # NaN, or the largest by absolute value, which no square overflows.
                    norm = torch.linalg.vector_norm(values, torch.inf)
                    largest.setdefault(values.device, []).append(norm)
        return all(bool(torch.stack(some).isfinite().all()) for some in largest.values())
