"""Exit of a learner's script when an error reaches its top level."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gadei_ps.errors import GadeiError, JobFailed, JobStopped
from gadei_ps.learners.attach import number

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install() -> None:
    """Handle errors that end this process, from now on. Other hooks keep all other errors."""
    if getattr(sys.excepthook, "func", None) is not _report:
        sys.excepthook = functools.partial(_report, sys.excepthook)


def _report(
    previous: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print one line for the end of the job, and no frames of gadei_ps for its other errors.

    A learner whose job has stopped ends with the exit code of JobStopped.
    """
    if isinstance(error, JobStopped | JobFailed):
        who = f"learner {number()}" if number() >= 0 else f"learner (pid {os.getpid()})"
        print(f"gadei-ps: {who} ends: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)
    ours = isinstance(error, GadeiError | KeyboardInterrupt)
    if not ours or previous is not sys.__excepthook__:
        previous(kind, error, trace)
        return
    shown = traceback.TracebackException(kind, error, trace, limit=_frames_of_script(trace))
    print("".join(shown.format()), end="", file=sys.stderr, flush=True)


def _frames_of_script(trace: TracebackType | None) -> int:
    """Return how many frames come before the first one of gadei_ps."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(trace)]
    ours = (number for number, name in enumerate(names) if name.startswith("gadei_ps."))
    return next(ours, len(names))
