"""Addresses of agents and clusters as text: HOST:PORT, or [HOST]:PORT."""

from __future__ import annotations

import socket

Address = tuple[str, int]


def parse(text: str) -> Address:
    """HOST:PORT, or [HOST]:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text[:80]!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listening(address: Address, backlog: int | None = None) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:  # whoever reads it knows where it was tried
        error.strerror = (error.strerror or "").partition(" (while")[0]
        raise


def written(host: str, port: int) -> str:
    """The text that parse() reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
