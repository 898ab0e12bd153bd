"""Types of numbers that users write into files.

`true` is not a number there, though Python would count it as 1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"give a number, not {str(value).lower()}")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
