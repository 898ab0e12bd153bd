"""Labelled sentences: reading, holding out, tokenising, numbering.

    CSV file --read_training--> Dataset --split--> Dataset, Dataset
    Dataset.texts --tokenize--> words --Vocabulary.build--> Vocabulary
    texts, Vocabulary --encode--> Encoded: one padded row of word numbers a sentence

NumPy and the standard library only, so that a process that never computes a gradient can use it.
Every mistake in a file is a `DatasetError` of one line: where (`file:line`), what, what to do.
The defaults are those of the paper's Table 3, the tokeniser is that of Kim (2014), "Convolutional
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

PADDING = 0
UNKNOWN = 1
UNSEEN_LABEL = -1
"""Label number of a test row whose label is not among the training labels: never predicted."""

MIN_LENGTH = 5
"""Tokens: an encoded sentence is never narrower than the widest filter."""
MAX_LENGTH = 256
"""Tokens: what follows is cut off, which bounds the memory of one long text among short ones."""
MIN_ROWS = 10
"""A training file needs one row for every tenth, because a tenth is held out."""


class DatasetError(UsageError):
    """A file of sentences cannot be used. The message is one line and names the remedy."""


class TrainDefaults(NamedTuple):
    """Hyper-parameters fixed by the size of the training set alone (paper, Table 3)."""

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

    UTF-8, with or without a byte-order mark; commas; any quoting; other columns are ignored and
    white space around texts and labels is dropped. Raises DatasetError for a file that cannot be
    read or parsed, for a row without text or label, for fewer than two labels, and for fewer than
    MIN_ROWS rows.
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
            f"{len(rows)} rows are too few to hold a tenth out",
            f"give at least {MIN_ROWS} rows",
        )
    return _dataset(rows, names, ())


def read_test(
    path: str | PathLike[str],
    label_names: Sequence[str],
    text_column: str = "text",
    label_column: str = "label",
) -> Dataset:
    """Read a CSV file to measure a model on whose labels are `label_names`.

    A row with another label gets UNSEEN_LABEL, so that it counts as wrong, and `warnings` says how
    many there are. Raises DatasetError as `read_training` does, but one row or label is enough.
    """
    rows = list(_rows(path, text_column, label_column))
    known = set(label_names)
    unseen = [row for row in rows if row.label not in known]
    warnings: tuple[str, ...] = ()
    if unseen:
        names = sorted({row.label for row in unseen})
        count = f"{len(unseen)} of {len(rows)} rows have"
        what = f"{count} a label that the training data lack ({_shown(names)}); they count as wrong"
        warnings = (f"{_place(path, unseen[0].line)}: {what}",)
    return _dataset(rows, tuple(label_names), warnings)


class Table(NamedTuple):
    """A CSV file's header and rows, all of the header's width, and the texts among them."""

    header: tuple[str, ...]
    rows: list[list[str]]
    texts: list[str]


def read_table(path: str | PathLike[str], text_column: str = "text") -> Table:
    """Read a CSV file of sentences without labels; an empty text is a sentence of no words.

    Raises DatasetError as `read_training` does for a file that cannot be read or parsed.
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
    """The header, then every row filled up to its width, each with its line; at least one row."""
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
        "separate columns by commas and name one of them so, or give the name that the file uses",
    )


def _records(path: str | PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Each non-blank record with the number of the line on which it begins, from 1."""
    # Strict, because the lenient parser silently swallows the rows after a lone quote.
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
        data = Path(path).read_bytes()
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
        # The appended byte makes an offset at the start of a line belong to that line.
        line = len((body[:bad] + b".").splitlines())
        raise _error(path, line, f"{what} at offset {bad + skipped}", "save the file as UTF-8 text")
    return text


def _error(path: str | PathLike[str], line: int | None, what: str, remedy: str) -> DatasetError:
    return DatasetError(f"{_place(path, line)}: {what}; {remedy}")


def _place(path: str | PathLike[str], line: int | None) -> str:
    shown = fspath(path)
    if not shown.isprintable():  # a line break in a path would break the promise of one line
        shown = repr(shown)
    return shown if line is None else f"{shown}:{line}"


def _shown(names: Sequence[str], most: int = 8) -> str:
    """Names for a message: quoted, each at most 40 characters, at most `most` of them."""
    shown = [repr(name if len(name) <= 40 else name[:37] + "...") for name in names[:most]]
    return ", ".join(shown + (["..."] if len(names) > most else []))


# Holding out


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into (the rest, the held-out `fraction`), both in the order of the file.

    The same arguments give the same split. Each label is held out in proportion and keeps at least
    one row in the rest; if labels are so many that this leaves too few rows, fewer are held out.
    Only if no label has a second row is the draw blind to labels. At least one row is held out.
    Raises ValueError unless 0 < fraction < 1 and there are two rows.
    """
    if not 0 < fraction < 1 or len(dataset) < 2:
        raise ValueError(f"cannot hold {fraction} of {len(dataset)} rows out")
    shuffled = np.random.default_rng(seed).permutation(len(dataset))
    grouped = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
    labels = dataset.labels[grouped]
    spare = grouped[1:][labels[1:] == labels[:-1]]  # all but the first row of each label
    if not len(spare):
        spare = shuffled[1:]
    count = min(max(1, round(fraction * len(dataset))), len(spare))
    # Evenly spaced picks from rows grouped by label take each label's share to within one row.
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

    `, ! ? ( )` and the endings `n't 's 've 're 'd 'll` become words; every other character that is
    not a letter, a digit, an apostrophe or a backtick separates words. Unlike Kim's, which knows
    ASCII only, letters and digits of every script are kept (in normal form C, with their combining
    marks), a typographic apostrophe is an apostrophe, and case is dropped first, so that "IT'S" is
    split too. Scripts without spaces are not split into words.
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
    """The words a model knows. `words[i]` has the number i + 2: 0 is padding, 1 any other word."""

    words: tuple[str, ...]

    @classmethod
    def build(cls, texts: Iterable[str], min_count: int = 1) -> Vocabulary:
        """The words that occur at least `min_count` times in `texts`, most frequent first."""
        counts = Counter(word for text in texts for word in tokenize(text))
        kept = [word for word, count in counts.items() if count >= min_count]
        return cls(tuple(sorted(kept, key=lambda word: (-counts[word], word))))

    def __len__(self) -> int:
        """Rows of the embedding: the words, padding and the unknown word."""
        return len(self.words) + 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words, start=2)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON: {"words": [...]}. Raises OSError."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Vocabulary:
        """Read what `save` wrote. Raises DatasetError for a missing or damaged file."""
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

    tokens: int32, shape (n, width), each row a sentence followed by PADDING; width is the longest
    sentence's length, at least MIN_LENGTH. lengths: int32, shape (n,), in tokens, at least 1.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def batch(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Copy the given rows, no wider than their longest needs: int32, (len(rows), width)."""
        width = max(MIN_LENGTH, int(self.lengths[rows].max(initial=0)))
        return self.tokens[rows, :width]


def encode(texts: Sequence[str], vocabulary: Vocabulary, max_length: int = MAX_LENGTH) -> Encoded:
    """Number the words of `texts`; tokens after the first `max_length` are dropped.

    A text without any word (punctuation only, say) becomes one UNKNOWN.
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
