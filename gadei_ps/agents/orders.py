"""What an agent is told while it lives: lines of JSON on its standard input.

`{"group": 1, "agents": {"4": "10.0.0.4:4100"}}`: where agents of a group can be reached now.
`{"go_on": 7}`: see Agreement.go_on. `{"give_up": 4}`: see Agreement.give_up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gadei_ps.agents import addresses
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.events import GiveUp, GoOn
from gadei_ps.agents.letters import Book, Entry
from gadei_ps.errors import UsageError

Number = Annotated[int, Field(ge=0, lt=2**31)]


def _parsed(text: object) -> Address:
    return addresses.parse(str(text))


class Reached(BaseModel):
    """Agents of a group, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    group: Number
    agents: dict[Number, Annotated[Address, BeforeValidator(_parsed)]]

    @property
    def book(self) -> Book:
        """The same, as letters have it."""
        return {number: Entry(0, *address) for number, address in self.agents.items()}


class _GoOn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    go_on: Annotated[int, Field(ge=0)]


class _GiveUp(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    give_up: Number


_ORDER: TypeAdapter[Reached | _GoOn | _GiveUp] = TypeAdapter(Reached | _GoOn | _GiveUp)


def lines(descriptor: int) -> Iterator[str]:
    """What comes, line by line, to its end.

    A thread that waits here keeps no lock that the end of the process would need.
    """
    rest = b""
    while data := os.read(descriptor, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        yield from (one.decode(errors="replace") for one in whole)
    if rest:
        yield rest.decode(errors="replace")


def read(line: str) -> Reached | GoOn | GiveUp:
    """An order. Raises UsageError in one line."""
    try:
        found = _ORDER.validate_json(line)
    except ValidationError:
        raise UsageError(f"agent: no order: {line[:80]!r}") from None
    if isinstance(found, Reached):
        return found
    return GoOn(found.go_on) if isinstance(found, _GoOn) else GiveUp(found.give_up)
