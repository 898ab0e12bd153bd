"""The outcome of a simulated run of worker groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gadei_ps.groups.compress import Wire, size
from gadei_ps.simulate.draws import FloatArray
from gadei_ps.simulate.groups_broadcast import Broadcasts, Sent
from gadei_ps.simulate.groups_setting import GroupSetting
from gadei_ps.simulate.histogram import Histogram


class GroupOutcome:
    """Counts and times of one rule's run."""

    def __init__(self, rule: str, setting: GroupSetting) -> None:
        self.rule = rule
        self.ended = "done"
        self.seconds = 0.0
        """Virtual time from the start to the end."""
        self.rounds = 0
        self.samples = 0
        """Samples whose gradients are in an aggregate."""
        self.training_s = 0.0
        self.waiting_s = 0.0
        """Time for which replicas waited for others of their group."""
        self.exchange_s = 0.0
        """Time for which replicas aggregated."""
        self.staleness = Histogram()
        """Staleness of taken models: rounds that the sender has ended since it sent them."""
        self.training: dict[str, float] | None = None
        self.curve: list[dict[str, float]] = []
        self.wall_s = 0.0
        self._setting = setting
        self._iterations = 0
        self._machine_rounds = 0
        self._aggregated = 0.0
        self._broadcast = 0.0
        self._paper = 0.0
        self._age_s = 0.0
        self._lost: dict[str, int] = {}

    def trained(self, seconds: FloatArray, aggregation_s: float) -> None:
        """Count a round. seconds: training of each replica."""
        self.training_s += float(seconds.sum())
        self.waiting_s += float((seconds.max() - seconds).sum())
        self.exchange_s += aggregation_s * len(seconds)
        self._iterations += self._setting.k * len(seconds)
        self.samples += self._setting.k * self._setting.batch * len(seconds)

    def exchanged(self, aggregated: float, broadcast: float, members: int) -> None:
        """Count the bytes that all members together have sent in a round."""
        self._machine_rounds += members
        self._aggregated += aggregated
        self._broadcast += broadcast
        self._paper += 2 * (members - 1)

    def take(self, taken: Sequence[Sent], now: float, rounds: Sequence[int]) -> None:
        """Count the models that a group has taken. rounds: those that the senders have ended."""
        for one, ended in zip(taken, rounds, strict=True):
            self.staleness.add(ended - one.round)
            self._age_s += now - one.made

    def end(self, broadcasts: Broadcasts) -> None:
        """Count what became of the broadcasts."""
        self._lost = {
            "taken": self.staleness.count,
            "lost_in_buffers": broadcasts.lost_in_buffers,
            "given_up": broadcasts.given_up,
            "waiting": broadcasts.waiting,
        }

    @property
    def samples_per_s(self) -> float:
        """Throughput of all replicas together (samples/s)."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def speed_up(self) -> float:
        """Speed-up over one replica of mean speed that exchanges nothing."""
        if not self.training_s:
            return 0.0
        alone = self._iterations * self._setting.batch / self.training_s
        return self.samples_per_s / alone

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values. Bytes are the mean per replica and round; models are float32."""
        rounds = self._machine_rounds or 1
        model = size(self._setting.values, Wire.FLOAT32)
        paid = self.training_s + self.waiting_s + self.exchange_s
        stale = self.staleness
        found = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        for name in ("training_s", "waiting_s", "exchange_s"):
            del found[name]
        return found | {
            "samples_per_s": self.samples_per_s,
            "speed_up": self.speed_up,
            "speed_up_share": self.speed_up / self._setting.machines,
            "waiting_share": self.waiting_s / paid if paid else 0.0,
            "exchange_share": self.exchange_s / paid if paid else 0.0,
            "aggregation_bytes": self._aggregated / rounds,
            "aggregation_models": self._aggregated / rounds / model,
            "aggregation_models_paper": self._paper / rounds,
            "broadcast_bytes": self._broadcast / rounds,
            "broadcast_models": self._broadcast / rounds / model,
            "broadcast": self._lost,
            "staleness": stale.summary()
            | {"mean_s": self._age_s / stale.count if stale.count else 0.0},
        }
