"""Notifications to systemd: a real datagram socket in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PATIENCE_S, Manager, eventually

from gadei_ps.watchdog.notify import Notify

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, runtime_dir: Path) -> Iterator[Manager]:
    path = str(runtime_dir / "notify")
    made = Manager(path if request.param == "path" else f"@{path}")
    yield made
    made.close()


@pytest.fixture
def notify(manager: Manager) -> Iterator[Notify]:
    made = Notify(manager.address)
    yield made
    made.close()


def test_a_life(manager: Manager, notify: Notify) -> None:
    notify.status("recovering")
    notify.ready()
    notify.stopping(2.5)
    messages = manager.heard()
    assert messages == ["STATUS=recovering", "READY=1", "STOPPING=1\nEXTEND_TIMEOUT_USEC=2500000"]
    notify.stopping()
    assert manager.heard() == ["STOPPING=1"]


def test_a_status_is_one_line_and_said_once(manager: Manager, notify: Notify) -> None:
    for _ in range(3):
        notify.status("2 learners,\nSTOPPING=1 \udcff")
    assert manager.heard() == ["STATUS=2 learners, STOPPING=1 ?"]
    notify.status("3 learners")
    assert manager.heard() == ["STATUS=3 learners"]


def test_the_environment(manager: Manager) -> None:
    environ = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
        "HOME": "/",
    }
    notify = Notify.from_environment(environ)
    assert environ == {"HOME": "/"}
    assert notify.enabled
    assert notify.interval_s == 1.5
    notify.ready()
    assert manager.heard() == ["READY=1"]
    notify.close()


def test_children_do_not_inherit_it(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, (manager.address, "1000", str(os.getpid())), strict=True):
        monkeypatch.setenv(name, value)
    notify = Notify.from_environment()
    script = f"import os; print([name for name in {VARIABLES} if name in os.environ])"
    script += f"; print(os.path.exists('/proc/self/fd/{notify._socket.fileno()}'))"  # type: ignore[union-attr]
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, close_fds=False
    )
    assert child.stdout == b"[]\nFalse\n"
    notify.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"},  # asked of the parent
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "9" * 400},
        {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "-1"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "relative"},
        {"NOTIFY_SOCKET": "/no/such/socket"},
        {"NOTIFY_SOCKET": "/" + "x" * 200},
        {"NOTIFY_SOCKET": "@"},
    ],
)
def test_with_nobody_to_tell_nothing_happens(environ: dict[str, str]) -> None:
    notify = Notify.from_environment(environ)
    assert environ == {}
    assert notify.interval_s is None
    notify.status("text")
    notify.ready()
    notify.watchdog()
    notify.stopping(1)
    notify.close()
    notify.ready()
    notify.close()


def test_pings_come_once_in_an_interval(manager: Manager) -> None:
    notify = Notify(manager.address, interval_s=0.2)
    begin = time.monotonic()
    messages: list[str] = []

    def pinged() -> bool:
        notify.watchdog()
        messages.extend(manager.heard())
        return len(messages) == 3

    eventually(pinged)
    assert time.monotonic() >= begin + 0.4
    assert set(messages) == {"WATCHDOG=1"}
    notify.close()


def test_without_a_watchdog_there_are_no_pings(manager: Manager, notify: Notify) -> None:
    for _ in range(3):
        notify.watchdog()
    assert manager.heard() == []


def test_a_slow_manager_is_not_waited_for_and_hears_the_rest_later(
    manager: Manager, notify: Notify
) -> None:
    begin = time.monotonic()
    for number in range(2000):  # more than any queue of datagrams holds
        notify.status(f"number {number}")
    notify.ready()
    assert time.monotonic() - begin < PATIENCE_S
    taken = manager.heard()
    assert "READY=1" not in "".join(taken)
    assert 0 < len(taken) < 2000
    notify.watchdog()
    assert manager.heard() == ["STATUS=number 1999\nREADY=1"]
    notify.watchdog()
    assert manager.heard() == []


def test_a_manager_may_go_and_come_back(runtime_dir: Path) -> None:
    path = runtime_dir / "notify"
    first = Manager(str(path))
    notify = Notify(str(path), interval_s=0.001)
    first.close()
    notify.ready()
    notify.watchdog()
    path.unlink()
    notify.status("on")
    second = Manager(str(path))
    messages = eventually(lambda: notify.watchdog() or second.heard())
    assert messages == ["READY=1\nSTATUS=on\nWATCHDOG=1"]
    second.close()
    notify.close()


def test_a_start_that_goes_on(runtime_dir: Path) -> None:
    manager = Manager(str(runtime_dir / "notify"))
    notify = Notify(str(runtime_dir / "notify"))
    for done in (1, 1, 2, 2):
        notify.starting(180.0, done)
    notify.ready()
    more = "EXTEND_TIMEOUT_USEC=180000000"
    assert manager.heard() == [more, more, "READY=1"], "only where it has got on"
    manager.close()
    notify.close()


def test_more_time_is_asked_for_again(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that is executed again has forgotten it. Without progress no more is asked for."""
    manager = Manager(str(runtime_dir / "notify"))
    notify = Notify(str(runtime_dir / "notify"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    notify.watchdog()
    notify.stopping(8.0)
    notify.watchdog()
    now += 6
    notify.watchdog()
    notify.watchdog()
    now += 6
    notify.watchdog()
    notify.more_time(60.0)
    notify.watchdog()
    assert manager.heard() == [
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=8000000",
        "EXTEND_TIMEOUT_USEC=2000000",
        "EXTEND_TIMEOUT_USEC=60000000",
    ]
    manager.close()
    notify.close()
