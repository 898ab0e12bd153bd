"""`gadei-ps serve` as a service of systemd: a real notify socket in the manager's place."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shell import Cli, Running
from support import eventually, gone, segments, status

from gadei_ps import segment
from gadei_ps.learners.client import Client

MODEL = "standby = false\n[[tensors]]\nname = 'w'\nshape = [100]\n"
WATCHDOG_S = 2.0


class Manager:
    """systemd's end: every assignment that it has heard, in order."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard: list[tuple[str, str]] = []
        self.times: list[float] = []  # of WATCHDOG=1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(0.05)

    def listen(self) -> None:
        """Takes the next message, if one comes soon."""
        try:
            message = self._socket.recv(4096).decode()
        except TimeoutError:
            return
        for line in message.splitlines():
            name, _, value = line.partition("=")
            self.heard.append((name, value))
            if name == "WATCHDOG":
                self.times.append(time.monotonic())

    def said(self, name: str) -> list[str]:
        return [value for one, value in self.heard if one == name]

    def wait(self, name: str, count: int = 1) -> list[str]:
        """Until it has said so, and so often."""

        def heard() -> list[str]:
            self.listen()
            return self.said(name) if len(self.said(name)) >= count else []

        found: list[str] = eventually(heard, what=lambda: self.heard)
        return found

    def hush(self) -> None:
        """Takes what has been said."""
        before = -1
        while len(self.heard) > before:
            before = len(self.heard)
            self.listen()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Manager]:
    made = Manager(runtime_dir / "notify")
    yield made
    made.close()


def start(cli: Cli, manager: Manager, job: str, text: str) -> Running:
    """As the unit does; WATCHDOG_PID would be the child's, which nobody knows yet."""
    file = cli.directory / f"{job}.toml"
    file.write_text(text)
    cli.made(job)
    return cli.start(
        "serve",
        file,
        NOTIFY_SOCKET=manager.path,
        WATCHDOG_USEC=str(int(WATCHDOG_S * 1e6)),
    )


def test_ready_means_that_a_learner_can_attach(cli: Cli, manager: Manager, job_name: str) -> None:
    service = start(cli, manager, job_name, MODEL)
    assert manager.wait("READY") == ["1"]
    with Client(job_name) as client:  # at the first attempt
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        eventually(
            lambda: manager.listen() or "1 learner, version 1, 0/s" in manager.said("STATUS"),
            what=lambda: manager.said("STATUS"),
        )
    eventually(lambda: manager.listen() or manager.said("STATUS")[-1].startswith("0 learners"))
    assert "STOPPING" not in dict(manager.heard)
    service.process.terminate()
    assert service.wait().code == 0
    manager.hush()
    assert manager.said("READY") == manager.said("STOPPING") == ["1"]
    (limit,) = manager.said("EXTEND_TIMEOUT_USEC")
    assert int(limit) > 10e6
    names = [name for name, _ in manager.heard]
    assert names.index("READY") < names.index("STOPPING")


def test_a_stop_by_command_is_announced(cli: Cli, manager: Manager, job_name: str) -> None:
    service = start(cli, manager, job_name, MODEL + "[checkpoint]\nevery_s = 0\n")
    manager.wait("READY")
    cli("stop", job_name)
    assert service.wait().code == 0
    manager.hush()
    assert manager.said("STOPPING") == ["1"]
    (limit,) = manager.said("EXTEND_TIMEOUT_USEC")
    assert int(limit) > 600e6, "the last checkpoint may take its time"


def test_what_cannot_start_is_never_ready(cli: Cli, manager: Manager, job_name: str) -> None:
    service = start(cli, manager, job_name, MODEL + "weights = 'nowhere'\n[optimizer]\nlr = -1\n")
    assert service.wait().code != 0
    manager.hush()
    assert "READY" not in dict(manager.heard)


def test_pings(cli: Cli, manager: Manager, job_name: str) -> None:
    """More often than systemd wants them; none while the watchdog hangs."""
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    manager.wait("WATCHDOG", len(manager.times) + 3)
    gaps = np.diff(manager.times[-3:])
    assert gaps.max() < WATCHDOG_S, gaps
    assert gaps.min() > WATCHDOG_S / 4, "but not on every turn of its loop"
    service.process.send_signal(signal.SIGSTOP)
    eventually(lambda: b") T" in Path(f"/proc/{service.pid}/stat").read_bytes())
    manager.hush()
    before = len(manager.times)
    until = time.monotonic() + WATCHDOG_S
    while time.monotonic() < until:
        manager.listen()
    assert len(manager.times) == before
    service.process.send_signal(signal.SIGCONT)
    manager.wait("WATCHDOG", before + 1)


def test_nobody_else_speaks_in_its_name(cli: Cli, manager: Manager, job_name: str) -> None:
    """Servers and learners do not inherit the socket: systemd would take them for the service."""
    script = """
        from gadei_ps.learners.client import Client
        with Client() as client:
            client.push({})
            client.take_batch()  # there will be none
    """
    (cli.directory / "learner.py").write_text(textwrap.dedent(script))
    command = json.dumps([sys.executable, str(cli.directory / "learner.py")])
    text = MODEL.replace("standby = false\n", "") + f"[learners]\ncommand = {command}\n"
    start(cli, manager, job_name, text)
    manager.wait("READY")
    eventually(lambda: status(job_name)["standby_pid"])
    eventually(lambda: status(job_name)["version"] > 0)
    pids = segment.server_pids(job_name)
    pids += [row["pid"] for row in status(job_name)["learners"]]
    assert len(pids) == 3
    for pid in pids:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {line.partition(b"=")[0] for line in environ}
        assert b"PATH" in names
        assert not names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"}


def test_a_restart_adopts(cli: Cli, manager: Manager, job_name: str) -> None:
    """As systemd restarts a service whose watchdog it has killed: KillMode=process."""
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    with Client(job_name) as client:
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        server = status(job_name)["server_pid"]
        service.signal(signal.SIGKILL)
        service = start(cli, manager, job_name, MODEL)
        manager.wait("READY", 2)
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        now = status(job_name)
        assert (now["server_pid"], now["watchdog_pid"]) == (server, service.pid)
        assert [row["pid"] for row in now["learners"]] == [os.getpid()]
    service.process.terminate()
    assert service.wait().code == 0
    assert gone(server)
    assert not segments(job_name)
