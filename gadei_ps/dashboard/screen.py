"""A terminal's alternate screen and its keys, for full-screen displays."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

from rich.console import Console, RenderableType

from gadei_ps.errors import UsageError
from gadei_ps.show.tables import Escaped

KEYS: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "back",
    "\b": "back",
    "\x1b": "escape",
}
ESCAPE_S: Final = 0.05  # for the rest of a key's sequence, also over a slow connection
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"


class Screen:
    """The whole terminal, restored at the end. Only lines that have changed are written."""

    def __init__(self) -> None:
        """Raise UsageError without a terminal."""
        is_plain = os.environ.get("TERM", "dumb") == "dumb"  # it cannot place the cursor
        if is_plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UsageError(
                "top needs a terminal, other than TERM=dumb; gadei-ps status --watch needs none"
            )
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._shown: list[str] = []
        self._size = (0, 0)
        self._pending = ""

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._in)
        tty.setcbreak(self._in)
        mode: list[Any] = termios.tcgetattr(self._in)
        mode[6][termios.VSUSP] = b"\0"  # a suspended display would leave the alternate screen
        termios.tcsetattr(self._in, termios.TCSADRAIN, mode)
        self._write(ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be closed
            self._write(LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def draw(self, render: Callable[[int, int], RenderableType]) -> None:
        """Show what is rendered for these columns and lines. Raises OSError if it is closed."""
        size = os.get_terminal_size(self._out)  # $COLUMNS would hide that it has changed
        columns, lines = size.columns or 80, size.lines or 24
        if (columns, lines) != self._size:
            self._size, self._shown = (columns, lines), []
            self._write("\x1b[2J")
        made = io.StringIO()
        console = Console(
            file=made, force_terminal=True, width=columns, height=lines, highlight=False
        )
        console.print(Escaped(render(columns, lines)), end="")
        texts = made.getvalue().split("\n")[:lines]
        texts += [""] * (lines - len(texts))
        old = self._shown or ["\0"] * lines
        changed = [at for at in range(lines) if texts[at] != old[at]]
        self._write("".join(f"\x1b[{at + 1};1H\x1b[0m\x1b[2K{texts[at]}" for at in changed))
        self._shown = texts

    def keys(self, timeout_s: float) -> Iterator[str]:
        """Yield the keys that are pressed until the time is over, each at once.

        A key is a character, or a name in KEYS. Raises EOFError if the terminal is closed.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0 or self._pending:
            if not self._pending and not select.select([self._in], [], [], max(0.0, left))[0]:
                return
            yield self._key()

    def _key(self) -> str:
        if not self._pending:
            self._pending = self._read()
        if self._pending == "\x1b" and select.select([self._in], [], [], ESCAPE_S)[0]:
            self._pending += self._read()
        for text, name in KEYS.items():
            if self._pending.startswith(text) and (text != "\x1b" or len(self._pending) == 1):
                self._pending = self._pending[len(text) :]
                return name
        if self._pending.startswith("\x1b"):  # a key without a use
            self._pending = ""
            return ""
        one, self._pending = self._pending[0], self._pending[1:]
        return one

    def _read(self) -> str:
        raw = os.read(self._in, 1024)
        if not raw:
            raise EOFError
        return raw.decode(errors="replace")

    def _write(self, text: str) -> None:
        raw = text.encode(errors="replace")
        while raw:
            raw = raw[os.write(self._out, raw) :]
