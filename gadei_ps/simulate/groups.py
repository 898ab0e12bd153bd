"""Worker groups in virtual time, by the rules that replicas use.

Every replica of a group trains k mini-batches. When the last one has ended, the group aggregates by
linear partition: all send at once, each as fast as its link, and the slowest ends the step. Then it
takes what has arrived from its neighbours, broadcasts, and begins the next round at once.
Broadcasts do not slow down training, aggregation or what arrives.

A death is noticed `detect_s` later. The round then ends among those that remain: if the aggregation
had begun, it is made again. What the dead replica has trained since the last round is lost.
"""

from __future__ import annotations

import heapq
import itertools
import time
from functools import cache

import numpy as np

from gadei_ps.groups import reading, traffic
from gadei_ps.groups.member import Member
from gadei_ps.simulate.draws import FloatArray, Stream, uniform
from gadei_ps.simulate.groups_broadcast import Broadcasts
from gadei_ps.simulate.groups_outcome import GroupOutcome
from gadei_ps.simulate.groups_setting import GroupSetting
from gadei_ps.simulate.groups_training import GroupTraining, NotFinite

DRAWN = 200_000
"""Run times that are drawn at a time for a group, so that memory stays bounded."""
POINTS = 50
"""The most points of a curve."""


class _Group:
    """One group: its members, its replicas by their numbers, and its current round."""

    def __init__(self, number: int, members: tuple[Member, ...]) -> None:
        self.number = number
        self.members = members
        first, size = int(members[0].replica), len(members)
        self.numbers = range(first, first + size)
        self.alone = False  # nobody is left
        self.machines = np.array(self.numbers)
        self.rounds = 0
        self.begun = 0  # rounds that were begun; nobody may live at the end of one
        self.dead: list[tuple[float, Member]] = []  # with the time of its return
        self.spent = np.empty(0), np.empty(0), 0.0  # of the current round: see GroupOutcome.trained


class GroupSimulator:
    """Simulates one rule."""

    def __init__(
        self, rule: str, setting: GroupSetting, training: GroupTraining | None = None
    ) -> None:
        self._setting = setting
        self._rule = reading.parse(rule)
        self._training = training
        self._broadcasts = Broadcasts(setting.neighbours, takes_all=self._rule.takes_all)
        self._outcome = GroupOutcome(str(self._rule), setting)
        self._groups = [_Group(*one) for one in enumerate(first_members(setting))]
        speeds = np.array(setting.links.bandwidths)
        self._speeds = speeds[np.arange(setting.machines) % len(speeds)]
        self._die = dict(sorted(setting.deaths.die, reverse=True))
        self._events: list[tuple[float, int]] = []
        self._aggregation = cache(
            lambda members: np.array(traffic.aggregation(setting.values, members, setting.wire))
        )
        self._broadcast = cache(
            lambda members, receivers: np.array(
                traffic.broadcast(
                    setting.values, members, receivers, setting.wire, whole=setting.whole
                )
            )
        )

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
        for group in self._groups:
            self._begin(group, 0.0)
        found, done = self._outcome, 0
        while self._events and done < wanted:
            now, number = heapq.heappop(self._events)
            found.seconds = now
            group = self._groups[number]
            if group.alone:
                self._return(group, now)
                continue
            self._end(group, now)
            done += 1
            found.rounds = done
            if self._training and done * POINTS // wanted != (done - 1) * POINTS // wanted:
                self._training.look(now)
            self._begin(group, now)
        if done < wanted:
            found.ended = "no replica is left"

    # -- a round ----------------------------------------------------------------------------------

    def _begin(self, group: _Group, now: float) -> None:
        """Compute when the round that begins now ends, and for whom."""
        self._join(group, now)
        group.begun += 1
        machines = group.machines
        seconds = self._seconds(group)[machines - group.numbers.start]
        arrivals = now + seconds
        ready = float(arrivals.max())
        exchange = self._exchange(machines)
        dying = self._deaths(group, now, arrivals, ready + exchange)
        end = ready + exchange
        if dying:
            lives = np.array([one not in dying for one in machines.tolist()])
            known = max(dying.values()) + self._setting.deaths.detect_s
            exchange = self._exchange(machines[lives]) if lives.any() else 0.0
            before = max(dying.values()) < ready
            ready = max(float(arrivals[lives].max()) if lives.any() else known, known)
            end = ready + exchange
            self._outcome.redone += not before and bool(lives.any())
            self._bury(group, dying, now)
            arrivals, seconds = arrivals[lives], seconds[lives]
        if group.alone:
            if group.dead:  # it begins again when the first one comes back
                heapq.heappush(self._events, (min(group.dead)[0], group.number))
            return
        group.spent = seconds, ready - arrivals, exchange
        heapq.heappush(self._events, (end, group.number))

    def _end(self, group: _Group, now: float) -> None:
        """A round has ended: exchange with other groups."""
        group.rounds += 1
        self._outcome.trained(*group.spent)
        members = len(group.machines)
        taken = self._broadcasts.take(group.number, now)
        self._outcome.take(taken, now, [self._groups[one.source].rounds for one in taken])
        weights = None
        if self._training:
            aggregate = self._training.round(group.number, group.members, self._setting.k)
            arrived = [one.weights for one in taken if one.weights is not None]
            weights = self._training.end_round(group.number, aggregate, arrived)
        neighbours = self._setting.neighbours[group.number]
        receivers = [len(self._groups[one].machines) for one in neighbours]
        sent = {one: self._broadcast(members, one) for one in set(receivers) if one}
        speeds = self._speeds[group.machines]
        latency = self._setting.links.latency_s
        slowest = {one: latency + float((sent[one] / speeds).max()) for one in sent}
        self._outcome.exchanged(
            self._aggregation(members),
            sum((sent[one] for one in receivers if one), np.zeros(members)),
            members,
        )
        times = [slowest.get(one, 0.0) for one in receivers]
        self._broadcasts.send(group.number, now, group.rounds, times, weights)

    def _exchange(self, machines: np.ndarray) -> float:
        """Return the duration (s) of an aggregation among these replicas, in two steps."""
        if len(machines) < 2:
            return 0.0
        sent = self._aggregation(len(machines)) / self._speeds[machines]
        return 2 * self._setting.links.latency_s + float(sent.max())

    def _seconds(self, group: _Group) -> FloatArray:
        """Return each replica's time (s) for the k mini-batches of the group's next round."""
        k, ids = self._setting.k, np.array(group.numbers)
        found = np.zeros(len(ids))
        step = max(1, DRAWN // len(ids))
        for at in range(0, k, step):
            numbers = group.rounds * k + np.arange(at, min(k, at + step))
            found += self._setting.times.draw(ids[:, None], numbers[None, :]).sum(axis=1)
        return found

    # -- deaths and returns -----------------------------------------------------------------------

    def _deaths(
        self, group: _Group, now: float, arrivals: FloatArray, end: float
    ) -> dict[int, float]:
        """Return the replicas that die in this round, and when."""
        deaths = self._setting.deaths
        dying: dict[int, float] = {}
        if deaths.share:
            numbers = np.full(len(group.machines), group.begun)
            seed = self._setting.seed
            chance = uniform(seed, Stream.DEATH, group.machines, numbers)
            moment = uniform(seed, Stream.MOMENT, group.machines, numbers)
            for place in np.flatnonzero(chance < deaths.share).tolist():
                dying[int(group.machines[place])] = now + float(moment[place]) * (end - now)
        for machine in group.machines.tolist() if self._die else ():
            if self._die.get(machine, end) < end:
                when = max(now, self._die.pop(machine))
                dying[machine] = min(when, dying.get(machine, when))
        return dying

    def _bury(self, group: _Group, dying: dict[int, float], now: float) -> None:
        """The group continues without these replicas, in the next generation."""
        gone = [one for one in group.members if int(one.replica) in dying]
        staying = tuple(one for one in group.members if one not in gone)
        for one in gone:
            when = dying[int(one.replica)]
            self._outcome.died(when - now)
            if self._setting.deaths.return_s is not None:
                group.dead.append((when + self._setting.deaths.return_s, one))
        if staying:
            self._install(group, staying)
        else:
            group.alone = True
            group.machines = group.machines[:0]
        if self._training:
            for one in gone:
                self._training.gone(group.number, one, staying)

    def _join(self, group: _Group, now: float) -> None:
        """Let the replicas whose time has come join the group, between two rounds."""
        if not group.dead:
            return
        back = [one for when, one in group.dead if when <= now]
        if not back:
            return
        group.dead = [(when, one) for when, one in group.dead if when > now]
        newcomers = tuple(Member(one.replica, one.incarnation + 1) for one in back)
        self._outcome.joins += len(newcomers)
        self._install(group, newcomers if group.alone else (*group.members, *newcomers))
        group.alone = False

    def _install(self, group: _Group, members: tuple[Member, ...]) -> None:
        group.members = members
        group.machines = np.array([int(one.replica) for one in members])
        self._outcome.views += 1

    def _return(self, group: _Group, now: float) -> None:
        """The first replicas of a group that had none take up a neighbour's model."""
        self._join(group, now)
        taken = self._broadcasts.take(group.number, now)
        self._outcome.take(taken, now, [self._groups[one.source].rounds for one in taken])
        if self._training:
            newest = taken[-1].weights if taken else None
            self._training.begin_again(group.number, group.members, newest)
        self._begin(group, now)


def first_members(setting: GroupSetting) -> list[tuple[Member, ...]]:
    """The members with which the groups begin. A replica's name is its number."""
    ends = np.cumsum([0, *setting.sizes]).tolist()
    return [
        tuple(Member(str(one), 0) for one in range(low, high))
        for low, high in itertools.pairwise(ends)
    ]
