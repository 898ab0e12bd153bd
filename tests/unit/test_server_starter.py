"""Fork servers that end, speak nonsense or cannot be started: how often they are tried."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support import eventually

from gadei_ps.machine import log, process
from gadei_ps.memory import build
from gadei_ps.watchdog import fork_server, server_starter
from gadei_ps.watchdog.fork_server import ForkServer
from gadei_ps.watchdog.server_starter import ServerStarter

SAYS = "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); end.send({!r}); {}"
READY = b'{"kind": "Ready"}'


class Tries:
    """A starter whose fork servers are these programs, and how often one was started."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.starter = ServerStarter(
            self.selector, log.get(), lambda _: None, lambda _: None, self.died
        )
        self.started = self.deaths = 0
        self.program = ""
        self.error: OSError | None = None

    def died(self) -> None:
        self.deaths += 1

    def start(self) -> ForkServer:
        self.started += 1
        if self.error is not None:
            raise self.error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-S", "-c", self.program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        return ForkServer(child, os.pidfd_open(child.pid), ours, build.files())

    def hear(self) -> None:
        for key, mask in self.selector.select(0.05):
            key.data(mask)

    def die(self, now: float) -> None:
        """Start one at this time, and receive all until its end."""
        self.starter.tick(now)
        eventually(lambda: self.hear() or not (self.starter.pid or self.starter._ending))


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tries]:
    made = Tries()
    monkeypatch.setattr(fork_server, "start", made.start)
    yield made
    made.starter.close()
    made.selector.close()


@pytest.mark.parametrize("says", [READY, b'{"kind": "Other"}', b"nonsense", b'{"kind": "Started"}'])
def test_one_that_is_of_no_use_is_started_ever_more_slowly(tries: Tries, says: bytes) -> None:
    tries.program = SAYS.format(says, "")
    tries.die(0.0)
    at = tries.starter._died_at
    tries.die(at)
    at = tries.starter._died_at
    for early in (0.1, 0.4):
        tries.starter.tick(at + early)
    assert tries.started == 2
    tries.die(at + 0.6)
    assert tries.started == tries.deaths == 3


def test_one_that_cannot_be_started_is_not_tried_at_each_look(tries: Tries) -> None:
    """Also not after one that was of use."""
    tries.program = SAYS.format(READY, "__import__('time').sleep(1000)")
    tries.starter.tick(0.0)
    eventually(lambda: tries.hear() or tries.starter._ready_at is not None)
    tries.starter._has_started_any = True
    tries.starter._fork_server.child.kill()  # type: ignore[union-attr]
    eventually(lambda: tries.hear() or not (tries.starter.pid or tries.starter._ending))
    tries.error = OSError(11, "none is available")
    now = tries.starter._died_at
    for tick in range(100):
        tries.starter.tick(now + tick / 100)
    assert tries.started <= 1 + 3


def test_one_of_another_build_is_tried_again_with_other_files(
    tries: Tries, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries.program = f"raise SystemExit({build.REFUSED})"
    tries.die(0.0)
    now = tries.starter._died_at
    for tick in range(1, 50):
        tries.starter.tick(now + tick)
    assert tries.started == 1
    monkeypatch.setattr(build, "files", lambda: frozenset({("other", 1, 1)}))
    tries.die(now + 60)
    assert (tries.started, tries.deaths) == (2, 0)


def test_one_that_the_kernel_does_not_end_blocks_nothing(
    tries: Tries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continue the watchdog's one thread. It starts another process in the end."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    monkeypatch.setattr(process, "send_signal", lambda child, number: None)
    monkeypatch.setattr(server_starter, "FORK_SERVER_KILL_S", 1000.0)
    tries.program = SAYS.format(READY, "end.close(); __import__('time').sleep(1000)")
    tries.starter.tick(0.0)
    blocked = tries.starter._fork_server.child  # type: ignore[union-attr]
    eventually(lambda: tries.hear() or not tries.starter.pid)
    assert blocked.poll() is None
    now = time.monotonic()
    tries.starter.tick(now + 500)
    assert tries.started == 1
    tries.starter.tick(now + 2000)
    assert (tries.started, tries.deaths) == (2, 1)
    monkeypatch.setattr(server_starter, "FORK_SERVER_KILL_S", 0.0)
    for one in (blocked, tries.starter._fork_server.child):  # type: ignore[union-attr]
        os.kill(one.pid, signal.SIGKILL)
        one.wait()
