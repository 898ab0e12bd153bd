"""Worker groups in virtual time, by the rules that replicas use.

Every replica of a group trains k mini-batches. When the last one has ended, the group aggregates by
linear partition: all send at once, each as fast as its link, and the slowest ends the step. Then it
takes what has arrived from its neighbours, broadcasts, and begins the next round at once.
Broadcasts do not slow down training, aggregation or what arrives.
"""

from __future__ import annotations

import heapq
import time
from functools import cache

import numpy as np

from gadei_ps.groups import reading
from gadei_ps.simulate import groups_traffic as traffic
from gadei_ps.simulate.draws import FloatArray, IntArray
from gadei_ps.simulate.groups_broadcast import Broadcasts
from gadei_ps.simulate.groups_outcome import GroupOutcome
from gadei_ps.simulate.groups_setting import GroupSetting
from gadei_ps.simulate.groups_training import GroupTraining, NotFinite

DRAWN = 200_000
"""Run times that are drawn at a time for a group, so that memory stays bounded."""
POINTS = 50
"""The most points of a curve."""


class _Group:
    """One group: what its exchanges cost, and its current round.

    aggregated, broadcast: bytes that each replica sends in an aggregation, and to each neighbour.
    speeds: the bytes a second that each sends.
    """

    def __init__(
        self,
        replicas: IntArray,
        aggregated: FloatArray,
        broadcast: list[FloatArray],
        speeds: FloatArray,
        latency_s: float,
    ) -> None:
        self.replicas = replicas
        self.rounds = 0
        self.seconds = np.empty(0)  # of each replica in the current round
        self.aggregation_s = 0.0  # in two steps
        if len(replicas) > 1:
            self.aggregation_s = 2 * latency_s + float((aggregated / speeds).max())
        self.transfers_s = [latency_s + float((one / speeds).max()) for one in broadcast]
        self.aggregated = float(aggregated.sum())
        self.broadcast = float(sum(one.sum() for one in broadcast))


class GroupSimulator:
    """Simulates one rule."""

    def __init__(
        self, rule: str, setting: GroupSetting, training: GroupTraining | None = None
    ) -> None:
        self._setting = setting
        self._training = training
        parsed = reading.parse(rule)
        self._broadcasts = Broadcasts(setting.neighbours, takes_all=parsed.takes_all)
        self._outcome = GroupOutcome(str(parsed), setting)
        values, wire, sizes = setting.values, setting.wire, setting.sizes
        aggregated = cache(lambda size: np.array(traffic.aggregation(values, size, wire), float))
        broadcast = cache(
            lambda size, to: np.array(
                traffic.broadcast(values, size, to, wire, whole=setting.whole), float
            )
        )
        every = np.arange(setting.machines)
        speeds = np.resize(np.array(setting.links.bandwidths), setting.machines)
        ends = np.cumsum(sizes)
        self._groups = [
            _Group(
                every[end - size : end],
                aggregated(size),
                [broadcast(size, sizes[one]) for one in neighbours],
                speeds[end - size : end],
                setting.links.latency_s,
            )
            for size, end, neighbours in zip(sizes, ends, setting.neighbours, strict=True)
        ]
        self._events: list[tuple[float, int]] = []

    def run(self) -> GroupOutcome:
        """Run to the end of the setting's rounds."""
        began = time.perf_counter()
        found = self._outcome
        with np.errstate(over="ignore", invalid="ignore"):  # NotFinite reports it
            try:
                self._run()
            except NotFinite:
                found.ended = "the weights are not finite any more; lower --lr or the rule's rate"
            found.end(self._broadcasts)
            if self._training:
                found.training = self._training.outcome()
                found.curve = self._training.curve
                found.samples = self._training.samples
        found.wall_s = time.perf_counter() - began
        return found

    def _run(self) -> None:
        wanted = self._setting.rounds * len(self._groups)
        for number in range(len(self._groups)):
            self._begin(number, 0.0)
        for done in range(1, wanted + 1):
            now, number = heapq.heappop(self._events)
            self._outcome.seconds = now
            self._end(number, now)
            self._outcome.rounds = done
            if self._training and done * POINTS // wanted != (done - 1) * POINTS // wanted:
                self._training.look(now)
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        """Draw the run times of the round that begins now, which give its end."""
        group = self._groups[number]
        group.seconds = self._seconds(group)
        end = now + float(group.seconds.max()) + group.aggregation_s
        heapq.heappush(self._events, (end, number))

    def _end(self, number: int, now: float) -> None:
        """A round has ended: exchange with other groups."""
        group = self._groups[number]
        group.rounds += 1
        self._outcome.trained(group.seconds, group.aggregation_s)
        taken = self._broadcasts.take(number, now)
        self._outcome.take(taken, now, [self._groups[one.source].rounds for one in taken])
        weights = None
        if self._training:
            aggregate = self._training.round(number, self._setting.k)
            arrived = [one.weights for one in taken if one.weights is not None]
            weights = self._training.end_round(number, aggregate, arrived)
        self._outcome.exchanged(group.aggregated, group.broadcast, len(group.replicas))
        self._broadcasts.send(number, now, group.rounds, group.transfers_s, weights)

    def _seconds(self, group: _Group) -> FloatArray:
        """Return each replica's time (s) for the k mini-batches of the group's next round."""
        k, ids = self._setting.k, group.replicas
        found = np.zeros(len(ids))
        step = max(1, DRAWN // len(ids))
        for at in range(0, k, step):
            numbers = group.rounds * k + np.arange(at, min(k, at + step))
            found += self._setting.times.draw(ids[:, None], numbers[None, :]).sum(axis=1)
        return found
