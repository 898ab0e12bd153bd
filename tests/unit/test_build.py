"""The files of a build, while they are replaced, and servers that these files refuse."""

from __future__ import annotations

import os
import selectors
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support import FORK

from gadei_ps.job.config import JobConfig
from gadei_ps.machine import process
from gadei_ps.memory import build
from gadei_ps.memory.layout import CONTROL
from gadei_ps.sync import parse
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.server_starter import ServerStarter
from gadei_ps.watchdog.servers import FILES_INTERVAL_S, Servers


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the package's."""
    for room in build._ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "module.py").write_text("one = 1\n")
    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(build, "of_server", lambda: 1)  # which would be cached for all tests
    return tmp_path


def _replace(room: Path, begun: object) -> None:
    while True:
        for number in range(20):
            (room / f"{number}" / "deep").mkdir(parents=True)
            (room / f"{number}" / "deep" / "module.py").touch()
        begun.set()
        for number in range(20):
            shutil.rmtree(room / f"{number}")


def test_folders_that_come_and_go(package: Path) -> None:
    begun = FORK.Event()
    replacer = FORK.Process(target=_replace, args=(package / "server", begun), daemon=True)
    replacer.start()
    try:
        begun.wait()
        seen = [len(build.files()) for _ in range(1000)]
    finally:
        replacer.kill()
        replacer.join()
    assert min(seen) >= len(build._ROOMS) + 1, "with the extension"
    assert max(seen) > min(seen)


class Lines:
    """A log that keeps its errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, text: str, **_: object) -> None:
        self.errors.append(text)


def test_a_refused_server_is_tried_again_with_other_files(
    package: Path, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files than it was started from, though they be replaced while it starts."""
    gate = package / "gate"
    os.mkfifo(gate)
    server = f"import os; open({str(gate)!r}).read(); os._exit({build.REFUSED})"
    command = [sys.executable, "-S", "-c", server]
    monkeypatch.setattr(process, "module_command", lambda *_: list(command))
    monkeypatch.setattr(ServerStarter, "_start", lambda self, now: None)
    memory = JobMemory(JobConfig(name=job_name, hang_s=60.0))
    memory.create_control(parse("asp"))
    control: Any = memory.control.view(CONTROL)
    lines = Lines()
    selector = selectors.DefaultSelector()
    failed: list[str] = []
    servers = Servers(memory, selector, lines, failed.append)
    now = 0.0

    def look(starts: int) -> None:
        nonlocal now
        now = max(now, servers._looked_at, servers._last_exit) + 2 * FILES_INTERVAL_S
        servers.tick(now)
        assert (int(control["server_starts"]), len(servers.running)) == (starts, starts and 1)

    def refuse() -> None:
        with gate.open("w"):
            pass
        for key, mask in selector.select():
            key.data(mask)
        assert not servers.running and servers.why_alone

    try:
        look(1)
        (package / "server" / "module.py").write_text("another = 1\n")
        refuse()
        look(2)
        refuse()
        for _ in range(3):
            now = max(now, servers._looked_at) + 2 * FILES_INTERVAL_S
            servers.tick(now)
        assert int(control["server_starts"]) == 2, "nothing has changed"
        assert len(lines.errors) == 1 and "no server is left" in lines.errors[0]
        (package / "server" / "other.py").touch()
        look(3)
        refuse()
        servers.tick(now + FILES_INTERVAL_S / 2)
        assert len(lines.errors) == 2, "it is logged once for each build"
        assert not failed
    finally:
        for one in list(servers.running.values()):
            one.kill("the test is over")
            one.made.child.wait()
            os.close(one.pidfd)
        selector.close()
        memory.remove()
