"""Fixtures of the end-to-end tests: some of them use jobs as the command line serves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))  # for `import shell`
pytest.register_assert_rewrite("shell")

from shell import Cli  # noqa: E402


@pytest.fixture
def cli(runtime_dir: Path, tmp_path: Path) -> Iterator[Cli]:
    made = Cli(tmp_path)
    yield made
    made.close()
