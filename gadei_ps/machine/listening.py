"""Addresses at which HTTP servers listen, and hosts that requests name."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from gadei_ps.errors import UsageError
from gadei_ps.machine import addresses

LOCAL: Final = ("127.0.0.1", "::1", "localhost")
"""Names of this host that no other host can use."""


def shown(host: str, port: int) -> str:
    """Return HOST:PORT, or [HOST]:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> tuple[str, socket.socket]:
    """Listen at HOST:PORT, at `::` also for IPv4. Return the host and the socket.

    Raises UsageError, which names the option --listen.
    """
    try:
        host, port = addresses.parse(address)
    except ValueError as error:
        raise UsageError(f"--listen: {error}, such as 127.0.0.1:8470") from None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return host, socket.create_server(place, family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # a name such as `a..b` has no encoding
        why = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]
        raise UsageError(
            f"cannot listen at {shown(host, port)}: {why}; give another --listen"
        ) from None


def is_address(host: str) -> bool:
    """Return whether it is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can connect to it."""
    return host in LOCAL or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def host_of(header: str) -> str:
    """Return the host of a Host header, in lower case; empty if it is not valid."""
    try:
        parts = urlsplit(f"//{header}")
        name, _ = parts.hostname or "", parts.port
    except ValueError:
        return ""
    return name if parts.netloc == header and "@" not in header else ""
