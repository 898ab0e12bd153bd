"""A child process of an event loop, which never waits for it."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from gadei_ps.machine import process
from gadei_ps.machine.lines import Lines


class Child:
    """A process whose lines and whose end arrive through a selector.

    on_line: called with each whole line that it prints on standard output. on_end: called with the
    exit code when it has ended, after its last line. stdin: a descriptor for its standard input;
    None: that reads the lines that are sent. how: as for process.spawn(). Raises OSError.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        command: Sequence[str],
        on_line: Callable[[bytes], None],
        on_end: Callable[[int], None],
        *,
        stdin: int | None = None,
        pass_fds: Sequence[int] = (),
        how: int | None = signal.SIGKILL,
    ) -> None:
        self._selector = selector
        self._on_line = on_line
        self._on_end = on_end
        with ExitStack() as failed, ExitStack() as theirs:
            receives, stdout = os.pipe()
            failed.callback(os.close, receives)
            theirs.callback(os.close, stdout)
            sends = -1
            if stdin is None:
                stdin, sends = os.pipe()
                failed.callback(os.close, sends)
                theirs.callback(os.close, stdin)
            self._process = process.spawn(
                command, stdin=stdin, stdout=stdout, pass_fds=pass_fds, how=how
            )
            failed.callback(process.end_group, self._process)
            self._pidfd = os.pidfd_open(self._process.pid)
            failed.pop_all()
        self._lines = Lines(receives, sends)
        self._receives = receives
        selector.register(receives, selectors.EVENT_READ, lambda _: self._receive())
        selector.register(self._pidfd, selectors.EVENT_READ, lambda _: self._ended())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: bytes) -> bool:
        """Send a line to its standard input; False if it does not read. Raises nothing."""
        try:
            return self._lines.send(line)
        except OSError:  # it is ending
            return False

    def kill(self) -> None:
        """Kill it; its end is reported as any other."""
        process.send_signal(self._process, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Close its input and wait for its end, which is reported; False if it lives on."""
        self._lines.close_sending()
        if self._pidfd >= 0 and process.gone(self._pidfd, timeout_s):
            self._ended()
        return self._pidfd < 0

    def end(self, grace_s: float, kill_s: float) -> None:
        """End it without reports: close its input, kill it after `grace_s`, wait `kill_s` for that.

        The kernel may block it for longer: then it is left behind. May be called by `on_line`.
        """
        if self._pidfd < 0:
            return
        self._lines.close_sending()
        if not (grace_s and process.gone(self._pidfd, grace_s)):
            self.kill()
        ended = process.gone(self._pidfd, kill_s)
        self._close()
        if ended:
            self._process.wait()

    def _receive(self) -> None:
        if self._receives < 0:
            return
        for line in self._lines.receive():
            self._on_line(line)
            if self._receives < 0:  # by end()
                return
        if self._lines.has_ended and self._receives >= 0:
            self._unregister()

    def _unregister(self) -> None:
        self._selector.unregister(self._receives)
        self._receives = -1

    def _ended(self) -> None:
        self._receive()
        if self._pidfd >= 0:  # else end() was called
            self._close()
            self._on_end(self._process.wait())

    def _close(self) -> None:
        if self._receives >= 0:
            self._unregister()
        self._lines.close()
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
