"""Result of a check of `gadei-ps doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Found = tuple["Level", str, str]
"""Level, finding, and what to do about it (empty: nothing)."""


class Level(StrEnum):
    """Severity of a check's result. A job cannot run if there is an error."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """One thing looked at; `remedy` is empty where there is nothing to do."""

    name: str
    level: Level
    finding: str
    remedy: str = ""
