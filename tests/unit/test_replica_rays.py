"""Connections to a Ray cluster at an address where another program may listen."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from support import PATIENCE_S

from gadei_ps.errors import ClusterError
from gadei_ps.replicas import rays

SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + b"\0\3\0\0\0\1"
"""The first frame of a gRPC server, with one setting."""
LOADED = "Ray was loaded"


@pytest.mark.parametrize(
    ("sent", "is_ray"),
    [
        (b"", False),  # silent
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"-ERR", False),  # and ends the connection
        (SETTINGS, True),
    ],
)
def test_another_program_listens_there(
    sent: bytes, is_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not left to Ray, which would try again for a minute."""
    monkeypatch.setattr(rays, "CONNECT_S", PATIENCE_S if sent else 1.0)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    for name in rays._MODE | rays._TRIES:
        monkeypatch.setenv(name, "")  # connect() sets them
    ray = SimpleNamespace(init=lambda **_: pytest.fail(LOADED))
    monkeypatch.setattr(rays, "loaded", lambda: ray)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            listener.accept()[0].close()  # that a process listens is looked at first
            with listener.accept()[0] as connection:
                connection.sendall(sent)
                if sent != b"-ERR":
                    over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            if is_ray:
                with pytest.raises(pytest.fail.Exception, match=LOADED):
                    rays.connect(address)
            else:
                with pytest.raises(ClusterError, match=r"at .*, but another program listens"):
                    rays.connect(address)
        finally:
            over.set()
            thread.join()
