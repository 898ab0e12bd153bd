"""Whether something that should move still does: pure decisions on what was seen of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Watch:
    """Several things that must each change within limit_s seconds while they are looked at.

    late_s: a look that comes later than this after the last one tells nothing: the observer itself
    did not run, so perhaps nobody did (a suspended machine).
    """

    limit_s: float
    late_s: float = 1.0
    _seen: dict[Hashable, tuple[Hashable, float]] = field(default_factory=dict)
    _looked: float = float("-inf")

    def look(self, now: float, signs: dict[Hashable, Hashable]) -> list[Hashable]:
        """Keys of `signs` whose sign has not changed for too long. Others are forgotten."""
        rested = now - self._looked > self.late_s
        self._looked = now
        seen = {}
        for key, sign in signs.items():
            before = self._seen.get(key)
            same = before is not None and before[0] == sign and not rested
            seen[key] = before if same and before is not None else (sign, now)
        self._seen = seen
        return [key for key, (_, since) in seen.items() if now - since > self.limit_s]
