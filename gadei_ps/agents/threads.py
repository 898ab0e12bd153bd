"""Threads of an agent: how they start, and what becomes of one that ends by a mistake."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from gadei_ps.errors import AgentError


def start(name: str, run: Callable[..., Any], *args: Any) -> threading.Thread:
    """A new thread, which does not keep its process from ending.

    Raises AgentError if there is none to be had: then nothing may count on it.
    """
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise AgentError(f"{error}: raise the limit of processes (ulimit -u)") from None
    return thread


def guard() -> None:
    """From now on, a thread that ends by an error which nobody awaits ends this process.

    The group would wait for it for ever: signs of life would go on. A new life of the agent joins.
    """
    threading.excepthook = _end


def _end(error: threading.ExceptHookArgs) -> None:
    threading.__excepthook__(error)
    sys.stderr.flush()
    os._exit(1)
