"""Problems for virtual workers, as chains of layers, and a learner of one of them.

    python -m gadei_ps.benchmarks.reproduce.virtual_learner PROBLEM RATE EPOCHS SEED STAGES

STAGES 1: a plain learner, of the whole model, with the same optimizer of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gadei_ps.benchmarks.nlc_texts import VARIABLE, data_directory
from gadei_ps.benchmarks.reproduce import mnist
from gadei_ps.classifier import dataset, words
from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker

LENGTH = 24  # words of a question; a longer one is cut
HIDDEN = 256
EMBEDDING, MAPS, TAPS = 64, 96, 4
RANGE = 0.1  # of the embedding at the start
BATCHES = {"mnist": 32, "trec6": 16}


@dataclass(frozen=True)
class Samples:
    """Inputs of the first layer, and labels, int64 (n,)."""

    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """A data set and a model that is a chain of layers."""

    training: Samples
    test: Samples
    layers: Callable[[], list[nn.Module]]
    """Makes the layers. Call torch.manual_seed before."""
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    """Given the parameters and the rate."""


class _Channels(nn.Module):
    """(B, L, channels) as (B, channels, L)."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2)


class _Peak(nn.Module):
    """The maximum over the last dimension."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.amax(-1)


def problem(name: str) -> Problem:
    """mnist: a network with two hidden layers. trec6: embedding, convolution, maximum.

    Raises UsageError if the data are missing.
    """
    return _digits() if name == "mnist" else _questions()


def _digits() -> Problem:
    parts = [mnist.load(kind) for kind in ("train", "t10k")]
    training, test = (
        Samples(torch.from_numpy(one.pixels), torch.from_numpy(one.labels)) for one in parts
    )

    def layers() -> list[nn.Module]:
        return [
            nn.Linear(mnist.PIXELS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, mnist.CLASSES),
        ]

    return Problem(training, test, layers, torch.optim.SGD)


def _questions() -> Problem:
    directory = data_directory() / "trec6"
    if not directory.exists():
        raise UsageError(f"{directory}: no trec6; set {VARIABLE} to a directory with it")
    files = [dataset.read_training(directory / f"{part}.csv") for part in ("train", "test")]
    vocabulary = words.Vocabulary.build(files[0].texts)
    names = {name: number for number, name in enumerate(files[0].label_names)}

    def samples(data: dataset.Dataset) -> Samples:
        found = words.encode(data.texts, vocabulary, LENGTH).padded().astype(np.int64)
        tokens = np.full((len(found), LENGTH), words.PADDING)
        tokens[:, : found.shape[1]] = found
        labels = [names[data.label_names[label]] for label in data.labels]
        return Samples(torch.from_numpy(tokens), torch.tensor(labels))

    def layers() -> list[nn.Module]:
        embedding = nn.Embedding(len(vocabulary), EMBEDDING, padding_idx=words.PADDING)
        with torch.no_grad():
            embedding.weight.uniform_(-RANGE, RANGE)
            embedding.weight[words.PADDING] = 0
        filters = nn.Conv1d(EMBEDDING, MAPS, TAPS, padding=TAPS - 1)
        rest = [_Peak(), nn.ReLU(), nn.Dropout(0.5), nn.Linear(MAPS, len(names))]
        return [embedding, _Channels(), filters, *rest]

    return Problem(samples(files[0]), samples(files[1]), layers, torch.optim.Adagrad)


def accuracy(layers: Sequence[nn.Module], test: Samples) -> float:
    """The share of the samples that are classified correctly."""
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        right = model(test.inputs).argmax(1) == test.labels
    return float(right.float().mean())


def main() -> None:
    """Train on the batches of the server's until they are done."""
    name, rate, epochs, seed, stages = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    one = problem(name)
    layers = one.layers()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return one.optimizer(parameters, rate)

    inputs, labels = one.training.inputs, one.training.labels
    if stages > 1:
        with VirtualWorker(layers, ["host:1"] * stages, make) as worker:
            told = {"batch_size": BATCHES[name], "epochs": epochs, "seed": seed}
            for _ in worker.train_on(inputs, labels, functional.cross_entropy, **told):
                pass
        return
    model = nn.Sequential(*layers)
    optimizer = LocalOptimizer(model, make)
    try:
        for batch in optimizer.batches(len(inputs), BATCHES[name], epochs, seed):
            at = torch.from_numpy(batch.indices)
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(inputs[at]), labels[at]))
            optimizer.step()
    except JobStopped:
        pass
    finally:
        optimizer.close()


if __name__ == "__main__":
    main()
