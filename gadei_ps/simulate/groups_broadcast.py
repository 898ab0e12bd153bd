"""Broadcasts between groups in virtual time: what is under way, what waits, what is lost.

A group sends its newest model to one neighbour after the other. What has not begun when a newer
model comes is given up; what has begun is finished. A receiver keeps the newest whole model: of all
its neighbours, or of each of them, as its rule takes them. All that concerns many neighbours is
done in NumPy, because each group may have hundreds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gadei_ps.groups.parts import Floats
from gadei_ps.simulate.draws import FloatArray, IntArray

NOTHING = np.inf


class Taken(NamedTuple):
    """A model that a group takes at the end of a round. weights: None without training."""

    source: int
    made: float
    """Time at which the sender had it."""
    round: int
    """The sender's round that it comes of, from 1."""
    weights: Floats | None


class _Models:
    """One model, or none, for each link. `at` is the time of its arrival, NOTHING if none."""

    def __init__(self, links: int) -> None:
        self.at = np.full(links, NOTHING)
        self.made = np.zeros(links)
        self.round = np.zeros(links, np.int64)
        self.weights: list[Floats | None] = [None] * links

    def move(self, links: IntArray, to: _Models) -> None:
        """Move what is on these links."""
        to.at[links], to.made[links] = self.at[links], self.made[links]
        to.round[links] = self.round[links]
        self.at[links] = NOTHING
        for link in links.tolist():
            to.weights[link], self.weights[link] = self.weights[link], None


class Broadcasts:
    """All models between groups. A link is a pair of a group and one of its neighbours."""

    def __init__(self, neighbours: Sequence[Sequence[int]], *, takes_all: bool) -> None:
        """takes_all: as the rule's."""
        self.lost_in_buffers = 0
        self.given_up = 0
        self.arrived = 0
        self._takes_all = takes_all
        counts = [len(one) for one in neighbours]
        ends = np.cumsum([0, *counts])
        self._out = [np.arange(*pair) for pair in itertools.pairwise(ends)]
        self._source = np.repeat(np.arange(len(neighbours)), counts)
        target = np.array([one for ones in neighbours for one in ones], np.int64)
        order = np.argsort(target, kind="stable")
        bounds = np.searchsorted(target[order], np.arange(len(neighbours) + 1))
        self._in = [order[low:high] for low, high in itertools.pairwise(bounds)]
        links = len(target)
        self._begins = np.zeros(links)
        # A link has at most one model that has begun before the newest was sent, and the newest.
        self._older, self._newest = _Models(links), _Models(links)
        self._buffered = _Models(links)

    def send(
        self, group: int, now: float, round_: int, seconds: FloatArray, weights: Floats | None
    ) -> None:
        """A group sends its model to its neighbours.

        seconds: how long each neighbour's transfer takes, in the order of the neighbours.
        """
        out = self._out[group]
        if not len(out):
            return
        self._deliver(out, now)
        waiting = out[self._newest.at[out] != NOTHING]
        if len(waiting):
            begun = self._begins[waiting] < now
            self.given_up += int((~begun).sum())
            for link in waiting[~begun].tolist():
                self._newest.weights[link] = None
            self._newest.move(waiting[begun], self._older)
            self._newest.at[waiting] = NOTHING
        older = self._older.at[out]
        under_way = older[older != NOTHING]
        free = float(under_way.max()) if len(under_way) else now
        ends = free + np.cumsum(seconds)
        self._begins[out] = ends - seconds
        self._newest.at[out], self._newest.made[out] = ends, now
        self._newest.round[out] = round_
        if weights is not None:
            for link in out.tolist():
                self._newest.weights[link] = weights

    def take(self, group: int, now: float) -> list[Taken]:
        """Take the models from a group's buffers at the end of its round, the newest last."""
        links = self._in[group]
        if not len(links):
            return []
        self._deliver(links, now)
        full = links[self._buffered.at[links] != NOTHING]
        if not len(full):
            return []
        full = full[np.argsort(self._buffered.at[full], kind="stable")]
        if not self._takes_all:
            self.lost_in_buffers += len(full) - 1
        taken = [
            Taken(
                int(self._source[link]),
                float(self._buffered.made[link]),
                int(self._buffered.round[link]),
                self._buffered.weights[link],
            )
            for link in (full if self._takes_all else full[-1:]).tolist()
        ]
        for link in full.tolist():
            self._buffered.weights[link] = None
        self._buffered.at[full] = NOTHING
        return taken

    @property
    def waiting(self) -> int:
        """Number of models that lie in buffers or are under way."""
        kinds = (self._older, self._newest, self._buffered)
        return sum(int((one.at != NOTHING).sum()) for one in kinds)

    def _deliver(self, links: IntArray, now: float) -> None:
        """Move what has arrived by now to the buffers."""
        for models in (self._older, self._newest):
            arrived = links[models.at[links] <= now]
            if len(arrived):
                self.arrived += len(arrived)
                self.lost_in_buffers += int((self._buffered.at[arrived] != NOTHING).sum())
                models.move(arrived, self._buffered)
