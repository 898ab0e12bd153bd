"""Fixtures for what both clients must do; both are driven by tests/clients/."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from clients.both import Makers
from clients.drivers import CC, HERE, LIBRARY, PYTHON, SMALL, Job, Programs, running, starter
from support.turns import Turns


@pytest.fixture(scope="session")
def c_programs(turns: Turns) -> Programs:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    return Programs(turns)


@pytest.fixture
def both(c_programs: Programs, job: Callable[..., Job]) -> Iterator[dict[str, Makers]]:
    """End its learners before the test's jobs, which would wait for them."""
    with ExitStack() as stack:
        hurried = c_programs.build(
            HERE / "driver.c",
            *LIBRARY,
            compiler=[*CC, "-include", HERE / "hurried.h"],
            name="hurried",
        )
        plain = c_programs.build(HERE / "driver.c")
        yield {
            "c": Makers(starter(stack, plain), starter(stack, hurried)),
            "python": Makers(starter(stack, *PYTHON), starter(stack, *PYTHON, "hurried")),
        }


@pytest.fixture(params=["c", "python"])
def client(request: pytest.FixtureRequest, both: dict[str, Makers]) -> Makers:
    return both[request.param]


@pytest.fixture(scope="module")
def small() -> Iterator[Job]:
    with running(SMALL) as started:
        yield started


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Start jobs that end with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(settings))
