"""A watchdog's process before it is known what to serve: it imports what it needs meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gadei_ps.errors import GadeiError
from gadei_ps.job import paths
from gadei_ps.machine import lines, process


@dataclass
class Child:
    """A watchdog's process, and our end of the socket to it. used: its job was sent."""

    process: subprocess.Popen[bytes]
    end: int
    used: bool = False

    def tell(self, config: str, **how: Any) -> None:
        """Send the job to serve. config: a JobConfig as JSON. how: see watchdog/entry.py."""
        self.used = True
        # If it is dead, that is seen later.
        lines.write(self.end, json.dumps(how | {"config": json.loads(config)}).encode())

    def drop(self) -> None:
        """End a process that nobody needs."""
        os.close(self.end)
        self.process.kill()
        self.process.wait()


def start(*flags: str, log_file: int | None = None, dies: bool = True) -> Child:
    """Start a watchdog's process, which waits for its job. Raises OSError.

    log_file: for its output; else its output goes to stderr. dies: with this process.
    """
    ours, theirs = (end.detach() for end in socket.socketpair())
    try:
        child = process.spawn(
            [*process.module_command("gadei_ps.watchdog"), *flags, str(theirs)],
            stdout=2 if log_file is None else log_file,
            stderr=log_file,
            pass_fds=[theirs],
            how=signal.SIGTERM if dies else None,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return Child(child, ours)


@contextlib.contextmanager
def for_job(job: str) -> Iterator[Child | None]:
    """A watchdog's process for a command's job, if that is likely to be a new one.

    job: what the command was given, a name, a job file or a socket. If nobody has used it at the
    end of the block, it ends.
    """
    child = None
    if _may_be_new(job):
        with contextlib.suppress(OSError):  # what needs it says why it cannot be started
            child = start()
    try:
        yield child
    finally:
        if child is not None and not child.used:
            child.drop()


def _may_be_new(job: str) -> bool:
    if job.endswith(".toml"):
        return True
    try:
        return "/" not in job and not paths.socket_path(job).exists()
    except (GadeiError, OSError):
        return False
