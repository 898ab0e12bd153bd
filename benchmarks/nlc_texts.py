"""The labelled sentences of the benchmarks: whole files, numbered once, the same for all.

The data sets are mr/all.csv, trec6/train.csv and banking77/train.csv in $GADEI_PS_BENCH_DATA, else
in shared/data beside the checkout. If none of them exists, the benchmarks use the checkout's
examples/intents.csv.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier import dataset, hold_out, words
from gadei_ps.classifier.dataset import Dataset
from gadei_ps.classifier.words import Encoded, Vocabulary
from gadei_ps.errors import UsageError

VARIABLE = "GADEI_PS_BENCH_DATA"
CHECKOUT = Path(__file__).resolve().parents[1]
EXAMPLE = CHECKOUT / "examples" / "intents.csv"
FILES = {"mr": "mr/all.csv", "trec6": "trec6/train.csv", "banking77": "banking77/train.csv"}
FALLBACK = "intents"
SEED = 0


@dataclass
class Texts:
    """A data set for a learner. The vocabulary has every word that occurs."""

    name: str
    encoded: Encoded
    labels: NDArray[np.int64]
    vocabulary_size: int
    classes: int

    def __post_init__(self) -> None:
        """Shuffle nothing yet."""
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.labels)

    def rows(self, number: int, size: int) -> NDArray[np.int64]:
        """Return the sentences of mini-batch `number`, counted through all epochs.

        Each epoch has its own order. A rest that is smaller than a batch is left out.
        """
        size = min(size, len(self))
        epoch, at = divmod(number, len(self) // size)
        if epoch != self._epoch:
            # The same as gadei_ps.learners.client.epoch_order, which this process does not import.
            self._order = np.random.default_rng([SEED, epoch]).permutation(len(self))
            self._epoch = epoch
        return self._order[at * size : (at + 1) * size]


def data_directory() -> Path:
    """$GADEI_PS_BENCH_DATA, else shared/data beside the checkout. It may be missing."""
    return Path(os.environ.get(VARIABLE, CHECKOUT.parent / "shared" / "data"))


def read(names: Sequence[str]) -> tuple[dict[str, Dataset], list[str]]:
    """Return the data sets that exist, and notes on those that do not.

    Raises UsageError if there is no data set at all.
    """
    directory = data_directory()
    paths = {name: directory / FILES[name] for name in names}
    found = {name: dataset.read_training(path) for name, path in paths.items() if path.exists()}
    missing = ", ".join(FILES[name] for name in names if name not in found)
    if not missing:
        return found, []
    note = f"not measured, because missing in {directory} (${VARIABLE}): {missing}"
    if not found:
        found = {FALLBACK: example()}
        note += "; examples/intents.csv instead"
    return found, [note]


def example() -> Dataset:
    """Return the checkout's example. Raises UsageError if this is not a checkout."""
    if not EXAMPLE.exists():
        raise UsageError(
            f"no sentences to train on in {data_directory()}: set ${VARIABLE} to a directory that "
            f"has {' or '.join(FILES.values())}, or run the benchmark in a checkout"
        )
    return dataset.read_training(EXAMPLE)


def whole(name: str, data: Dataset) -> Texts:
    """Return all sentences of a data set, for training."""
    return _numbered(name, data, Vocabulary.build(data.texts))


def parts(name: str, data: Dataset) -> tuple[Texts, Texts]:
    """Return nine tenths for training and one for accuracy, always the same."""
    training, held_out = hold_out.split(data, 0.1, SEED)
    vocabulary = Vocabulary.build(training.texts)
    return _numbered(name, training, vocabulary), _numbered(name, held_out, vocabulary)


def test_part(name: str) -> Texts:
    """Return the rows of a data set's test file, numbered as the training part of `parts`.

    Raises DatasetError if there is none.
    """
    whole = dataset.read_training(data_directory() / FILES[name])
    training, _ = hold_out.split(whole, 0.1, SEED)
    path = data_directory() / name / "test.csv"
    found = dataset.read_test(path, whole.label_names)
    return _numbered(name, found, Vocabulary.build(training.texts))


def _numbered(name: str, data: Dataset, vocabulary: Vocabulary) -> Texts:
    encoded = words.encode(data.texts, vocabulary)
    return Texts(name, encoded, data.labels, len(vocabulary), len(data.label_names))
