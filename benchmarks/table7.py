"""Bytes per second of gradients through the server (paper, Table 7), beside the memory's bandwidth.

Learners train the sentence classifier at mini-batch 1. The figure counts the payload of all applied
gradients: the rows of the embedding that a batch names, and the other tensors whole. With dense
frames it is all of every tensor. A learner writes each byte once, and the server reads it once, as
in a copy of memory. So the figure is compared with a copy. The time also contains the update of the
weights and the computation of the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.nlc import WARM_UP
from gadei_ps.benchmarks.nlc_member import OURS, OURS_DENSE
from gadei_ps.benchmarks.nlc_team import Team, started
from gadei_ps.benchmarks.sizes import sizes

COPY = "copy of memory"
FRAMES = {OURS: "rows", OURS_DENSE: "dense"}


def measure(quick: bool) -> Report:
    """Measure each data set with rows and with dense frames."""
    size = sizes("table7", quick)
    found, notes = nlc_texts.read(size["sets"])
    report = Report(
        ["set", "frames", "learners", "gradients/s", "KB each", "MB/s", "of a copy"], notes=notes
    )
    copy = copies(size["copy_bytes"])
    for name, data in found.items():
        texts = nlc_texts.whole(name, data)
        teams = {(kind, n): Team(kind, n, texts) for kind in FRAMES for n in size["learners"]}
        with started(teams.values()):
            _measure_set(report, name, teams, copy, size)
    return report


def _measure_set(
    report: Report,
    name: str,
    teams: Mapping[tuple[str, int], Team],
    copy: Callable[[], float],
    size: Mapping[str, Any],
) -> None:
    payloads = {key: Payload(team, size["window_s"]) for key, team in teams.items()}
    contenders: dict[str, Callable[[], float]] = {
        f"{kind}, {n}": payload for (kind, n), payload in payloads.items()
    }
    figures = alternate(contenders | {COPY: copy}, size["rounds"])
    report.rows.append(
        {"contender": COPY, "set": name, **summary(figures[COPY], "bytes/s", larger=True)}
    )
    for (kind, learners), payload in payloads.items():
        values = figures[f"{kind}, {learners}"]
        row = summary(values, "bytes/s", larger=True)
        told = {"set": name, "frames": FRAMES[kind], "learners": learners, "mini_batch": 1}
        each = {"bytes_each": payload.bytes_each}
        report.rows.append({"contender": OURS, **told, **each, **row})
        ratio = ratios_of(values, figures[COPY], larger=True)
        report.ratios.append({"contender": COPY, **told, **ratio})
        report.lines.append(
            [
                name,
                FRAMES[kind],
                str(learners),
                f"{row['median'] / payload.bytes_each:.0f}",
                f"{payload.bytes_each / 1e3:.0f}",
                f"{row['median'] / 1e6:.0f}",
                f"{ratio['ratio']:.3f}",
            ]
        )


class Payload:
    """Measures bytes per second. All of them are applied when the window ends."""

    def __init__(self, team: Team, window_s: float) -> None:
        """team: must be started."""
        self.bytes_each = 0.0
        """Mean bytes of a gradient in the last window."""
        self._team, self._window_s = team, window_s

    def __call__(self) -> float:
        """Train for a window."""
        done = self._team.train(1, self._window_s, WARM_UP * self._window_s)
        self.bytes_each = sum(one.payload_bytes for one in done) / sum(one.steps for one in done)
        return sum(one.payload_bytes / one.seconds for one in done)


def copies(size: int) -> Callable[[], float]:
    """Return a function that measures the bytes per second that one thread copies."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def measure() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return size / (time.perf_counter() - begin)

    return measure
