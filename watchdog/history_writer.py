"""A process that writes a job's history: a disk may be full, or block whoever writes to it.

It reads lines from its standard input until that ends, with the watchdog. What cannot be written is
kept for a while, as far as that is bounded. On standard output it reports a problem, and its end by
an empty line. Imports little: it lives as long as its job.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

from gadei_ps.machine import command_line, lines
from gadei_ps.storage import history_file
from gadei_ps.storage.history_file import HistoryFile

KEPT = 1000  # lines that wait for the disk


class Writer:
    """Writes lines to one file."""

    def __init__(self, path: Path, fresh: bool) -> None:
        """fresh: as for HistoryFile."""
        self._path = path
        self._fresh = fresh
        self._file: HistoryFile | None = None
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=KEPT)
        self._problem = ""
        self._command = ""  # of the last learner

    def write(self, line: bytes) -> None:
        """Write the lines and the notes. Raises nothing."""
        whole = self._with_command(line)
        self._waiting += [whole] * bool(whole)
        if self._file is None and (whole != line or _is_event(line)):
            return  # a job without a gradient leaves the history of the job before
        problem = ""
        try:
            if self._file is None:
                self._file = HistoryFile(self._path, fresh=self._fresh)
                self._fresh = False
            while self._waiting:
                self._file.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            problem = error.strerror or str(error)
        except ValueError as error:  # of what stands in the file
            problem = str(error)
        if problem != self._problem:
            self._problem = problem
            lines.write(1, problem.partition("\n")[0].encode(errors="replace"))

    def _with_command(self, raw: bytes) -> bytes:
        """Replace a learner's pid in a line by its command line; empty if that is known already."""
        if b'"pid":' not in raw or _is_event(raw):
            return raw
        values = json.loads(raw)
        command = command_line.of(values.pop("pid"))
        if command in ("", self._command):
            return b""
        self._command = command
        return history_file.line(values | {"command": command})


def _is_event(raw: bytes) -> bool:
    """Return whether the line is about processes of the job or its checkpoints."""
    return b'"event":' in raw and "event" in json.loads(raw)


def main() -> None:
    """`python -m gadei_ps.watchdog.history_writer FILE FRESH`: started by the watchdog."""
    writer = Writer(Path(sys.argv[1]), bool(int(sys.argv[2])))
    with open(0, "rb", closefd=False) as stdin:
        for line in stdin:
            if line.endswith(b"\n"):  # else the watchdog has died within it
                writer.write(line)


if __name__ == "__main__":
    main()
