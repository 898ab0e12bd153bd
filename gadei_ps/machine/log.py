"""Log lines on stderr: readable ones, or JSON for the journal.

structlog is imported when a process logs. It takes as long as NumPy to import, which commands that
only ask a job are spared.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast


class _Patient:
    """stderr of processes that must outlive its reader: a closed pipe is no error."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def set_up(*, as_json: bool = False, verbose: bool = False, quiet: bool = False) -> None:
    """Once, at the start of a process. `quiet`: warnings and errors only."""
    import structlog

    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    if as_json:
        processors.append(structlog.processors.JSONRenderer())
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
        ),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Patient())),
        cache_logger_on_first_use=False,
    )


def get(**context: Any) -> Any:
    """A logger with these fields on every line."""
    import structlog

    return structlog.get_logger(**context)
