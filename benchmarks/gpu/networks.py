"""The networks that learners on a GPU train, besides the sentence classifier.

The paper gives no sizes of its LSTM (section 6.4): here words have 300 values, as in its other
network (Figure 2), and one layer of 512 units. VGG and AlexNet are of the sizes of its Table 5, 60
and 244 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from gadei_ps.benchmarks.nlc_member import SPARSE
from gadei_ps.benchmarks.nlc_texts import SEED, Texts
from gadei_ps.classifier.words import PADDING
from gadei_ps.learners.torch import embedding

WORD = 300
VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of each convolution; 0 is a maximum over 2 x 2."""


class Lstm(nn.Module):
    """Word numbers (B, L) -> embedding (B, L, 300) -> LSTM -> output at the last word -> logits.

    sparse: the gradient of the embedding has the rows of the batch only.
    """

    def __init__(self, vocabulary_size: int, classes: int, hidden: int, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary_size, WORD).uniform_(-0.05, 0.05))
        self.lstm = nn.LSTM(WORD, hidden, batch_first=True)
        self.output = nn.Linear(hidden, classes)
        self.sparse = sparse

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, classes), of word numbers (B, L)."""
        outputs, _ = self.lstm(embedding(tokens, self.embedding, PADDING, sparse=self.sparse))
        last = (tokens != PADDING).sum(1).clamp(min=1) - 1
        rows = torch.arange(len(tokens), device=tokens.device)  # on the CPU it would wait for a GPU
        logits: torch.Tensor = self.output(outputs[rows, last])
        return logits


def lstm(kind: str, texts: Texts, hidden: int = 512) -> Lstm:
    """The LSTM of a contender, as nlc_member.fresh makes the sentence classifier."""
    torch.manual_seed(SEED)
    return Lstm(texts.vocabulary_size, texts.classes, hidden, sparse=kind in SPARSE)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Fully connected layers of these sizes; 2500, 1250, 2500 have 25 MB."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def vgg(classes: int = 10, narrow: int = 1) -> nn.Sequential:
    """VGG for images of 32 x 32, with batch norm. narrow: divides the channels."""
    layers: list[nn.Module] = []
    before = 3
    for channels in VGG:
        if not channels:
            layers.append(nn.MaxPool2d(2))
            continue
        after = channels // narrow
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    layers += [nn.Flatten(), nn.Dropout(), nn.Linear(before, before), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(before, classes))


def alexnet(classes: int = 1000) -> nn.Sequential:
    """AlexNet for images of 224 x 224."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)),
    )


def loss_of(network: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of a mini-batch."""
    return functional.cross_entropy(network(inputs), labels)
