"""Make the manual pages, from what --help shows, and the scripts of shells' completions.

`python docs/manual.py docs/share` writes them. The wheel installs them where man and shells look.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from gadei_ps.cli.app import command_tree
from gadei_ps.cli.exits import EXIT_CODES

PROGRAM = "gadei-ps"
HELP = ("-h, --help", "Show the help and exit.")
COMPLETIONS = {
    "bash": "bash-completion/completions/gadei-ps",
    "zsh": "zsh/site-functions/_gadei-ps",
    "fish": "fish/vendor_completions.d/gadei-ps.fish",
}


def files() -> dict[str, str]:
    """Text of each file by its path below share/."""
    root = command_tree()
    every = list(_commands(PROGRAM, root))
    pages = {
        f"man/man1/{name.replace(' ', '-')}.1": _page(name, command, every)
        for name, command in every
    }
    return pages | {path: _completion(shell) for shell, path in COMPLETIONS.items()}


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The command and those below it, with their whole names."""
    yield name, command
    for word, one in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {word}", one)


def _completion(shell: str) -> str:
    """The script that the command itself gives to a shell."""
    said = io.StringIO()
    before = dict(os.environ)
    os.environ["_GADEI_PS_COMPLETE"] = f"source_{shell}"
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit, typer.Exit):
            command_tree().main([], prog_name=PROGRAM, standalone_mode=False)
    finally:
        os.environ.clear()
        os.environ.update(before)
    text = said.getvalue().strip() + "\n"
    # A file that zsh loads as a function must also be that function, at the first call.
    loaded = (
        "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n"
        r'  \1 "$@"'
        "\nelse\n  compdef \\1 \\2\nfi"
    )
    return re.sub(r"^compdef (\S+) (\S+)$", loaded, text, flags=re.M)


# -- a page ---------------------------------------------------------------------------------------


def _page(name: str, command: Any, every: list[tuple[str, Any]]) -> str:
    paragraphs = _paragraphs(command.help or "")
    summary = paragraphs[0].rstrip(".")
    title = name.replace(" ", "-")
    below = [(one, other) for one, other in every if one.rpartition(" ")[0] == name]
    lines = [
        f'.TH "{title.upper()}" 1 "" "{PROGRAM}" "{PROGRAM}"',
        ".SH NAME",
        f"{_roff(title)} \\- {_roff(summary)}",
        ".SH SYNOPSIS",
        f".B {_roff(name)}",
        _roff(_synopsis(command, bool(below))),
        ".SH DESCRIPTION",
    ]
    for paragraph in paragraphs:
        lines += [".PP", _roff(paragraph)]
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    options = [one for one in command.params if one.opts[0].startswith("-")]
    lines += _list("ARGUMENTS", [(_metavar(one), _told(one)) for one in arguments])
    lines += _list("OPTIONS", [*((_names(one), _told(one)) for one in options), HELP])
    lines += _list(
        "COMMANDS",
        [(one.removeprefix(f"{name} "), _paragraphs(other.help or "")[0]) for one, other in below],
    )
    word = name.removeprefix(f"{PROGRAM} ")
    codes = [one for one in EXIT_CODES if word in one.commands or not one.commands]
    lines += _list("EXIT STATUS", [(one.code, one.meaning) for one in codes])
    others = [one for one, _ in every if one != name and (name == PROGRAM or one == PROGRAM)]
    lines += [".SH SEE ALSO"]
    lines += [
        f".BR {_roff(one.replace(' ', '-'))} (1)" + ("," if one != others[-1] else "")
        for one in others
    ]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(one.split()) for one in re.split(r"\n\s*\n", text.strip())] or [""]


def _synopsis(command: Any, group: bool) -> str:
    words = ["[OPTIONS]"]
    for one in command.params:
        if not one.opts[0].startswith("-"):
            word = _metavar(one)
            words.append(word if one.required else f"[{word}]")
    return " ".join(words + (["COMMAND [ARGUMENTS]..."] if group else []))


def _metavar(one: Any) -> str:
    name: str = one.metavar or one.name.upper()
    return f"{name}..." if one.nargs == -1 else name


def _names(one: Any) -> str:
    names = ", ".join([*one.opts, *one.secondary_opts])
    if getattr(one, "is_flag", False):
        return names
    choices = _choices(one)
    return f"{names} {one.metavar or ('|'.join(choices) if choices else one.name.upper())}"


def _choices(one: Any) -> list[str]:
    kind = getattr(one.type_descriptor, "annotation", None)
    return (
        [str(each.value) for each in kind]
        if isinstance(kind, type) and issubclass(kind, Enum)
        else []
    )


def _told(one: Any) -> str:
    """Its help, with its default and its limits."""
    text = " ".join((one.help or "").split()).replace("\\[", "[")
    default = one.show_default if isinstance(one.show_default, str) else one.default
    if default is not None and default is not False and one.show_default and not callable(default):
        text += f" Default: {default.value if isinstance(default, Enum) else default}."
    if one.min is not None and one.max is not None:
        text += f" From {one.min} to {one.max}."
    elif one.min is not None:
        text += f" At least {one.min}."
    if one.envvar:
        text += f" Environment: {one.envvar}."
    return text


def _list(title: str, rows: Any) -> list[str]:
    lines = [f".SH {title}"] if rows else []
    for name, text in rows:
        lines += [".TP", f".B {_roff(name)}", _roff(text)]
    return lines


def _roff(text: str) -> str:
    """The text for roff, which interprets backslashes, hyphens, and dots at the start."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    for name, text in files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
