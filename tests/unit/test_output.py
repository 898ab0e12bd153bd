"""Output of several learners at a time, as lines of one output."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import support
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.errors import UsageError
from gadei_ps.machine import output
from gadei_ps.machine.output import Output, _Stream


class Shown:
    """Text that has been written to a pipe by now."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        while data := os.read(self._read, 1 << 16):
            self._parts.append(data)
        os.close(self._read)

    @property
    def text(self) -> bytes:
        return b"".join(self._parts)

    def close(self) -> bytes:
        os.close(self.fd)
        self._thread.join()
        return self.text


@contextmanager
def shown() -> Iterator[Shown]:
    one = Shown()
    try:
        yield one
    finally:
        if one._thread.is_alive():
            one.close()


def started(lines: Output, index: int, script: str) -> subprocess.Popen[bytes]:
    with lines.pipes(index) as (stdout, stderr):
        return subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(script)], stdout=stdout, stderr=stderr
        )


def test_lines_of_learners_do_not_mix() -> None:
    """Half lines of one learner, while the other one prints."""
    with shown() as to:
        lines = Output(2, stdout=to.fd)
        with lines.pipes(0) as (one, _), lines.pipes(1) as (other, _):
            for number in range(50):
                os.write(one, b"a" * 5)
                os.write(other, b"line %d\nh" % number)
                os.write(other, b"alf ")
                lines.catch_up() if number % 10 == 0 else None
                os.write(one, b"b\n")
            os.write(other, b"end")
        lines.close()
        found = to.close().splitlines()
    assert found.count(b"[0] aaaaab") == 50
    assert next(one for one in found if one.startswith(b"[1]")) == b"[1] line 0"
    assert found.count(b"[1] half end") == 1, "a last line without an end"
    assert {one[:4] for one in found} == {b"[0] ", b"[1] "}


def test_what_is_no_text(tmp_path: Path) -> None:
    """Send bytes of all kinds without an end: parts are shown, and all is in the file."""
    endless = bytes(range(14, 256)) * 2000
    with shown() as to:
        lines = Output(1, stdout=to.fd, directory=tmp_path / "logs")
        with lines.pipes(0) as (one, _):
            os.write(one, b"\n\nfirst\r\n")
            left = memoryview(endless)
            while left:
                left = left[os.write(one, left[:5000]) :]
        lines.close()
        text = to.close()
    assert text.startswith(b"\n\nfirst\n")
    assert text[8:].replace(b"\n", b"") == endless
    assert max(map(len, text.split(b"\n"))) == output.MOST_BYTES
    assert (tmp_path / "logs" / "learner-0.log").read_bytes() == b"\n\nfirst\r\n" + endless


def test_progress_bars(tmp_path: Path) -> None:
    """One state of many that come within a second, and the last one."""
    bar = b"".join(b"\r%3d%%|##" % number for number in range(100))
    with shown() as to:
        lines = Output(2, stdout=to.fd, directory=tmp_path)
        with lines.pipes(1) as (one, _):
            os.write(one, bar + b"\ndone\n")
        lines.close()
        found = to.close().splitlines()
    assert found == [b"[1]   0%|##", b"[1]  99%|##", b"[1] done"]
    assert (tmp_path / "learner-1.log").read_bytes() == bar + b"\ndone\n"


@given(st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"\r", b""))), st.data())
def test_nothing_is_lost_however_it_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    """A stream's lines do not depend on the reads by which they come."""
    text = b"\r\n".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    read, write = os.pipe()
    try:
        stream = _Stream(os.open(os.devnull, os.O_RDONLY), b"", write, None)
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            stream._take(text[begin:end])
        stream.close()
        os.write(write, b".")
        found = os.read(read, 1 << 16)[:-1]
    finally:
        os.close(read)
        os.close(write)
    lines = text.replace(b"\r\n", b"\n")
    assert found == lines + (b"" if lines.endswith(b"\n") or not lines else b"\n")


def test_a_child_that_keeps_the_pipe() -> None:
    """It outlives its learner, and prints without end."""
    with shown() as to:
        lines = Output(2, stdout=to.fd)
        left = "import os\nos.read(0, 1)\nwhile True: os.write(1, b'left behind' * 100)"
        learner = started(
            lines,
            0,
            f"""
            import subprocess, sys
            child = subprocess.Popen(
                [sys.executable, "-c", {left!r}], start_new_session=True, stdin=subprocess.PIPE
            )  # it prints once this process has ended: their lines do not mix
            print("child", child.pid)
            """,
        )
        assert learner.wait() == 0
        support.eventually(lambda: b"left behind" in to.text)
        lines.close()
        text = to.close()
    pid = int(text.partition(b"[0] child ")[2].split()[0])
    support.eventually(lambda: support.gone(pid), what=lambda: "it writes into nothing")


def test_lines_before_a_death_are_shown() -> None:
    """catch_up() returns once they are."""
    with shown() as to:
        lines = Output(2, stdout=to.fd)
        learner = started(
            lines, 1, "print('last words', flush=True); import os; os.kill(os.getpid(), 9)"
        )
        learner.wait()
        lines.catch_up()
        support.eventually(lambda: to.text == b"[1] last words\n")
        lines.close()


def test_nobody_reads_it(tmp_path: Path) -> None:
    """Check that learners see it as without the pipe between; files are still written."""
    forever = "while True: print('x' * 1000)"
    read, write = os.pipe()
    os.close(read)
    lines = Output(1, stdout=write)
    learner = started(lines, 0, forever)
    assert learner.wait() != 0, "a broken pipe"
    lines.close()
    lines = Output(1, stdout=write, directory=tmp_path)
    learner = started(lines, 0, "print('x' * 200_000); print('end')")
    assert learner.wait() == 0
    lines.close()
    os.close(write)
    assert (tmp_path / "learner-0.log").read_bytes().endswith(b"x\nend\n")


def test_a_full_disk(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "learner-0.log").symlink_to("/dev/full")
    with shown() as to:
        lines = Output(1, stdout=to.fd, directory=tmp_path)
        with lines.pipes(0) as (one, _):
            os.write(one, b"one\n")
            lines.catch_up()
            os.write(one, b"two\n")
        lines.close()
        assert to.close() == b"one\ntwo\n"
    printed = capfd.readouterr().err
    assert printed.count("learner-0.log: No space left on device; the rest is not written") == 1
    with pytest.raises(UsageError, match=r"--log-dir /dev/null: .*; name a directory"):
        Output(2, directory=Path("/dev/null"))


def test_learners_of_a_run_are_not_held_up() -> None:
    """No descriptor is left, and no thread."""
    gc.collect()  # else what other tests have left may be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    lines = Output(3)
    with lines.pipes(0), lines.pipes(1), lines.pipes(2):
        pass
    lines.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert "output" not in {one.name for one in threading.enumerate()}
