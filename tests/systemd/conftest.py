"""A booted systemd with the units of this checkout. `make test-systemd` runs these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import booted`
pytest.register_assert_rewrite("booted", "lanes", "service", "versions", "walk")

import booted  # noqa: E402
from service import Service, install  # noqa: E402

from gadei_ps.kernels import cache  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.systemd)


@pytest.fixture(scope="session")
def manager(compiled: None) -> Iterator[booted.Booted]:
    if why := booted.impossible():
        pytest.skip(f"no systemd can be booted here: {why}")
    with booted.Booted(cache.base()) as made:
        install(made)
        yield made


@pytest.fixture
def service(manager: booted.Booted, job_name: str) -> Iterator[Service]:
    made = Service(manager, job_name)
    yield made
    manager.run("systemctl", "stop", made.unit)
    for _, process in made.learners:
        process.kill()
        process.wait()
