"""The data of a training: sentences to train on, held-out ones, the test file, the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier import dataset, features, hold_out, words
from gadei_ps.classifier.dataset import Dataset
from gadei_ps.classifier.features import Features, Hashed, Rows
from gadei_ps.classifier.records import place
from gadei_ps.classifier.training_settings import ENSEMBLE, Settings
from gadei_ps.classifier.words import Encoded, Vocabulary
from gadei_ps.show.counts import counted

HOLD_OUT: Final = 0.1
MOST_HELD_OUT: Final = 10_000
"""Most rows that are held out for an ensemble. No more are needed to calibrate it."""
TRAIN, HELD_OUT, TEST = range(3)
HIDDEN: Final = 64
"""Weights of each n-gram in an ensemble besides one for each label: the hidden units of `bag`."""


@dataclass
class Corpus:
    """The data of a training. notices and warnings: one line each, for the user to see.

    vocabulary: what the model knows, with the sentences as it needs them: Vocabulary and Encoded of
    the CNN, Features and Rows of an ensemble. encoded: the texts of `train`; `test_encoded` is
    empty without a test file. source: for an ensemble, the training file and all hashes.
    """

    train: Dataset
    held_out: Dataset
    test: Dataset | None
    vocabulary: Vocabulary | Features
    encoded: Encoded | Rows
    held_out_encoded: Encoded | Rows
    test_encoded: Encoded | Rows
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    source: tuple[Dataset, Hashed] | None = None

    @classmethod
    def read(cls, settings: Settings) -> Corpus:
        """Raise DatasetError."""
        names = (settings.text_column, settings.label_column, settings.label_separator)
        whole = dataset.read_training(settings.train_file, *names)
        test = None
        if settings.test_file is not None:
            test = dataset.read_test(settings.test_file, whole.label_names, *names)
        texts = whole.texts + (test.texts if test else ())
        hashes = numbered = None
        if settings.model == ENSEMBLE:
            # Of the training file alone: a test file must not change the model.
            hashes = features.hashed(texts, features.characters_of(len(whole)))
            every = hold_out.equal_texts(hashes.encoded)
        else:
            numbered = words.number(texts, words.cut_for(texts))
            every = hold_out.equal_texts(numbered[1])
        groups = every[: len(whole)]
        hold_out.check(settings.train_file, whole, groups)
        fraction = HOLD_OUT if hashes is None else min(HOLD_OUT, MOST_HELD_OUT / len(whole))
        held = hold_out.held_rows(whole, fraction, settings.seed, groups)
        train, held_out = hold_out.subset(whole, ~held), hold_out.subset(whole, held)
        part = np.full(len(texts), TEST)
        part[: len(whole)] = np.where(held, HELD_OUT, TRAIN)
        notices, warnings = [*whole.notices], [*whole.warnings]
        of_file = place(settings.train_file)
        warnings += [f"{of_file}: {one}" for one in hold_out.findings(whole, groups)]
        vocabulary: Vocabulary | Features
        encoded: tuple[Any, Any, Any]
        if hashes is not None:
            vocabulary, encoded = _learned(hashes, part, len(whole.label_names))
            if hashes.cut:
                what = f"of {counted(hashes.cut, 'text')}, only the beginning is used"
                warnings.append(f"{of_file}: {what}")
        else:
            assert numbered is not None
            vocabulary, encoded = _numbered(texts, part, train, *numbered)
            if long := int((encoded[TRAIN].lengths == words.MAX_LENGTH).sum()):
                what = f"of {counted(long, 'text')}, only the first {words.MAX_LENGTH} words are "
                warnings.append(f"{of_file}: {what}used")
            if vocabulary.cut == words.CHARACTERS:
                several = counted(sum(map(words.is_unspaced, train.texts)), "text")
                what = "in a script without spaces: cut into characters"
                notices.append(f"{of_file}: {several} {what}")
        if test is not None:
            notices += test.notices
            warnings += test.warnings
            if seen := hold_out.seen(every, len(whole)):
                share = f"{seen:,} of {counted(len(test), 'text')}"
                warnings.append(
                    f"{place(settings.test_file or '')}: {share} also in the training file: the "
                    "network has seen them, so the accuracy of new ones may be lower"
                )
        source = None if hashes is None else (whole, hashes)
        corpus = cls(train, held_out, test, vocabulary, *encoded)
        return replace(corpus, notices=tuple(notices), warnings=tuple(warnings), source=source)

    def with_all_rows(self) -> Corpus:
        """The same data, with the held-out rows among those to train on. For an ensemble."""
        assert self.source is not None
        whole, hashes = self.source
        part = np.where(np.arange(len(hashes)) < len(whole), TRAIN, TEST)
        vocabulary, (encoded, held_out, test) = _learned(hashes, part, len(whole.label_names))
        return replace(
            self,
            train=whole,
            vocabulary=vocabulary,
            encoded=encoded,
            held_out_encoded=held_out,
            test_encoded=test,
        )


def _learned(
    hashes: Hashed, part: NDArray[np.int64], classes: int
) -> tuple[Features, tuple[Rows, Rows, Rows]]:
    """Learn the features of the rows of TRAIN, and encode the rows of each part."""
    train = hashes.only(part == TRAIN)
    known = Features.learn(train, classes + HIDDEN)
    held_out, test = (known.rows(hashes.only(part == one)) for one in (HELD_OUT, TEST))
    return known, (known.rows(train, np.float16), held_out, test)


def _numbered(
    texts: Sequence[str],
    part: NDArray[np.int64],
    train: Dataset,
    known: Vocabulary,
    numbered: Encoded,
) -> tuple[Vocabulary, tuple[Encoded, Encoded, Encoded]]:
    """The same for the CNN. known, numbered: all words of the texts, and the texts by them."""
    cut = words.cut_for(train.texts)
    if cut != known.cut:  # characters, for texts alone that are not trained on
        known, numbered = words.number(texts, cut)
    min_count = 2 if len(train) >= words.RARE_FROM else 1
    vocabulary = known.frequent(numbered.only(part == TRAIN), min_count)
    numbered = numbered.renumbered(known, vocabulary)
    train_, held_out, test = (numbered.only(part == one) for one in (TRAIN, HELD_OUT, TEST))
    return vocabulary, (train_, held_out, test)
