"""Shared state of pytest-xdist's workers: what they compile once, and tests that run alone.

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
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        os.close(fd)


class Turns:
    """The locks of one run of the tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """A test's time: beside the tests of other workers, or while none of them runs.

        Every test passes the gate; one that must be alone keeps it until it is done, so that the
        tests of other workers cannot overtake it for ever.
        """
        with contextlib.ExitStack() as kept:
            with contextlib.ExitStack() as gate:
                gate.enter_context(_locked(self.directory / "gate", fcntl.LOCK_EX))
                how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
                kept.enter_context(_locked(self.directory / "tests", how))
                if alone:
                    kept.push(gate.pop_all())
            yield

    def once(self, name: str, do: Callable[[], object]) -> None:
        """Do it in the first worker that asks; the others wait until it is done."""
        with _locked(self.directory / f"{name}.lock", fcntl.LOCK_EX):
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
