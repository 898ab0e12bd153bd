"""Words and n-grams of texts as numbers, and their TF-IDF weights.

    texts --hashed--> Hashed: the words and the n-grams of each text, as hashes
    Hashed --Features.learn--> Features: which of them a model knows, and how rare they are
    Hashed, Features --Features.rows--> Rows: sparse TF-IDF vectors and word numbers

Each text is decoded and cut once. No n-gram is ever a Python object: texts of a chunk become one
array of characters, of which the polynomial hash of any stretch follows from prefix sums. Of 32-bit
hashes, two n-grams in ten thousand share one if a model knows a million, which does no harm.

A word is a run of letters, digits and combining marks, with an apostrophe before it if there is
one; every other mark is a word, and so is each character of a script without spaces. Character
n-grams are those of scikit-learn's `char_wb`: they do not cross spaces, and words begin and end
with one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier.words import (
    MAX_CHARACTERS,
    MAX_LENGTH,
    RARE_FROM,
    UNKNOWN,
    Encoded,
    gathered,
    is_unspaced,
    packed,
)

WORD_GRAMS: Final = (1, 2)
CHARACTER_GRAMS: Final = (2, 3, 4, 5)
CHUNK: Final = 1024
"""Texts that are hashed at once."""
SLAB: Final = 1 << 14
"""Texts that are encoded at once, which takes more memory than they keep."""
MOST_CHARACTERS: Final = 1 << 26
"""Characters of all training texts that are used. Each gives about three n-grams, of 11 bytes."""
LEAST_CHARACTERS: Final = 128
"""Characters of each text that are used at least."""
MOST_WEIGHTS: Final = 1 << 27
"""Weights of all n-grams together. In larger models, the rarest n-grams are left out."""
MOST_WORDS: Final = 1 << 18

Floats = NDArray[np.float32]
_U = np.uint64
_BASE = _U(0x9E3779B97F4A7C15)
_INVERSE = _U(pow(int(_BASE), -1, 1 << 64))
_SPACE, _LETTER, _MARK, _QUOTE = range(4)
_CHARACTERS = np.uint32(1 << 31)
"""Bit of the hashes of character n-grams; those of word n-grams lack it."""


@dataclass(frozen=True, eq=False)
class Hashed:
    """Texts as hashes.

    starts: int64, (n + 1,), of each text in `grams`, and the end of the last. grams: uint32, each
    once a text, in ascending order. counts: uint8, how often. word_starts: as `starts`, of `words`.
    words: uint32, the first MAX_LENGTH of each text in their order. characters: of each text that
    are used. cut: number of longer texts.
    """

    starts: NDArray[np.int64]
    grams: NDArray[np.uint32]
    counts: NDArray[np.uint8]
    word_starts: NDArray[np.int64]
    words: NDArray[np.uint32]
    characters: int
    cut: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def encoded(self) -> Encoded:
        """The words, for a comparison of texts."""
        return Encoded(self.words.view(np.int32), np.diff(self.word_starts).astype(np.int32))

    def part(self, begin: int, end: int) -> Hashed:
        """Return some texts in a row, without a copy."""
        grams, words = self.starts[begin : end + 1], self.word_starts[begin : end + 1]
        of_grams, of_words = slice(grams[0], grams[-1]), slice(words[0], words[-1])
        return Hashed(
            grams - grams[0],
            self.grams[of_grams],
            self.counts[of_grams],
            words - words[0],
            self.words[of_words],
            self.characters,
        )

    def only(self, keep: NDArray[np.bool_]) -> Hashed:
        """Return these texts alone."""
        of_grams, of_words = np.diff(self.starts), np.diff(self.word_starts)
        gram, word = np.repeat(keep, of_grams), np.repeat(keep, of_words)
        return Hashed(
            _starts(of_grams[keep]),
            self.grams[gram],
            self.counts[gram],
            _starts(of_words[keep]),
            self.words[word],
            self.characters,
        )


def characters_of(rows: int) -> int:
    """Return the number of characters of each text that a model of so many rows uses."""
    return max(LEAST_CHARACTERS, min(MAX_CHARACTERS, MOST_CHARACTERS // max(1, rows)))


def hashed(texts: Iterable[str], most: int = MAX_CHARACTERS) -> Hashed:
    """Cut the first `most` characters of each text into words and n-grams."""
    rest = iter(texts)
    chunks = []
    while chunk := list(islice(rest, CHUNK)):
        chunks.append(_hashed(chunk, most))
    if not chunks:
        return _hashed([], most)
    return Hashed(
        _starts(np.concatenate([np.diff(one.starts) for one in chunks])),
        np.concatenate([one.grams for one in chunks]),
        np.concatenate([one.counts for one in chunks]),
        _starts(np.concatenate([np.diff(one.word_starts) for one in chunks])),
        np.concatenate([one.words for one in chunks]),
        most,
        sum(one.cut for one in chunks),
    )


def _hashed(texts: Sequence[str], most: int) -> Hashed:
    """Hash the first `most` characters of each text."""
    cut = sum(len(text) > most for text in texts)
    plain = [_normal(text[:most]) for text in texts]
    code = np.frombuffer((" " + " ".join(plain) + " ").encode("utf-32-le"), np.uint32)
    lengths = [len(text) + 1 for text in plain]
    row = np.concatenate(([0], np.repeat(np.arange(len(plain)), lengths), [len(plain)]))
    distinct, at = np.unique(code, return_inverse=True)
    kinds = np.array([_kind(int(one)) for one in distinct], np.int8)[at]
    stretch = _Stretches(code)
    space = kinds == _SPACE
    of, words = _words(stretch, kinds, space, row)
    lines, grams = _grams(stretch, space, row, of, words)
    key, counts = np.unique(lines.astype(_U) << _U(32) | grams, return_counts=True)
    of_grams = np.bincount((key >> _U(32)).astype(np.int64), minlength=len(plain))
    of_words = np.bincount(of, minlength=len(plain))
    kept = np.arange(len(of)) - np.repeat(_starts(of_words)[:-1], of_words) < MAX_LENGTH
    return Hashed(
        _starts(of_grams),
        key.astype(np.uint32),
        np.minimum(counts, 255).astype(np.uint8),
        _starts(np.minimum(of_words, MAX_LENGTH)),
        words[kept].astype(np.uint32),
        most,
        cut,
    )


def _normal(text: str) -> str:
    """Lower-case a text, in normal form C, with one space between words."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.replace("\u2019", "'"))
        # A lone surrogate, as JSON may have it, cannot be encoded.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.lower().split())


@cache
def _kind(code: int) -> int:
    char = chr(code)
    if char.isspace():
        return _SPACE
    if char == "'":
        return _QUOTE
    if is_unspaced(char):
        return _MARK
    return _LETTER if char.isalnum() or unicodedata.category(char)[0] == "M" else _MARK


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each value's information over all of its bits."""
    values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
    return values ^ (values >> _U(31))


class _Stretches:
    """Hashes of any stretches of a text: sums of code[i] * _BASE**i, moved to the beginning."""

    def __init__(self, code: NDArray[np.uint32]) -> None:
        self._sums = np.zeros(len(code) + 1, _U)
        powers = self._powers(_BASE, len(code))
        np.cumsum((code.astype(_U) + _U(1)) * powers[:-1], out=self._sums[1:])
        self._back = self._powers(_INVERSE, len(code))

    @staticmethod
    def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
        powers = np.full(count + 1, base, _U)
        powers[0] = 1
        return np.multiply.accumulate(powers)

    def __call__(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _mixed((self._sums[end] - self._sums[begin]) * self._back[begin])


def _words(
    stretch: _Stretches, kinds: NDArray[np.int8], space: NDArray[np.bool_], row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the text of each word, and its hash."""
    before = np.concatenate(([_SPACE], kinds[:-1]))
    joins = (kinds == _LETTER) & ((before == _LETTER) | (before == _QUOTE))
    start = ~space & ~joins
    begin = np.flatnonzero(start)
    end = np.flatnonzero(~space & np.append(start[1:] | space[1:], True)) + 1
    return row[begin], stretch(begin, end)


def _grams(
    stretch: _Stretches,
    space: NDArray[np.bool_],
    row: NDArray[np.int64],
    of: NDArray[np.int64],
    words: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the text of each n-gram, and its hash of 32 bits."""
    rows, hashes = [], []
    for n in WORD_GRAMS:
        count = max(0, len(words) - n + 1)
        values = words[:count]
        for k in range(1, n):
            values = _mixed(values * _U(3) + words[k : k + count])
        same = of[:count] == of[n - 1 : n - 1 + count]
        rows.append(of[:count][same])
        hashes.append(_mixed(values[same] ^ _U(n)) >> _U(33))
    spaces = np.concatenate(([0], np.cumsum(space)))
    for n in CHARACTER_GRAMS:
        at = np.arange(max(0, len(space) - n + 1))
        inside = spaces[at + n - 1] == spaces[at + 1]  # no space but at the ends
        if n == 2:
            inside &= ~(space[at] & space[at + 1])
        at = at[inside]
        rows.append(row[at + space[at]])
        hashes.append(_mixed(stretch(at, at + n) ^ _U(n)) >> _U(33) | _U(_CHARACTERS))
    return np.concatenate(rows), np.concatenate(hashes)


def _starts(lengths: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


# What a model knows


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts for the network.

    starts: int64, (n + 1,), of each text in `features` and `values`. features: int32, the numbers
    of its n-grams. values: TF-IDF, float32, or float16 where they wait for learners. word_starts:
    as `starts`, of `words`. words: int32; PADDING is not among them.
    """

    starts: NDArray[np.int64]
    features: NDArray[np.int32]
    values: NDArray[Any]
    word_starts: NDArray[np.int64]
    words: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by their names."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def bag(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Return the features of these texts, their starts, and the values.

        Starts: int64, (rows + 1,), of each text among the features, and the end of the last one.
        """
        at, starts = gathered(self.starts, rows)
        return self.features[at].astype(np.int64), starts, self.values[at].astype(np.float32)

    def packed(
        self, rows: NDArray[np.int64], gap: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the words of these texts as words.packed does."""
        return packed(self.words, self.word_starts, rows, gap)


@dataclass(frozen=True, eq=False)
class Features:
    """The n-grams and words that a model knows.

    grams: uint32, ascending; the number of one is its place. idf: float32, of each. words: uint32,
    ascending; the number of one is its place + 2. characters: of each text that are used, in
    training and prediction alike.
    """

    grams: NDArray[np.uint32]
    idf: Floats
    words: NDArray[np.uint32]
    characters: int = MAX_CHARACTERS

    @classmethod
    def learn(cls, texts: Hashed, weights: int) -> Features:
        """Choose the features of training texts. weights: of each n-gram, which bound the model.

        An n-gram of words is known if one text has it, one of characters if two have it.
        """
        grams, frequency = np.unique(texts.grams, return_counts=True)
        kept = (grams < _CHARACTERS) | (frequency > 1)
        grams, frequency = _most_frequent(grams[kept], frequency[kept], MOST_WEIGHTS // weights)
        idf = np.log((1 + len(texts)) / (1 + frequency)) + 1
        words, count = np.unique(texts.words, return_counts=True)
        kept = count >= (2 if len(texts) >= RARE_FROM else 1)
        words, _ = _most_frequent(words[kept], count[kept], MOST_WORDS)
        return cls(grams, idf.astype(np.float32), words, texts.characters)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by their names."""
        return {"grams": self.grams, "idf": self.idf, "words": self.words}

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding: the words, padding and the unknown word."""
        return len(self.words) + 2

    def encode(self, texts: Iterable[str]) -> Rows:
        """Encode texts that are not hashed yet."""
        return self.rows(hashed(texts, self.characters))

    def rows(self, texts: Hashed, dtype: Any = np.float32) -> Rows:
        """Encode texts. dtype: of the values."""
        parts = [
            self._rows(texts.part(begin, begin + SLAB), dtype)
            for begin in range(0, max(1, len(texts)), SLAB)
        ]
        if len(parts) == 1:
            return parts[0]
        return Rows(
            _starts(np.concatenate([np.diff(one.starts) for one in parts])),
            np.concatenate([one.features for one in parts]),
            np.concatenate([one.values for one in parts]),
            texts.word_starts,
            np.concatenate([one.words for one in parts]),
        )

    def _rows(self, texts: Hashed, dtype: Any) -> Rows:
        at, found = _looked_up(self.grams, texts.grams)
        row = np.repeat(np.arange(len(texts)), np.diff(texts.starts))[found]
        features = at[found].astype(np.int32)
        values = (1 + np.log(texts.counts[found], dtype=np.float32)) * self.idf[features]
        # The words and the characters of a text have the length 1 each.
        block = row * 2 + (self.grams[features] >= _CHARACTERS)
        norms = np.sqrt(np.bincount(block, values * values, minlength=2 * len(texts)))
        values /= norms[block]
        starts = _starts(np.bincount(row, minlength=len(texts)))
        at, found = _looked_up(self.words, texts.words)
        words = np.where(found, at + 2, UNKNOWN).astype(np.int32)
        return Rows(starts, features, values.astype(dtype), texts.word_starts, words)


def _most_frequent(
    hashes: NDArray[np.uint32], counts: NDArray[np.int64], most: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Keep at most so many of them, in ascending order."""
    if len(hashes) <= most:
        return hashes, counts
    kept = np.sort(np.argsort(-counts, kind="stable")[:most])
    return hashes[kept], counts[kept]


def _looked_up(
    known: NDArray[np.uint32], hashes: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Find the place of each hash among the known ones, and whether it is there."""
    if not len(known):
        return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.bool_)
    at = np.searchsorted(known, hashes)
    at[at == len(known)] = 0
    return at, known[at] == hashes
