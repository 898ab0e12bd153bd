"""Signals that end a command, as an exception in its main thread; held back where it would harm.

An exception at an arbitrary instruction can leave a lock of the standard library locked for ever,
as in Popen.poll. Code that must not be interrupted there runs while signals are held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(BaseException):
    """A signal that ends the command; whatever it has started is ended on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


class _State:
    held = False
    waiting: int | None = None
    noting = False
    noted: int | None = None


def install() -> None:
    """Once, from the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and background jobs have it
            signal.signal(number, _on_signal)
    sys.unraisablehook = _unraisable


@contextlib.contextmanager
def of_commands() -> Iterator[None]:
    """Handle Ctrl-C as a command does, in the main thread of a program that is not a command.

    Interrupted leaves the block as KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _on_signal)
    try:
        yield
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _State.held:
        _State.waiting = number
    else:
        _deliver(number)


def _deliver(number: int) -> None:
    if not _State.noting or _State.noted is not None:
        raise Interrupted(number)
    _State.noted = number


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Meanwhile a signal waits for check(), or for the end; both raise Interrupted.

    For the main thread; in another one, where no signal is delivered, it does nothing.
    """
    if _State.held or threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.held = True
    try:
        yield
    finally:
        _State.held = False
        check()


def check() -> None:
    """Main thread: raises Interrupted if a signal waits."""
    if threading.current_thread() is not threading.main_thread():
        return
    number, _State.waiting = _State.waiting, None
    if number is not None:
        _deliver(number)


@contextlib.contextmanager
def first_told() -> Iterator[Callable[[], int | None]]:
    """Main thread: meanwhile the first signal interrupts nothing; the next one raises Interrupted.

    Gives a function that returns the first signal, None before one has come. For work that ends
    properly if it is given the time: a user who sends a second signal does not want to wait.
    """
    _State.noting, _State.noted = True, None
    try:
        yield lambda: _State.noted
    finally:
        _State.noting = False


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    """Python drops an exception of a signal handler in a finalizer: the signal is sent again."""
    if isinstance(args.exc_value, Interrupted):
        again = threading.Timer(0.05, os.kill, (os.getpid(), args.exc_value.number))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(args)
