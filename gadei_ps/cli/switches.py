"""Commands as typer makes them, with two differences.

The help shows no type beside a switch, which takes no value. All words after the first one of a
learner's program belong to that program, also without `--` before it.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from typer import Typer
from typer.core import TyperCommand, TyperGroup

from gadei_ps.errors import UsageError

# Names that no user gives to a job, but that programs begin with.
INTERPRETER = re.compile(r"(.*/)?(python[0-9.]*|sh|bash|env|uv|torchrun)")
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


def separated(command: Any, args: Sequence[str]) -> list[str]:
    """Put `--` before the program of a command line that starts learners; others stay.

    Raises UsageError if the job's name is missing.
    """
    before: list[str] = []
    words = list(args)
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        before.append(words[0])
        command = command.commands[words.pop(0)]
    if isinstance(command, TyperGroup) and words and _is_program(words[0]):
        program = shlex.join(["python"] * words[0].endswith(".py") + words)
        raise UsageError(
            f"{words[0]} is not a command; to start learners: gadei-ps run NAME -- {program}"
        )
    if not any(one.name == "command" for one in command.params):
        return list(args)
    line = " ".join(("gadei-ps", *before))
    takes_value = {
        name: not getattr(one, "is_flag", False) for one in command.params for name in one.opts
    }
    return [*before, *_before_program(line, takes_value, words)]


def _is_program(word: str) -> bool:
    return word.endswith(".py") or bool(INTERPRETER.fullmatch(word))


def command_path(command: Any, args: Sequence[str]) -> str:
    """`gadei-ps` and the command that a command line names."""
    names = ["gadei-ps"]
    for word in args:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        names.append(word)
        command = command.commands[word]
    return " ".join(names)


def _before_program(line: str, takes_value: dict[str, bool], words: list[str]) -> list[str]:
    job: str | None = None
    at = 0
    while at < len(words) and words[at] != "--":
        word = words[at]
        if word in ("-h", "--help"):
            return words
        is_option = word.startswith("-") and word != "-"
        unknown = word.partition("=")[0] not in takes_value
        if (
            job
            and INTERPRETER.fullmatch(job)
            and (unknown if is_option else not shutil.which(word))
        ):
            before = [one for one in words[:at] if one != job]
            raise _nameless(line, before, [job, *words[at:]])
        if is_option:
            at += 1 + takes_value.get(word, False)
        elif job is not None:
            return [*words[:at], "--", *words[at:]]
        else:
            job, at = word, at + 1
    if job is None and at + 1 < len(words):
        raise _nameless(line, words[:at], words[at + 1 :])
    if job and at == len(words) and job.endswith(".py"):
        raise _nameless(line, [one for one in words if one != job], ["python", job])
    return words


def _nameless(line: str, options: Sequence[str], program: Sequence[str]) -> UsageError:
    words = shlex.join([*options, "--", *program])
    missing, place = "name of the job", "NAME"
    if "group" in line.split():
        missing, place = "file of the groups", "GROUPS.toml"
    return UsageError(f"the {missing} is missing: {line} {place} {words}")


class App(Typer):
    """A Typer of such commands."""

    def __init__(self, **how: Any) -> None:
        super().__init__(cls=_Group, **how)

    def command(self, *args: Any, **how: Any) -> Callable[[Function], Function]:
        return super().command(*args, cls=_Command, **how)
