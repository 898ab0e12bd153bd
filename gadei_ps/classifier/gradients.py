"""Losses and gradients of an ensemble on the host, in closed form and without PyTorch.

A mini-batch of 16 sentences is so small that PyTorch's calls, and the graph of its autograd, take
longer than the arithmetic. `ensemble.py` has the same losses for GPUs; the tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gadei_ps import _native
from gadei_ps.classifier.calibration import PRIOR, log_softmax, sigmoid, softmax
from gadei_ps.classifier.features import Rows as Texts
from gadei_ps.classifier.inference import (
    EMBEDDING_RANGE,
    HIDDEN_DROPOUT,
    SLICE,
    Classifier,
    CnnForward,
    EnsembleClassifier,
    EnsembleSizes,
    Floats,
    Forward,
    Sizes,
)
from gadei_ps.classifier.words import PADDING
from gadei_ps.learners.gradients import Rows

MARGIN: Final = 2.0
"""Logits of `wide` that have no hinge loss. Its share is then about as large as the others'."""


class Product(NamedTuple):
    """A gradient that is the transpose of `factors` times `vectors`.

    factors: mostly zeros, (n, rows of the tensor). vectors: (n, values of a row). The product is
    computed while it is pushed.
    """

    factors: Floats
    vectors: Floats


Gradient = Floats | Rows | Product


def first_weights(sizes: EnsembleSizes, seed: int) -> dict[str, Floats]:
    """Return the weights that training begins with, by the names of `sizes.shapes`."""
    generator = np.random.default_rng(seed)
    found = {name: np.zeros(shape, np.float32) for name, shape in sizes.shapes.items()}
    cnn = sizes.cnn
    # The bound of PyTorch's layers is 1 / sqrt(number of inputs). A filter of `width` words has a
    # row for each of them: see SentenceClassifier.forward for their order.
    of_filters = [(cnn.embedding * width) ** -0.5 for width in cnn.widths for _ in range(cnn.maps)]
    of_rows = np.concatenate([of_filters[:count] for count in cnn.tap_features])
    bounds = {
        "bag": 1 / sizes.hidden,
        "output_weight": sizes.hidden**-0.5,
        "cnn.embedding": EMBEDDING_RANGE,
        "cnn.filters": of_rows.astype(np.float32)[:, None],
        "cnn.output_weight": cnn.features**-0.5,
    }
    for name, bound in bounds.items():
        values = found[name]
        generator.random(dtype=np.float32, out=values)
        values *= 2
        values -= 1
        values *= np.float32(bound) if isinstance(bound, float) else bound
    found["cnn.embedding"][PADDING] = 0
    # What the squared hinge loss has for labels of equal frequency, before any n-gram is known.
    found["wide_bias"][:] = MARGIN * (2 / sizes.classes - 1)
    return found


def frequencies(texts: Texts, features: int) -> Floats:
    """Return the number of texts that have each n-gram, at least 1."""
    found = np.zeros(features, np.int64)
    for begin in range(0, len(texts.features), 1 << 24):  # bincount makes a copy of 8 bytes each
        found += np.bincount(texts.features[begin : begin + (1 << 24)], minlength=features)
    return np.maximum(found, 1).astype(np.float32)


def gradients(
    model: EnsembleClassifier,
    texts: Texts,
    rows: NDArray[np.int64],
    truth: Floats,
    batch_size: int,
    *,
    multi_label: bool = False,
    frequency: Floats | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[float, dict[str, Gradient]]:
    """Return loss and gradients of a mini-batch, or the sums of several.

    texts: of which `rows` are trained on. truth: 1 for each label of these, else 0, (rows,
    classes). batch_size: rows of a mini-batch; the last one may have fewer. The loss that is
    minimized is the sum of the parts' mean losses. That which is returned is the cross-entropy of
    the prediction (nats), with equal shares of the parts, to be compared with that of the held-out
    rows. frequency: as from `frequencies`; with it, the weights of `wide` are drawn to zero as by a
    linear SVM with C = 1. rng: draws the dropout; without it, nothing is dropped.
    """
    share = np.full((len(rows), 1), 1 / batch_size, np.float32)
    if rest := len(rows) % batch_size:
        share[-rest:] = 1 / rest
    found = []
    loss = 0.0
    for begin in range(0, len(rows), SLICE):
        part = slice(begin, begin + SLICE)
        forward = model.forward(texts, rows[part], rng)
        reported, errors = losses(forward.logits, truth[part], multi_label)
        loss += float((reported * share[part]).sum())
        found.append(_backward(model, forward, errors * share[part], rng is not None))
        if frequency is not None:
            # Each text pays for its n-grams by their frequency, so all pay for each weight once.
            paid = (share[part] * (forward.wide != 0)).sum(axis=0) / frequency[forward.grams]
            weights = model.tensors["wide"][forward.grams]
            gradient = found[-1]["wide"]
            assert isinstance(gradient, Rows)
            gradient.values[:] += paid[:, None] / MARGIN**2 * weights
    batches = -(-len(rows) // batch_size)
    return loss / batches, found[0] if len(found) == 1 else _sum(found)


def losses(logits: Floats, truth: Floats, multi_label: bool) -> tuple[Floats, Floats]:
    """Return the reported loss of each row, (rows, 1), and the derivatives of its minimized one.

    logits, and the derivatives by them: (3, rows, classes). The minimized loss is the squared hinge
    of `wide`, each label against all others as of a linear SVM, and the cross-entropies of the
    other parts; of texts of several labels, three cross-entropies.
    """
    mixed = logits.sum(axis=0) * np.float32(PRIOR / len(logits))
    if multi_label:
        loss = np.logaddexp(0, mixed) - truth * mixed
        return loss.sum(axis=1, keepdims=True), sigmoid(logits) - truth
    errors = np.empty_like(logits)
    signs = 2 * truth - 1
    errors[0] = signs * np.maximum(1 - signs * logits[0] / MARGIN, 0) * np.float32(-2 / MARGIN)
    errors[1:] = softmax(logits[1:]) - truth
    return -(truth * log_softmax(mixed)).sum(axis=1, keepdims=True), errors


def _backward(
    model: EnsembleClassifier, forward: Forward, errors: Floats, drops: bool
) -> dict[str, Gradient]:
    """Return the gradients, by the derivatives of the logits. drops: whether there is dropout."""
    wide, bag, cnn = errors
    units = bag @ model.tensors["output_weight"] * (forward.hidden > 0)
    if drops:
        units *= np.float32(1 / (1 - HIDDEN_DROPOUT))
    of_cnn = _backward_of_cnn(model.cnn, forward.cnn, cnn, drops)
    return {
        "wide": Rows(forward.grams, forward.wide.T @ wide),
        "wide_bias": wide.sum(axis=0),
        "bag": Rows(forward.grams, forward.bag.T @ units),
        "bag_bias": units.sum(axis=0),
        "output_weight": bag.T @ forward.hidden,
        "output_bias": bag.sum(axis=0),
        **{f"cnn.{name}": gradient for name, gradient in of_cnn.items()},
    }


def _backward_of_cnn(
    model: Classifier, forward: CnnForward, errors: Floats, drops: bool
) -> dict[str, Gradient]:
    """Do the same for the part `cnn`."""
    maxima = errors @ model.tensors["cnn.output_weight"] * (forward.maxima > 0)
    if drops:
        maxima *= np.float32(1 / (1 - model.sizes.dropout))
    products = _of_products(model.sizes, forward, maxima)
    words = np.empty_like(forward.embedded)
    to, factors, matrix = map(_native.address, (words, products, model.tensors["cnn.filters"]))
    count, rows = products.shape
    _native.sparse_product(to, factors, matrix, count, rows, model.sizes.embedding)
    known = forward.tokens != PADDING
    return {
        "embedding": Rows(forward.tokens[known].astype(np.int64), words[known]),
        "filters": Product(products, forward.embedded),
        "filter_bias": maxima.sum(axis=0),
        "output_weight": errors.T @ forward.maxima,
        "output_bias": errors.sum(axis=0),
    }


def _of_products(sizes: Sizes, forward: CnnForward, maxima: Floats) -> Floats:
    """Return the derivatives of the words' products with the filters: (tokens, taps of filters).

    maxima: the derivatives of the maxima. Each belongs to one window, that which has the maximum,
    and so to one product for each tap of its filter.
    """
    filters, taps = maxima.shape[1], sum(sizes.tap_features)
    changes = (maxima != 0) & (forward.peaks > 0)
    row = np.repeat(np.arange(len(maxima)), np.diff(forward.starts))
    # By flat numbers: NumPy finds and sets places of two dimensions several times slower.
    highest = forward.windows == np.where(changes, forward.peaks, np.nan)[row]
    at, of = np.divmod(np.flatnonzero(highest), filters)
    place = np.zeros(maxima.size, np.int64)
    place[row[at] * filters + of] = at  # of several windows that are equal, the last one
    changed = np.flatnonzero(changes)
    values, of = maxima.ravel()[changed], changed % filters
    first = place[changed] * taps + of
    found = np.zeros((len(forward.tokens), taps), np.float32)
    begin = 0
    for tap, count in enumerate(sizes.tap_features):
        has = of < count
        # Before a text, there is the padding of another one; before the first one, of the last.
        found.ravel()[first[has] + (begin - tap * taps)] = values[has]
        begin += count
    return found


def _sum(parts: Sequence[Mapping[str, Gradient]]) -> dict[str, Gradient]:
    """Add up gradients of the same tensors."""
    found: dict[str, Gradient] = {}
    for name, first in parts[0].items():
        every = [one[name] for one in parts]
        if isinstance(first, np.ndarray):
            found[name] = np.sum(every, axis=0)
        else:  # repeated rows are added up by the push
            found[name] = type(first)(*map(np.concatenate, zip(*every, strict=True)))
    return found
