"""Which members of a view are heard and which are silent, and what a machine that waits tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gadei_ps.groups.agreement import Agreement
from gadei_ps.groups.membership import Member


class Hearing:
    """When each member was heard last. For the driver's thread."""

    def __init__(self, silence_s: float) -> None:
        """silence_s: after which a member counts as silent."""
        self._silence_s = silence_s
        self._heard: dict[Member, float] = {}
        self._silent: set[Member] = set()

    def begin(self, members: Iterable[Member], until: float) -> None:
        """These may take until then to be heard first."""
        self._heard = dict.fromkeys(members, until) | self._heard

    def hear(self, member: Member) -> bool:
        """Something has come from it. Returns whether it was silent."""
        self._heard[member] = time.monotonic()
        was_silent = member in self._silent
        self._silent.discard(member)
        return was_silent

    def keep(self, members: Iterable[Member]) -> None:
        """Of a new view: they have been heard of now."""
        now = time.monotonic()
        self._heard = {one: self._heard.get(one, now) for one in members}
        self._silent &= self._heard.keys()

    def silent(self, others: Iterable[Member], now: float, stood_still_s: float) -> list[Member]:
        """Those of the others that have become silent. stood_still_s: this process itself."""
        found = []
        for one in others:
            heard = self._heard.setdefault(one, now) + max(0.0, stood_still_s)
            self._heard[one] = heard
            if now - heard > self._silence_s and one not in self._silent:
                self._silent.add(one)
                found.append(one)
        return found


@dataclass(frozen=True)
class Standing:
    """Where a machine is in its group. view: its generation; None: it is no member yet.

    waits: machines without which the group decides nothing, for longer than a silence; dead ones
    only where none is left that may live. stands: these are dead, and fewer than half are left.
    hears: other members of its view that are not silent. doubts: those that are, and may live.
    refused: why one of `waits` that lives is not heard; nothing if that is not known.
    """

    view: int | None = None
    waits: tuple[int, ...] = ()
    stands: bool = False
    hears: tuple[int, ...] = ()
    doubts: tuple[int, ...] = ()
    refused: str = ""


class Lookout:
    """Tells the standing of a machine when it changes."""

    def __init__(self, silence_s: float, told: Callable[[Standing], None]) -> None:
        self._silence_s, self._told = silence_s, told
        self._last = Standing()
        self._since: float | None = None

    def look(self, agreement: Agreement, refusals: Mapping[int, str]) -> None:
        """Something may have changed. refusals: of the post."""
        missing, now = agreement.missing, time.monotonic()
        self._since = (self._since or now) if missing else None
        waits = self._since is not None and now - self._since > self._silence_s
        which = _numbers(missing) if waits else ()
        found = Standing(
            agreement.view.generation if agreement.view is not None else None,
            which,
            waits and agreement.stands,
            _numbers(agreement.hears),
            _numbers(agreement.doubts),
            next((why for one in which if (why := refusals.get(one))), ""),
        )
        if found != self._last:
            self._last = found
            self._told(found)


def _numbers(members: Iterable[Member]) -> tuple[int, ...]:
    return tuple(int(one.machine) for one in members)
