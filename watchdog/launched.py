"""A watchdog that a command has started, which sends its configuration and receives its errors."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, TypedDict

from gadei_ps.errors import GadeiError, in_words
from gadei_ps.job.config import from_mapping
from gadei_ps.machine import lines, log
from gadei_ps.machine.lines import Lines
from gadei_ps.watchdog.fork_server import ForkServer
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.supervisor import serve


class NotifyLauncher(Notify):
    """Sends an empty line to the launcher whenever the servers' start has made progress."""

    def __init__(self, launcher: int) -> None:
        super().__init__()
        self._launcher = Lines(sends=launcher)

    def progress(self, timeout_s: float) -> None:
        with contextlib.suppress(OSError):  # nobody waits any more
            self._launcher.send(b"")


class Order(TypedDict):
    """Job that a command's watchdog serves: config, and fields of Options."""

    config: dict[str, Any]
    fresh: bool
    verbose: bool
    keep: bool
    survives: bool
    learners: int


def _report(end: int, kind: str, message: str) -> None:
    """Report to the command why the watchdog has not started."""
    os.set_blocking(end, True)
    lines.write(end, json.dumps({"kind": kind, "message": message}).encode())


def run(end: int, fork_server: ForkServer | None) -> int:
    """Return the exit code. end: descriptor of a socket to the command that has started this.

    From there comes an Order, as a line of JSON. The reason why the watchdog could not start goes
    there, as a line with the kind of the error and its message.
    """
    line = next(lines.read(end), None)
    if line is None:  # nobody wants it any more
        return 0
    order: Order = json.loads(line)
    verbose = order["verbose"]
    log.set_up(verbose=verbose, quiet=not verbose)
    config = from_mapping(order["config"], "job")
    try:
        options = Options(
            fresh=order["fresh"],
            resume=config.checkpoint is not None or order["keep"],
            survives=order["survives"],
            verbose=verbose,
            quiet=not verbose,
            learners=order["learners"],
            fork_server=fork_server,
        )
        return serve(config, options, NotifyLauncher(end))
    except GadeiError as error:
        _report(end, type(error).__name__, str(error))
        return error.exit_code
    except (OSError, MemoryError) as error:
        why = in_words(error)
        _report(end, "JobFailed", f"the daemon of job {config.name!r} could not start: {why}")
        return 1
