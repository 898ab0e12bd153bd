"""What a member of a group says of the round that it has in hand, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gadei_ps.agents.plan import MOST_MEMBERS

MOST_SAID = 1 << 14
"""Bytes that a member may say of its values."""
_FIELDS = struct.Struct("<QQ")
_LENGTH = struct.Struct("<I")
MOST_BYTES = _FIELDS.size + MOST_MEMBERS * (_LENGTH.size + MOST_SAID)


@dataclass(frozen=True, slots=True)
class RoundState:
    """The generation that began the round, in how many parts, and those that are here.

    said: what each member of that generation has said of its values, in their order.
    """

    round: int
    generation: int
    parts: int
    whole: int
    said: Sequence[bytes] = ()

    def pack(self) -> bytes:
        """All but the round and `whole`, which stand in the frame's header."""
        said = b"".join(_LENGTH.pack(len(one)) + one for one in self.said)
        return _FIELDS.pack(self.generation, self.parts) + said


def unpack(round_number: int, whole: int, payload: bytes) -> RoundState | None:
    """The state that a frame tells; None: it is none."""
    if len(payload) < _FIELDS.size:
        return None
    generation, parts = _FIELDS.unpack_from(payload)
    said, rest = [], payload[_FIELDS.size :]
    while rest:
        if len(rest) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(rest)
        one, rest = rest[_LENGTH.size :][:length], rest[_LENGTH.size + length :]
        if len(one) != length or length > MOST_SAID:
            return None
        said.append(one)
    if parts > MOST_MEMBERS or len(said) > MOST_MEMBERS or whole >= 1 << parts:
        return None
    return RoundState(round_number, generation, parts, whole, said)
