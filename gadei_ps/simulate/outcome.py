"""The outcome of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gadei_ps.simulate.histogram import Histogram


@dataclass
class Outcome:
    """Counts and times of one model's run.

    Every `wave` iterations are one push: of a gradient, or of an empty frame if the learner gave it
    up. pushed = applied + dropped + in_flight, counted in pushes. given_up is part of dropped.
    """

    model: str
    wave: int = 1
    """Number of iterations whose gradients are pushed as one: the model's `wave`."""
    seconds: float = 0.0
    """Virtual time from the start to the end."""
    ended: str = "done"
    """Otherwise, why the run ended early."""
    pushed: int = 0
    applied: int = 0
    dropped: int = 0
    given_up: int = 0
    in_flight: int = 0
    """Published, but neither applied nor dropped when the run ended."""
    updates: int = 0
    """Number of changes of the weights: one for each commit, or for each gradient on arrival."""
    member_s: float = 0.0
    """Sum of the times for which learners were members."""
    waiting_s: float = 0.0
    """Sum of the times for which learners waited, for a grant or for a free slot."""
    lost_s: float = 0.0
    """Computing time of iterations that were dropped, given up, or lost by a death."""
    deaths: int = 0
    joins: int = 0
    lost_iterations: int = 0
    """Iterations during which the learner died."""
    staleness: Histogram = field(default_factory=Histogram)
    """Staleness of applied gradients: version when applied minus version pulled (gradients)."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Loss against time, if weights were trained."""
    wall_s: float = 0.0
    """Real time that the simulation took."""

    @property
    def throughput(self) -> float:
        """Iterations a second whose gradients were applied."""
        return self.applied * self.wave / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Mean share of a learner's time that it waits."""
        return self.waiting_s / self.member_s if self.member_s else 0.0

    def as_dict(self, oracle: float) -> dict[str, Any]:
        """Return JSON values. oracle: throughput of the oracle (gradients/s)."""
        iterations = self.pushed * self.wave
        found = vars(self) | {
            "gradients_per_s": self.throughput,
            "updates_per_s": self.updates / self.seconds if self.seconds else 0.0,
            "oracle_share": self.throughput / oracle if oracle else None,
            "waiting_share": self.waiting_share,
            "waiting_s_per_iteration": self.waiting_s / iterations if iterations else 0.0,
            "lost_share": self.lost_s / self.member_s if self.member_s else 0.0,
            "staleness": {
                **self.staleness.summary(),
                "histogram": [
                    {"from": low, "to": high, "gradients": times}
                    for low, high, times in self.staleness.rows()
                ],
            },
        }
        del found["member_s"], found["waiting_s"]
        return found
