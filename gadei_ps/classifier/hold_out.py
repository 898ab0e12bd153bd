"""Holds rows out of a training set, so that no text is on both sides.

A text that were trained on and measured would be known by heart: the accuracy would say nothing.
So rows whose texts are the same for the network, word by word, stay together.
"""

from __future__ import annotations

from itertools import pairwise
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from gadei_ps.classifier.dataset import Dataset
from gadei_ps.classifier.records import error, list_names
from gadei_ps.classifier.words import Encoded, cut_for, number
from gadei_ps.show.counts import counted

Groups = NDArray[np.int64]


def equal_texts(encoded: Encoded) -> Groups:
    """A number for each text, shape (n,): the same for texts that have the same words.

    encoded: by all words of the texts (`words.number`). Numbers count from 0 in the order in which
    the texts first come.
    """
    known: dict[bytes, int] = {}
    texts = (
        encoded.tokens[begin:end].tobytes() for begin, end in pairwise(encoded.starts.tolist())
    )
    numbers = (known.setdefault(text, len(known)) for text in texts)
    return np.fromiter(numbers, np.int64, len(encoded.lengths))


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split into (the rest, the held-out `fraction`), both in the order of the file.

    By held_rows().
    """
    _, encoded = number(dataset.texts, cut_for(dataset.texts))
    held = held_rows(dataset, fraction, seed, equal_texts(encoded))
    return subset(dataset, ~held), subset(dataset, held)


def held_rows(dataset: Dataset, fraction: float, seed: int, groups: Groups) -> NDArray[np.bool_]:
    """Choose the held-out `fraction`: whether each row is in it.

    The same arguments give the same rows. Rows with equal texts stay together; `groups` are theirs.
    Each label is held out in proportion to its texts and keeps at least one in
    the rest. If there are so many labels that too few rows can be held out in this way, fewer are
    held out. If no label has a second text, the draw ignores labels. At least one text is held out,
    and none of which there are more copies than rows to hold out, unless there are only such.
    Raises ValueError unless 0 < fraction < 1 and there are at least two texts.
    """
    if not 0 < fraction < 1 or len(dataset) < 2 or not groups.any():
        raise ValueError(f"cannot hold {fraction} of {len(dataset)} rows out")
    shuffled = np.random.default_rng(seed).permutation(len(dataset))
    by_label = shuffled[np.argsort(dataset.labels[shuffled], kind="stable")]
    stay = np.zeros(groups.max() + 1, np.bool_)
    rows, labels = dataset.pairs()
    order = np.lexsort((np.argsort(shuffled)[rows], labels))
    rows, labels = rows[order], labels[order]
    texts_of_label = np.split(groups[rows], np.flatnonzero(labels[1:] != labels[:-1]) + 1)
    # Those of one text first: another label with that text needs no further one.
    for texts in sorted(texts_of_label, key=lambda some: (some != some[0]).any()):
        if not stay[texts].any():
            stay[texts[0]] = True
    spare = _first_of_each(groups[by_label], stay)
    if not len(spare):
        stay[:] = False
        stay[groups[shuffled[0]]] = True
        spare = _first_of_each(groups[shuffled], stay)
    sizes = np.bincount(groups)
    wanted = max(1, round(fraction * len(dataset)))
    small = spare[sizes[spare] <= wanted]
    spare = small if len(small) else spare[[sizes[spare].argmin()]]
    count = min(max(1, round(wanted / sizes[spare].mean())), len(spare))
    # Evenly spaced picks from texts in the order of labels: each label's share is right within one.
    picks = spare[((np.arange(count) + 0.5) * len(spare) / count).astype(np.int64)]
    held = np.zeros(len(sizes), np.bool_)
    held[picks] = True
    return held[groups]


def _first_of_each(groups: Groups, stay: NDArray[np.bool_]) -> Groups:
    """The groups that do not stay, each once, in the order in which they first come."""
    _, first = np.unique(groups, return_index=True)
    ordered = groups[np.sort(first)]
    return ordered[~stay[ordered]]


def subset(dataset: Dataset, keep: NDArray[np.bool_]) -> Dataset:
    """These rows alone, without notices and warnings."""
    texts = tuple(text for text, kept in zip(dataset.texts, keep, strict=True) if kept)
    sets = None if dataset.sets is None else dataset.sets.only(keep)
    return Dataset(texts, dataset.labels[keep], dataset.label_names, sets=sets)


def check(path: str | PathLike[str], dataset: Dataset, groups: Groups) -> None:
    """Raise DatasetError if no label has two different texts: nothing could be measured."""
    _, counts = np.unique(_texts_of_labels(dataset, groups)[0], return_counts=True)
    if counts.max() > 1:
        return
    names = list_names(dataset.label_names, most=4)
    raise error(
        path,
        None,
        f"none of its {counted(len(dataset.label_names), 'label')} ({names}) has two different "
        "texts, but a tenth is held out",
        "give several texts for each label, or choose the column of labels with --label-column",
    )


def findings(dataset: Dataset, groups: Groups) -> list[str]:
    """List notes on the rows for the user, one line each."""
    found = []
    if copies := len(groups) - len(np.unique(groups)):
        found.append(
            f"{copies:,} of {counted(len(groups), 'row')} are copies of other rows' texts: all "
            "copies of a text are trained on, or all are held out"
        )
    pairs = np.unique(np.stack([groups, dataset.labels]), axis=1)
    labels_of_text = np.bincount(pairs[0])
    if several := int((labels_of_text > 1).sum()):
        one = dataset.texts[int((groups == int((labels_of_text > 1).argmax())).argmax())]
        found.append(
            f"{counted(several, 'text')} with copies of different labels ({list_names([one])}): "
            "they are left as they are, and the network cannot learn them"
        )
    labels, counts = np.unique(_texts_of_labels(dataset, groups)[0], return_counts=True)
    if single := [dataset.label_names[at] for at in labels[counts == 1]]:
        found.append(
            f"{counted(len(single), 'label')} with a single text ({list_names(single, most=4)}): "
            "it is trained on, but not measured"
        )
    return found


def _texts_of_labels(dataset: Dataset, groups: Groups) -> NDArray[np.int64]:
    """Return each label and each of its texts once: shape (2, n)."""
    rows, labels = dataset.pairs()
    return np.unique(np.stack([labels, groups[rows]]), axis=1)


def seen(groups: Groups, training: int) -> int:
    """Count the texts from number `training` on that are equal to one before."""
    return int(np.isin(groups[training:], groups[:training]).sum())
