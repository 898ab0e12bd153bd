"""Addresses at which HTTP servers listen."""

from __future__ import annotations

import socket

import pytest

from gadei_ps.machine.listening import listen


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_all_addresses(client: str) -> None:
    """`::` is all addresses of this host, those of IPv4 included."""
    _, server = listen("[::]:0")
    with server:
        socket.create_connection((client, server.getsockname()[1])).close()
