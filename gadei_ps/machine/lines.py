"""Lines between two processes, through a pipe or a socket.

One of two ways in which processes of a job pass objects to each other, a JSON object a line; where
descriptors come along, it is gadei_ps/job/fork_server_messages.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MOST_BYTES = 1 << 20
READ_BYTES = 1 << 16


class Lines:
    """A channel of whole lines that never waits.

    receives, sends: descriptors, which may be the same; -1: none. They are closed with this.
    most_bytes: of a line that is received; a longer one ends the channel.
    """

    def __init__(self, receives: int = -1, sends: int = -1, most_bytes: int = MOST_BYTES) -> None:
        self._receives, self._sends = receives, sends
        self._most_bytes = most_bytes
        self._part = b""  # of a line that has not arrived whole
        self.has_ended = receives < 0
        """True if no more lines can arrive."""
        self._unsent = b""
        for fd in {receives, sends} - {-1}:
            os.set_blocking(fd, False)

    def receive(self) -> Iterator[bytes]:
        """Yield the lines that have arrived, without their ends. An incomplete line is lost."""
        while not self.has_ended:
            try:
                read = os.read(self._receives, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a socket whose other end has died without reading all
                read = b""
            *lines, self._part = (self._part + read).split(b"\n")
            if not read or len(self._part) > self._most_bytes:
                self.has_ended = True
            yield from lines

    def send(self, line: bytes) -> bool:
        """Send a line whole, now or with later calls; False if one before it has not been sent.

        Raises OSError if the other process does not read any more.
        """
        if not self.flush():
            return False
        self._unsent = line + b"\n"
        self.flush()
        return True

    def flush(self) -> bool:
        """Send what is left of the last line; whether all of it is sent. Raises OSError."""
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._sends, self._unsent) :]
            except BlockingIOError:
                return False
        return True

    def close_sending(self) -> None:
        """The other process reads an end of file after what was sent."""
        if self._sends not in (-1, self._receives):
            os.close(self._sends)
            self._sends = -1

    def close(self) -> None:
        """Close the descriptors."""
        for fd in {self._receives, self._sends} - {-1}:
            os.close(fd)
        self._receives = self._sends = -1
        self.has_ended = True


def write(fd: int, line: bytes) -> None:
    """Write a whole line, however long that takes, unless nobody reads it any more."""
    rest = line + b"\n"
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while rest:
            rest = rest[os.write(fd, rest) :]
