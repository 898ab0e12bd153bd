"""`gadei-ps predict`: labels for sentences. Needs only a model directory."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from gadei_ps.classifier import network, words
from gadei_ps.classifier.dataset import Table
from gadei_ps.errors import UsageError
from gadei_ps.storage import files

CHUNK = 1024  # number of sentences that are labelled at once


class Prediction(NamedTuple):
    """The most likely label of a sentence and its probability, 0 to 1."""

    text: str
    label: str
    probability: float


class Predictor:
    """A trained model. Raises ModelDirectoryError if the directory has none."""

    def __init__(self, directory: Path) -> None:
        self._result = network.load_result(directory)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction for each sentence."""
        return list(self.stream(texts))

    def _predicted(self, texts: Sequence[str]) -> list[Prediction]:
        encoded = words.encode(texts, self._result.vocabulary)
        probabilities = network.predict(self._result.model, encoded.padded())
        best = probabilities.argmax(axis=1)
        names = self._result.label_names
        chosen = probabilities[np.arange(len(texts)), best]
        return [
            Prediction(sentence, names[label], float(probability))
            for sentence, label, probability in zip(texts, best, chosen, strict=True)
        ]

    def stream(self, lines: Iterable[str], chunk: int = CHUNK) -> Iterator[Prediction]:
        """Predictions in the order of the lines. Reads `chunk` lines before the first."""
        rest = iter(lines)
        while texts := list(islice(rest, chunk)):
            yield from self._predicted(texts)


def sentences(stream: IO[bytes]) -> Iterator[str]:
    """The lines that are not blank. Raises UsageError if a line is not UTF-8."""
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

    The new columns are label and probability, or predicted_label and predicted_probability if the
    table has a column with one of those names. No header is written if the table has none. Replaces
    `out` whole or not at all. Raises OSError.
    """
    added = ["label", "probability"]
    if set(added) & set(table.header):
        added = [f"predicted_{name}" for name in added]
    rows = [[*table.header, *added]] if table.header else []
    rows += [
        [*row, one.label, f"{one.probability:.4f}"]
        for row, one in zip(table.rows, predictions, strict=True)
    ]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        return
    if out.exists() and not out.is_file():  # a pipe or a device cannot be replaced
        with open(out, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        return
    with files.replacing(out.resolve()) as raw:  # resolved, so that a link is kept
        file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        csv.writer(file, lineterminator="\n").writerows(rows)
        file.detach()
