"""What the machines of a run have counted together, whichever of them have died meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COUNTED = (
    "samples",
    "gradients_applied",
    "gradients_dropped",
    "gradients_refused",
    "learner_deaths",
)

Row = Mapping[str, Any]
"""What one machine is doing, as `group status` has it."""


class Counts:
    """Sums of all machines, also of jobs that are gone."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, str], dict[str, int]] = {}
        self._passes: dict[int, int] = {}

    def hear(self, rows: Iterable[Row]) -> None:
        """What each machine is doing now."""
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
        """Passes that all groups have answered, where their machines divide the batches."""
        return min(self._passes.get(group, 0) for group in range(groups))


def sources(rows: Sequence[Row], passes: int) -> list[int]:
    """Machines that can give the weights of the run, the best one first.

    Members of their groups come before those that are about to join; and those whose weights have
    so many passes in them before the others.
    """
    there = [row for row in rows if row.get("job") and row["job"]["model"]]
    there.sort(
        key=lambda row: (
            row["agent"]["state"] != "member",
            row["job"]["work"]["epochs_done"] < passes,
            row["machine"],
        )
    )
    return [row["machine"] for row in there]
