"""Shared by the crash tests: `import team`, and the lines that they print at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import team`
pytest.register_assert_rewrite("team")

import team  # noqa: E402


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the numbers of deaths, for which long runs are made."""
    for line in team.TOLD:
        terminalreporter.write_line(line)
