"""Reads labelled sentences from a file.

    file --records.opened--> rows --columns.find--> texts and labels --read_training--> Dataset

Imports only NumPy and the standard library, so that processes that compute no gradients can use it;
Parquet needs pyarrow. Every mistake in a file raises `DatasetError` with one line: where
(`file:line`), what, what to do. The defaults are those of the paper's Table 3.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier import columns, records
from gadei_ps.classifier.columns import LABEL, TEXT, Columns
from gadei_ps.classifier.records import DatasetError as DatasetError
from gadei_ps.classifier.records import Row, error, list_names, place, plain
from gadei_ps.show.counts import counted

UNSEEN_LABEL = -1
"""Label number of a test row whose label the training data lack. It is never predicted."""
NO_LABEL = -2
"""Label number of a row without labels, where rows may have several."""

MIN_ROWS = 10
"""The fewest rows of a training file. A tenth of it is held out, which must be one row."""
HEAD = 1000
"""Rows from which the columns are found."""


class TrainDefaults(NamedTuple):
    """Hyper-parameters that depend only on the size of the training set (paper, Table 3)."""

    batch_size: int
    learning_rate: float
    epochs: int


def defaults(rows: int) -> TrainDefaults:
    """The paper's Table 3 for `rows` training sentences (after the hold-out).

    Small (below 10,000 rows): mini-batch 2; medium (up to 100,000): 4; large: 32. The learning
    rate is 0.01 and the number of epochs 200 for all.
    """
    batch_size = 2 if rows < 10_000 else 4 if rows <= 100_000 else 32
    return TrainDefaults(batch_size, 0.01, 200)


@dataclass(frozen=True, eq=False)
class LabelSets:
    """Labels of rows that may have several.

    starts: int64, (n + 1,), of each row in `labels`, and the end of the last one. labels: int64.
    """

    starts: NDArray[np.int64]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> LabelSets:
        """Pack the labels of each row."""
        starts = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
        return cls(starts, np.fromiter(chain.from_iterable(rows), np.int64, int(starts[-1])))

    def matrix(self, rows: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
        """Return 1 for each label of these rows, else 0: float32, (rows, classes)."""
        found = np.zeros((len(rows), classes), np.float32)
        for at, row in enumerate(rows.tolist()):
            found[at, self.labels[self.starts[row] : self.starts[row + 1]]] = 1
        return found

    def only(self, keep: NDArray[np.bool_]) -> LabelSets:
        """Return those of these rows alone."""
        lengths = np.diff(self.starts)
        starts = np.concatenate(([0], np.cumsum(lengths[keep])))
        return LabelSets(starts, self.labels[np.repeat(keep, lengths)])


def split_labels(label: str, separator: str | None) -> list[str]:
    """Split the content of a column of labels: by the separator, or as a JSON list.

    Empty parts and repeated ones are dropped, so that an empty list, or separators alone, give no
    label.
    """
    if separator is None:
        return [label]
    parts: list[Any] | None = _json_list(label)
    if parts is None:
        parts = label.split(separator)
    found = dict.fromkeys(plain(part).strip() for part in parts)
    return [one for one in found if one]


def _json_list(text: str) -> list[Any] | None:
    """Return the values of a JSON list; None for any other text."""
    if text.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return list(json.loads(text))
    return None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sentences with their labels.

    texts: n sentences. labels: int64, shape (n,), indices into label_names, or UNSEEN_LABEL.
    label_names: sorted, without duplicates. notices: how the file was read, where that is not as
    everybody expects; warnings: what is odd in it. One line each, for the user to see. sets: all
    labels of each row, if rows may have several. `labels` then has the first one, UNSEEN_LABEL if
    any of them is unseen, and NO_LABEL if there is none.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    sets: LabelSets | None = None

    def __post_init__(self) -> None:
        if self.labels.shape != (len(self.texts),):
            raise ValueError(f"{len(self.texts)} texts but labels of shape {self.labels.shape}")

    def __len__(self) -> int:
        return len(self.texts)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row and the label number of each label of each row of training data."""
        rows = np.arange(len(self))
        if self.sets is None:
            return rows, self.labels
        return np.repeat(rows, np.diff(self.sets.starts)), self.sets.labels


# Reading


def read_training(
    path: str | PathLike[str],
    text_column: str | None = None,
    label_column: str | None = None,
    separator: str | None = None,
) -> Dataset:
    """Read the file to train from: one labelled sentence a row, with or without a header.

    CSV (separated by commas, semicolons, tabs or vertical bars), JSON lines or Parquet; text is
    UTF-8, or UTF-16 as Excel writes it; all may be compressed. The columns are found as
    `columns.find` says. Other columns are ignored. White space around texts and labels is dropped.
    Rows without a text or a label are left out, with a warning. Raises DatasetError if the file
    cannot be read or parsed, or has fewer than two labels or fewer than MIN_ROWS rows. separator:
    of several labels of a row, if rows may have several.
    """
    rows, notices, warnings = _labelled(path, text_column, label_column)
    every = [split_labels(row.label, separator) for row in rows]
    _check_labels(path, rows, every, separator)
    names = tuple(sorted({one for labels in every for one in labels}))
    warnings += [f"{place(path)}: {one}" for one in _odd_labels(rows, every, names, separator)]
    if len(rows) < MIN_ROWS:
        what = f"the file has only {counted(len(rows), 'row')}, but a tenth is held out"
        raise error(path, None, what, f"give at least {MIN_ROWS} rows")
    return _dataset(rows, every, names, notices, warnings, separator)


def read_test(
    path: str | PathLike[str],
    label_names: Sequence[str],
    text_column: str | None = None,
    label_column: str | None = None,
    separator: str | None = None,
) -> Dataset:
    """Read a file on which a model is measured. `label_names` are the labels of the model.

    A row with another label gets UNSEEN_LABEL, so that it counts as wrong. `warnings` says how many
    such rows there are. Raises DatasetError as `read_training` does, but one row and one label are
    enough.
    """
    rows, notices, warnings = _labelled(path, text_column, label_column)
    known = set(label_names)
    every = [split_labels(row.label, separator) for row in rows]
    unseen = [row for row, labels in zip(rows, every, strict=True) if not known.issuperset(labels)]
    if unseen:
        names = sorted({one for labels in every for one in labels} - known)
        share = f"{len(unseen)} of {counted(len(rows), 'row')}"
        what = (
            f"labels that the training data lack ({list_names(names)}) in {share}: "
            "their predictions are wrong"
        )
        warnings.append(f"{place(path, unseen[0].line)}: {what}")
    return _dataset(rows, every, tuple(label_names), notices, warnings, separator)


class Table(NamedTuple):
    """A file's header, its rows, all as wide as the header, and its texts.

    header: empty if the file has none. text_at: number of the column of the texts. notices: how the
    file was read, and what was left out.
    """

    header: tuple[str, ...]
    rows: list[list[str]]
    texts: list[str]
    text_at: int = 0
    notices: tuple[str, ...] = ()


def read_table(path: str | PathLike[str], text_column: str | None = None) -> Table:
    """Read a file of sentences without labels. An empty text is a sentence without words.

    Raises DatasetError if the file cannot be read or parsed.
    """
    opened = _Opened(path, {TEXT: text_column})
    rows = [fields for _, fields in opened.rows()]
    width = max([len(opened.names), *map(len, rows)])  # JSON may add columns
    for row in rows:
        row += [""] * (width - len(row))
    header = opened.records.names or opened.columns.names
    texts = [row[opened.columns.text].strip() for row in rows]
    notices = (*opened.notices(), *opened.left_out())
    return Table(tuple(header), rows, texts, opened.columns.text, notices)


class _Labelled(NamedTuple):
    line: int
    text: str
    label: str


def _dataset(
    rows: list[_Labelled],
    every: list[list[str]],
    names: tuple[str, ...],
    notices: tuple[str, ...],
    warnings: list[str],
    separator: str | None,
) -> Dataset:
    """every: labels of each row."""
    number = {name: i for i, name in enumerate(names)}
    numbers = [[number.get(one, UNSEEN_LABEL) for one in labels] for labels in every]
    first = [
        NO_LABEL if not row else UNSEEN_LABEL if UNSEEN_LABEL in row else row[0] for row in numbers
    ]
    sets = None
    if separator is not None:
        sets = LabelSets.of([[one for one in row if one != UNSEEN_LABEL] for row in numbers])
    texts = tuple(row.text for row in rows)
    return Dataset(texts, np.array(first, np.int64), names, tuple(warnings), notices, sets)


def _check_labels(
    path: str | PathLike[str], rows: list[_Labelled], every: list[list[str]], separator: str | None
) -> None:
    """Raise DatasetError if nothing can be learned from the labels, or one cannot be written.

    every: labels of each row.
    """
    if all(set(labels) == set(every[0]) for labels in every):
        what = "no row has a label"
        if every[0]:
            what = f"every row has the label{'s' * (len(every[0]) > 1)} {list_names(every[0])}"
        raise error(path, None, what, "give rows of at least two labels")
    if separator is None:
        return
    for row, labels in zip(rows, every, strict=True):
        if re.fullmatch(r"\[\s*['\"].*]", row.label, re.S) and _json_list(row.label) is None:
            what = f"the labels {list_names([row.label])} are not a JSON list"
            remedy = f"""write them as ["a", "b"], or separate them by {separator!r}"""
            raise error(path, row.line, what, remedy)
        for one in labels:
            if split_labels(one, separator) != [one]:
                what = f"label {list_names([one])} would be split by {separator!r} or as a list"
                remedy = "give another separator with --label-separator, or rename the label"
                raise error(path, row.line, what, remedy)


def _odd_labels(
    rows: list[_Labelled], every: list[list[str]], names: tuple[str, ...], separator: str | None
) -> Iterator[str]:
    """Yield notes on labels that may not be what the user means, one line each."""
    if separator is None:
        if lists := [row.label for row in rows if _json_list(row.label) is not None]:
            yield (
                f"{counted(len(lists), 'row')} with a list for a label ({list_names(lists[:1])}): "
                "each list is one label; --label-separator gives rows several labels"
            )
    elif all(len(labels) < 2 for labels in every):
        yield f"no row has several labels, separated by {separator!r} or as a list"
    alike: dict[str, list[str]] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        visible = "".join(one for one in folded if unicodedata.category(one) != "Cf")
        alike.setdefault(" ".join(visible.split()), []).append(name)
    if several := [some for some in alike.values() if len(some) > 1]:
        yield (
            f"{counted(len(several), 'label')} with several spellings "
            f"({', '.join(map(ascii, several[0][:2]))}): each spelling is a label of its own"
        )
    if broken := [name for name in names if re.search(r"[\t\r\n]", name)]:
        yield (
            f"{counted(len(broken), 'label')} with a tab or a line break ({list_names(broken[:1])})"
            ": read the output of predict as JSON or CSV"
        )


def _labelled(
    path: str | PathLike[str], text_column: str | None, label_column: str | None
) -> tuple[list[_Labelled], tuple[str, ...], list[str]]:
    """Return the rows that have a text and a label; notices; warnings."""
    opened = _Opened(path, {TEXT: text_column, LABEL: label_column})
    text_at, label_at = opened.columns.text, opened.columns.label
    assert label_at is not None
    rows: list[_Labelled] = []
    empty: list[int] = []
    for line, fields in opened.rows():
        text, label = fields[text_at].strip(), fields[label_at].strip()
        if text and label:
            rows.append(_Labelled(line, text, label))
        else:
            empty.append(line)
    warnings = opened.left_out()
    if empty:
        what = f"{counted(len(empty), 'row')} without a text or a label, from here on: left out"
        warnings.append(f"{place(path, empty[0])}: {what}")
    if not rows:
        raise error(path, None, "no row has both a text and a label", "add labelled sentences")
    return rows, opened.notices(), warnings


class _Opened:
    """A file of which the columns are known. Raises DatasetError."""

    def __init__(self, path: str | PathLike[str], wanted: dict[str, str | None]) -> None:
        self.path = path
        self.records = records.opened(path)
        self._head = list(islice(self.records.rows, HEAD))
        if not self._head:
            what = "there is a header but no row" if self.records.names else "the file is empty"
            raise error(path, None, what, "give labelled sentences, with or without a header line")
        self.columns: Columns = columns.find(path, self._head, self.records.names, wanted)
        self.names = self.columns.names or ("",) * len(self._head[0].fields)
        self.repeated = 0
        """Rows that have been left out because they repeat the header."""

    def notices(self) -> tuple[str, ...]:
        """Return notes on how the file is read, if it is not as usual."""
        told = [", ".join(self.records.form), self.columns.notice]
        text = "; ".join(part for part in told if part)
        return (f"{place(self.path)}: {text}",) if text else ()

    def left_out(self) -> list[str]:
        """A line for rows that repeat the header, if there were any among those read so far."""
        if not self.repeated:
            return []
        what = f"{counted(self.repeated, 'row')} with the header's names again: left out"
        return [f"{place(self.path)}: {what}"]

    def rows(self) -> Iterator[Row]:
        """Yield the rows, at least one, padded to the header's width, each with its line. Once."""
        known = self.records.names is not None
        rows = chain(self._head, self.records.rows)
        header = list(self.columns.names)
        if self.columns.line:
            next(rows)
        line = 0
        for line, fields in rows:
            if len(fields) > len(self.names) and not known:
                what = f"{len(fields)} fields where the {self._first} has {len(self.names)}"
                raise error(self.path, line, what, _QUOTES)
            if not known and header and [field.strip() for field in fields] == header:
                self.repeated += 1
                continue
            yield Row(line, fields + [""] * (len(self.names) - len(fields)))
        if not line:
            what = "there is a header but no row"
            raise error(self.path, None, what, "add labelled sentences")

    @property
    def _first(self) -> str:
        return "header" if self.columns.line else "first row"


_QUOTES = "put quotes around a text that contains what separates the columns"
