"""Every command, argument and option explains itself, and the screen shows all of its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gadei_ps.cli.app import app, command_tree, tree_for

WIDE = {"COLUMNS": "600", "TERM": "dumb"}  # no help text is broken into lines
USUAL = {"COLUMNS": "80", "TERM": "dumb"}
PANELS = ["Options", "Train", "Jobs", "Checkpoints", "Faults", "This machine", "Research"]
FORBIDDEN = re.compile(
    r"\b(likewise|whoever|but for|there is not|of then|sai[d] once|not running yet|todo|for now"
    r"|so many|where it goes)\b",
    re.IGNORECASE,
)


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the tree, with the words of its path."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(command_tree()))


def default_of(parameter: Any) -> str | None:
    """The default that the help must show; None if there is none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.default is None or getattr(parameter, "is_flag", False):
        return None
    return str(getattr(parameter.default, "value", parameter.default))


def faults(command: Any, screen: str) -> list[str]:
    """The faults in the help of a command. screen: the output of --help."""
    found = [] if (command.help or "").strip() else ["the command has no help"]
    printed = " ".join(screen.split())
    for parameter in command.params:
        name, text = parameter.opts[-1], parameter.help or ""
        if len(text) < 8 or not text.endswith((".", "...")):
            found.append(f"{name}: {text!r} explains nothing, or is not a sentence")
        elif " ".join(text.split()) not in printed:
            found.append(f"{name}: not all of {text!r} is on the screen")
        if not name.startswith("-") and parameter.metavar not in screen:
            found.append(f"{name}: its name is not on the screen")
        default = default_of(parameter)
        if default is not None and not re.search(
            rf"\[default: \(?{re.escape(default)}\)?\]", printed
        ):
            found.append(f"{name}: its default {default} is not shown")
    if "<bool>" in screen:
        found.append("a switch shows the type of a value, which it does not take")
    found += [f"the word {one.group()!r}" for one in FORBIDDEN.finditer(printed)]
    return found


def swallowed(command: Any, screen: str) -> list[str]:
    """Return the words of the help texts that do not come on the screen, in their order.

    Rich takes a word in brackets for markup, and cuts words that are too long for a column.
    """
    shown = re.sub(r"[\s│╭╮╰╯─]", "", screen)
    missing = []
    inner = getattr(command, "commands", {}).values()
    heads = [(one.help or "").partition("\n\n")[0] for one in inner]
    for text in (command.help or "", *(one.help or "" for one in command.params), *heads):
        at = 0
        for word in text.split():
            found = shown.find(word, at)
            missing += [word] * (found < 0)
            at = found + len(word) if found >= 0 else at
    return missing


def test_the_walk_sees_all_commands() -> None:
    assert ("runtime-model", "train") in COMMANDS
    assert ("status",) in COMMANDS
    assert len(COMMANDS) >= 22


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    printed = CliRunner().invoke(app, [*path, "--help"], env=WIDE, terminal_width=600)
    assert printed.exit_code == 0
    # Borders of the panels stand between the columns.
    assert not faults(COMMANDS[path], re.sub(r"[│╭╮╰╯─]", " ", printed.output))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_all_words_are_on_a_screen_of_80_columns(path: tuple[str, ...]) -> None:
    printed = CliRunner().invoke(app, [*path, "--help"], env=USUAL, terminal_width=80)
    assert printed.exit_code == 0
    assert not swallowed(COMMANDS[path], printed.output)


def test_commands_are_grouped() -> None:
    printed = CliRunner().invoke(app, ["--help"], env=USUAL, terminal_width=80)
    assert re.findall(r"╭─ ([\w ]+) ─", printed.output) == PANELS


def test_swallowed_words_are_found() -> None:
    wrong = typer.Typer(rich_markup_mode="rich")

    @wrong.command(help="All of [optimizer] but kind.")
    def _(long: str = typer.Option(None, help=f"One of {'x' * 90} and [others].")) -> None: ...

    screen = CliRunner().invoke(wrong, ["--help"], env=USUAL, terminal_width=80).output
    found = swallowed(typer.main.get_command(wrong), screen)
    assert found == ["[optimizer]", "x" * 90, "[others]."]


def test_faults_are_found() -> None:
    wrong = typer.Typer()

    @wrong.command(help="A command.")
    def _(
        silent: str = typer.Option("x", help=""),
        swallowed: str = typer.Option(None, help="A number. [default: 200] It counts."),
        vague: str = typer.Option(None, help="Likewise."),
        hidden: int = typer.Option(3, help="A number of things.", show_default=False),
        switch: bool = typer.Option(False, "--switch", help="Switches something on."),
    ) -> None: ...

    screen = CliRunner().invoke(wrong, ["--help"], env=WIDE, terminal_width=600).output
    found = "\n".join(faults(typer.main.get_command(wrong), screen))
    for part in (
        "--silent: ''",
        "not all of 'A number",
        "'Likewise'",
        "--hidden: its default",
        "a switch shows",
    ):
        assert part in found


@pytest.mark.parametrize("name", command_tree().commands)
def test_a_command_is_built_without_the_others(name: str) -> None:
    """It has the options that it has in the tree of all, and so have the commands below it."""

    def options(tree: Any) -> dict[tuple[str, ...], list[str]]:
        return {path: [str(one.opts) for one in made.params] for path, made in walk(tree)}

    everything = options(command_tree())
    alone = options(tree_for([name, "--json"]))
    assert alone == {path: everything[path] for path in everything if path[:1] in ((), (name,))}


def test_words_that_name_no_command_have_all_commands() -> None:
    for words in ([], ["--version"], ["stat"], ["--", "ls"]):
        assert tree_for(words) is command_tree()
