"""Plan of a training: its data, and the settings that follow from their size."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from gadei_ps.classifier import dataset
from gadei_ps.classifier.corpus import Corpus
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display


@dataclass(frozen=True)
class Plan:
    """A training before it begins. Where the user says nothing, Table 3 says it."""

    settings: Settings
    corpus: Corpus
    epochs: int
    batch_size: int
    lr: float

    @classmethod
    def read(cls, settings: Settings) -> Plan:
        """Raise DatasetError."""
        corpus = Corpus.read(settings)
        defaults = dataset.defaults(len(corpus.train))
        return cls(
            settings,
            corpus,
            settings.epochs or defaults.epochs,
            settings.batch_size or defaults.batch_size,
            defaults.learning_rate if settings.lr is None else settings.lr,
        )

    def print(self, display: Display, learners: str) -> None:
        """Print what is trained. learners: their number, in words."""
        corpus, settings = self.corpus, self.settings
        for notice in corpus.notices:
            display.event(notice)
        for warning in corpus.warnings:
            display.event(f"warning: {warning}")
        display.event(
            f"{counted(len(corpus.train), 'sentence')} to train on, "
            f"{len(corpus.held_out):,} held out, "
            f"{counted(len(corpus.train.label_names), 'label')}, "
            f"{counted(len(corpus.vocabulary.words), 'word')}; "
            f"mini-batch {self.batch_size}, {learners}"
        )
        display.event(f"optimizer {settings.optimizer}, lr {self.lr:g}; sync {settings.sync}")

    def options(self, device: str, threads: int | None, own_order: bool = False) -> dict[str, Any]:
        """Return the options of learners.

        threads: None for as many as their machine gives each. own_order: whether each machine of a
        run of groups has an order of its own.
        """
        settings = self.settings
        return {
            "threads": threads,
            "vocabulary_size": len(self.corpus.vocabulary),
            "classes": len(self.corpus.train.label_names),
            "dropout": settings.dropout,
            "seed": settings.seed,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "wire": settings.wire,
            "error_feedback": settings.error_feedback,
            "device": device,
            "own_order": own_order,
        }

    def write(self, stream: IO[bytes], options: dict[str, Any]) -> None:
        """Write what learners read: the encoded sentences, and their options."""
        np.savez(
            stream,
            tokens=self.corpus.encoded.tokens,
            lengths=self.corpus.encoded.lengths,
            labels=self.corpus.train.labels,
            settings=json.dumps(options),
        )
        stream.flush()

    def digest(self, options: dict[str, Any]) -> str:
        """Return the digest of all that write() writes."""
        found = hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=16)
        encoded = self.corpus.encoded
        for array in (encoded.tokens, encoded.lengths, self.corpus.train.labels):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()
