"""A watchdog that a command has started, which gives its configuration and hears its errors."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from gadei_ps.errors import GadeiError, in_words
from gadei_ps.job.config import from_mapping
from gadei_ps.machine import log
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.nursery import Nursery
from gadei_ps.watchdog.options import Options
from gadei_ps.watchdog.supervisor import serve


class NotifyLauncher(Notify):
    """Writes a line end to the launcher whenever the servers' start has got on."""

    def __init__(self, say: int) -> None:
        super().__init__()
        self._say_to = say

    def progress(self, timeout_s: float) -> None:
        os.set_blocking(self._say_to, False)
        with contextlib.suppress(OSError):  # nobody waits any more, or reads
            os.write(self._say_to, b"\n")
        os.set_blocking(self._say_to, True)


def _told(end: int) -> dict[str, Any] | None:
    """What it is to serve; None if nobody wants it any more."""
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(end, 1 << 16)
        if not part:
            return None
        text += part
    told: dict[str, Any] = json.loads(text)
    return told


def run(end: int, nursery: Nursery | None) -> int:
    """Returns the exit code. end: descriptor of a socket to the command that has started this.

    From there come, as a line of JSON: config, the job's configuration; fresh, verbose, keep,
    survives and learners, see Options. The reason why the watchdog could not start goes there.
    """
    told = _told(end)
    if told is None:
        return 0
    verbose = told["verbose"]
    log.set_up(verbose=verbose, quiet=not verbose)
    config = from_mapping(told["config"], "job")
    try:
        options = Options(
            fresh=told["fresh"],
            resume=config.checkpoint is not None or told["keep"],
            survives=told["survives"],
            verbose=verbose,
            quiet=not verbose,
            learners=told["learners"],
            nursery=nursery,
        )
        return serve(config, options, NotifyLauncher(end))
    except GadeiError as error:
        os.write(end, f"{type(error).__name__}: {error}".encode())
        return error.exit_code
    except (OSError, MemoryError) as error:
        why = in_words(error)
        said = f"JobFailed: the daemon of job {config.name!r} could not start: {why}"
        os.write(end, said.encode())
        return 1
