"""Progress of long work: a live table in a terminal, plain lines in a pipe, nothing with --json."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

LINE_S = 5.0  # at most one plain line in this time, besides the events
RATE_S = 1.0  # window over which samples/s are taken


def duration(seconds: float | None) -> str:
    """`3 s`, `4 min 5 s` or `1 h 2 min`; `?` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@dataclass
class Rates:
    """Samples per second of each learner, from counters that only grow."""

    _before: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    _rate: dict[tuple[int, int], float] = field(default_factory=dict)

    def update(self, learners: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        """By row; a learner seen for the first time has rate 0."""
        now = time.monotonic()
        rates = {}
        for learner in learners:
            key = (learner["row"], learner["generation"])
            then, samples = self._before.setdefault(key, (now, learner["samples"]))
            if now - then >= RATE_S:
                self._rate[key] = (learner["samples"] - samples) / (now - then)
                self._before[key] = (now, learner["samples"])
            rates[learner["row"]] = self._rate.get(key, 0.0)
        living = {(one["row"], one["generation"]) for one in learners}
        for known in (self._before, self._rate):
            for key in known.keys() - living:
                del known[key]
        return rates


def learner_table(status: Mapping[str, Any], rates: Mapping[int, float] | None = None) -> Table:
    """One row for each learner of a job's status."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("learner", "pid", "samples/s", "applied", "queue", "staleness", "loss"):
        table.add_column(name, justify="right")
    for one in status["learners"]:
        rate = "" if rates is None else f"{rates.get(one['row'], 0.0):,.0f}"
        loss = "" if one["loss"] is None else f"{one['loss']:.3f}"
        table.add_row(
            str(one["row"]),
            str(one["pid"]),
            rate,
            f"{one['applied']:,}",
            str(one["queue"]),
            f"{one['staleness_mean']:.1f} (max {one['staleness_max']})",
            loss,
        )
    return table


class Display:
    """Where `gadei-ps train` says how far it is."""

    def __init__(self, epochs: int, *, silent: bool = False) -> None:
        self._silent = silent
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._rates = Rates()
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("at most {task.fields[left]} left"),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=epochs, epoch="", left="?")
        self._epochs = epochs

    def __enter__(self) -> Self:
        if not self._silent and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, text: str) -> None:
        """Something worth a line that stays."""
        if self._silent:
            return
        if self._live is not None:
            self._console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, status: Mapping[str, Any], done: float, left_s: float | None) -> None:
        """done: epochs, with the fraction of the one being done. left_s: None where unknown."""
        if self._silent:
            return
        rates = self._rates.update(status["learners"])
        epoch = min(int(done) + 1, self._epochs)
        if self._live is not None:
            self._progress.update(
                self._task,
                completed=done,
                epoch=f"{epoch} of at most {self._epochs}",
                left=duration(left_s),
            )
            self._live.update(Group(self._progress, learner_table(status, rates)))
            return
        now = time.monotonic()
        if now - self._last_line < LINE_S:
            return
        self._last_line = now
        staleness = [one["staleness_mean"] for one in status["learners"]]
        queue = sum(one["queue"] for one in status["learners"])
        print(
            f"epoch {done:.2f} of at most {self._epochs}, {sum(rates.values()):,.0f} samples/s, "
            f"{len(status['learners'])} learners, queue {queue}, "
            f"staleness {sum(staleness) / len(staleness) if staleness else 0:.1f}, "
            f"at most {duration(left_s)} left",
            file=sys.stderr,
            flush=True,
        )
