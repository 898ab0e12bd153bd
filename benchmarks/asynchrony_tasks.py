"""The networks and data of the benchmark of asynchrony: with momentum, small mini-batches.

    gpt     a small GPT that predicts the next character of mr/all.csv; AdamW; cross-entropy
    resnet  a residual network with batch norm on MNIST, 14 x 14; SGD with momentum; error in %
    text    the sentence classifier on trec6; Adam; error in %

Each task gives a fresh model, the loss of one mini-batch, and what is held out. Less is better.
"""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.nlc_member import loss_of
from gadei_ps.classifier.network import SentenceClassifier, evaluate
from gadei_ps.errors import UsageError

CONTEXT, WIDTH, HEADS, LAYERS = 48, 64, 4, 2


@dataclass(frozen=True)
class Task:
    """One of TASKS. optimizer: keywords of `Optimizer`; without `kind`, also of torch's class."""

    name: str
    batch: int
    optimizer: dict[str, Any]
    figure: str


TASKS = {
    "gpt": Task("gpt", 12, {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.01}, "loss"),
    "resnet": Task("resnet", 8, {"kind": "momentum", "lr": 0.02, "momentum": 0.9}, "error in %"),
    "text": Task("text", 4, {"kind": "adam", "lr": 2e-3}, "error in %"),
}


class Block(nn.Module):
    """Attention and a network of two layers, each beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.asked, self.found = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, time, WIDTH)."""
        batch, time, _ = x.shape
        shape = batch, time, 3, HEADS, WIDTH // HEADS
        q, k, v = self.asked(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.found(y.transpose(1, 2).reshape(batch, time, WIDTH))
        out: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x))))
        return out


class Gpt(nn.Module):
    """Characters to the logits of the next ones."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.what, self.where = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: int64 of shape (batch, time)."""
        hidden = self.what(x) + self.where(torch.arange(x.shape[1]))
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norm beside their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, channels, height, width)."""
        return functional.relu(x + self.layers(x))


class Data:
    """A task's examples, split in those to train on and those held out."""

    def __init__(self, task: Task) -> None:
        """Raise UsageError if the files are missing."""
        self._task = task
        try:
            getattr(self, f"_read_{task.name}")()
        except FileNotFoundError as error:
            raise UsageError(f"bench asynchrony needs {error.filename}") from None

    def _read_gpt(self) -> None:
        text = (nlc_texts.data_directory() / "mr" / "all.csv").read_text(errors="ignore")
        _, numbers = np.unique(np.array(list(text[:1_000_000])), return_inverse=True)
        whole = torch.from_numpy(numbers.astype(np.int64))
        self._characters = int(whole.max()) + 1
        cut = len(whole) * 9 // 10
        self._text, self._held_out = whole[:cut], whole[cut:]

    def _read_resnet(self) -> None:
        self._images = [self._mnist(part) for part in ("train", "t10k")]

    @staticmethod
    def _mnist(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        folder = nlc_texts.data_directory() / "mnist"
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
        small = functional.avg_pool2d(torch.from_numpy(pixels.copy()).float() / 255, 2)
        return (small - 0.13) / 0.31, torch.from_numpy(labels)

    def _read_text(self) -> None:
        found, _ = nlc_texts.read(["trec6"])
        if "trec6" not in found:
            raise FileNotFoundError(2, "", nlc_texts.FILES["trec6"])
        self._texts, self._others = nlc_texts.parts("trec6", found["trec6"])

    def model(self, seed: int) -> nn.Module:
        """Fresh weights, the same for the same seed."""
        torch.manual_seed(seed)
        if self._task.name == "gpt":
            return Gpt(self._characters)
        if self._task.name == "resnet":
            first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
            half = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
            last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
            return nn.Sequential(first, nn.ReLU(), Residual(16), half, Residual(32), last)
        return SentenceClassifier(self._texts.vocabulary_size, self._texts.classes, seed=seed)

    def loss(self, model: nn.Module, random: np.random.Generator) -> torch.Tensor:
        """Return the loss of a random mini-batch."""
        if self._task.name == "gpt":
            return self._gpt_loss(model, self._text, random, self._task.batch)
        if self._task.name == "resnet":
            images, labels = self._images[0]
            rows = torch.from_numpy(random.integers(0, len(labels), self._task.batch))
            return functional.cross_entropy(model(images[rows]), labels[rows])
        drawn = random.integers(0, len(self._texts), self._task.batch)
        return loss_of(model, self._texts, drawn, torch.device("cpu"))

    @staticmethod
    def _gpt_loss(
        model: nn.Module, text: torch.Tensor, random: np.random.Generator, batch: int
    ) -> torch.Tensor:
        begins = random.integers(0, len(text) - CONTEXT - 1, batch)
        rows = torch.from_numpy(begins[:, None] + np.arange(CONTEXT + 1))
        piece = text[rows]
        logits = model(piece[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> float:
        """The task's figure on what is held out."""
        model.eval()
        if self._task.name == "gpt":
            random = np.random.default_rng(99)
            return float(self._gpt_loss(model, self._held_out, random, 1000))
        if self._task.name == "resnet":
            images, labels = self._images[1]
            parts = [model(part).argmax(1) for part in torch.split(images, 1000)]
            return 100 * float((torch.cat(parts) != labels).float().mean())
        assert isinstance(model, SentenceClassifier)
        accuracy, _ = evaluate(model, self._others.encoded, self._others.labels)
        return 100 * (1 - accuracy)


@functools.cache
def data(name: str) -> Data:
    """A task's data, read once in each process."""
    return Data(TASKS[name])
