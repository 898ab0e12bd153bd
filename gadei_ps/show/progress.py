"""Progress of segment creation and of training, in readable lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps.show.counts import counted, rate
from gadei_ps.show.plain import escaped, print_text

PROGRESS_LINE_S = 1.0  # before the first line, and between two
LEAST_S, MOST_S = 10.0, 60.0  # between two lines on how training goes
SHARE = 1 / 10  # of the time so far
WIDTH = 69  # of a line in a terminal of 80 columns, after "gadei-ps: "


NO_LOSS = "no loss reported: optimizer.report(loss=...)"


def no_loss(learners: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether gradients are applied, but none of these learners has reported a loss."""
    applied = any(one["applied"] for one in learners)
    refused = any(one["refused"] for one in learners)  # the loss may be NaN
    return applied and not refused and all(one["loss"] is None for one in learners)


def making(note: Mapping[str, Any]) -> str:
    """`the model is being made: 512 of 2,048 MiB`. note: what, and done and total in bytes.

    Of a note that has a text, the text. Of less than 1 MiB, no size.
    """
    if "text" in note:
        return str(note["text"])
    done, total = note["done"] >> 20, note["total"] >> 20
    if not total:
        return f"{note['what']} is being made"
    return f"{note['what']} is being made: {done:,} of {total:,} MiB"


class ProgressLines:
    """Lines on standard error, for what takes longer than a moment."""

    def __init__(self) -> None:
        self._next: float | None = None
        self._printed = ""

    def __call__(self, note: Mapping[str, Any]) -> None:
        """Print the progress, unless it has just been printed."""
        now = time.monotonic()
        if self._next is None:
            self._next = now + PROGRESS_LINE_S
        text = making(note)
        if now >= self._next and text != self._printed:
            self._next = now + PROGRESS_LINE_S
            self._printed = text
            print_text(f"gadei-ps: {text}")


def above(text: str) -> str:
    """The text as a line of its own above the line in which the terminal's cursor stands.

    For a terminal that another process writes to, which may draw a progress bar. The bar stays as
    it is, and the cursor where it was in it. IND and CUU make room at the bottom of the screen.
    """
    return f"\x1bD\x1b[A\x1b7\r\x1b[L{escaped(text)}\x1b8\x1b[B"


class Training:
    """Now and then a line on how a job's training goes: every ten seconds, later every minute."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._before: tuple[float, int, int] | None = None  # when; samples and gradients then
        self._printed = False  # that no loss is reported

    def __call__(self, report: Mapping[str, Any], now: float, width: int = WIDTH) -> list[str]:
        """Return the lines that are due. report: a status. now: a clock (s). width: of a line."""
        if report["watchdog_pid"] is None or not report["gradients_applied"]:
            return []
        here = now, int(report["samples"]), int(report["gradients_applied"])
        if self._before is None:
            self._begin, self._before = now, here
            return []
        then, samples, gradients = self._before
        if now - then < min(max(LEAST_S, (now - self._begin) * SHARE), MOST_S):
            return []
        self._before = here
        if here[2] == gradients:
            return [f"no gradient has been applied for {now - then:.0f} s"]
        if samples_more := here[1] - samples:
            speed = f"{rate(samples_more / (now - then))} samples/s"
        else:
            speed = f"{rate((here[2] - gradients) / (now - then))} gradients/s"
        lines = [_fitting(_parts(report, speed), width)]
        if no_loss(report["learners"]) and not self._printed:
            self._printed = True
            lines.append(NO_LOSS)
        return lines


def _fitting(parts: Sequence[str], width: int) -> str:
    """The parts on one line, without the last ones that do not fit."""
    kept = list(parts)
    while len(", ".join(kept)) > width and len(kept) > 1:
        kept.pop()
    return ", ".join(kept)


def _parts(report: Mapping[str, Any], speed: str) -> list[str]:
    learners = report["learners"]
    losses = [one["loss"] for one in learners if one["loss"] is not None]
    applied = sum(one["applied"] for one in learners)
    stale = sum(one["staleness_mean"] * one["applied"] for one in learners)
    parts = [counted(report["gradients_applied"], "gradient"), speed]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4g}")
    parts.append(f"staleness {stale / applied if applied else 0:.1f}")
    return [*parts, counted(len(learners), "learner")]
