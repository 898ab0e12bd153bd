"""Addresses that users write."""

from __future__ import annotations


def parse(text: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT, or [HOST]:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text[:80]!r} is not a valid HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
