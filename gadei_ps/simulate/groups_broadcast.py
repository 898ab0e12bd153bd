"""Broadcasts between groups in virtual time: what is under way, what waits, what is lost.

A group sends its newest model to one neighbour after the other. What has not begun when a newer
model comes is given up; what has begun is finished. A receiver keeps the newest whole model: of all
its neighbours, or of each of them, as its rule takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gadei_ps.groups.parts import Floats


@dataclass(frozen=True)
class Sent:
    """A model on its way, or in the buffer of its receiver. weights: None without training."""

    source: int
    made: float
    """Time at which the sender had it."""
    round: int
    """The sender's round that it comes of, from 1."""
    weights: Floats | None
    at: float
    """Time of its arrival."""


@dataclass
class _Link:
    """A group and one of its neighbours. At most one model has begun before the newest was sent."""

    begins: float = 0.0
    """Time at which the transfer of the newest model begins."""
    older: Sent | None = None
    newest: Sent | None = None
    buffered: Sent | None = None


class Broadcasts:
    """All models between groups."""

    def __init__(self, neighbours: Sequence[Sequence[int]], *, takes_all: bool) -> None:
        """takes_all: as the rule's."""
        self.lost_in_buffers = 0
        self.given_up = 0
        self._takes_all = takes_all
        self._out: list[list[_Link]] = [[_Link() for _ in targets] for targets in neighbours]
        self._in: list[list[_Link]] = [[] for _ in neighbours]
        for links, targets in zip(self._out, neighbours, strict=True):
            for link, target in zip(links, targets, strict=True):
                self._in[target].append(link)

    def send(
        self, group: int, now: float, round_: int, seconds: Sequence[float], weights: Floats | None
    ) -> None:
        """A group sends its model to its neighbours.

        seconds: how long each neighbour's transfer takes, in the order of the neighbours.
        """
        links = self._out[group]
        self._deliver(links, now)
        for link in links:
            if link.newest is not None and link.begins < now:
                link.older = link.newest
            else:
                self.given_up += link.newest is not None
        free = max([now, *(link.older.at for link in links if link.older is not None)])
        for link, took in zip(links, seconds, strict=True):
            link.begins, free = free, free + took
            link.newest = Sent(group, now, round_, weights, free)

    def take(self, group: int, now: float) -> list[Sent]:
        """Take the models from a group's buffers at the end of its round, the newest last."""
        links = self._in[group]
        self._deliver(links, now)
        full = [link.buffered for link in links if link.buffered is not None]
        full.sort(key=lambda one: one.at)
        for link in links:
            link.buffered = None
        if full and not self._takes_all:
            self.lost_in_buffers += len(full) - 1
            return full[-1:]
        return full

    @property
    def waiting(self) -> int:
        """Number of models that lie in buffers or are under way."""
        links = [link for links in self._out for link in links]
        models = [one for link in links for one in (link.older, link.newest, link.buffered)]
        return sum(one is not None for one in models)

    def _deliver(self, links: Iterable[_Link], now: float) -> None:
        """Move what has arrived by now to the buffers."""
        for link in links:
            if link.older is not None and link.older.at <= now:
                self._arrive(link, link.older)
                link.older = None
            if link.newest is not None and link.newest.at <= now:
                self._arrive(link, link.newest)
                link.newest = None

    def _arrive(self, link: _Link, one: Sent) -> None:
        self.lost_in_buffers += link.buffered is not None
        link.buffered = one
