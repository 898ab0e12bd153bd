"""A member of a group."""

from __future__ import annotations

from typing import NamedTuple

CLIENT = "replica"
"""Name of a replica as a client of its job."""


class Member(NamedTuple):
    """One incarnation of a replica in its group; greater each time that the replica joins."""

    replica: str
    incarnation: int
