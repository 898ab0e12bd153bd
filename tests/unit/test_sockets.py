"""The control socket's server side, without a watchdog: requests sent while a reply is pending."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gadei_ps.job import control
from gadei_ps.watchdog import sockets
from gadei_ps.watchdog.sockets import Client, ControlServer


class Server:
    """A server whose handler answers nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.asked: list[str] = []
        self.clients: list[Client] = []
        self.selector = selectors.DefaultSelector()
        self.server = ControlServer(path, self.selector, self.handle, lambda _: None)

    def handle(self, client: Client, request: control.Request) -> dict[str, Any] | None:
        self.asked.append(request.op)
        self.clients.append(client)
        return None if request.op == "checkpoint" else {"op": request.op}

    def turn(self) -> None:
        """One turn of a main loop."""
        for key, mask in self.selector.select(0.01):
            key.data(mask)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "sock")
    yield made
    made.server.shut_down()
    made.selector.close()


@pytest.fixture
def client(server: Server) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect(str(server.server.path))
        made.setblocking(False)
        server.turn()
        yield made


def request(op: str) -> bytes:
    return control.pack({"v": control.PROTOCOL, "op": op})


def wait(server: Server, count: int) -> None:
    for _ in range(20):
        if len(server.asked) >= count:
            return
        server.turn()
    raise AssertionError(server.asked)


def test_requests_sent_while_the_client_waits(server: Server, client: socket.socket) -> None:
    """Each is served after the reply, without another byte, and one in each turn."""
    client.sendall(request("checkpoint") + request("status") * 2 + request("checkpoint"))
    for _ in range(8):
        server.turn()
    assert server.asked == ["checkpoint"]
    server.server.reply(server.clients[0], {"saved": 1})
    assert server.asked == ["checkpoint"], "served in the turn of whoever has replied"
    server.turn()
    assert server.asked == ["checkpoint", "status"]
    wait(server, 4)
    assert server.asked == ["checkpoint", "status", "status", "checkpoint"]
    for _ in range(3):
        server.turn()
    assert len(server.asked) == 4
    server.server.reply(server.clients[0], {"saved": 2})
    assert not server.selector.select(0), "nothing is left, and the main loop sleeps"


def test_the_time_of_a_message_begins_with_the_reply(
    server: Server, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was sent in time is not late because another one's reply took long."""
    clock = [100.0]
    monkeypatch.setattr(sockets.time, "monotonic", lambda: clock[0])
    client.sendall(request("checkpoint") + request("status")[:-3])
    for _ in range(4):
        server.turn()
    clock[0] += 60.0
    server.server.expire()
    server.server.reply(server.clients[0], {"saved": 1})
    server.server.expire()
    client.sendall(request("status")[-3:])
    wait(server, 2)
    assert server.asked == ["checkpoint", "status"]
    client.sendall(b"\0")
    server.turn()
    clock[0] += 2 * sockets.MESSAGE_TIMEOUT_S
    server.server.expire()
    assert server.clients[0] not in server.server
