"""WSP as virtual workers keep it: what each of their stages computes a mini-batch from."""

from __future__ import annotations

import mmap
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import pytest
import torch
from support import quick
from support.staleness import MANY, MODELS, grants, most_missed, notes
from torch import nn

from gadei_ps.errors import JobStopped
from gadei_ps.learners.virtual import VirtualWorker
from gadei_ps.sync.wsp import WSP

WRONG = -MANY
"""Noted of a mini-batch of which a stage's passes have not had the same weights, or wrong ones."""


class Count(nn.Module):
    """Adds 1 to a value of its learner's own, by SGD with a rate of 1; notes the others' values.

    Of its mini-batch's copy of the weights, when it computes forward and when it does backward.
    """

    def __init__(self, me: int, mine: np.ndarray) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(3))
        self._me = me
        self._mine = mine
        self._copies: dict[int, int] = {}
        self.s_local = 0
        self._forward = 0
        self._backward = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._forward += 1
        self._note(self._forward, self.count)
        outputs = inputs - self.count[self._me]
        count = self.count  # the copy; it is another one in the next call

        def note(_: torch.Tensor) -> None:
            self._backward += 1
            self._note(self._backward, count)

        outputs.register_hook(note)
        return outputs

    def _note(self, number: int, count: torch.Tensor) -> None:
        """number: of the mini-batch, from 1.

        A gradient of another learner may be in one stage's values and not yet in the next one's:
        what lacks more of them counts.
        """
        held = count.detach().numpy()
        others = int(np.delete(held, self._me).min())
        copied = self._copies.setdefault(number, others)
        if number > self._mine[0]:  # the first stage's forward pass
            self._mine[number] = others
            self._mine[0] = number
        own = max(0, number - 1 - self.s_local)
        if held[self._me] != own or others != copied:
            self._mine[number] = WRONG
        self._mine[number] = min(self._mine[number], others)


def _go_on(pipe: Connection, job: str, me: int, noted: mmap.mmap) -> None:
    """Mini-batch after mini-batch through two stages."""
    torch.set_num_threads(1)
    layers = [Count(me, notes(noted)[me]) for _ in range(2)]
    worker = VirtualWorker(
        layers, ["host:1", "host:1"], lambda of: torch.optim.SGD(of, lr=1.0), job
    )
    for layer in layers:
        layer.s_local = worker.client.wave - 1
    try:
        worker.client.wait_turn()
        pipe.send("joined")
        pipe.recv()  # all have joined at the same clock
        for _ in range(1, MANY):
            worker.train(torch.zeros(1), None, lambda outputs, _: outputs.sum())
    except JobStopped:
        pass


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_what_each_stage_sees_at_least(model: WSP, job_name: str) -> None:
    """The bound is reached, and not passed; of its own, a worker lacks those in flight."""
    assert most_missed(job_name, model, model.D + 1, _go_on) == model.s_global


@pytest.mark.parametrize(
    ("waves", "model"), [(1, WSP(0, 3)), (1, WSP(1, 0)), (-1, WSP(1, 3))], ids=str
)
def test_a_server_that_grants_a_wave_too_many_or_too_few_is_noticed(
    waves: int, model: WSP, job_name: str
) -> None:
    with mock.patch.object(quick, "STARTING", [grants(waves, "published")]):
        missed = most_missed(job_name, model, model.D + 1 + waves, _go_on)
    assert missed == model.s_global + waves * model.wave
