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
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier.dataset import UNSEEN_LABEL
from gadei_ps.classifier.words import PADDING, WORDS, Vocabulary
from gadei_ps.errors import GadeiError
from gadei_ps.machine import given
from gadei_ps.show.counts import counted
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
        sizes = (vocabulary_size, classes, embedding, maps, *widths)
        if not widths or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(f"sizes must be positive integers: {sizes}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1: {dropout}")
        self.sizes: dict[str, Any] = {
            "vocabulary_size": vocabulary_size,
            "classes": classes,
            "embedding": embedding,
            "maps": maps,
            "widths": sorted(widths, reverse=True),
            "dropout": dropout,
        }
        self.dropout = dropout
        self.sparse = sparse
        self.linear = linear
        self.lookup = lookup
        self.widest = max(widths)
        features = maps * len(widths)
        self.tap_features = [
            maps * sum(width > tap for width in widths) for tap in range(self.widest)
        ]
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
        """Logits, float32 (B, classes), of word numbers (B, L), int32 or int64. L is at least 1.

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
    batch_size: int = 64,
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


def predict(
    model: SentenceClassifier, tokens: NDArray[np.int32], batch_size: int = 64
) -> NDArray[np.float32]:
    """Probabilities, float32 (n, classes), of sentences (n, width), without dropout."""
    probabilities = np.empty((len(tokens), model.sizes["classes"]), np.float32)
    for rows, logits in _logits(model, tokens, batch_size):
        probabilities[rows] = logits.softmax(dim=1).numpy()
    return probabilities


def _logits(
    model: SentenceClassifier, tokens: NDArray[np.int32], batch_size: int
) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
    """Row numbers and their logits on the CPU, shortest sentences first, for less padding."""
    lengths = (tokens != PADDING).sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = tokens[rows, : max(1, lengths[rows[-1]])]
            with torch.no_grad():
                logits = model(torch.from_numpy(batch).to(model.embedding.device))
            yield rows, logits.cpu()
    finally:
        model.train(training)


# The result directory

_FORMAT = 2
_FORMAT_OF_CUTS = 3
"""Of a model whose texts are not cut into words. Releases that only know words refuse it."""
_WEIGHTS, _VOCABULARY, _LABELS, _CONFIG, _METRICS = RESULT_FILES = (
    "weights.safetensors",
    "vocabulary.json",
    "labels.json",
    "config.json",
    "metrics.json",
)


class ModelDirectoryError(GadeiError):
    """A result directory cannot be written or read. The message is one line with the remedy."""


class Result(NamedTuple):
    """What a result directory holds. The model is in evaluation mode."""

    model: SentenceClassifier
    vocabulary: Vocabulary
    label_names: tuple[str, ...]
    config: dict[str, Any]
    metrics: dict[str, Any]


def check_result_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ModelDirectoryError if `save_result` would refuse `directory`.

    The directory may be missing, empty, or an earlier result. Call this before a long training.
    """
    path = _resolved(directory)
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        parent = next(p for p in path.parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise _error(path, f"{parent} is not a writable directory", _ELSEWHERE) from None
        try:  # for root, access() is not reliable
            Path(tempfile.mkdtemp(prefix=".gadei-ps-", dir=parent)).rmdir()
        except OSError as error:
            raise _error(path, f"cannot be made ({error.strerror})", _ELSEWHERE) from None
        return
    except OSError as error:
        raise _error(path, f"cannot be used ({error.strerror})", _ELSEWHERE) from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _error(path, f"{path.parent} is not writable", _ELSEWHERE)
    if names and not (names <= set(RESULT_FILES) and _CONFIG in names):
        raise _error(path, "holds other files than an earlier result", "empty it or name another")


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
    path = _resolved(directory)
    number = _FORMAT if vocabulary.cut == WORDS else _FORMAT_OF_CUTS
    settings = {"format": number, "model": model.sizes, "training": dict(config)}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    contents = {
        _WEIGHTS: safetensors.torch.save(tensors),
        _VOCABULARY: vocabulary.to_json().encode(),
        _LABELS: _json({"labels": list(label_names)}),
        _CONFIG: _json(settings),
        _METRICS: _json(dict(metrics)),
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
        raise _error(path, f"cannot be written ({error.strerror})", _ELSEWHERE) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # what could not be written, or the earlier one


def load_result(directory: str | os.PathLike[str]) -> Result:
    """Read what `save_result` wrote. Raises ModelDirectoryError if a file is missing or damaged."""
    path = _resolved(directory)
    if not path.is_dir():
        raise _error(path, "is not a directory", "give the directory of a finished training")
    config = _read_object(path / _CONFIG)
    if config.get("format") not in (_FORMAT, _FORMAT_OF_CUTS):
        what = f"has format {config.get('format')!r}, not {_FORMAT} or {_FORMAT_OF_CUTS}"
        raise _error(path / _CONFIG, what, "load it with the version that wrote it")
    metrics = _read_object(path / _METRICS)
    labels = _read_object(path / _LABELS).get("labels")
    if not isinstance(labels, list) or not all(isinstance(name, str) for name in labels):
        raise _damaged(path / _LABELS, "labels must be a list of strings")
    try:
        vocabulary = Vocabulary.from_json(_read(path / _VOCABULARY).decode())
    except ValueError as error:
        raise _damaged(path / _VOCABULARY, str(error)) from None
    sizes = config.get("model")
    if not isinstance(sizes, dict):
        raise _damaged(path / _CONFIG, "the sizes of the model are missing")
    # Compared before the model is built, because a damaged size could need all the memory.
    for name, file, number in (
        ("vocabulary_size", _VOCABULARY, len(vocabulary)),
        ("classes", _LABELS, len(labels)),
    ):
        if sizes.get(name) != number:
            what = (
                f"{counted(number, 'entry', 'entries')}, but config.json says {sizes.get(name)!r}"
            )
            raise _damaged(path / file, what)
    model = _load_model(path, sizes)
    return Result(model, vocabulary, tuple(labels), config, metrics)


def _load_model(path: Path, sizes: dict[str, Any]) -> SentenceClassifier:
    try:
        tensors = safetensors.torch.load(_read(path / _WEIGHTS))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path / _WEIGHTS, str(error)) from None
    try:
        with torch.device("meta"):
            shapes = SentenceClassifier(**sizes)
    except (TypeError, ValueError) as error:
        raise _damaged(path / _CONFIG, str(error)) from None
    expected = {name: (t.shape, t.dtype) for name, t in shapes.state_dict().items()}
    if {name: (t.shape, t.dtype) for name, t in tensors.items()} != expected:
        raise _damaged(path / _WEIGHTS, "the tensors are not those that config.json describes")
    model = SentenceClassifier(**sizes)
    model.load_state_dict(tensors)
    return model.eval()


_ELSEWHERE = "name another directory"


def _resolved(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(directory))


def _read(path: Path) -> bytes:
    try:
        with given.opened(path) as file:
            return file.read()
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _damaged(path, "not a JSON object")
    return value


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=2).encode()


def _damaged(path: Path, what: str) -> ModelDirectoryError:
    return _error(path, f"missing or damaged ({what})", "restore the directory or train again")


def _error(path: Path, what: str, remedy: str) -> ModelDirectoryError:
    return ModelDirectoryError(" ".join(f"{path}: {what}; {remedy}".split()))
