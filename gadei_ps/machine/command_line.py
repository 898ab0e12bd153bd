"""Command lines of processes, for people who look for a job by what it runs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

MOST = 300
"""Characters of a command line that are kept: a line of a history has room for them."""
# Values of such options and variables are not shown: they may be secret.
SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
PASSWORD = re.compile(r"://[^/@\s]+@")
HIDDEN = "..."


def of(pid: int) -> str:
    """The command line of a process, on one line; empty if it is gone or shows none.

    For a learner that gadei-ps brings, it is that of the command that has started it. Values of
    options that may be secret are replaced by HIDDEN, and directories of programs are left out.
    """
    words = _words(pid)
    while any(one.startswith("gadei_ps.") for one in words[1:4]):
        pid = _parent(pid)
        words = _words(pid)
    if not words:
        return ""
    if len(words) > 1 and Path(words[1]).name == "gadei-ps":  # a script of the interpreter
        words = words[1:]
    return " ".join(as_text([Path(words[0]).name, *words[1:]]).split())[:MOST]


def as_text(words: Sequence[str]) -> str:
    """Return a command line without secrets."""
    return PASSWORD.sub(f"://{HIDDEN}@", shlex.join(_without_secrets(words)))


def _words(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(one).encode(errors="replace").decode() for one in raw.split(b"\0")[:-1]]


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"^PPid:\s+(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _without_secrets(words: Sequence[str]) -> list[str]:
    safe, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = bool(SECRET.search(name))
        if hide and not word.startswith("-"):
            safe.append(HIDDEN)
        else:
            safe.append(f"{name}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals and word.startswith("-")
    return safe
