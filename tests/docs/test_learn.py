"""The tutorials in docs/learn: each command is run, and its output is the one on the page.

Numbers, units of times and sizes, the width of spaces, and lines of a log, which begin with a time,
are not compared; a line `...` stands for any lines. `python tests/docs/test_learn.py [PAGE]...`
runs the commands and writes their outputs into the pages.

A fenced block after "Save this as `FILE`" becomes that file. `<!-- learn: background -->` above a
block: it runs beside the next ones. `after`: wait first until that has ended. `skip`: not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as tests/conftest.py does, which a program does not load

from support.tutorials import Block, blocks, fits  # noqa: E402

WRITTEN = sorted(one for one in (ROOT / "docs" / "learn").glob("*.md") if one.stem != "index")
# tests/end_to_end/test_group_run.py runs the commands of replicas: it has a cluster already.
PAGES = [one for one in WRITTEN if one.stem != "replicas"]
FIRST = ROOT / "docs" / "learn" / "first-job.md"  # whose script others use
JOB = "demo"
PATIENCE_S = 900.0
STEPS = "range(1, 4001)"
"""Steps of the first script, each with a gradient."""
FEWER = (
    "__import__('itertools').chain(iter(lambda: __import__('time').sleep(0.01) "
    "or not __import__('os').path.exists('end'), False), (2000, 4000))"
)
"""Slow steps until the file is there, then the two whose loss is printed."""


class Reader:
    """Does what a reader of a page does, in a directory and with a job name of its own."""

    def __init__(self, directory: Path, job: str, *, short: bool = False) -> None:
        """short: the first script trains only as long as the page's commands need it."""
        self.directory, self.job, self._short = directory, job, short
        self.found: dict[tuple[int, int], str] = {}
        """Output by the block's start and the command's number."""
        self._running: list[tuple[int, subprocess.Popen[bytes], Path]] = []
        tools = Path(sys.executable).parent
        self._env = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        }
        (directory / "examples").symlink_to(ROOT / "examples")

    def read(self, page: Path) -> None:
        """Run the page. The files of the first tutorial are there already."""
        if page != FIRST:
            for block in blocks(FIRST.read_text()):
                self._save(block)
        for block in blocks(page.read_text()):
            self._save(block)
            if block.how == "after":
                self._wait()
            if not block.file and block.how != "skip":
                for number, (command, _) in enumerate(block.commands):
                    if block.how == "background":
                        self._start(block.start, command)
                    else:
                        self.found[block.start, number] = self._run(command)
        self._wait()

    def close(self) -> None:
        """End what still runs."""
        for _, process, _ in self._running:
            process.terminate()
            process.wait()

    def _save(self, block: Block) -> None:
        if block.file:
            (self.directory / block.file).write_text(self._own(block.text))

    def _own(self, text: str) -> str:
        text = re.sub(rf"\b{JOB}\b", self.job, text).replace("--for 60s", "--for 4s")
        return text.replace(STEPS, FEWER) if self._short else text

    def _popen(self, command: str, out: Path) -> subprocess.Popen[bytes]:
        with out.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", self._own(command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=self._env,
            )

    def _run(self, command: str) -> str:
        out = self.directory / "out"
        self._popen(command, out).wait(PATIENCE_S)
        return out.read_text().replace(self.job, JOB)

    def _start(self, start: int, command: str) -> None:
        out = self.directory / f"out-{start}"
        (self.directory / "end").unlink(missing_ok=True)  # of the run before
        process = self._popen(command, out)
        self._running.append((start, process, out))
        self._until_trains(process, out)

    def _until_trains(self, process: subprocess.Popen[bytes], out: Path) -> None:
        """Wait until its learners train, or it has ended."""
        until = time.monotonic() + PATIENCE_S
        while process.poll() is None and not self._trains():
            assert time.monotonic() < until, out.read_text()
            time.sleep(0.05)

    def _trains(self) -> bool:
        """Return whether both learners of the job, or of its replicas, train, beside all others."""
        from gadei_ps.errors import GadeiError
        from gadei_ps.job.faults import Processes

        found = []
        for name in (self.job, f"{self.job}-0", f"{self.job}-1"):
            try:
                found.append(Processes(name))
            except (GadeiError, OSError):
                continue
        applied = [
            int(one.control["roster"][learner.row]["applied"])
            for one in found
            for learner in one.learners()
        ]
        ready = all(one.standby() and one.watchdog() and one.fork_server() for one in found)
        return ready and len(applied) >= 2 and all(applied)

    def _wait(self) -> None:
        for start, process, out in self._running:
            self._until_trains(process, out)  # again, if one was killed
            (self.directory / "end").touch()
            process.wait(PATIENCE_S)
            self.found[start, 0] = out.read_text().replace(self.job, JOB)
        self._running.clear()


def differences(page: Path, found: dict[tuple[int, int], str]) -> list[str]:
    """Return the commands whose output is another one."""
    return [
        f"$ {command}\non the page:\n{wanted}\nnow:\n{found[block.start, number]}"
        for block in blocks(page.read_text())
        for number, (command, wanted) in enumerate(block.commands)
        if not block.file and block.how != "skip" and not fits(wanted, found[block.start, number])
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_outputs_are_those_of_the_page(
    page: Path, tmp_path: Path, job_name: str, compiled: None
) -> None:
    pytest.importorskip("torch")
    assert STEPS in FIRST.read_text()
    reader = Reader(tmp_path, job_name, short=True)
    try:
        reader.read(page)
    finally:
        reader.close()
    assert not differences(page, reader.found)


def test_a_second_run_in_the_background_trains_too(tmp_path: Path, job_name: str) -> None:
    reader = Reader(tmp_path, job_name, short=True)
    for number in range(2):
        reader._start(number, "LC_ALL=C ls end")
        reader._wait()
        assert "No such file" in reader.found[number, 0]


def test_another_output_is_found() -> None:
    assert fits("demo: 1,234 gradients in 5 ms\n", "demo:   7 gradients in 1.2 s\n")
    assert fits("in 1 min 9 s\n", "in 4 s\n")
    assert fits("started 11-27 01:13:44\n", "started 12-01 23:00:00\n")
    assert fits("2026-11-27 01:13\n", "2027-01-03 23:00\n")
    assert fits("a\n...\nb 1\n", "a\nx\ny\nb 2\n")
    assert fits("a\n", "a\n12:03:04 [warning  ] failover job=demo\n")
    assert not fits("2 killed\n", "2 lost\n")
    assert not fits("a\n", "a\nb\n")
    page = "Save this as `x.py`:\n\n```python\npass\n```\n\n<!-- learn: skip -->\n"
    file, command = blocks(f"{page}```console\n$ ls\nx\n```\n")
    assert (file.file, file.text) == ("x.py", "pass\n")
    assert (command.how, command.commands) == ("skip", [("ls", "x\n")])


def write(page: Path) -> None:
    """Run the commands of a page, and write their outputs into it if they are others."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as directory:
        reader = Reader(Path(directory), f"learn-{os.getpid()}")
        reader.read(page)
    for block in reversed(list(blocks(text))):
        if not block.file and block.how != "skip":
            new = ""
            for number, (command, old) in enumerate(block.commands):
                found = reader.found[block.start, number]
                new += f"$ {command}\n{old if fits(old, found) else found}"
            text = text[: block.start] + new + text[block.end :]
    page.write_text(text)


if __name__ == "__main__":
    for one in WRITTEN:
        if not sys.argv[1:] or one.stem in sys.argv[1:]:
            write(one)
