"""Groups of parameters with settings of their own: which tensor belongs to which.

Groups are numbered from 0 as they are given. The last number, one more, stands for the parameters
that none of them names; these have the optimizer's own settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from gadei_ps.job.optimizer_config import Settings
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Tensor


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Group(Settings):
    """Parameters by their names, and what the optimizer has for them; None: as for the rest."""

    match: Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)]
    """Names, or patterns as in a shell: * stands for any text, ? for one letter."""

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str | None) -> None:
        if value is not None:
            raise ValueError("a job has one kind of optimizer for all groups: leave it out")

    def names(self, tensor: str) -> bool:
        """Return whether a tensor of this name belongs to the group."""
        return self.place(tensor) < len(self.match)

    def place(self, tensor: str) -> int:
        """Number of the first name or pattern that means it; how many there are if none does."""
        found = (one == tensor or fnmatchcase(tensor, one) for one in self.match)
        return next((at for at, means in enumerate(found) if means), len(self.match))


def group_numbers(names: Iterable[str], groups: Sequence[Group]) -> dict[str, int]:
    """The number of each parameter's group: the first that names it, or len(groups)."""
    return {
        name: next((at for at, one in enumerate(groups) if one.names(name)), len(groups))
        for name in names
    }


def grouped(tensors: Iterable[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """The same tensors, each with its group; they have no places yet."""
    given = list(tensors)
    found = group_numbers((one.name for one in given if one.role is Role.PARAMETER), groups)
    return [replace(one, group=found.get(one.name, 0)) for one in given]


def without(tensors: Iterable[Tensor], groups: Sequence[Group]) -> list[int]:
    """The groups to which no parameter belongs. tensors: of `grouped`."""
    used = {one.group for one in tensors if one.role is Role.PARAMETER}
    return [number for number in range(len(groups)) if number not in used]
