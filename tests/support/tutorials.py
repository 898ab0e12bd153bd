"""The blocks of the tutorials in docs/learn, and the comparison of outputs with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = re.compile(r"(?:^<!-- learn: (\w+) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"Save this as `([\w.]+)`")
COMMAND = re.compile(r"^\$ (.*)\n", re.M)
DATE = re.compile(r"\b(\d{4}-)?\d\d-\d\d\b")
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
UNIT = re.compile(r"\b0 (ns|µs|ms|s|min|bytes|KB|MB|GB|KiB|MiB|GiB)\b")
TIMES = re.compile(r"\b(0 s )+0 s\b")  # 1 min 5 s
LOGGED = "0:0:0 ["  # on a busy machine, a server may seem to hang, and is replaced


@dataclass(frozen=True)
class Block:
    """A block of a page. how: background, after, skip or nothing."""

    start: int
    end: int
    how: str
    file: str
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command with its output."""
        parts = COMMAND.split(self.text)[1:]
        return list(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str) -> Iterator[Block]:
    """Yield the files and the commands of a page."""
    last = 0
    for found in BLOCK.finditer(text):
        files = FILE.findall(text[last : found.start()])
        last = found.end()
        if found[2] == "console" or files:
            file = "" if found[2] == "console" else files[-1]
            yield Block(found.start(3), found.end(3), found[1] or "", file, found[3])


def masked(text: str) -> list[str]:
    """Return the lines without what differs from run to run."""
    lines = [DATE.sub("0", " ".join(line.split())) for line in text.splitlines()]
    lines = [NUMBER.sub("0", line) for line in lines]
    lines = [TIMES.sub("0 s", UNIT.sub("0 s", line)) for line in lines]
    return [line for line in lines if line and not line.startswith(LOGGED)]


def fits(wanted: str, found: str) -> bool:
    """Return whether an output is that of the page."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in masked(wanted)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in masked(found))) is not None
