"""Reads labelled sentences, holds some out, splits them into words, and numbers the words.

    CSV file --read_training--> Dataset --split--> Dataset, Dataset
    Dataset.texts --tokenize--> words --Vocabulary.build--> Vocabulary
    texts, Vocabulary --encode--> Encoded: one padded row of word numbers a sentence

Imports only NumPy and the standard library, so that processes that compute no gradients can use it.
Every mistake in a file raises `DatasetError` with one line: where (`file:line`), what, what to do.
The defaults are those of the paper's Table 3. The tokeniser is that of Kim (2014), "Convolutional
neural networks for sentence classification", whose network the paper trains (Figure 2).
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gadei_ps.errors import UsageError
from gadei_ps.machine import given
from gadei_ps.show.counts import counted
from gadei_ps.storage import files

PADDING = 0
UNKNOWN = 1
UNSEEN_LABEL = -1
"""Label number of a test row whose label the training data lack. It is never predicted."""

MIN_LENGTH = 5
"""Tokens. An encoded sentence is at least as wide as the widest filter."""
MAX_LENGTH = 256
"""Tokens. Longer sentences are cut, so that one long text does not need much memory."""
MIN_ROWS = 10
"""The fewest rows of a training file. A tenth of it is held out, which must be one row."""


class DatasetError(UsageError):
    """A file of sentences cannot be used. The message is one line and names the remedy."""


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
class Dataset:
    """Sentences with their labels.

    texts: n sentences. labels: int64, shape (n,), indices into label_names, or UNSEEN_LABEL.
    label_names: sorted, without duplicates. warnings: one line each, for the user to see.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    label_names: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.labels.shape != (len(self.texts),):
            raise ValueError(f"{len(self.texts)} texts but labels of shape {self.labels.shape}")

    def __len__(self) -> int:
        return len(self.texts)


# Reading


class _Row(NamedTuple):
    line: int
    text: str
    label: str


def read_training(
    path: str | PathLike[str], text_column: str = "text", label_column: str = "label"
) -> Dataset:
    """Read the CSV file to train from: a header line, then one labelled sentence a row.

    The file is UTF-8, with or without a byte-order mark. Commas separate columns; any quoting is
    accepted. Other columns are ignored. White space around texts and labels is dropped. Raises
    DatasetError if the file cannot be read or parsed, if a row lacks text or label, or if the file
    has fewer than two labels or fewer than MIN_ROWS rows.
    """
    rows = list(_rows(path, text_column, label_column))
    names = tuple(sorted({row.label for row in rows}))
    if len(names) == 1:
        raise _error(
            path,
            None,
            f"every row has the label {_shown(names)}",
            "give rows of at least two labels",
        )
    if len(rows) < MIN_ROWS:
        raise _error(
            path,
            None,
            f"the file has only {counted(len(rows), 'row')}, but a tenth is held out",
            f"give at least {MIN_ROWS} rows",
        )
    return _dataset(rows, names, ())


def read_test(
    path: str | PathLike[str],
    label_names: Sequence[str],
    text_column: str = "text",
    label_column: str = "label",
) -> Dataset:
    """Read a CSV file on which a model is measured. `label_names` are the labels of the model.

    A row with another label gets UNSEEN_LABEL, so that it counts as wrong. `warnings` says how many
    such rows there are. Raises DatasetError as `read_training` does, but one row and one label are
    enough.
    """
    rows = list(_rows(path, text_column, label_column))
    known = set(label_names)
    unseen = [row for row in rows if row.label not in known]
    warnings: tuple[str, ...] = ()
    if unseen:
        names = sorted({row.label for row in unseen})
        share = f"{len(unseen)} of {counted(len(rows), 'row')}"
        what = (
            f"labels that the training data lack ({_shown(names)}) in {share}: they count as wrong"
        )
        warnings = (f"{_place(path, unseen[0].line)}: {what}",)
    return _dataset(rows, tuple(label_names), warnings)


class Table(NamedTuple):
    """A CSV file's header, its rows, all as wide as the header, and its texts."""

    header: tuple[str, ...]
    rows: list[list[str]]
    texts: list[str]


def read_table(path: str | PathLike[str], text_column: str = "text") -> Table:
    """Read a CSV file of sentences without labels. An empty text is a sentence without words.

    Raises DatasetError if the file cannot be read or parsed.
    """
    (header_line, header), *lines = _rows_of(path)
    text_at = _column(path, header_line, header, text_column)
    rows = [fields for _, fields in lines]
    return Table(tuple(header), rows, [row[text_at].strip() for row in rows])


def _dataset(rows: list[_Row], names: tuple[str, ...], warnings: tuple[str, ...]) -> Dataset:
    number = {name: i for i, name in enumerate(names)}
    labels = np.array([number.get(row.label, UNSEEN_LABEL) for row in rows], np.int64)
    return Dataset(tuple(row.text for row in rows), labels, names, warnings)


def _rows(path: str | PathLike[str], text_column: str, label_column: str) -> Iterator[_Row]:
    rows = _rows_of(path)
    header_line, names = next(rows)
    text_at, label_at = (
        _column(path, header_line, names, wanted) for wanted in (text_column, label_column)
    )
    for line, fields in rows:
        text, label = fields[text_at].strip(), fields[label_at].strip()
        for value, name in ((text, text_column), (label, label_column)):
            if not value:
                raise _error(path, line, f"the column {name!r} is empty", "fill or delete the row")
        yield _Row(line, text, label)


def _rows_of(path: str | PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """The header, then at least one row, padded to the header's width, each with its line."""
    records = _records(path)
    header_line, header = next(records, (0, []))
    if not header:
        raise _error(path, None, "the file is empty", "give a CSV file with a header line")
    names = [name.strip() for name in header]
    yield header_line, names
    line = 0
    for line, fields in records:
        if len(fields) > len(names):
            raise _error(
                path,
                line,
                f"{len(fields)} fields where the header has {len(names)}",
                "put quotes around a text that contains commas",
            )
        yield line, fields + [""] * (len(names) - len(fields))
    if not line:
        raise _error(path, None, "there is a header but no row", "add labelled sentences")


def _column(path: str | PathLike[str], line: int, names: list[str], wanted: str) -> int:
    found = names.count(wanted)
    if found == 1:
        return names.index(wanted)
    what = "no column" if not found else f"{found} columns"
    raise _error(
        path,
        line,
        f"{what} named {wanted!r}; the columns are {_shown(names)}",
        "give the name that the file uses; commas must separate the columns",
    )


def _records(path: str | PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Each non-blank record with the number of the line on which it begins, from 1."""
    # Strict, because the lenient parser silently drops the rows after a single quote.
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _error(
                path,
                line,
                f"the row that begins here cannot be parsed ({error})",
                "look for a quote that is not closed or not doubled",
            ) from None
        if any(field.strip() for field in record) or len(record) > 1:
            yield line, record


def _text(path: str | PathLike[str]) -> str:
    try:
        data = given.stream(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"cannot be read ({reason})"
        raise _error(path, None, what, "give the path of a CSV file") from None
    body = data.removeprefix(b"\xef\xbb\xbf")
    skipped = len(data) - len(body)
    try:
        text = body.decode()
        bad, what = body.find(b"\0"), "NUL byte"
    except UnicodeDecodeError as error:
        bad, what = error.start, f"byte 0x{body[error.start]:02x} is not UTF-8"
    if bad >= 0:
        # With the appended byte, an offset at the start of a line counts in that line.
        line = len((body[:bad] + b".").splitlines())
        raise _error(path, line, f"{what} at offset {bad + skipped}", "save the file as UTF-8 text")
    return text


def _error(path: str | PathLike[str], line: int | None, what: str, remedy: str) -> DatasetError:
    return DatasetError(f"{_place(path, line)}: {what}; {remedy}")


def _place(path: str | PathLike[str], line: int | None) -> str:
    shown = fspath(path)
    if not shown.isprintable():  # the path may contain a line break
        shown = repr(shown)
    return shown if line is None else f"{shown}:{line}"


def _shown(names: Sequence[str], most: int = 8) -> str:
    """At most `most` names for a message, quoted, each with at most 40 characters."""
    shown = [repr(name if len(name) <= 40 else name[:37] + "...") for name in names[:most]]
    return ", ".join(shown + (["..."] if len(names) > most else []))


# Holding out


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into (the rest, the held-out `fraction`), both in the order of the file.

    The same arguments give the same split. Each label is held out in proportion and keeps at least
    one row in the rest. If there are so many labels that too few rows can be held out in this way,
    fewer are held out. If no label has a second row, the draw ignores labels. At least one row is
    held out. Raises ValueError unless 0 < fraction < 1 and there are at least two rows.
    """
    if not 0 < fraction < 1 or len(dataset) < 2:
        raise ValueError(f"cannot hold {fraction} of {len(dataset)} rows out")
    shuffled = np.random.default_rng(seed).permutation(len(dataset))
    grouped = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
    labels = dataset.labels[grouped]
    spare = grouped[1:][labels[1:] == labels[:-1]]  # all except the first row of each label
    if not len(spare):
        spare = shuffled[1:]
    count = min(max(1, round(fraction * len(dataset))), len(spare))
    # Evenly spaced picks from rows grouped by label: each label's share is right within one row.
    picks = spare[((np.arange(count) + 0.5) * len(spare) / count).astype(np.int64)]
    held = np.zeros(len(dataset), np.bool_)
    held[picks] = True
    return _subset(dataset, ~held), _subset(dataset, held)


def _subset(dataset: Dataset, keep: NDArray[np.bool_]) -> Dataset:
    texts = tuple(text for text, kept in zip(dataset.texts, keep, strict=True) if kept)
    return Dataset(texts, dataset.labels[keep], dataset.label_names, dataset.warnings)


# Words

_CONTRACTIONS = re.compile(r"n't|'(?:s|ve|re|d|ll)")
_MARKS = re.compile(r"[,!()?]")
_KEPT = frozenset("(),!?'`")
_DROPPED_ASCII = re.compile(r"[^a-z0-9(),!?'`]")


def tokenize(text: str) -> list[str]:
    """Lower-case words of a sentence, as Kim (2014) splits them.

    `, ! ? ( )` and the endings `n't 's 've 're 'd 'll` become words. Letters, digits, apostrophes
    and backticks belong to words; every other character separates them. Kim's code knows ASCII
    only. This function keeps letters and digits of every script (in normal form C, with their
    combining marks), and treats a typographic apostrophe as an apostrophe. It lowers the case
    first, so that "IT'S" is split too. It does not split scripts without spaces.
    """
    text = text.lower()
    if text.isascii():
        text = _DROPPED_ASCII.sub(" ", text)
    else:
        text = unicodedata.normalize("NFC", text.replace("\u2019", "'"))
        text = "".join(char if _is_kept(char) else " " for char in text)
    return _MARKS.sub(r" \g<0> ", _CONTRACTIONS.sub(r" \g<0>", text)).split()


def _is_kept(char: str) -> bool:
    return char.isalnum() or char in _KEPT or unicodedata.category(char).startswith("M")


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows. `words[i]` has the number i + 2. 0 is padding, 1 any other word."""

    words: tuple[str, ...]

    @classmethod
    def build(cls, texts: Iterable[str], min_count: int = 1) -> Vocabulary:
        """The words that occur at least `min_count` times in `texts`, most frequent first."""
        counts = Counter(word for text in texts for word in tokenize(text))
        kept = [word for word, count in counts.items() if count >= min_count]
        return cls(tuple(sorted(kept, key=lambda word: (-counts[word], word))))

    def __len__(self) -> int:
        """Number of rows of the embedding: the words, padding and the unknown word."""
        return len(self.words) + 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words, start=2)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON, {"words": [...]}, whole or not at all. Raises OSError."""
        with files.replacing(Path(path)) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Vocabulary:
        """Read what `save` wrote. Raises DatasetError if the file is missing or damaged."""
        text = _text(path)
        try:
            return cls.from_json(text)
        except ValueError as error:
            remedy = "restore it from the model it was saved with"
            raise _error(path, None, str(error), remedy) from None

    def to_json(self) -> str:
        return json.dumps({"words": self.words}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The reverse of `to_json`. Raises ValueError, in one line, for anything else."""
        try:
            words = json.loads(text)["words"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError('not a vocabulary: expected JSON {"words": [...]}') from None
        if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
            raise ValueError("not a vocabulary: words must be a list of non-empty strings")
        if len(set(words)) != len(words):
            raise ValueError("not a vocabulary: a word occurs twice")
        return cls(tuple(words))


class Encoded(NamedTuple):
    """Sentences as word numbers.

    tokens: int32, shape (n, width). Each row is a sentence followed by PADDING. width is the length
    of the longest sentence, at least MIN_LENGTH. lengths: int32, shape (n,), in tokens, at least 1.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def batch(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Copy these rows, as wide as their longest sentence: int32, (len(rows), width)."""
        width = max(MIN_LENGTH, int(self.lengths[rows].max(initial=0)))
        return self.tokens[rows, :width]


def encode(texts: Sequence[str], vocabulary: Vocabulary, max_length: int = MAX_LENGTH) -> Encoded:
    """Number the words of `texts`. Tokens after the first `max_length` are dropped.

    A text without any word, such as punctuation only, becomes one UNKNOWN.
    """
    numbers = vocabulary.numbers
    rows = [
        [numbers.get(word, UNKNOWN) for word in tokenize(text)[:max_length]] or [UNKNOWN]
        for text in texts
    ]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(MIN_LENGTH, lengths.max(initial=0))), PADDING, np.int32)
    for row, numbered in zip(tokens, rows, strict=True):
        row[: len(numbered)] = numbered
    return Encoded(tokens, lengths)
