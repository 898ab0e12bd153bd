"""What a machine says of its copy, as bytes: which of its batches are not in it."""

from __future__ import annotations

import zlib

from pydantic import TypeAdapter, ValidationError

from gadei_ps.agents.round_state import MOST_SAID
from gadei_ps.errors import UsageError
from gadei_ps.groups.shares import Said

_MOST_TEXT = 1 << 20
_SAID: TypeAdapter[Said] = TypeAdapter(Said)


def encode(said: Said) -> bytes:
    """Raises UsageError where it is too long."""
    data = zlib.compress(_SAID.dump_json(said))
    if len(data) > MOST_SAID:
        raise UsageError(
            f"{len(said.unanswered)} ranges of batches are unanswered, too many to tell: use fewer "
            "learners, or a smaller `ahead`"
        )
    return data


def decode(data: bytes) -> Said | None:
    """None if the bytes are none."""
    try:
        text = zlib.decompressobj().decompress(data, _MOST_TEXT)
        return _SAID.validate_json(text)
    except (zlib.error, ValidationError):
        return None
