"""A watchdog that a command has started, which gives its configuration and hears its errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from gadei_ps.errors import GadeiError, in_words
from gadei_ps.job.config import from_mapping
from gadei_ps.machine import log
from gadei_ps.watchdog.begun import Begun
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.options import CONFIG_VARIABLE, Options
from gadei_ps.watchdog.supervisor import serve


class NotifyLauncher(Notify):
    """Writes a line end into the pipe to the launcher whenever the servers' start has got on."""

    def __init__(self, say: int) -> None:
        super().__init__()
        self._say_to = say

    def progress(self, timeout_s: float) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            os.write(self._say_to, b"\n")


def run(say: int, nursery: Begun | None) -> int:
    """Returns the exit code. say: where the launcher reads why the watchdog could not start."""
    verbose = "--verbose" in sys.argv
    log.set_up(verbose=verbose, quiet=not verbose)
    learners = [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--learners=")]
    config = from_mapping(json.loads(os.environ.pop(CONFIG_VARIABLE)), "job")
    try:
        options = Options(
            fresh="--fresh" in sys.argv,
            resume=config.checkpoint is not None or "--keep" in sys.argv,
            verbose=verbose,
            quiet=not verbose,
            learners=int(learners[0]) if learners else 1,
            nursery=nursery,
        )
        return serve(config, options, NotifyLauncher(say))
    except GadeiError as error:
        os.write(say, f"{type(error).__name__}: {error}".encode())
        return error.exit_code
    except (OSError, MemoryError) as error:
        why = in_words(error)
        said = f"JobFailed: the daemon of job {config.name!r} could not start: {why}"
        os.write(say, said.encode())
        return 1
