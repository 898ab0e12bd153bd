"""Shared state of pytest-xdist's workers: what they compile once.

The workers of a run agree by locks on files of one directory. A run without workers takes the same
locks and never waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

COMPILE = Path(__file__).parent / "kept.py"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        os.close(fd)


class Turns:
    """The locks of one run of the tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def once(self, name: str, do: Callable[[], object]) -> None:
        """Do it in the first worker that asks; the others wait until it is done."""
        with _locked(self.directory / f"{name}.lock"):
            done = self.directory / f"{name}.done"
            if not done.exists():
                do()
                done.touch()

    def compile(self) -> None:
        """Wait until the server's code is in the cache.

        It is compiled in a process of its own. This takes 50 s of a core if the cache is empty,
        which no test's time-out should have to allow.
        """
        command = [sys.executable, "-P", str(COMPILE)]
        self.once("compiled", lambda: subprocess.run(command, check=True))
