"""Shared by the counts: whether the whole of each is run, and the lines that they print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import lines` and others
pytest.register_assert_rewrite("counted", "preloaded", "rounds", "scenes", "served")

WHOLE = bool(os.environ.get("CRASH_ALL"))  # else a subset that is chosen deterministically
TOLD: list[str] = []  # a line of figures for each count, printed at the end of the run


@pytest.fixture(scope="session")
def whole() -> bool:
    """Return whether the whole count is run."""
    return WHOLE


@pytest.fixture(scope="session")
def report() -> list[str]:
    """Take the line of figures of a count."""
    return TOLD


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, for which whole counts are made."""
    for line in TOLD:
        terminalreporter.write_line(line)
