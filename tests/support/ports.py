"""Ports that stay free until a test's process listens at them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from pathlib import Path

LOWEST = 10_000
_numbers = itertools.count(97 * os.getpid())  # another place for each worker


def free_port() -> int:
    """Return a port of 127.0.0.1 that the kernel gives to no connection, and this to no other test.

    One that it gives itself, for port 0, may be a connection's by the time that it is needed.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = max(given, 2 * LOWEST) - LOWEST
    while True:
        port = LOWEST + next(_numbers) % ports
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
