"""A child that dies of a fatal signal prints nothing into a passing run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import FAULTS, fork

TESTS = Path(__file__).parents[1]
FAILS = """
from test_fatal_signals import dies_of_a_signal

def test_that_fails():
    dies_of_a_signal()
    assert False
"""


def _dies(pipe: Connection) -> None:
    ctypes.string_at(0)


def dies_of_a_signal() -> None:
    with fork(1, _dies) as (child,):
        assert child.join() < 0


def test_its_report_goes_into_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    dies_of_a_signal()
    assert b"Segmentation fault" in os.pread(FAULTS.fileno(), 1000, 0)
    assert "Segmentation fault" not in capfd.readouterr().err


@pytest.mark.parametrize("fails", [True, False])
def test_a_test_that_fails_shows_it(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(FAILS if fails else FAILS.replace("False", "True"))
    paths = (tmp_path, TESTS, TESTS / "cli", TESTS / "gpu", TESTS / "unit")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", tmp_path]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert run.returncode == fails, run.stdout + run.stderr
    assert ("Segmentation fault" in run.stdout + run.stderr) == fails
