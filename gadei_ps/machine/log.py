"""Log lines on stderr: readable ones, or JSON for the journal, with their priorities.

structlog is imported when a process logs. It takes as long as NumPy to import, which commands that
only ask a job are spared.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import Any

from gadei_ps.errors import printable
from gadei_ps.machine.output import write

# Of sd-daemon(3), which are those of syslog, by the names of structlog's methods.
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2}


def in_journal() -> bool:
    """Return whether stderr is the journal, whose file systemd names in JOURNAL_STREAM."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def prioritized(method: str, text: str) -> str:
    """The text as the journal wants it: each line is an entry of its own."""
    prefix = f"<{PRIORITIES.get(method, 6)}>"
    return "\n".join(prefix + line for line in text.splitlines())


class _Discarding(io.FileIO):
    """A file that discards what cannot be written.

    A closed terminal, a reader that has ended or a full disk must not end a job.
    """

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            write(self.fileno(), data)
        return len(data)


def outlive_reader() -> None:
    """Make prints to this process' standard error never fail."""
    buffer = getattr(sys.stderr, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # the same if Python does not buffer
    if isinstance(raw, io.FileIO) and raw.fileno() == 2:  # else a program has put its own there
        sys.stderr.flush()
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Discarding(2, "w", closefd=False)),
            sys.stderr.encoding,
            "backslashreplace",
            line_buffering=True,
        )


def set_up(*, as_json: bool = False, verbose: bool = False, quiet: bool = False) -> None:
    """Once, at the start of a process. `quiet`: warnings and errors only."""
    outlive_reader()
    structlog = _structlog()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    if as_json:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors.append(_escaped)
        processors.append(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    if in_journal():
        processors.append(lambda _, method, text: prioritized(method, text))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
        ),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _escaped(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Text may be another user's: names of files, and what is in them."""
    return {
        name: value if name == "exc_info" else printable(value if name == "event" else str(value))
        for name, value in event.items()
    }


def get(**context: Any) -> Any:
    """A logger with these fields on every line."""
    return _structlog().get_logger(**context)


def _structlog() -> Any:
    """structlog, which imports rich if it can: that takes longer than the rest, and is not used."""
    absent = "rich" not in sys.modules
    if absent:
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        if absent:
            del sys.modules["rich"]
    return structlog
