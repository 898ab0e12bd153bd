"""A directory on a disk that is full after a few KiB."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size, such as 16k; skips the test where this user cannot mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "gadei-ps-test", directory]
    if os.geteuid() or subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
