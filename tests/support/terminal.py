"""Commands in a terminal of their own, which may be closed while they run."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import select
import subprocess
import termios
import threading
from pathlib import Path
from typing import Self

from support.waiting import PATIENCE_S

LOOK_S = 0.02


def until_end(master: int) -> str:
    """Return all that was written to a pseudo-terminal whose other end is closed.

    The kernel hands over a line in pieces: one read may return the text without the line's end.
    """
    output = b""
    with contextlib.suppress(OSError):  # EIO: that was all
        while part := os.read(master, 4096):
            output += part
    return output.decode()


class Terminal:
    """A shell's command line in the foreground of a pseudo-terminal."""

    def __init__(self, directory: Path, line: str) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            ["sh", "-c", line],
            cwd=directory,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.err = ""
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # A read may end amid a character.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with contextlib.suppress(OSError):  # no process has the other end any more
            while True:
                closing = self._closing  # what was written before close() is read
                if select.select([self._master], [], [], 0.0 if closing else LOOK_S)[0]:
                    self.err += decoder.decode(os.read(self._master, 4096))
                elif closing:
                    return

    def interrupt(self) -> None:
        """Ctrl-C: all processes of the command line get SIGINT."""
        self.type("\x03")

    def type(self, text: str) -> None:
        """Type like a user."""
        os.write(self._master, text.encode())

    def close(self) -> None:
        """The session gets SIGHUP, and every write to the terminal fails."""
        if not self._closing:
            self._closing = True
            self._reader.join()  # a read that is under way would keep it open
            os.close(self._master)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.close()
