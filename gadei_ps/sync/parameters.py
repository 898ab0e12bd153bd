"""Parameters of synchronization models, and how their values are read from text or a mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SpecError(ValueError):
    """A description of a synchronization model that cannot be read; its message is one line."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model.

    `convert` returns the value, or raises ValueError with a text such as 'must be ...'. If a
    parameter is not `required` and not given, the constructor's default holds.
    """

    convert: Callable[[object], Any]
    required: bool = True


def converted(
    parameters: Mapping[str, Parameter],
    given: Mapping[str, object],
    error: Callable[[str], SpecError],
) -> dict[str, Any]:
    """The values of the parameters that are given, by name.

    error: makes what is raised for one that cannot be converted, is missing, or does not exist.
    """
    for key in given:
        if key not in parameters:
            raise error(f"unknown parameter {short_repr(key)}")
    values: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key in given:
            try:
                values[key] = parameter.convert(given[key])
            except ValueError as wrong:
                raise error(f"{key} {wrong}") from None
        elif parameter.required:
            raise error(f"{key} is missing")
    return values


def split(
    items: Sequence[str],
    keys: Sequence[str],
    error: Callable[[str], SpecError],
    positional: int = 1,
) -> dict[str, object]:
    """The values in items like `key=value`, not yet converted.

    keys: of all parameters, in their order. positional: so many values may stand without theirs at
    the beginning.
    """
    given: dict[str, object] = {}
    for place, item in enumerate(items):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if not key or place != len(given) or place >= min(positional, len(keys)):
                raise error(f"cannot read {short_repr(item)}")
            key, value = keys[place], key
        if key in given:
            raise error(f"{key} is given twice")
        given[key] = value
    return given


def short_repr(value: object) -> str:
    """`value` on one line, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def whole_number(low: int, high: int) -> Callable[[object], int]:
    """A converter for whole numbers in [low, high], 0 <= low: an int, or its decimal digits."""

    def convert(value: object) -> int:
        number = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and value.isascii() and value.isdigit():
            # The length is checked first: int() of a very long text is slow.
            number = int(value) if len(value.lstrip("0")) <= len(str(high)) else None
        if number is None or not low <= number <= high:
            raise ValueError(
                f"must be a whole number from {low} to {high}, not {short_repr(value)}"
            )
        return number

    return convert


def choice(*words: str) -> Callable[[object], str]:
    """A converter that accepts one of `words`."""

    def convert(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be {' or '.join(words)}, not {short_repr(value)}")
        return value

    return convert


def path(value: object) -> str:
    """A converter for the path of a file. Makes it absolute, because a server may run elsewhere."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be the path of a file, not {short_repr(value)}")
    absolute = str(Path(value).expanduser().absolute())
    if "," in absolute or not absolute.isprintable():
        raise ValueError(
            f"cannot be a path with a comma or control characters: {short_repr(value)}"
        )
    return absolute
