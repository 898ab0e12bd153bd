"""A process that trains on images: python -m gadei_ps.benchmarks.gpu.vision_learner GPU

GPU: its name in CUDA_VISIBLE_DEVICES; if empty, the process sees what its launcher sees. Orders:
{"model", "mini_batch", "images", "device", "quick", "job"}: make the network, for gadei-ps if there
is a job, else for torch's SGD; {"steps"}: train so many; {"profiled"}: train so many, and
return their profile; {"close"}: leave the job.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch

from gadei_ps.benchmarks.gpu import networks, step_profile
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.peers import LR, answer, orders
from gadei_ps.learners.torch import Optimizer
from gadei_ps.machine import gpus

NOISE = 256  # images of AlexNet's size, to cut mini-batches from
NARROW = 8
LARGE, CLASSES = 224, 1000


class Trainer:
    """A network, its images and its optimizer."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._target = Target(setup["device"], setup["quick"])
        device = self._target.torch_device
        torch.manual_seed(0)
        self._size = setup["mini_batch"]
        if setup["model"] == "vgg":
            small = self._target.quick or not self._target.on_gpu
            network = networks.vgg(narrow=NARROW if small else 1)
            self._images = torch.from_numpy(np.load(setup["images"])).to(device)
            classes = 10
        else:
            network = networks.alexnet(CLASSES)
            self._images = torch.randint(0, 256, (NOISE, 3, LARGE, LARGE), dtype=torch.uint8)
            self._images = self._images.to(device)
            classes = CLASSES
        self._labels = torch.randint(classes, (len(self._images),)).to(device)
        self._network = network.to(device).train()
        self.bytes = 4 * sum(one.numel() for one in network.parameters())
        self._optimizer: torch.optim.Optimizer
        if setup["job"]:
            self._optimizer = Optimizer(network, setup["job"])
        else:
            self._optimizer = torch.optim.SGD(network.parameters(), lr=LR)

    def run(self, steps: int) -> dict[str, float]:
        """Train `steps` steps, until all of them are applied."""
        begin = time.perf_counter()
        for number in range(steps):
            self._optimizer.zero_grad()
            loss = self._loss(number)
            loss.backward()  # type: ignore[no-untyped-call]
            if isinstance(self._optimizer, Optimizer):
                self._optimizer.report(loss=loss, samples=self._size)
            self._optimizer.step()
        self._target.wait()
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.client.wait_applied(timeout_s=60.0)
        return {"begin": begin, "end": time.perf_counter()}

    def _loss(self, number: int) -> torch.Tensor:
        """Return the loss of a random mini-batch."""
        rows = torch.randint(len(self._images), (self._size,), device=self._images.device)
        inputs = self._images[rows].float().div_(127.5).sub_(1)
        return networks.loss_of(self._network, inputs, self._labels[rows])

    def profile(self, steps: int) -> list[dict[str, Any]]:
        """Return the host's parts of a step."""
        return step_profile.on_host(self._target, self._optimizer, self._network, self._loss, steps)

    def close(self) -> None:
        """Leave the job, and free the GPU's memory."""
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.close()


def main() -> None:
    """See the module's text."""
    if sys.argv[1]:
        os.environ |= {gpus.VISIBLE: sys.argv[1]} | gpus.order()
    torch.set_num_threads(2)
    trainer: Trainer | None = None
    for order in orders():
        if "model" in order:
            trainer = Trainer(order)
            answer({"bytes": trainer.bytes})
            continue
        assert trainer is not None
        if "steps" in order:
            answer(trainer.run(order["steps"]))
        elif "profiled" in order:
            answer({"rows": trainer.profile(order["profiled"])})
        else:
            trainer.close()
            trainer = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            answer({})
    if trainer is not None:
        trainer.close()


if __name__ == "__main__":
    main()
