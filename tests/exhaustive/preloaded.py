"""A process that does what it is asked, with a C library of this folder loaded before others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@contextmanager
def preloaded(source: str, program: str) -> Iterator[subprocess.Popen[str]]:
    """source: of the library, in C. program: in Python; reads a JSON object a line, and answers."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    directory = Path(tempfile.mkdtemp(prefix="gps-preloaded-"))
    library = directory / "library.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-o", library, HERE / source, "-ldl"],
        check=True,
    )
    process = subprocess.Popen(
        [sys.executable, "-P", HERE / program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(library)},
    )
    try:
        yield process
    finally:
        process.communicate()
        shutil.rmtree(directory)


def ask(process: subprocess.Popen[str], what: dict[str, Any]) -> Any:
    """The answer to one line."""
    assert process.stdin
    assert process.stdout
    print(json.dumps(what), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())
