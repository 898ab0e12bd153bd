"""Learners that cannot be started."""

from __future__ import annotations

import os
import resource

import pytest

from gadei_ps.errors import UsageError
from gadei_ps.machine.launch import Learners


def test_no_descriptor_is_free() -> None:
    """One line, with what to do."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(UsageError) as said:
            Learners(["/bin/true"], 2, "none")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert str(said.value) == (
        "cannot start '/bin/true': Too many open files; raise the limit of open files (ulimit -n)"
    )
