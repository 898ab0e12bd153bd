"""Commands whose help shows no type beside a switch, which takes no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from typer import Typer
from typer.core import TyperCommand, TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])


def _without_types(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class App(Typer):
    """A Typer of such commands."""

    def __init__(self, **how: Any) -> None:
        super().__init__(cls=_Group, **how)

    def command(self, *args: Any, **how: Any) -> Callable[[Function], Function]:
        return super().command(*args, cls=_Command, **how)
