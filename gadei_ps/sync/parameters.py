"""What a synchronization model may be given, and how a value is read from text or a mapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class SpecError(ValueError):
    """A description of a synchronization model that cannot be read; its message is one line."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model.

    `convert` returns its value or raises ValueError with a text such as 'must be ...'. One that
    is not `required` and not given is left to the constructor's default.
    """

    convert: Callable[[object], Any]
    required: bool = True


def shown(value: object) -> str:
    """`value` on one line, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def whole(low: int, high: int) -> Callable[[object], int]:
    """A converter for whole numbers in [low, high], 0 <= low: an int, or its decimal digits."""

    def convert(value: object) -> int:
        number = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and value.isascii() and value.isdigit():
            # The length is looked at first: int() of a very long text is slow.
            number = int(value) if len(value.lstrip("0")) <= len(str(high)) else None
        if number is None or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}, not {shown(value)}")
        return number

    return convert
