"""The sentence classifier that the paper trains (Figure 2), and its model directory.

    word numbers (B, L) -> embedding (B, L, 300) -> filters of width 3, 4, 5, 100 of each
    -> maximum over positions (B, 300) -> ReLU -> dropout 1/2 -> linear -> logits (B, classes)

This is the CNN-rand of Kim (2014), "Convolutional neural networks for sentence classification".
The module does not use the parameter server.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier.dataset import UNSEEN_LABEL
from gadei_ps.classifier.inference import (
    BATCH,
    CONFIG,
    FORMAT,
    FORMAT_OF_CUTS,
    LABELS,
    METRICS,
    RESULT_FILES,
    VOCABULARY,
    WEIGHTS,
    ModelDirectoryError,
    Sizes,
    batches,
    failure,
    resolved,
)
from gadei_ps.classifier.words import PADDING, WORDS, Vocabulary
from gadei_ps.show.strict_json import finite
from gadei_ps.storage import files

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Lookup = Callable[..., torch.Tensor]
EMBEDDING_RANGE = 0.05
"""Embeddings start uniform within this distance of zero.

Adagrad moves a word by about 0.01 at a time, at the paper's learning rate of 0.01. With 0.05 it
reaches a higher validation accuracy on TREC-6 than with Kim's 0.25, in 4 epochs instead of 7 (one
run each), and about the same on MR. Plain SGD moves words much less and needs 0.25.
"""


class SentenceClassifier(torch.nn.Module):
    """Kim's network with one trained embedding (paper, Figure 2).

    Parameters, all float32 and dense:

    embedding      (vocabulary_size, embedding)       row PADDING is zero and has no gradient
    filters        (maps * sum(widths), embedding)    tap by tap, see `forward`
    filter_bias    (maps * len(widths),)              features of the widest filters first
    output_weight  (classes, maps * len(widths))
    output_bias    (classes,)

    The initial weights depend only on the arguments and `seed`, not on the global generator, which
    draws the dropout. With `sparse`, the gradient of `embedding` is a sparse tensor. `linear` and
    `lookup` replace torch's functions that multiply by the filters and look words up. Raises
    ValueError for sizes that are not positive.
    """

    def __init__(
        self,
        vocabulary_size: int,
        classes: int,
        *,
        embedding: int = 300,
        maps: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        dropout: float = 0.5,
        embedding_range: float = EMBEDDING_RANGE,
        seed: int = 0,
        sparse: bool = False,
        linear: Linear = functional.linear,
        lookup: Lookup = functional.embedding,
    ) -> None:
        super().__init__()
        sizes = Sizes(vocabulary_size, classes, embedding, maps, widths, dropout)
        self.sizes = sizes.as_dict()
        self.dropout = dropout
        self.sparse = sparse
        self.linear = linear
        self.lookup = lookup
        self.widest = max(widths)
        self.tap_features = sizes.tap_features
        features = sizes.features
        generator = torch.Generator().manual_seed(seed)

        def uniform(shape: tuple[int, ...], bound: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(
                torch.empty(shape).uniform_(-bound, bound, generator=generator)
            )

        self.embedding = uniform((vocabulary_size, embedding), embedding_range)
        with torch.no_grad():
            self.embedding[PADDING] = 0
        # The bound of torch's own layers: 1 / sqrt(number of inputs). A row's filter has `width`
        # taps. `forward` explains the order of the rows.
        filters = uniform((sum(self.tap_features), embedding), 1.0)
        scale = torch.tensor(
            [(embedding * width) ** -0.5 for width in self.sizes["widths"] for _ in range(maps)]
        )
        with torch.no_grad():
            filters.mul_(torch.cat([scale[:count] for count in self.tap_features])[:, None])
        self.filters = filters
        self.filter_bias = torch.nn.Parameter(torch.zeros(features))
        self.output_weight = uniform((classes, features), features**-0.5)
        self.output_bias = torch.nn.Parameter(torch.zeros(classes))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 (B, classes), for word numbers (B, L), int32 or int64; L >= 1.

        Each sentence is treated as surrounded by endless padding, so its logits do not depend on
        the padding of its row. The result equals one convolution for each width, zero-padded by
        width - 1 on both sides, the maximum over positions and 0, then bias and ReLU.

        It is computed as one product of the embedded words with all taps of all filters. The blocks
        of columns of the product are then added, tap k shifted by k positions. A tap's block has
        the features of all filters that have this tap, the widest filters first.

        A feature is a row of the filters. A small mini-batch does not change all rows: at
        mini-batch 1, half of the peaks are below zero or dropped out. Such rows need not be pushed.

        At mini-batch 2 with one thread, forward and backward take half the time of a `conv1d` for
        each width for sentences of 12 words, and three quarters for 25 words. Windows that are
        gathered for a matrix product lie between. At mini-batch 32 this takes a fifth more time
        than `conv1d`.
        """
        batch, length = tokens.shape
        embedded = self.lookup(tokens, self.embedding, PADDING, sparse=self.sparse)
        words = embedded.reshape(batch * length, -1)
        products = self.linear(words, self.filters).view(batch, length, -1)
        features = self.tap_features[0]
        windows: torch.Tensor | None = None
        for tap, block in enumerate(torch.split(products, self.tap_features, dim=2)):
            shifted = functional.pad(
                block, (0, features - block.shape[2], tap, self.widest - 1 - tap)
            )
            windows = shifted if windows is None else windows + shifted
        assert windows is not None
        # ReLU and bias commute with the maximum. A window of padding only is 0 without its bias.
        peaks = windows.amax(dim=1).clamp(min=0)
        hidden = functional.dropout(
            functional.relu(peaks + self.filter_bias), self.dropout, self.training
        )
        return functional.linear(hidden, self.output_weight, self.output_bias)


def evaluate(
    model: SentenceClassifier,
    tokens: NDArray[np.int32],
    labels: NDArray[np.int64],
    batch_size: int = BATCH,
) -> tuple[float, float]:
    """Accuracy (0 to 1) and mean cross-entropy (nats) without dropout.

    tokens: (n, width), with trailing PADDING. labels: (n,). A sentence with UNSEEN_LABEL is wrong
    and has no loss. If all have it, the loss is NaN. Raises ValueError if there is no sentence.
    """
    if not len(tokens) or len(tokens) != len(labels):
        raise ValueError(f"cannot evaluate {len(tokens)} sentences with {len(labels)} labels")
    correct, loss = 0, 0.0
    for rows, logits in _logits(model, tokens, batch_size):
        expected = torch.from_numpy(labels[rows])
        correct += int((logits.argmax(dim=1) == expected).sum())
        losses = functional.cross_entropy(
            logits, expected, ignore_index=UNSEEN_LABEL, reduction="sum"
        )
        loss += float(losses)
    known = int((labels != UNSEEN_LABEL).sum())
    return correct / len(labels), loss / known if known else math.nan


def _logits(
    model: SentenceClassifier, tokens: NDArray[np.int32], batch_size: int
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    """Row numbers and their logits on the CPU, as `batches` gives them."""
    training = model.training
    model.eval()
    try:
        for rows, batch in batches(tokens, batch_size):
            with torch.no_grad():
                logits = model(torch.from_numpy(batch).to(model.embedding.device))
            yield rows, logits.cpu()
    finally:
        model.train(training)


# The result directory


def check_result_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ModelDirectoryError if `save_result` would refuse `directory`.

    The directory may be missing, empty, or an earlier result. Call this before a long training.
    """
    path = resolved(directory)
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        parent = next(p for p in path.parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise failure(path, f"{parent} is not a writable directory", _ELSEWHERE) from None
        try:  # for root, access() is not reliable
            Path(tempfile.mkdtemp(prefix=".gadei-ps-", dir=parent)).rmdir()
        except OSError as error:
            raise failure(path, f"cannot be made ({error.strerror})", _ELSEWHERE) from None
        return
    except OSError as error:
        raise failure(path, f"cannot be used ({error.strerror})", _ELSEWHERE) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise failure(path, f"{path.parent} is not writable", _ELSEWHERE)
    if names and not (names <= set(RESULT_FILES) and CONFIG in names):
        raise failure(path, "holds other files than an earlier result", "empty it or name another")


def save_result(
    directory: str | os.PathLike[str],
    model: SentenceClassifier,
    vocabulary: Vocabulary,
    label_names: Sequence[str],
    config: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> None:
    """Write the result directory whole or not at all, replacing an earlier result.

    config: the training settings, written as "training" in config.json. metrics: any JSON values;
    NaN and infinities are written as null. The files are written beside `directory`, in a directory
    that then changes names with an earlier result by one call; that is deleted last. Where the file
    system cannot exchange names, a kill may leave the earlier result whole as
    `.<name>.<hex>.new.old`. Raises ModelDirectoryError if `check_result_directory` does or if a
    write fails; then nothing has changed.
    """
    check_result_directory(directory)
    path = resolved(directory)
    number = FORMAT if vocabulary.cut == WORDS else FORMAT_OF_CUTS
    settings = {"format": number, "model": model.sizes, "training": dict(config)}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    contents = {
        WEIGHTS: safetensors.torch.save(tensors),
        VOCABULARY: vocabulary.to_json().encode(),
        LABELS: _json({"labels": list(label_names)}),
        CONFIG: _json(settings),
        METRICS: _json(dict(metrics)),
    }
    mark = secrets.token_hex(4)
    fresh = path.with_name(f".{path.name}.{mark}.new")
    try:
        files.make_directory(path.parent)
        fresh.mkdir()
        for name, data in contents.items():
            files.write(fresh / name, [data])
        files.replace_directory(fresh, path)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ModelDirectoryError(f"{path}: {what}; {_ELSEWHERE}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # what could not be written, or the earlier one


_ELSEWHERE = "name another directory"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=2).encode()
