"""`gadei-ps predict`: labels for sentences. Needs only a model directory."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from gadei_ps.classifier import model_directory
from gadei_ps.classifier.columns import LABEL
from gadei_ps.classifier.dataset import Table, split_labels
from gadei_ps.errors import UsageError
from gadei_ps.storage import files

CHUNK = 1024  # number of sentences that are labelled at once


class Choice(NamedTuple):
    """Options of a prediction: how many labels of a sentence, and whether it may have none.

    threshold: least probability of the label (0 to 1) if `none`; None: the model's.
    """

    top: int = 1
    none: bool = False
    threshold: float | None = None


class Prediction(NamedTuple):
    """The most likely label of a sentence and its probability, 0 to 1.

    label: empty if none is likely and that was asked for; of a model of several labels, all that
    reach the threshold. known_words: how many of its words the
    model knows. Without any, the label is a guess. top: the most likely labels, with probabilities.
    below: whether the probability is below the model's threshold.
    """

    text: str
    label: str
    probability: float
    known_words: int
    below: bool = False
    top: tuple[tuple[str, float], ...] = ()

    def cells(self) -> list[str]:
        """Label and probability, and those of the further labels."""
        pairs = [(self.label, self.probability), *self.top[1:]]
        return [cell for label, share in pairs for cell in (label, f"{share:.4f}")]

    def as_dict(self) -> dict[str, Any]:
        """The prediction as JSON values."""
        top = [{"label": label, "probability": share} for label, share in self.top]
        return self._asdict() | {"top": top}


class Predictor:
    """A trained model. Raises ModelDirectoryError if the directory has none."""

    def __init__(self, directory: Path, choice: Choice = Choice()) -> None:  # noqa: B008
        self._result = model_directory.load_result(directory)
        self._choice = choice
        self.threshold = self._result.calibration.threshold
        training = self._result.config.get("training", {})
        self.separator: str | None = training.get("label_separator")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Labels that the model predicts."""
        return self._result.label_names

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction for each sentence."""
        return list(self.stream(texts))

    def _predicted(self, texts: Sequence[str]) -> list[Prediction]:
        probabilities, known = self._result.probabilities(texts)
        names, choice = self._result.label_names, self._choice
        least = self.threshold if choice.threshold is None else choice.threshold
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, : choice.top]
        shares = np.take_along_axis(probabilities, order, axis=1).tolist()
        found = []
        for text, labels, ps, count, row in zip(
            texts, order.tolist(), shares, known.tolist(), probabilities, strict=True
        ):
            top = tuple((names[label], p) for label, p in zip(labels, ps, strict=True))
            below = ps[0] < least
            label = "" if below and choice.none else top[0][0]
            if self.separator is not None:
                label = self.separator.join(names[at] for at in np.flatnonzero(row >= least))
            found.append(Prediction(text, label, ps[0], count, below, top))
        return found

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
    table: Table,
    predictions: Sequence[Prediction],
    label_names: Iterable[str],
    separator: str | None = None,
) -> Compared | None:
    """Accuracy where a column holds true labels; None without one, or if several may be it.

    It is the column `label`, or else the only one of which most values are labels of the model.
    """
    known = set(label_names)

    def is_known(value: str) -> bool:
        return bool(value) and known.issuperset(split_labels(value, separator))

    columns = {
        at: [value.strip() for value in column]
        for at, column in enumerate(zip(*table.rows, strict=True))
        if at != table.text_at
    }
    found = [
        at
        for at, column in columns.items()
        if 2 * sum(map(is_known, column)) > sum(map(bool, column))
    ]
    if len(found) > 1:
        found = [at for at in found if table.header and table.header[at] == LABEL]
    if len(found) != 1:
        return None
    pairs = zip(columns[found[0]], predictions, strict=True)
    right = [
        set(split_labels(true, separator)) == set(split_labels(one.label, separator))
        for true, one in pairs
        if true
    ]
    name = repr(table.header[found[0]]) if table.header else str(found[0] + 1)
    return Compared(sum(right) / len(right), name, len(right))


def write_csv(table: Table, predictions: Sequence[Prediction], out: Path | None) -> None:
    """Write the rows with their label and probability to `out`, or to standard output.

    The new columns are label and probability, or predicted_label and predicted_probability if the
    table has a column with one of those names; of further labels, the same with their rank, such as
    label_2. No header is written if the table has none. Replaces
    `out` whole or not at all. Raises OSError.
    """
    ranks = range(2, 1 + len(predictions[0].top)) if predictions else ()
    added = ["label", "probability"]
    added += [f"{name}_{rank}" for rank in ranks for name in ("label", "probability")]
    if set(added) & set(table.header):
        added = [f"predicted_{name}" for name in added]
    rows = [[*table.header, *added]] if table.header else []
    rows += [[*row, *one.cells()] for row, one in zip(table.rows, predictions, strict=True)]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        return
    try:
        if out.exists() and not out.is_file():  # a pipe or a device cannot be replaced
            with open(out, "w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
            return
        with files.replacing(out.resolve()) as raw:  # resolved, so that a link is kept
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            csv.writer(file, lineterminator="\n").writerows(rows)
            file.detach()
    except OSError as error:
        error.filename = str(out)  # not the temporary file beside it
        raise
