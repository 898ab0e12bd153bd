"""What the crash tests share: `import team`, how long they go on, and what they say at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import team`
pytest.register_assert_rewrite("team")

import team  # noqa: E402


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many deaths there were: a long run is made for this number."""
    for line in team.TOLD:
        terminalreporter.write_line(line)
