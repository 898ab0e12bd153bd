"""Requests between processes of one host: a peer that hangs, and a process without free files."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import eventually

from gadei_ps.errors import NoAnswer
from gadei_ps.replicas import sockets

MUCH = b"x" * (1 << 22)
"""More than a socket holds."""


@pytest.fixture
def path(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sockets, "PART_S", 1)
    return sockets.replica_path("a", 0)


def test_a_process_that_reads_nothing_costs_the_time_limit(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(NoAnswer, match="no answer in"):
        listener.bind(str(path))
        listener.listen(1)
        sockets.request(path, "status", data=MUCH)


def test_a_process_that_accepts_nothing_costs_the_time_limit(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = []
        for _ in range(2):  # until its queue is full
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect_ex(str(path))
            waiting.append(one)
        with pytest.raises(NoAnswer, match="no answer in time"):
            sockets.request(path, "status")
        for one in waiting:
            one.close()


def test_an_answer_that_stops_in_the_middle_costs_the_time_limit(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        over = threading.Event()

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall((100).to_bytes(4) + b"only the beginning")
                over.wait()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoAnswer, match="no answer in time"):
            sockets.request(path, "status")
        over.set()
        thread.join()


def test_a_server_without_free_files_uses_no_processor_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def accept(_: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(server._listener)

    real = sockets.Listener.accept
    monkeypatch.setattr(sockets.Listener, "accept", accept)
    server = sockets.Server(path, lambda what: what)
    eventually(lambda: len(tries) >= 4)
    assert tries[3] - tries[0] >= 3 * sockets.FULL_S
    assert sockets.request(path, "status") == "status"
    server.close()
