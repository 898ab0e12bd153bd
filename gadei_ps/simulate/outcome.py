"""What a simulated run has come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gadei_ps.simulate.histogram import Histogram


@dataclass
class Outcome:
    """Counts and times of one model's run.

    Every `wave` iterations are one push: of a gradient, or of an empty frame where it was given up.
    pushed = applied + dropped + in_flight, counted in pushes, and given_up is part of dropped.
    """

    model: str
    wave: int = 1
    """Iterations whose gradients are pushed at once, as one: the model's `wave`."""
    seconds: float = 0.0
    """Virtual time from the start to the end."""
    ended: str = "done"
    """Or why it ended before its time."""
    pushed: int = 0
    applied: int = 0
    dropped: int = 0
    given_up: int = 0
    in_flight: int = 0
    """Published, and neither applied nor dropped at the end."""
    updates: int = 0
    """How often the weights moved: once a commit, or once for each gradient applied on arrival."""
    member_s: float = 0.0
    """Sum of the times that learners were members."""
    waiting_s: float = 0.0
    """Sum of the times that they waited, for a grant or for a free slot."""
    lost_s: float = 0.0
    """Computing time that came to nothing: dropped, given up, or lost by a death."""
    deaths: int = 0
    joins: int = 0
    lost_iterations: int = 0
    """Begun by learners that died in them."""
    staleness: Histogram = field(default_factory=Histogram)
    """Of applied gradients: version when applied less version pulled, both in gradients."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """Loss against time, where weights were trained."""
    wall_s: float = 0.0
    """What the simulation itself took."""

    @property
    def throughput(self) -> float:
        """Iterations per second whose gradients were applied."""
        return self.applied * self.wave / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Mean share of a learner's time that it spends waiting."""
        return self.waiting_s / self.member_s if self.member_s else 0.0

    def as_dict(self, oracle: float) -> dict[str, Any]:
        """For JSON. oracle: gradients per second of the one that knows all run times."""
        stale = self.staleness
        return {
            "model": self.model,
            "wave": self.wave,
            "ended": self.ended,
            "seconds": self.seconds,
            "pushed": self.pushed,
            "applied": self.applied,
            "dropped": self.dropped,
            "given_up": self.given_up,
            "in_flight": self.in_flight,
            "updates": self.updates,
            "gradients_per_s": self.throughput,
            "updates_per_s": self.updates / self.seconds if self.seconds else 0.0,
            "oracle_share": self.throughput / oracle if oracle else None,
            "waiting_share": self.waiting_share,
            "waiting_s_per_iteration": (
                self.waiting_s / (self.pushed * self.wave) if self.pushed else 0.0
            ),
            "lost_s": self.lost_s,
            "lost_share": self.lost_s / self.member_s if self.member_s else 0.0,
            "deaths": self.deaths,
            "joins": self.joins,
            "lost_iterations": self.lost_iterations,
            "staleness": {
                "mean": stale.mean,
                "p50": stale.quantile(0.5),
                "p90": stale.quantile(0.9),
                "p99": stale.quantile(0.99),
                "max": stale.max,
                "histogram": [
                    {"from": low, "to": high, "gradients": times}
                    for low, high, times in stale.rows()
                ],
            },
            "curve": self.curve,
            "wall_s": self.wall_s,
        }
