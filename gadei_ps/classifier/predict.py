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

from gadei_ps.classifier import inference, words
from gadei_ps.classifier.columns import LABEL
from gadei_ps.classifier.dataset import Table
from gadei_ps.errors import UsageError
from gadei_ps.storage import files

CHUNK = 1024  # number of sentences that are labelled at once


class Prediction(NamedTuple):
    """The most likely label of a sentence and its probability, 0 to 1.

    known_words: how many of its words the model knows. Without any, the label is a guess.
    """

    text: str
    label: str
    probability: float
    known_words: int


class Predictor:
    """A trained model. Raises ModelDirectoryError if the directory has none."""

    def __init__(self, directory: Path) -> None:
        self._result = inference.load_result(directory)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels that the model predicts."""
        return self._result.label_names

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction for each sentence."""
        return list(self.stream(texts))

    def _predicted(self, texts: Sequence[str]) -> list[Prediction]:
        tokens = words.encode(texts, self._result.vocabulary).padded()
        probabilities = self._result.model.probabilities(tokens)
        best = probabilities.argmax(axis=1)
        names = self._result.label_names
        chosen = probabilities[np.arange(len(texts)), best]
        known = (tokens > words.UNKNOWN).sum(axis=1)
        return [
            Prediction(sentence, names[label], float(probability), int(count))
            for sentence, label, probability, count in zip(texts, best, chosen, known, strict=True)
        ]

    def stream(self, lines: Iterable[str], chunk: int = CHUNK) -> Iterator[Prediction]:
        """Yield predictions in the order of the lines. Read `chunk` lines before the first."""
        rest = iter(lines)
        while texts := list(islice(rest, chunk)):
            yield from self._predicted(texts)


def sentences(stream: IO[bytes]) -> Iterator[str]:
    """The lines without white space around them. Raises UsageError if a line is not UTF-8."""
    for number, raw in enumerate(iter(stream.readline, b""), start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8; "
                "give UTF-8 text"
            ) from None


class Compared(NamedTuple):
    """Predictions beside true labels. column: its name or number. rows: that have a label."""

    accuracy: float
    column: str
    rows: int


def compare(
    table: Table, predictions: Sequence[Prediction], label_names: Iterable[str]
) -> Compared | None:
    """Accuracy where a column holds true labels; None without one, or if several may be it.

    It is the column `label`, or else the only one of which most values are labels of the model.
    """
    known = set(label_names)
    columns = {
        at: [value.strip() for value in column]
        for at, column in enumerate(zip(*table.rows, strict=True))
        if at != table.text_at
    }
    found = [
        at
        for at, column in columns.items()
        if 2 * sum(value in known for value in column) > sum(map(bool, column))
    ]
    if len(found) > 1:
        found = [at for at in found if table.header and table.header[at] == LABEL]
    if len(found) != 1:
        return None
    pairs = zip(columns[found[0]], predictions, strict=True)
    right = [true == one.label for true, one in pairs if true]
    name = repr(table.header[found[0]]) if table.header else str(found[0] + 1)
    return Compared(sum(right) / len(right), name, len(right))


def write_csv(table: Table, predictions: Sequence[Prediction], out: Path | None) -> None:
    """Write the rows with their label and probability to `out`, or to standard output.

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
