"""Shared by the crash tests: their own modules, the recorder of stores, the lines printed last."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.drivers import CC, Programs
from support.models import verify
from support.turns import Turns

sys.path.insert(0, str(Path(__file__).parent))  # for `import team`
pytest.register_assert_rewrite("team", "traces")

import team  # noqa: E402
from traces import Recorder  # noqa: E402


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers of deaths, for which long runs are made."""
    for line in team.TOLD:
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def recorder(turns: Turns) -> Callable[[list[tuple[int, int]]], Recorder]:
    """Make recorders of words: of each its address and its bytes."""
    verify()
    compiler = [*CC, "-shared", "-fPIC"]
    library = Programs(turns).build(
        Path(__file__).parent / "stores.c", "-lrt", compiler=compiler, name="libstores.so"
    )
    return functools.partial(Recorder, library)
