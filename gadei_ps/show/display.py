"""Progress of long work: a live table in a terminal, plain lines in a pipe, nothing with --json."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from gadei_ps.show import groups
from gadei_ps.show.counts import counted
from gadei_ps.show.plain import escaped, print_text
from gadei_ps.show.status import Rates, learner_table
from gadei_ps.show.tables import duration

PLAIN_LINE_S = 5.0  # at most one plain line in this time, besides the events


class Display:
    """Progress display of `gadei-ps train`."""

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

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def event(self, text: str) -> None:
        """Something worth a line that stays."""
        if self._silent:
            return
        if self._live is not None:
            self._console.print(Text(escaped(text)))
        else:
            print_text(text)

    def update(self, status: Mapping[str, Any], done: float, left_s: float | None) -> None:
        """done: epochs, with the fraction of the one being done. left_s: None where unknown."""
        if self._silent:
            return
        rates = self._rates.update(status["learners"])
        if self._live is not None:
            self._draw(learner_table(status, rates), done, left_s)
            return
        staleness = [one["staleness_mean"] for one in status["learners"]]
        queue = sum(one["queue"] for one in status["learners"])
        self._print(
            f"{sum(rates.values()):,.0f} samples/s, "
            f"{counted(len(status['learners']), 'learner')}, queue {queue}, "
            f"staleness {sum(staleness) / len(staleness) if staleness else 0:.1f}",
            done,
            left_s,
        )

    def machines(
        self,
        rows: Sequence[Mapping[str, Any]],
        samples_per_s: float,
        done: float,
        left_s: float | None,
    ) -> None:
        """The same of a run of groups. rows: one for each machine."""
        if self._silent:
            return
        if self._live is not None:
            self._draw(groups.machines(rows), done, left_s)
            return
        there = [row for row in rows if row.get("job")]
        rounds = max((row["exchange"]["rounds"] for row in there), default=0)
        self._print(
            f"{samples_per_s:,.0f} samples/s, {counted(len(there), 'machine')}, round {rounds:,}",
            done,
            left_s,
        )

    def _draw(self, table: RenderableType, done: float, left_s: float | None) -> None:
        assert self._live is not None
        epoch = min(int(done) + 1, self._epochs)
        self._progress.update(
            self._task,
            completed=done,
            epoch=f"{epoch} of at most {self._epochs}",
            left=duration(left_s),
        )
        self._live.update(Group(self._progress, table))

    def _print(self, line: str, done: float, left_s: float | None) -> None:
        now = time.monotonic()
        if now - self._last_line < PLAIN_LINE_S:
            return
        self._last_line = now
        left = "" if left_s is None else f", at most {duration(left_s)} left"
        text = f"epoch {done:.2f} of at most {self._epochs}, {line}{left}"
        print_text(text)
