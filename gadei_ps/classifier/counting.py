"""Totals of the machines of a run, whichever of them have died meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gadei_ps.groups.shares import MOST_OPEN

LEAST_PASSES = 0.05
"""Passes to be trained before the remaining time is estimated."""
COUNTED = (
    "samples",
    "gradients_applied",
    "gradients_dropped",
    "gradients_refused",
    "learner_deaths",
)

Row = Mapping[str, Any]
"""Status of one machine, as in `group status`."""


class Counts:
    """Sums of all machines, also of jobs that are gone."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, str], dict[str, int]] = {}
        self._passes: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        """Groups of machines."""
        self._there: set[int] | None = None
        """Groups that have a machine, be it one that is away; None: not known yet."""

    def hear(self, rows: Sequence[Row]) -> None:
        """Update the totals from the machines' current status."""
        self._groups |= {row["machine"]: row["group"] for row in rows if "group" in row}
        there = {row["machine"] for row in rows if row.get("ended") is None}
        if there and there <= self._groups.keys():
            self._there = {self._groups[one] for one in there}
        for row in rows:
            if job := row.get("job"):
                seen = {name: int(job[name]) for name in COUNTED}
                self._jobs[row["machine"], job["job_id"]] = seen
                done = int(job["work"]["epochs_done"])
                self._passes[row["group"]] = max(self._passes.get(row["group"], 0), done)

    def __getitem__(self, name: str) -> int:
        """One of COUNTED."""
        return sum(one[name] for one in self._jobs.values())

    def divided(self, groups: int) -> int:
        """Return the passes that all groups have answered, where their machines divide the batches.

        groups: how many have begun. One whose machines have all left or ended is not waited for:
        nobody trains its part any more.
        """
        there = range(groups) if self._there is None else self._there
        return min((self._passes.get(group, 0) for group in there if group < groups), default=0)


class Progress:
    """Progress of the machines, and their speed since this command receives their status.

    They may have trained before it: a command comes back to a run whose cluster was lost.
    """

    def __init__(self, sentences: int, epochs: int, divided: int | None) -> None:
        """sentences: of a pass. epochs: most passes. divided: how many groups divide each pass;
        None: they do not."""
        self.counts = Counts()
        self.samples = 0
        self.begun = 0.0
        """Passes, with the part of the current ones."""
        self.passes = 0
        """Completed passes."""
        self.train_seconds = 0.0
        """Time since the first gradient that this command has seen (s)."""
        self._sentences, self._epochs, self._divided = sentences, epochs, divided
        self._first: tuple[float, int, float] | None = None
        """Time of that gradient; samples and passes then."""

    def hear(self, rows: Sequence[Row], now: float) -> None:
        """Update from the machines' current status. now: by the monotonic clock."""
        self.counts.hear(rows)
        samples = self.samples = self.counts["samples"]
        self.begun = samples / self._sentences
        self.passes = int(self.begun)
        if self._divided is not None:  # samples of a machine that has died are trained again
            self.passes = self.counts.divided(self._divided)
            self.begun = min(max(self.begun, self.passes), self.passes + MOST_OPEN)
        self.begun = min(self.begun, self._epochs)
        self.passes = min(self.passes, self._epochs)
        if samples and self._first is None:
            self._first = now, samples, self.begun
        if self._first is not None:
            self.train_seconds = now - self._first[0]

    @property
    def samples_per_s(self) -> float:
        """Mean of all the time."""
        if self._first is None or not self.train_seconds:
            return 0.0
        return (self.samples - self._first[1]) / self.train_seconds

    @property
    def left_s(self) -> float | None:
        """Estimate the time until all passes are done (s); None if too little is known."""
        done = self.begun - (self._first[2] if self._first is not None else 0.0)
        if done < LEAST_PASSES or not self.train_seconds:
            return None
        return self.train_seconds / done * (self._epochs - self.begun)


def sources(rows: Sequence[Row], passes: int) -> list[int]:
    """Return the machines that can give the weights of the run, the best one first.

    Members of their groups come before those that are about to join; and those whose weights have
    so many passes in them before the others.
    """
    there = [row for row in rows if row.get("job") and row["job"]["model"]]
    there.sort(
        key=lambda row: (
            row["exchange"]["state"] != "member",
            row["job"]["work"]["epochs_done"] < passes,
            row["machine"],
        )
    )
    return [row["machine"] for row in there]
