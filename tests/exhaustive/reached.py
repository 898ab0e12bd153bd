"""A plugin of pytest: which places that may be left out each test reaches, in any of its processes.

The file that GADEI_PS_REACHED names has a byte for each place. A line of JSON for each test is
written beside it: the test, its seconds, and the numbers of the places.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = Path(os.environ["GADEI_PS_REACHED"])


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set all bytes to zero before a test, and read them when its fixtures have ended."""
    with FILE.open("r+b") as file, mmap.mmap(file.fileno(), 0) as places:
        places[:] = bytes(len(places))
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        numbers = [number for number, reached in enumerate(places) if reached]
    line = {"test": item.nodeid, "seconds": seconds, "reached": numbers}
    with FILE.with_suffix(".jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
