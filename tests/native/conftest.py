"""Fixtures for tests of the C sources: compiled programs, learners in C, real jobs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from clients.drivers import (
    CC,
    HERE,
    LIBRARY,
    SANITIZERS,
    SMALL,
    WIDE,
    Job,
    Learner,
    Programs,
    running,
    starter,
)
from support.turns import Turns


@pytest.fixture(scope="session")
def programs(turns: Turns) -> Programs:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return Programs(turns)


def _hurried(programs: Programs) -> Path:
    compiler = [*CC, "-include", HERE / "hurried.h"]
    return programs.build(HERE / "driver.c", *LIBRARY, compiler=compiler, name="hurried")


@pytest.fixture
def learner(programs: Programs) -> Iterator[Callable[[], Learner]]:
    """Start learners in C; they end with the test."""
    with ExitStack() as stack:
        # With sanitizers, a program takes long to compile: one is enough.
        program = _hurried(programs) if SANITIZERS else programs.build(HERE / "driver.c")
        yield starter(stack, program)


@pytest.fixture
def hurried(programs: Programs) -> Iterator[Callable[[], Learner]]:
    """Start learners with waits of half a second instead of ten."""
    with ExitStack() as stack:
        yield starter(stack, _hurried(programs))


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Start jobs that end with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(settings))


@pytest.fixture(scope="session")
def job_of() -> Callable[..., Any]:
    """`running`, for fixtures with a scope of their own."""
    return running


@pytest.fixture(scope="module")
def small() -> Iterator[Job]:
    """A job with a small model and one shard, for all tests of the module."""
    with running(SMALL) as started:
        yield started


@pytest.fixture(scope="module")
def wide() -> Iterator[Job]:
    """A job with several shards, for all tests of the module."""
    with running(WIDE) as started:
        yield started
