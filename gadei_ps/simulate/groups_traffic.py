"""Bytes that each replica of a group has to send in a round."""

from __future__ import annotations

from gadei_ps.groups.compress import Wire, size
from gadei_ps.groups.parts import cut


def aggregation(values: int, members: int, wire: Wire = Wire.FLOAT32) -> list[int]:
    """Return the bytes that each member sends in one aggregation by linear partition, in order.

    A member sends each other member's part of its own model, then the sum of its own part to all
    others: 2 (m - 1) / m models, to within a chunk.
    """
    parts = [size(part.stop - part.start, wire) for part in cut(values, members)]
    total = sum(parts)
    return [total - own + (members - 1) * own for own in parts]


def broadcast(
    values: int,
    members: int,
    receivers: int,
    wire: Wire = Wire.FLOAT32,
    *,
    whole: bool,
) -> list[int]:
    """Return the bytes that each member sends to a neighbouring group of `receivers` members.

    whole: each member of the other group gets a whole model, from its counterpart in this group, as
    the paper counts. Otherwise each member sends the part that it has summed, once: a rule works
    value by value, so a group applies it to parts before it puts them together.
    """
    if whole:
        model = size(values, wire)
        return [model * len(range(place, receivers, members)) for place in range(members)]
    return [size(part.stop - part.start, wire) for part in cut(values, members)]
