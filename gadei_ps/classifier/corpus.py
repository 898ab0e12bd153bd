"""The data of a training: sentences to train on, held-out ones, the test file, the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gadei_ps.classifier import dataset, hold_out, words
from gadei_ps.classifier.dataset import Dataset
from gadei_ps.classifier.records import place
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.classifier.words import Encoded, Vocabulary
from gadei_ps.show.counts import counted

HOLD_OUT = 0.1
TRAIN, HELD_OUT, TEST = range(3)
RARE_FROM = 1000
"""Number of sentences from which the vocabulary has only words that occur twice. It then has half
as many words, the accuracy is the same, and the unknown word is trained. In smaller sets most
words occur once."""


@dataclass
class Corpus:
    """The data of a training. notices and warnings: one line each, for the user to see.

    encoded: the texts of `train`; `test_encoded` is empty without a test file.
    """

    train: Dataset
    held_out: Dataset
    test: Dataset | None
    vocabulary: Vocabulary
    encoded: Encoded
    held_out_encoded: Encoded
    test_encoded: Encoded
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, settings: Settings) -> Corpus:
        """Raise DatasetError."""
        names = (settings.text_column, settings.label_column)
        whole = dataset.read_training(settings.train_file, *names)
        test = None
        if settings.test_file is not None:
            test = dataset.read_test(settings.test_file, whole.label_names, *names)
        texts = whole.texts + (test.texts if test else ())
        known, numbered = words.number(texts, words.cut_for(texts))
        every = hold_out.equal_texts(numbered)
        groups = every[: len(whole)]
        hold_out.check(settings.train_file, whole, groups)
        held = hold_out.held_rows(whole, HOLD_OUT, settings.seed, groups)
        train, held_out = hold_out.subset(whole, ~held), hold_out.subset(whole, held)
        cut = words.cut_for(train.texts)
        if cut != known.cut:  # characters, for texts alone that are not trained on
            known, numbered = words.number(texts, cut)
        part = np.full(len(texts), TEST)
        part[: len(whole)] = np.where(held, HELD_OUT, TRAIN)
        min_count = 2 if len(train) >= RARE_FROM else 1
        vocabulary = known.frequent(numbered.only(part == TRAIN), min_count)
        numbered = numbered.renumbered(known, vocabulary)
        encoded = numbered.only(part == TRAIN)
        of_file = place(settings.train_file)
        warnings = [*whole.warnings]
        warnings += [f"{of_file}: {one}" for one in hold_out.findings(whole, groups)]
        if long := int((encoded.lengths == words.MAX_LENGTH).sum()):
            what = f"of {counted(long, 'text')}, only the first {words.MAX_LENGTH} words are used"
            warnings.append(f"{of_file}: {what}")
        notices = [*whole.notices]
        if vocabulary.cut == words.CHARACTERS:
            several = counted(sum(map(words.is_unspaced, train.texts)), "text")
            notices.append(f"{of_file}: {several} in a script without spaces: cut into characters")
        if test is not None:
            notices += test.notices
            warnings += test.warnings
            if seen := hold_out.seen(every, len(whole)):
                share = f"{seen:,} of {counted(len(test), 'text')}"
                warnings.append(
                    f"{place(settings.test_file or '')}: {share} also in the training file: the "
                    "network has seen them, so the accuracy of new ones may be lower"
                )
        others = numbered.only(part == HELD_OUT), numbered.only(part == TEST)
        told = tuple(notices), tuple(warnings)
        return cls(train, held_out, test, vocabulary, encoded, *others, *told)
