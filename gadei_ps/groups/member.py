"""A member of a group."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """One incarnation of a replica in its group: a random number, drawn each time that it joins."""

    replica: str
    incarnation: int
