"""Tasks of the machines of `bench worker_groups`: real data, small networks.

    trec6   the sentence classifier, as `gadei-ps train` has it
    mnist   two convolutions, on images of 14 x 14

A tenth of the training rows is never trained on: settings are chosen by it (`choosing`,
worker_groups_choice.py). The benchmark itself is judged by the test rows, which no choice has seen.
Learners of all machines draw their mini-batches from the other nine tenths, each in its own order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from gadei_ps.benchmarks import asynchrony_tasks, nlc_texts
from gadei_ps.benchmarks.asynchrony_tasks import Data
from gadei_ps.classifier.network import SentenceClassifier
from gadei_ps.learners.torch import embedding, linear


@dataclass(frozen=True)
class Task:
    """One of TASKS. like: of asynchrony_tasks, whose data it has. samples: of a whole run.

    lr: of one machine; together: of machines in groups, which average what they have trained.
    """

    like: str
    batch: int
    samples: int
    optimizer: str
    lr: float
    together: float


TASKS = {
    "trec6": Task("text", 8, 40_000, "adagrad", 2e-2, 4e-2),
    "mnist": Task("resnet", 16, 60_000, "adam", 1e-3, 3e-3),
}


class Examples(Data):
    """The rows of a task: `loss` draws from nine tenths of the training rows."""

    def __init__(self, name: str, *, choosing: bool = False) -> None:
        """choosing: `held_out` judges by the last tenth of the training rows, not by the test rows.

        Raises UsageError or DatasetError if the files are missing.
        """
        task = TASKS[name]
        super().__init__(replace(asynchrony_tasks.TASKS[task.like], batch=task.batch))
        if task.like == "text":
            if not choosing:
                self._others = nlc_texts.test_part(name)
            return
        (images, labels), test = self._images
        cut = len(labels) * 9 // 10
        self._images = [
            (images[:cut], labels[:cut]),
            (images[cut:], labels[cut:]) if choosing else test,
        ]

    def text_model(self, seed: int, *, plain: bool) -> nn.Module:
        """The sentence classifier. plain: by torch's own functions; else for `Optimizer`."""
        sizes = self._texts.vocabulary_size, self._texts.classes
        if plain:
            return SentenceClassifier(*sizes, seed=seed, sparse=True)
        return SentenceClassifier(*sizes, seed=seed, sparse=True, linear=linear, lookup=embedding)


def model(name: str, found: Examples, seed: int, *, plain: bool = False) -> nn.Module:
    """Fresh weights, the same for the same seed. plain: for torch's own optimizers."""
    if TASKS[name].like == "text":
        return found.text_model(seed, plain=plain)
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
