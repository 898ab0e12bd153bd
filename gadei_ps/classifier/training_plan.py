"""Plan of a training: its data, and the settings that follow from their size."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from gadei_ps import sync
from gadei_ps.classifier import dataset
from gadei_ps.classifier.corpus import Corpus
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.inference import (
    Classifier,
    EnsembleClassifier,
    EnsembleSizes,
    Floats,
    Sizes,
)
from gadei_ps.classifier.training_settings import CNN, Settings
from gadei_ps.classifier.words import Vocabulary
from gadei_ps.errors import UsageError
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display

SENTENCES: Final = 40_000
"""Sentences that an ensemble is trained on, over all epochs, within the following limits."""
LEAST_EPOCHS, MOST_EPOCHS = 4, 16
BATCH_SIZE: Final = 16
FEW_ROWS: Final = 5_000
"""Rows below which an ensemble is trained once more on all of them, as it needs each."""
FEW_OF_LABEL: Final = 50
"""The same, of the median label."""


@dataclass(frozen=True)
class Plan:
    """One run of training before it begins.

    lr: of the CNN. measures: whether there are held-out rows; an ensemble of few rows has a second
    run that has none.
    """

    settings: Settings
    corpus: Corpus
    epochs: int
    batch_size: int
    lr: float
    measures: bool = True

    @classmethod
    def read(cls, settings: Settings) -> Plan:
        """Raise DatasetError, or UsageError if PyTorch is needed and missing."""
        corpus = Corpus.read(settings)
        if settings.model == CNN and importlib.util.find_spec("torch") is None:
            raise UsageError("--groups and --model cnn need PyTorch: pip install 'gadei-ps[torch]'")
        rows = len(corpus.train)
        defaults = dataset.defaults(rows)
        if settings.model != CNN:
            epochs = min(max(round(SENTENCES / rows), LEAST_EPOCHS), MOST_EPOCHS)
            defaults = defaults._replace(batch_size=BATCH_SIZE, epochs=epochs)
        return cls(
            settings,
            corpus,
            settings.epochs or defaults.epochs,
            settings.batch_size or defaults.batch_size,
            defaults.learning_rate if settings.lr is None else settings.lr,
        )

    @property
    def is_cnn(self) -> bool:
        """Whether the paper's network is trained."""
        return self.settings.model == CNN

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels."""
        return self.corpus.train.label_names

    @property
    def batches(self) -> int:
        """Batches of an epoch that the server hands out. Under WSP they are waves."""
        wave = sync.parse(self.settings.sync).wave
        return -(-len(self.corpus.train) // (self.batch_size * wave))

    def second(self) -> Plan | None:
        """Return the plan of the run on all rows; None if this run is all."""
        rows = len(self.corpus.train) + len(self.corpus.held_out)
        of_labels = np.bincount(self.corpus.train.pairs()[1], minlength=len(self.label_names))
        if self.is_cnn or (rows >= FEW_ROWS and np.median(of_labels) >= FEW_OF_LABEL):
            self.corpus.source = None  # only a second run needs it, and it is large
            return None
        return replace(self, corpus=self.corpus.with_all_rows(), measures=False)

    def optimizer(self) -> dict[str, Any]:
        """Return the settings of the job's optimizer."""
        if self.is_cnn:
            return {"kind": self.settings.optimizer, "lr": self.lr}
        steps = self.batches * self.epochs
        if not sync.parse(self.settings.sync).on_arrival:  # one step of all learners' gradients
            steps = -(-steps // self.settings.learners)
        return _optimizer_of_ensemble(max(steps, 2), self.settings.label_separator is not None)

    @property
    def sizes(self) -> Sizes | EnsembleSizes:
        """Sizes of the network."""
        known, classes = self.corpus.vocabulary, len(self.label_names)
        if isinstance(known, Vocabulary):
            return Sizes(len(known), classes, dropout=self.settings.dropout)
        return EnsembleSizes(len(known.grams), known.vocabulary_size, classes)

    def classifier(self, tensors: Mapping[str, Floats]) -> Classifier | EnsembleClassifier:
        """Return the network with these weights."""
        sizes = self.sizes
        if isinstance(sizes, EnsembleSizes):
            return EnsembleClassifier(sizes, tensors)
        return Classifier(sizes, tensors)

    def print(self, display: Display, learners: str) -> None:
        """Print what is trained. learners: their number, in words."""
        corpus, settings = self.corpus, self.settings
        for notice in corpus.notices:
            display.event(notice)
        for warning in corpus.warnings:
            display.event(f"warning: {warning}")
        known = corpus.vocabulary
        size = counted(len(known.words), "word")
        if not isinstance(known, Vocabulary):
            size += f", {counted(len(known.grams), 'n-gram')}"
        display.event(
            f"{counted(len(corpus.train), 'sentence')} to train on, "
            f"{len(corpus.held_out):,} held out, "
            f"{counted(len(self.label_names), 'label')}, {size}; "
            f"mini-batch {self.batch_size}, {learners}"
        )
        if self.is_cnn:
            display.event(f"optimizer {settings.optimizer}, lr {self.lr:g}; sync {settings.sync}")
        else:
            display.event(f"{counted(self.epochs, 'epoch')}; sync {settings.sync}")

    def options(self, device: str, threads: int | None, own_order: bool = False) -> dict[str, Any]:
        """Return the options of learners.

        threads: None for as many as their machine gives each. own_order: whether each machine of a
        run of groups has an order of its own.
        """
        settings = self.settings
        return {
            "model": settings.model,
            "sizes": asdict(self.sizes),
            "multi_label": settings.label_separator is not None,
            "threads": threads,
            "seed": settings.seed,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "wire": settings.wire,
            "error_feedback": settings.error_feedback,
            "device": device,
            "own_order": own_order,
        }

    def _arrays(self) -> Mapping[str, NDArray[Any]]:
        encoded = self.corpus.encoded
        if isinstance(encoded, Rows):
            arrays = encoded.arrays()
        else:
            arrays = {"tokens": encoded.tokens, "lengths": encoded.lengths}
        if (sets := self.corpus.train.sets) is not None:
            arrays |= {"label_starts": sets.starts, "label_values": sets.labels}
        return {**arrays, "labels": self.corpus.train.labels}

    def write(self, stream: IO[bytes], options: dict[str, Any]) -> None:
        """Write what learners read: the encoded sentences, and their options."""
        np.savez(stream, **self._arrays(), settings=json.dumps(options))  # type: ignore[arg-type]
        stream.flush()

    def digest(self, options: dict[str, Any]) -> str:
        """Return the digest of all that write() writes."""
        found = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=16)
        for array in self._arrays().values():
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def _optimizer_of_ensemble(batches: int, multi_label: bool) -> dict[str, Any]:
    """Return the settings of the optimizer. batches: gradients until the learning rate is 0.

    A large eps has rare n-grams move in proportion to their gradient, as under SGD, rather than as
    far as frequent ones. The warm-up keeps gradients that do not know of each other, as those of
    many learners at the start, from adding up. multi_label: whether `wide` has cross-entropy.
    """
    warmup = min(256, batches // 10)
    wide = {"lr": 3.0, "eps": 0.1} if multi_label else {"lr": 1.0, "eps": 0.05}
    return {
        "kind": "adagrad",
        "lr": 0.025,
        "groups": [
            {"match": "wide", **wide},
            {"match": "wide_bias", "lr": 0.1 if multi_label else 0.2},
            {"match": ["bag", "bag_bias", "output_weight", "output_bias"], "lr": 0.03},
        ],
        "schedule": {"kind": "cosine", "total_steps": batches, "warmup_steps": warmup},
    }
