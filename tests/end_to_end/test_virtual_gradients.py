"""Virtual workers without an optimizer of their own: the job's server has it, and gets sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import data, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn
from torch.func import functional_call

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.virtual import VirtualWorker, stages
from gadei_ps.learners.waves import GradientWaves

CRITERION = nn.functional.cross_entropy
COUNT = 11  # mini-batches

KINDS = {"sgd": 0.1, "momentum": 0.1, "adam": 0.01}


def summed(wave: int, job: str) -> tuple[dict[str, np.ndarray], list[torch.Tensor]]:
    """One after another in one thread, from weights as they are pulled; pushes the sum of a wave.

    Returns the weights of this job, and those that were pulled last.
    """
    model = plain_model()
    names = [name for name, _ in model.named_parameters()]
    tensors = {name: one.detach().numpy() for name, one in model.named_parameters()}
    with Client(job, tensors=tensors) as client:
        sums = [torch.zeros_like(one) for one in model.parameters()]
        for number, (inputs, targets) in enumerate(data(COUNT)):
            if number == 0 or number % wave == wave - 1:
                client.wait_applied()
                pulled = [torch.tensor(client.weights[name]) for name in names]
            leaves = {
                name: one.clone().requires_grad_() for name, one in zip(names, pulled, strict=True)
            }
            loss = CRITERION(functional_call(model, leaves, (inputs,)), targets)
            for one, more in zip(sums, torch.autograd.grad(loss, [*leaves.values()]), strict=True):
                one += more
            if number % wave == wave - 1 or number == COUNT - 1:
                client.push({name: one.numpy() for name, one in zip(names, sums, strict=True)})
                for one in sums:
                    one.zero_()
        client.wait_applied()
        return {name: one.copy() for name, one in client.weights.items()}, pulled


@pytest.mark.parametrize(
    ("s_local", "count", "kind", "far"),
    [(0, 2, "adam", False), (1, 3, "momentum", False), (3, 2, "sgd", False), (3, 3, "adam", True)],
)
def test_without_an_optimizer_of_its_own_it_pushes_sums_of_gradients(
    s_local: int, count: int, kind: str, far: bool, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the sequential program that does so.

    far: the weights and the sums of stages 0 and 2 come and go as those on a GPU.
    """
    # The sums are the same, but here they are stale, and there they are not.
    optimizer = {"kind": kind, "lr": KINDS[kind], "spike_compensation": False}
    how = {"optimizer": optimizer}
    with daemon(f"{job_name}-s", **how):
        expected, own = summed(s_local + 1, f"{job_name}-s")
    devices = ["host:1"] * count
    if far:
        devices = ["host:1", "host:2", "host:1"]
        monkeypatch.setattr(
            stages.StageDevice, "has_own_memory", property(lambda one: one.cores == 1)
        )
    with (
        daemon(job_name, sync=f"wsp:D=1,s_local={s_local}", **how),
        VirtualWorker([*plain_model()], devices, None, job_name) as worker,
    ):
        for inputs, targets in data(COUNT):
            worker.train(inputs, targets, CRITERION)
        worker.drain()
        worker.waves.flush()
        worker.client.wait_applied()
        assert worker.client.published == -(-COUNT // (s_local + 1))
        for name, wanted in expected.items():
            np.testing.assert_array_equal(worker.client.weights[name], wanted)
        for got, pulled in zip(worker.model.parameters(), own, strict=True):
            assert torch.equal(got, pulled)


def test_in_numpy(job_name: str) -> None:
    """The weights change where they are pulled, and only there."""
    with (
        daemon(job_name, sync="wsp:D=1,s_local=2"),
        Client(job_name, tensors={"w": np.zeros(3)}) as client,
    ):
        waves = GradientWaves(client)
        seen = []
        for number in range(8):
            waves.begin()
            seen.append(-waves.weights["w"][0])
            waves.gradients["w"] += number
            waves.end(samples=1)
        assert seen == [0, 0, 0, 0, 0, 3, 3, 3]
        assert waves.flush()
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["w"], -28)
        assert status(job_name)["samples"] == 8


def test_a_job_that_adds_wants_an_optimizer(job_name: str) -> None:
    with daemon(job_name, optimizer={"kind": "add"}):
        with pytest.raises(UsageError, match="adds updates, and this learner has no optimizer"):
            VirtualWorker([*plain_model()], ["host:1"], None, job_name)
        eventually(lambda: not status(job_name)["learners"])
