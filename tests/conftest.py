"""What every test gets: names and places of its own, and a check that it leaves nothing behind."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# For `import support`, `import shell` and `import emulator`.
sys.path[:0] = [str(HERE), str(HERE / "cli"), str(HERE / "gpu")]
pytest.register_assert_rewrite("support", "shell")

import support  # noqa: E402
from shell import Cli  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36
JOBS = f"t{os.getpid()}-"
_numbers = itertools.count()


def pytest_configure() -> None:
    """Orphans of killed processes become our children, so that the check below sees them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A shell gives what it runs in the background, as nohup does, ignored signals: the processes
    # under test would inherit them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory for sockets; its path is short, as an address of AF_UNIX must be.

    Checkpoints go elsewhere: to tmp_path / "state".
    """
    path = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(path))
    monkeypatch.setenv("GADEI_PS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("GADEI_PS_JOB", raising=False)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def job_name(runtime_dir: Path) -> str:
    """A job name that no other test has."""
    return f"{JOBS}{next(_numbers)}"


@pytest.fixture
def cli(runtime_dir: Path, tmp_path: Path) -> Iterator[Cli]:
    """Runs gadei-ps; what it has started is ended after the test."""
    made = Cli(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test no process of it runs and no segment of its jobs exists."""
    before = support.children()
    yield
    support.eventually(
        lambda: not support.children() - before, 15, lambda: support.described(before)
    )
    support.eventually(lambda: not support.segments(JOBS), 5, lambda: support.segments(JOBS))
