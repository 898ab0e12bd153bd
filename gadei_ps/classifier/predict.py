"""`gadei-ps predict`: labels for sentences, from nothing but a model directory."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gadei_ps.classifier import dataset, network
from gadei_ps.classifier.dataset import Table
from gadei_ps.errors import UsageError

CHUNK = 1024  # sentences read from a pipe before their labels are shown


class Prediction(NamedTuple):
    """The most likely label of a sentence and its probability, 0 to 1."""

    text: str
    label: str
    probability: float


class Predictor:
    """A trained model. Raises ModelDirectoryError for a directory that holds none."""

    def __init__(self, directory: Path) -> None:
        self._result = network.load_result(directory)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction for each sentence."""
        if not texts:
            return []
        encoded = dataset.encode(texts, self._result.vocabulary)
        probabilities = network.predict(self._result.model, encoded.tokens)
        best = probabilities.argmax(axis=1)
        names = self._result.label_names
        chosen = probabilities[np.arange(len(texts)), best]
        return [
            Prediction(sentence, names[label], float(probability))
            for sentence, label, probability in zip(texts, best, chosen, strict=True)
        ]

    def stream(self, lines: Iterable[str], chunk: int = CHUNK) -> Iterator[Prediction]:
        """Predictions in the order of the lines; `chunk` lines are read before the first."""
        rest = iter(lines)
        while texts := list(islice(rest, chunk)):
            yield from self.predict(texts)


def sentences(stream: IO[bytes]) -> Iterator[str]:
    """The lines that are not blank. Raises UsageError for one that is not UTF-8."""
    for number, raw in enumerate(iter(stream.readline, b""), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8; "
                "give UTF-8 text"
            ) from None
        if line:
            yield line


def write_csv(table: Table, predictions: Sequence[Prediction], out: Path | None) -> None:
    """Writes the rows with their label and probability to `out`, or to standard output.

    The columns are called label and probability, or predicted_label and predicted_probability
    where the table has one of those. `out` is replaced whole or not at all. Raises OSError.
    """
    added = ["label", "probability"]
    if set(added) & set(table.header):
        added = [f"predicted_{name}" for name in added]
    rows = [[*table.header, *added]]
    rows += [
        [*row, one.label, f"{one.probability:.4f}"]
        for row, one in zip(table.rows, predictions, strict=True)
    ]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        return
    if out.exists() and not out.is_file():  # a pipe or a device is written to, not replaced
        with open(out, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        return
    out = out.resolve()  # through a link
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        with open(fresh, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        fresh.replace(out)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
