"""Job control of a command's children, which are in process groups of their own, as a shell's are.

A child that reads from the terminal becomes its foreground process group. Ctrl-Z stops the children
with the command, and `fg` continues all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

READS = (signal.SIGTTIN, signal.SIGTTOU)
STDIN = 0


def _stop_signal(pid: int) -> int | None:
    """Signal that has stopped a child since the last call."""
    try:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if found is None else found.si_status


def _foreground() -> int:
    """Foreground process group of the terminal that is our standard input; -1 without one."""
    try:
        return os.tcgetpgrp(STDIN)
    except OSError:
        return -1


def _set_foreground(group: int) -> None:
    """Set the foreground group from any group; SIGTTOU would stop a process in the background."""
    with contextlib.suppress(OSError):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(STDIN, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Foreground:
    """The terminal of a command. suspend: stops the command with its children."""

    def __init__(self, suspend: Callable[[], None]) -> None:
        self._suspend = suspend
        self._child = 0  # that has the terminal

    def pass_terminal(self, pid: int) -> None:
        """Give a child the terminal if it has stopped because it reads. To be called often."""
        number = _stop_signal(pid)
        if number == signal.SIGTSTP and self._child == pid:  # Ctrl-Z went to the child alone
            self.reclaim_terminal(pid)
            self._suspend()
        elif number in READS:
            while _foreground() not in (-1, os.getpgrp(), pid):  # as any job in the background
                os.kill(os.getpid(), signal.SIGSTOP)
            _set_foreground(pid)
            self._child = pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)

    def has(self, pid: int) -> bool:
        """Return whether a child has the terminal, so that Ctrl-C goes to it alone."""
        return self._child == pid

    def reclaim_terminal(self, pid: int) -> None:
        """The child has ended or stopped."""
        if self._child == pid:
            self._child = 0
            _set_foreground(os.getpgrp())


@contextlib.contextmanager
def suspends(suspend: Callable[[], None]) -> Iterator[None]:
    """Call `suspend` at Ctrl-Z within the block. In other threads than the main one nothing."""
    before = signal.getsignal(signal.SIGTSTP)
    main = threading.current_thread() is threading.main_thread()
    if not main or before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTSTP, lambda *_: suspend())
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
