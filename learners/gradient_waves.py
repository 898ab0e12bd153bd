"""Waves for a job whose server has the optimizer: a wave's gradients are pushed as their sum.

This is ours. In Park et al. 2020 (HetPipe) learners push updates; see waves.py. Here a learner has
no optimizer: no mini-batch changes its weights, which are those of its last pull. It waits and
pulls where WSP requires it, and the bound of WSP holds for its own mini-batches too: of those
before it, a mini-batch misses at most s_global of each learner.

    client = Client(tensors=..., optimizer={"kind": "adam"})
    waves = GradientWaves(client)
    for ... :
        waves.begin()                                # waits if the model requires it
        waves.gradients["w"] += ...                  # of waves.weights
        waves.end(loss=loss, samples=4)              # pushes after the last mini-batch of a wave

Under other models than WSP a wave is one mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.waves import WaveOrder, adds
from gadei_ps.memory.weights import FloatArray


class GradientWaves(WaveOrder):
    """Weights as they were pulled, and the sum of a wave's gradients.

    Mini-batches end in the order in which they began, so at most one wave has gradients.
    before_reading: is called before the sum is pushed; it adds to `gradients` what lies elsewhere.
    Raises UsageError if the job adds what learners push.
    """

    def __init__(self, client: Client, before_reading: Callable[[], object] = lambda: None) -> None:
        if adds(client):
            raise UsageError(
                f"job {client.job!r} adds updates, and this learner has no optimizer: give it one, "
                "or start the job with another optimizer than add"
            )
        super().__init__(client)
        self.before_reading = before_reading
        self._sum = np.zeros_like(self.flat)
        self.gradients: dict[str, FloatArray] = client.model.gradients(self._sum)
        """Gradients by name. Add to them in place, between begin() and end()."""

    def _take(self) -> None:
        self.client.pull(self.flat)

    def _of_wave(self) -> FloatArray:
        self.before_reading()
        return self._sum

    def _forget(self) -> None:
        self._sum.fill(0)
