"""Errors of a model: precision and recall of each label, and the confusion matrix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

WORST: Final = 5
"""Labels that `train` prints."""
MOST_DRAWN: Final = 40
"""Labels in the picture of the confusion matrix: those with the most errors."""
_CELL, _MARGIN = 14, 150  # pixels


class LabelQuality(NamedTuple):
    """Quality of one label. precision, recall: 0 to 1, NaN where nothing can be divided.

    rows: that have the label. training_rows: that it was learned from.
    """

    label: str
    precision: float
    recall: float
    rows: int
    training_rows: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 0 if no row was found."""
        if not self.recall > 0:
            return 0.0
        return 2 * self.precision * self.recall / (self.precision + self.recall)


class Confusion:
    """Counts of true and predicted labels on measured rows."""

    def __init__(
        self, truth: NDArray[np.int64], predicted: NDArray[np.int64], names: Sequence[str]
    ) -> None:
        self.names = names
        pairs = np.stack([truth, predicted], axis=1)[truth >= 0]
        self._pairs, self._counts = np.unique(pairs, axis=0, return_counts=True)

    def labels(self, training: NDArray[np.int64]) -> list[LabelQuality]:
        """Return the quality of each label that was measured, the worst first.

        training: labels of the rows that were trained on.
        """
        number = len(self.names)
        rows, found = (
            np.bincount(self._pairs[:, side], self._counts, minlength=number) for side in (0, 1)
        )
        same = self._pairs[:, 0] == self._pairs[:, 1]
        right = np.bincount(self._pairs[same, 0], self._counts[same], minlength=number)
        return quality(self.names, rows, found, right, np.bincount(training, minlength=number))

    def to_json(self) -> bytes:
        """Return JSON: labels, and [true, predicted, count] by their numbers, if above 0."""
        counts = [
            [*pair, count]
            for pair, count in zip(self._pairs.tolist(), self._counts.tolist(), strict=True)
        ]
        value = {"labels": list(self.names), "counts": counts}
        return json.dumps(value, ensure_ascii=False).encode()

    def to_svg(self) -> bytes:
        """Draw the matrix of the labels with the most errors: true labels down, predicted across.

        Each cell has the share of its row's texts.
        """
        errors = np.zeros(len(self.names))
        rows = np.zeros(len(self.names))
        for (true, found), count in zip(self._pairs.tolist(), self._counts.tolist(), strict=True):
            rows[true] += count
            if true != found:
                errors[true] += count
                errors[found] += count
        drawn = np.sort(np.argsort(-errors, kind="stable")[:MOST_DRAWN]).tolist()
        place = {label: at for at, label in enumerate(drawn)}
        size = _MARGIN + _CELL * len(drawn) + 4
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
            'font-family="sans-serif" font-size="10">',
            f'<rect width="{size}" height="{size}" fill="white"/>',
        ]
        for label, at in place.items():
            name = self.names[label]
            short = escape(name if len(name) <= 24 else name[:23] + "…")
            middle = _MARGIN + at * _CELL + _CELL - 4
            lines.append(f'<text x="{_MARGIN - 4}" y="{middle}" text-anchor="end">{short}</text>')
            lines.append(
                f'<text transform="translate({middle},{_MARGIN - 4}) rotate(-90)">{short}</text>'
            )
        for (true, found), count in zip(self._pairs.tolist(), self._counts.tolist(), strict=True):
            if true not in place or found not in place:
                continue
            x, y = _MARGIN + place[found] * _CELL, _MARGIN + place[true] * _CELL
            colour = "#2a6fb0" if true == found else "#c0392b"
            names = f"{self.names[true]} → {self.names[found]}: {count}"
            lines.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{colour}" '
                f'fill-opacity="{count / rows[true]:.2f}"><title>{escape(names)}</title></rect>'
            )
        side = _CELL * len(drawn)
        lines.append(
            f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{side}" height="{side}" fill="none" '
            'stroke="#888"/></svg>'
        )
        return "\n".join(lines).encode(errors="xmlcharrefreplace")


def quality(
    names: Sequence[str],
    rows: NDArray[Any],
    found: NDArray[Any],
    right: NDArray[Any],
    learned: NDArray[Any],
) -> list[LabelQuality]:
    """Return the quality of each label that was measured, the worst first.

    rows: that have the label, found: for which it is predicted, right: both. learned: rows to train
    on.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        precision, recall = (right / found).tolist(), (right / rows).tolist()
    every = [
        LabelQuality(name, precision[at], recall[at], int(rows[at]), int(learned[at]))
        for at, name in enumerate(names)
        if rows[at]
    ]
    return sorted(every, key=lambda one: (one.f1, -one.rows))


def as_metrics(labels: Sequence[LabelQuality]) -> list[dict[str, Any]]:
    """Return the labels as JSON values."""
    return [one._asdict() | {"f1": one.f1} for one in labels]


def lines(labels: Sequence[LabelQuality]) -> list[str]:
    """Describe the worst labels, one line each."""
    return [
        f"label {one.label!r}: precision {_percent(one.precision)}, recall "
        f"{_percent(one.recall)} on {one.rows:,} held-out rows, {one.training_rows:,} to train on"
        for one in labels[:WORST]
        if one.f1 < 1
    ]


def _percent(share: float) -> str:
    return "none" if np.isnan(share) else f"{100 * share:.0f}%"
