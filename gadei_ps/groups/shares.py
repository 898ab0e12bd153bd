"""The batch ledger of a group: which batches each replica owns, and which are answered.

The coordinator keeps it as a part of the group's state. With each commit it learns of each replica
whose copy is in the aggregate which of its batches are not in that copy. All others of its batches
are answered. A replica that owned batches and is not in the round has died or left: the batches
that it had not answered in its last round are divided among the replicas of this round. What it
has trained since is in nobody's weights. So each batch is in the group's weights once a pass.

A pass is divided when a replica is about to run out of batches, among the replicas of that round.
At most two passes are open. Of several groups each has an equal part of every pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gadei_ps.groups.ranges import Ranges

MOST_OPEN = 2
AHEAD = 2
"""A pass is divided when what a replica has left of the one before may last for so many rounds."""


class Member(NamedTuple):
    """One incarnation of a replica in its group: a random number, drawn each time that it joins."""

    replica: str
    incarnation: int


class Span(NamedTuple):
    """Batches of a pass, to the one before `end`."""

    epoch: int
    begin: int
    end: int


@dataclass(frozen=True)
class Work:
    """Batches that all jobs of a group hand out together; the seed orders the samples."""

    batches: int
    epochs: int
    seed: int

    def __str__(self) -> str:
        return f"{self.batches} batches, {self.epochs} epochs, seed {self.seed}"


@dataclass(frozen=True)
class CopyReport:
    """A replica's description of its copy.

    work: of its job. unanswered: batches that it was given and that are not in the copy. done:
    passes that the group had answered, as its job knows it. counts: whether the copy is in the
    aggregate; a copy whose weights are not finite is not.
    """

    work: Work
    unanswered: tuple[Span, ...]
    done: int = 0
    counts: bool = True


class Shares:
    """Batches that each replica owns and has not answered; immutable for its users."""

    def __init__(self, group: int = 0, groups: int = 1) -> None:
        """Begin without work. group: number of this group, of those that divide each pass."""
        if not 0 <= group < groups:
            raise ValueError(f"group {group} is not one of {groups}")
        self.group, self.groups = group, groups
        self.work: Work | None = None
        self.done = 0
        """Passes of which the group has answered its part."""
        self._open: dict[int, dict[Member, Ranges]] = {}
        """Batches of each pass that are not answered, by owner, from the group's part on."""

    def of(self, member: Member) -> list[Span]:
        """Return the batches that this replica owns and has not answered, the oldest pass first."""
        begin = self._bounds[0]
        return [
            Span(epoch, begin + low, begin + high)
            for epoch, owned in sorted(self._open.items())
            for low, high in owned.get(member, ())
        ]

    def after(self, reports: Mapping[Member, CopyReport]) -> Shares:
        """Return the shares after a round.

        reports: descriptions of the copies that are in it, in the members' order.

        The first round takes the weights of the first replica, and begins the pass after those that
        are in them. A replica whose job has other work gets nothing. One whose copy does not count
        has lost what it had trained, as if it had died.
        """
        made = copy.deepcopy(self)
        made._account(reports)
        return made

    def _account(self, reports: Mapping[Member, CopyReport]) -> None:
        begins = self.work is None
        if begins and reports:
            first = next(iter(reports.values()))
            self.work, self.done = first.work, first.done
        answered = {
            member: self._answer(member, one.unanswered)
            for member, one in reports.items()
            if (one.counts or begins) and one.work == self.work
        }
        if not answered:
            return
        heirs = list(answered)
        for owned in self._open.values():
            for owner in [one for one in owned if one not in answered]:
                _divide(owned.pop(owner), heirs, owned)
        while self._open and not any(self._open[self.done].values()):
            del self._open[self.done]
            self.done += 1
        self._begin_pass(answered)

    def facts(self) -> dict[str, Any]:
        """Return facts on the passes, for JSON."""
        return {
            "part": [self.group, self.groups],
            "work": None if self.work is None else asdict(self.work),
            "done": self.done,
            "left": {epoch: sum(map(len, owned.values())) for epoch, owned in self._open.items()},
        }

    @property
    def _bounds(self) -> tuple[int, int]:
        """Bounds of the group's part of a pass."""
        batches = 0 if self.work is None else self.work.batches
        return batches * self.group // self.groups, batches * (self.group + 1) // self.groups

    def _answer(self, member: Member, unanswered: Sequence[Span]) -> int:
        """Record the batches that a replica has answered; return their number."""
        begin, count = self._bounds[0], 0
        for epoch, owned in self._open.items():
            answered = Ranges(owned.get(member, ()))
            for span in unanswered:
                if span.epoch == epoch:
                    answered.remove(max(0, span.begin - begin), span.end - begin)
            for low, high in answered:
                owned[member].remove(low, high)
            count += len(answered)
        return count

    def _begin_pass(self, answered: dict[Member, int]) -> None:
        """Divide the next pass if a replica is about to have no batches."""
        assert self.work is not None
        following = self.done + len(self._open)
        if following >= self.work.epochs or len(self._open) == MOST_OPEN:
            return
        last = self._open.get(following - 1)
        if last is None or any(
            len(last.get(one, ())) <= AHEAD * count for one, count in answered.items()
        ):
            begin, end = self._bounds
            self._open[following] = {}
            _divide(Ranges([(0, end - begin)]), list(answered), self._open[following])


def _divide(batches: Ranges, heirs: Sequence[Member], owned: dict[Member, Ranges]) -> None:
    """Give the batches to the heirs, in pieces that differ by at most one."""
    whole, more = divmod(len(batches), len(heirs))
    for place, heir in enumerate(heirs):
        ours = owned.setdefault(heir, Ranges())
        for begin, end in batches.take(whole + (place < more)):
            ours.add(begin, end)


def without(spans: Iterable[Span], known: Iterable[Span]) -> list[Span]:
    """Return the batches that are not among `known`, the oldest pass first."""
    left: dict[int, Ranges] = {}
    for epoch, begin, end in spans:
        left.setdefault(epoch, Ranges()).add(begin, end)
    for epoch, begin, end in known:
        if epoch in left:
            left[epoch].remove(begin, end)
    return [
        Span(epoch, begin, end) for epoch, ranges in sorted(left.items()) for begin, end in ranges
    ]
