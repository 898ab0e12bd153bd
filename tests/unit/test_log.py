"""Write priorities of log lines to the journal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

CODE = """
import sys
from gadei_ps.machine import log
log.set_up(as_json="json" in sys.argv, verbose=True)
one = log.get(job="demo")
one.debug("a")
one.info("b\\x1b]0;x\\x07", path="/\\x9b2J", more=["\\x1b"])
one.warning("c")
one.error("d")
one.critical("e")
try:
    1 / 0
except ZeroDivisionError:
    one.exception("f")
"""


def logged(*arguments: str, journal: bool) -> list[str]:
    """Return lines on a stderr that JOURNAL_STREAM names, or another one."""
    read, write = os.pipe()
    status = os.fstat(write)
    stream = f"{status.st_dev}:{status.st_ino + (not journal)}"
    with os.fdopen(read) as lines:
        subprocess.run(
            [sys.executable, "-c", CODE, *arguments],
            stderr=write,
            env=os.environ | {"JOURNAL_STREAM": stream},
            check=True,
        )
        os.close(write)
        return lines.read().splitlines()


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_journal_is_told_priorities(form: str) -> None:
    lines = logged(form, journal=True)
    assert [line[:3] for line in lines[:5]] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    # A line that says none would be one of the lowest that is shown.
    assert all(line.startswith("<3>") for line in lines[5:])
    if form == "json":
        (entry,) = (json.loads(line[3:]) for line in lines[5:])
        assert entry["event"] == "f"
        assert "ZeroDivisionError" in entry["exception"]


def test_others_are_not() -> None:
    assert not [line for line in logged(journal=False) if re.match("<[0-9]>", line)]


@pytest.mark.parametrize("form", ["json", "text"])
def test_text_of_others_is_escaped(form: str) -> None:
    text = "\n".join(logged(form, journal=False))
    assert "]0;x" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
