"""The sentences of the parts."""

from __future__ import annotations

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.nlc_texts import EXAMPLE, FALLBACK, FILES, Texts
from gadei_ps.classifier import dataset


def first(target: Target) -> Texts:
    """Return the first data set of the target's sizes that is present, else the example.

    Without a checkout, any data set. Raises UsageError if no data set is present.
    """
    directory = nlc_texts.data_directory()
    for name in target.sizes("learners")["texts"] if EXAMPLE.exists() else FILES:
        if (path := directory / FILES[name]).exists():
            return nlc_texts.whole(name, dataset.read_training(path))
    return nlc_texts.whole(FALLBACK, nlc_texts.example())
