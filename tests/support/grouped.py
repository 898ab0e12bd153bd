"""A job with two groups of parameters, and the weights that its gradients must give."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, slots
from gadei_ps.learners.client import Client
from support import kernel_reference as reference

TENSORS = {
    "first.weight": np.ones((40, 3), np.float32),
    "first.bias": np.full(40, 2, np.float32),
    "last.weight": np.ones((70, 2), np.float32),
    "last.bias": np.full(7, 3, np.float32),
}
BIASES = {"params": "*.bias", "weight_decay": 0}
LAST = {"params": ["none", "last.*"], "lr": 0.5}
SAID: dict[str, Any] = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "groups": [BIASES, LAST]}
ROWS = [
    OptimizerSpec(Kind.ADAMW, 0.01, weight_decay=0.0),
    OptimizerSpec(Kind.ADAMW, 0.5, weight_decay=0.1),
    OptimizerSpec(Kind.ADAMW, 0.01, weight_decay=0.1),
]
GROUP = {"first.bias": 0, "last.bias": 0, "last.weight": 1, "first.weight": 2}
FILE = """standby = false
[checkpoint]
every_s = 0
[optimizer]
kind = "adamw"
lr = 0.01
weight_decay = 0.1
[[optimizer.groups]]
match = "*.bias"
weight_decay = 0
[[optimizer.groups]]
match = ["none", "last.*"]
lr = 0.5
"""


class Expected:
    """The weights as torch's optimizer with these groups would move them."""

    def __init__(self, group: Mapping[str, int] = GROUP) -> None:
        self.specs, self.group, self.steps = list(ROWS), group, 0
        self.weights = {name: value.copy() for name, value in TENSORS.items()}
        self._state = {
            name: [np.zeros_like(value) for _ in range(slots(Kind.ADAMW))]
            for name, value in TENSORS.items()
        }

    def push(self, client: Client, scales: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
        """One gradient, of the job and of the other; then both are the same."""
        self.steps += 1
        draw = np.random.default_rng(self.steps)
        gradients = {
            name: draw.standard_normal(value.shape).astype(np.float32)
            for name, value in TENSORS.items()
        }
        for name, gradient in gradients.items():
            spec, scale = self.specs[self.group[name]], scales[self.group[name]]
            state, weights = self._state[name], self.weights[name]
            reference.step(spec, weights, state, gradient, self.steps, spec.lr * scale)
        client.wait_turn()  # others may have pushed since
        client.push(gradients, rate_scale=scales)
        client.wait_applied()
        for name, weights in self.weights.items():
            np.testing.assert_allclose(client.weights[name], weights, rtol=2e-5, atol=1e-6)


def learner(job: str, tensors: Mapping[str, Any] | None = TENSORS, **settings: Any) -> Client:
    """Optimizer without settings of the job: the script's are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Client(job, tensors=tensors, optimizer=settings)
