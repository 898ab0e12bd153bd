"""Command lines of processes, as people are shown them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import eventually

from gadei_ps.machine import command_line
from gadei_ps.storage import history_file

WAIT = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--lr", "0.1", "a b"], "--lr 0.1 'a b'"),
        (["--api-key", "hush", "--lr=1"], "--api-key ... --lr=1"),
        (["--token=hush", "--password", "--verbose"], "--token=... --password --verbose"),
        (["PASSWORD=hush", "https://me:hush@host/x"], "PASSWORD=... https://...@host/x"),
        (["a\nb"], "'a b'"),
    ],
)
def test_what_a_process_runs(arguments: list[str], shown: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", WAIT, *arguments])
    try:
        words = eventually(lambda: command_line.of(child.pid))  # empty while exec() is not done
    finally:
        child.kill()
        child.wait()
    assert words.startswith("python")
    assert words.endswith(f" -c '{WAIT}' {shown}")
    assert "hush" not in words
    assert command_line.of(child.pid) == ""


def test_a_learner_that_comes_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows what its user has typed: the command that has started it."""
    known = {
        7: [sys.executable, "-P", "-m", "gadei_ps.classifier.learner", "/proc/5/fd/3"],
        8: [sys.executable, "-P", "-m", "gadei_ps.classifier.learner"],
        os.getppid(): ["/opt/bin/python3", "/opt/bin/gadei-ps", "train", "my file.csv"],
    }
    monkeypatch.setattr(command_line, "_words", lambda pid: known.get(pid, []))
    monkeypatch.setattr(command_line, "_parent", lambda pid: {7: 8, 8: os.getppid()}.get(pid, 0))
    assert command_line.of(7) == "gadei-ps train 'my file.csv'"
    monkeypatch.undo()
    assert command_line._parent(os.getpid()) == os.getppid()
    assert (command_line._parent(0), command_line.of(0)) == (0, "")


def test_the_longest_one_fits_a_history() -> None:
    assert history_file.line({"time": 1.0, "version": 2**63, "command": "\U0001f600" * 300})
