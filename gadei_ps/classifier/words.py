"""Splits sentences into words, and numbers the words.

    text --tokenize--> words --Vocabulary.build--> Vocabulary
    texts, Vocabulary --encode--> Encoded: the word numbers of all sentences
    texts --number--> both, with all words; `frequent` and `renumbered` make those of a training

The tokeniser is that of Kim (2014), "Convolutional neural networks for sentence classification",
whose network the paper trains (Figure 2). Scripts that put no spaces between words are cut into
characters, so that the network's filters are n-grams of characters.
"""

from __future__ import annotations

import array
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier.records import error
from gadei_ps.machine import user_files
from gadei_ps.storage import files

PADDING = 0
UNKNOWN = 1

MIN_LENGTH = 5
"""Tokens. An encoded sentence is at least as wide as the widest filter."""
MAX_LENGTH = 256
"""Tokens. Longer sentences are cut, so that one long text does not need much memory."""
MAX_CHARACTERS = 1 << 16
"""Characters of a text that are read. Later words are not among the first MAX_LENGTH."""

RARE_FROM: Final = 1000
"""Number of texts from which words that occur once are unknown. The vocabulary then has half as
many words, the accuracy is the same, and the unknown word is trained. In smaller sets most words
occur once."""

Cut = Literal["words", "characters"]
"""Unit of texts. `characters`: words, but characters of scripts without spaces."""
WORDS: Final = "words"
CHARACTERS: Final = "characters"

_CONTRACTIONS = re.compile(r"(?=n't|'(?:s|ve|re|d|ll))")
_MARKS = ",!()?"
_KEPT = frozenset("(),!?'`")
_ASCII = "".join(
    char.lower() if char.isalnum() or char in _KEPT else " " for char in map(chr, range(128))
)
"""Replacement of each ASCII character."""

_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # Japanese repetition marks
    (0x3040, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31A0, 0x31BF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # Katakana of half width
    (0x1B000, 0x1B16F),
    (0x20000, 0x3FFFF),
)
_SMALL = 0x200  # blocks up to this size are searched for combining marks; those of Han have none
_COMBINING = "".join(
    chr(code)
    for begin, end in _UNSPACED
    if end - begin <= _SMALL
    for code in range(begin, end + 1)
    if unicodedata.category(chr(code)).startswith("M")
)
_RANGES = "".join(f"{chr(begin)}-{chr(end)}" for begin, end in _UNSPACED)
_CHARACTER = re.compile(f"[{_RANGES}][{_COMBINING}]*")


def tokenize(text: str, cut: Cut = WORDS) -> list[str]:
    """Lower-case words of a sentence, as Kim (2014) splits them.

    `, ! ? ( )` and the endings `n't 's 've 're 'd 'll` become words. Letters, digits, apostrophes
    and backticks belong to words; every other character separates them. Kim's code knows ASCII
    only. This function keeps letters and digits of every script (in normal form C, with their
    combining marks), and treats a typographic apostrophe as an apostrophe. It lowers the case
    first, so that "IT'S" is split too. With the cut `characters`, each character of a script
    without spaces, with its combining marks, is a word. Only the first MAX_CHARACTERS are read.
    """
    text = text[:MAX_CHARACTERS]
    if text.isascii():
        text = text.translate(_ASCII)
    else:
        text = text.lower()
        text = unicodedata.normalize("NFC", text.replace("\u2019", "'"))
        text = "".join(char if _is_kept(char) else " " for char in text)
        if cut == CHARACTERS:
            text = _CHARACTER.sub(r" \g<0> ", text)
    if "'" in text:
        text = _CONTRACTIONS.sub(" ", text)
    for mark in _MARKS:
        text = text.replace(mark, f" {mark} ")
    return text.split()


def _is_kept(char: str) -> bool:
    return char.isalnum() or char in _KEPT or unicodedata.category(char).startswith("M")


def is_unspaced(text: str) -> bool:
    """Return whether a text has characters of a script that puts no spaces between words."""
    return not text.isascii() and _CHARACTER.search(text) is not None


def cut_for(texts: Iterable[str]) -> Cut:
    """Choose the unit of texts for a model of these texts."""
    return CHARACTERS if any(map(is_unspaced, texts)) else WORDS


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows. `words[i]` has the number i + 2. 0 is padding, 1 any other word.

    cut: how texts were cut when the model was trained; it must stay so.
    """

    words: tuple[str, ...]
    cut: Cut = WORDS

    @classmethod
    def build(cls, texts: Sequence[str], min_count: int = 1) -> Vocabulary:
        """The words that occur at least `min_count` times in `texts`, most frequent first.

        Of a text, only the MAX_LENGTH words count that `encode` keeps.
        """
        every, encoded = number(texts, cut_for(texts))
        return every.frequent(encoded, min_count)

    def frequent(self, encoded: Encoded, min_count: int) -> Vocabulary:
        """Those that occur at least `min_count` times in these sentences, most frequent first."""
        counts = np.bincount(encoded.tokens, minlength=len(self))[2:].tolist()
        pairs = zip(self.words, counts, strict=True)
        kept = sorted((-count, word) for word, count in pairs if count >= min_count)
        return Vocabulary(tuple(word for _, word in kept), self.cut)

    def __len__(self) -> int:
        """Number of rows of the embedding: the words, padding and the unknown word."""
        return len(self.words) + 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words, start=2)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write what `to_json` gives, whole or not at all. Raises OSError."""
        with files.replacing(Path(path)) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Vocabulary:
        """Read what `save` wrote. Raises DatasetError if the file is missing or damaged."""
        remedy = "restore it from the model it was saved with"
        try:
            with user_files.open_file(path) as file:
                return cls.from_json(file.read().decode())
        except OSError as failure:
            raise error(path, None, f"cannot be read ({failure.strerror})", remedy) from None
        except ValueError as failure:
            raise error(path, None, str(failure), remedy) from None

    def to_json(self) -> str:
        """JSON, {"words": [...]}; with "cut" unless the texts are cut into words."""
        told: dict[str, object] = {"words": self.words}
        if self.cut != WORDS:
            told["cut"] = self.cut
        return json.dumps(told, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The reverse of `to_json`. Raises ValueError, in one line, for anything else."""
        try:
            told = json.loads(text)
            words, cut = told["words"], told.get("cut", WORDS)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError('not a vocabulary: expected JSON {"words": [...]}') from None
        if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
            raise ValueError("not a vocabulary: words must be a list of non-empty strings")
        if len(set(words)) != len(words):
            raise ValueError("not a vocabulary: a word occurs twice")
        if cut not in (WORDS, CHARACTERS):
            raise ValueError("not a vocabulary: cut must be words or characters")
        return cls(tuple(words), cut)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Sentences as word numbers, one after the other.

    tokens: int32, all numbers. lengths: int32, shape (n,), of each sentence, at least 1. Their sum
    is the number of tokens.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Start of each sentence in `tokens`, and the end of the last one: shape (n + 1,)."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.lengths)

    def packed(
        self, rows: NDArray[np.int64], gap: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the words of these sentences as `packed` does."""
        return packed(self.tokens, self.starts, rows, gap)

    def batch(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """These sentences, each followed by PADDING, as wide as the longest: int32, (rows, width).

        The width is at least MIN_LENGTH.
        """
        width = max(MIN_LENGTH, int(self.lengths[rows].max(initial=0)))
        padded = np.full((len(rows), width), PADDING, np.int32)
        starts, tokens = self.starts, self.tokens
        for to, row in zip(padded, rows.tolist(), strict=True):
            begin, end = starts[row], starts[row + 1]
            to[: end - begin] = tokens[begin:end]
        return padded

    def padded(self) -> NDArray[np.int32]:
        """All sentences as `batch` gives them."""
        return self.batch(np.arange(len(self.lengths)))

    def only(self, rows: NDArray[np.bool_]) -> Encoded:
        """These sentences alone."""
        return Encoded(self.tokens[np.repeat(rows, self.lengths)], self.lengths[rows])

    def renumbered(self, old: Vocabulary, new: Vocabulary) -> Encoded:
        """The same sentences with the numbers of `new`, which cuts texts as `old` does."""
        numbers = [PADDING, UNKNOWN, *(new.numbers.get(word, UNKNOWN) for word in old.words)]
        return Encoded(np.array(numbers, np.int32)[self.tokens], self.lengths)


def number(texts: Iterable[str], cut: Cut) -> tuple[Vocabulary, Encoded]:
    """All words of the texts, in the order in which they first come, and the texts by them."""
    numbers = defaultdict[str, int](count(2).__next__)
    encoded = _encoded(texts, cut, MAX_LENGTH, numbers.__getitem__)
    return Vocabulary(tuple(numbers), cut), encoded


def encode(texts: Iterable[str], vocabulary: Vocabulary, max_length: int = MAX_LENGTH) -> Encoded:
    """Number the words of `texts`. Words after the first `max_length` are dropped.

    A text without any word, such as punctuation only, becomes one UNKNOWN.
    """
    numbers = vocabulary.numbers
    return _encoded(texts, vocabulary.cut, max_length, lambda word: numbers.get(word, UNKNOWN))


def _encoded(
    texts: Iterable[str], cut: Cut, max_length: int, numbered: Callable[[str], int]
) -> Encoded:
    tokens, lengths = array.array("i"), array.array("i")
    for text in texts:
        found = [*map(numbered, tokenize(text, cut)[:max_length])] or [UNKNOWN]
        tokens.extend(found)
        lengths.append(len(found))
    return Encoded(np.array(tokens, np.int32), np.array(lengths, np.int32))


def packed(
    words: NDArray[np.int32], starts: NDArray[np.int64], rows: NDArray[np.int64], gap: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the words of these texts, each followed by so many PADDING, and their starts.

    starts: of all texts among `words`, and the end of the last one; returned for these rows.
    """
    at, begins = gathered(starts, rows)
    gaps = gap * np.arange(len(begins))
    found = np.full(len(at) + gaps[-1], PADDING, np.int32)
    found[np.arange(len(at)) + np.repeat(gaps[:-1], np.diff(begins))] = words[at]
    return found, begins + gaps


def gathered(
    starts: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the places of the elements of these rows, and where each row begins among them."""
    lengths = starts[rows + 1] - starts[rows]
    begins = np.concatenate(([0], np.cumsum(lengths)))
    return np.arange(begins[-1]) + np.repeat(starts[rows] - begins[:-1], lengths), begins
