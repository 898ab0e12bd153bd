"""The sentences of the parts: the example of the checkout, and the data sets that are present."""

from __future__ import annotations

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.nlc_texts import CHECKOUT, FALLBACK, Texts
from gadei_ps.classifier import dataset


def example() -> Texts:
    """examples/intents.csv."""
    return nlc_texts.whole(
        FALLBACK, dataset.read_training(CHECKOUT / "examples" / f"{FALLBACK}.csv")
    )


def found(target: Target) -> tuple[list[Texts], list[str]]:
    """The data sets that the target's sizes name, then the example; and notes on missing ones."""
    wanted = target.sizes("learners")["texts"]
    data, notes = nlc_texts.read(wanted)
    sets = [nlc_texts.whole(name, one) for name, one in data.items() if name != FALLBACK]
    return [*sets, example()], notes


def first(target: Target) -> Texts:
    """The first of these."""
    return found(target)[0][0]
