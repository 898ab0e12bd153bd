"""Output of learners, line by line: each line with its learner's number, and a file per learner.

Each learner writes into pipes that one thread reads. The thread writes whole lines only, and lines
that come together, such as a traceback's, together. Binary output, a line without an end, or one
that is redrawn all the time, such as a progress bar, needs no more memory than other output.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from gadei_ps.errors import UsageError
from gadei_ps.machine import process

READ_BYTES = 1 << 16
MOST_BYTES = 1 << 16  # of a line; a longer one is shown in parts
LAST_BYTES = 1 << 20  # of a pipe that are read once its learner has ended: more than it holds
QUIET_S = 0.02  # lines that come within this time are shown together
HELD_S = 0.2  # and are held back for no longer than this
REDRAWN_S = 1.0  # a line that is redrawn is shown once in this time
WAIT_S = 5.0  # for a reader of our own output that does not read
_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")
_FILES_A_LEARNER = 5  # two pipes, of which the other ends are open for a moment, and a log


class _Log:
    """A learner's file. After a failed write it says so on standard error and writes no more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, data: bytes) -> None:
        if self._fd is None:
            return
        try:
            write(self._fd, data)
        except OSError as error:
            self.close()
            text = f"gadei-ps: {self._path}: {error.strerror}; the rest is not written there\n"
            with contextlib.suppress(OSError):
                write(2, text.encode(errors="replace"))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Stream:
    """Standard output, or standard error, of one learner.

    fd: of the pipe, not blocking. to: where lines are shown. last_read: time of the last bytes (s,
    monotonic).
    """

    def __init__(self, fd: int, prefix: bytes, to: int, log: _Log | None) -> None:
        self.fd = fd
        self.last_read = 0.0
        self._prefix = prefix
        self._to: int | None = to
        self._log = log
        self._begun = b""
        self._ready: list[bytes] = []
        self._size = 0
        self._since = 0.0
        self._redrawn = -REDRAWN_S

    def read(self) -> int:
        """Read once; the number of bytes, 0 at the end. Raises BlockingIOError."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return 0
        if data:
            self._take(data)
        return len(data)

    def _take(self, data: bytes) -> None:
        self.last_read = time.monotonic()
        if self._log is not None:
            self._log.write(data)
        text, at = self._begun + data, 0
        for end in _END.finditer(text):
            line, at = text[at : end.start()], end.end()
            if end[0] == b"\r":
                if not line.strip() or self.last_read - self._redrawn < REDRAWN_S:
                    continue
                self._redrawn = self.last_read
            self._show(line)
        self._begun = text[at:]
        while len(self._begun) > MOST_BYTES:
            self._show(self._begun[:MOST_BYTES])
            self._begun = self._begun[MOST_BYTES:]

    def _show(self, line: bytes) -> None:
        if not self._ready:
            self._since = self.last_read
        self._ready += [self._prefix, line, b"\n"]
        self._size += len(line)

    @property
    def waits(self) -> bool:
        """Whether there are lines to be shown."""
        return bool(self._ready)

    def is_due(self, now: float) -> bool:
        """Return whether the lines should be written without waiting for more."""
        late = now - self.last_read >= QUIET_S or now - self._since >= HELD_S
        return self.waits and (late or self._size >= MOST_BYTES)

    def flush(self) -> bool:
        """Show what is ready; False if nobody wants to know any more."""
        shown, self._ready, self._size = b"".join(self._ready), [], 0
        if self._to is not None:
            try:
                write(self._to, shown)
            except OSError:
                self._to = None
        return self._to is not None or self._log is not None

    def close(self) -> None:
        """Show the rest, also of a line that has no end."""
        if rest := self._begun.rstrip(b"\r"):
            self._show(rest)
        self._begun = b""
        self.flush()
        os.close(self.fd)


def write(fd: int, data: bytes) -> None:
    """Write all of it. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # whoever shares it may have set it so
            with selectors.DefaultSelector() as ready:
                ready.register(fd, selectors.EVENT_WRITE)
                ready.select()


class Output:
    """The output of some learners, from their start until `close`.

    first: number of the first learner.
    stdout: file descriptor for what they write to their standard output; that of errors is 2.
    directory: for a file of each learner, `learner-N.log`, which is overwritten. With one learner,
    lines have no number. Raises UsageError if a file cannot be made.
    """

    def __init__(
        self, learners: int, *, first: int = 0, stdout: int = 1, directory: Path | None = None
    ) -> None:
        process.allow_files(_FILES_A_LEARNER * learners + 100)
        self._stdout = stdout
        numbers = range(first, first + learners)
        self._prefixes = {number: b"[%d] " % number if learners > 1 else b"" for number in numbers}
        self._logs: dict[int, _Log] = {}
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for number in numbers:
                    self._logs[number] = _Log(directory / f"learner-{number}.log")
            except OSError as error:
                self._close_logs()
                raise UsageError(
                    f"--log-dir {directory}: {error.strerror}; name a directory that can be written"
                ) from None
        sys.stdout.flush()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._new: deque[_Stream] = deque()
        self._asked: deque[threading.Event] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="output", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def pipes(self, number: int) -> Iterator[tuple[int, int]]:
        """Standard output and standard error for a learner that is started meanwhile."""
        log = self._logs.get(number)
        ends = []
        try:
            for to in (self._stdout, 2):
                read, write = os.pipe()
                ends.append(write)
                os.set_blocking(read, False)
                self._new.append(_Stream(read, self._prefixes[number], to, log))
            self._wake()
            yield ends[0], ends[1]
        finally:
            for fd in ends:
                os.close(fd)

    def catch_up(self) -> None:
        """Return when what has been written so far is shown; not later than after WAIT_S."""
        if self._closing:
            return
        done = threading.Event()
        self._asked.append(done)
        self._wake()
        done.wait(WAIT_S)

    def close(self) -> None:
        """Show what is left. Processes that learners have left behind write into nothing then."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(WAIT_S)  # our own reader may have stopped reading

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    # -- in the thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        streams: set[_Stream] = set()
        while not self._closing:
            waiting = any(stream.waits for stream in streams)
            for key, _ in self._selector.select(QUIET_S if waiting else None):
                if key.data is None:
                    os.read(self._wake_read, READ_BYTES)
                    self._take_new(streams)
                    self._answer(streams)
                    continue
                with contextlib.suppress(BlockingIOError):
                    if not key.data.read():
                        self._end(streams, key.data)
            now = time.monotonic()
            for stream in [one for one in streams if one.is_due(now)]:
                if not stream.flush():
                    self._end(streams, stream)
        self._take_new(streams)
        self._answer(streams)
        for stream in list(streams):
            self._end(streams, stream)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._close_logs()

    def _take_new(self, streams: set[_Stream]) -> None:
        while self._new:
            stream = self._new.popleft()
            streams.add(stream)
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _answer(self, streams: set[_Stream]) -> None:
        """Read and shows all that there is, for those who wait for it, and at the end."""
        if not self._asked and not self._closing:
            return
        for stream in list(streams):
            left = LAST_BYTES  # a process that has been left behind may write for ever
            with contextlib.suppress(BlockingIOError):
                while left > 0 and (count := stream.read()):
                    left -= count
                    if stream.is_due(stream.last_read):
                        stream.flush()
            stream.flush()
        while self._asked:
            self._asked.popleft().set()

    def _end(self, streams: set[_Stream], stream: _Stream) -> None:
        streams.discard(stream)
        self._selector.unregister(stream.fd)
        stream.close()

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()
