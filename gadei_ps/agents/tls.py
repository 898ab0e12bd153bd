"""TLS between agents: both sides show a certificate of the job's own authority.

The data plane works on plain sockets. A connection with TLS is carried by a thread of its own
between the secure socket and one end of a socket pair; the other end is what the data plane gets.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import select
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from gadei_ps.agents import threads
from gadei_ps.errors import UsageError, reason_of

ROOM = 1 << 17
"""Bytes that a thread has in hand in each direction."""
LINGER_S = 5.0
"""For what was sent before the data plane has closed its end."""
_MOST_STEPS = 10
"""Of a handshake: each side waits for the other one a few times."""
_OTHER_KEY = "KEY_VALUES_MISMATCH"


class Distrusted(OSError):
    """The other side lives, and its certificate is refused."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """How to listen, and how to call. Certificates must name the hosts that are called."""

    listening: ssl.SSLContext
    calling: ssl.SSLContext


def contexts(certificate: Path, key: Path, authority: Path) -> Contexts:
    """Contexts from PEM files: this agent's certificate and key, and who signs them all.

    Raises UsageError for files that cannot be used.
    """
    files = {"certificate": certificate, "key": key, "authority": authority}
    for name, path in files.items():
        _check_readable(name, path)
    for name in ("certificate", "authority"):
        _check_certificates(name, files[name])
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _load_key(context, certificate, key)
        context.load_verify_locations(authority)
        made.append(context)
    return Contexts(*made)


def _check_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: {reason_of(error)}: each host needs its tls.{name} there"
        ) from None


def _check_certificates(name: str, path: Path) -> None:
    """Where a file is none of them, the errors that follow would not say which one it is."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise UsageError(f"{path}: no certificate in PEM format: tls.{name} is to be one") from None


def _load_key(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def refuse() -> str:  # otherwise the process would ask a person for it, and wait
        raise UsageError(f"{key}: the key has a password: tls.key is to be one without")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == _OTHER_KEY:
            what = f"the key does not fit the certificate: give that of {certificate}"
        elif error.reason is None:  # it is no key, or one of a kind that nobody knows
            what = "no key in PEM format: tls.key is to be one"
        else:
            what = f"it cannot be used with {certificate}: {_words(error)}"
        raise UsageError(f"{key}: {what}") from None


def checked(certificate: Path, key: Path, authority: Path, *, host: str) -> Contexts:
    """The same, for an agent that others call at this host. Raises UsageError also if these, which
    have the same authority, would refuse it."""
    given = contexts(certificate, key, authority)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = given.calling.wrap_bio(back, there, server_hostname=host)
    called = given.listening.wrap_bio(there, back, server_side=True)
    try:
        for one in _MOST_STEPS * (caller, called):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.do_handshake()
    except ssl.SSLError as error:
        raise UsageError(
            f"{certificate}: other agents would refuse it: {_words(error)}; it must be signed by "
            f"{authority} and name {host} as {_kind(host)} entry of subjectAltName"
        ) from None
    return given


def _words(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.removesuffix(".")
    return (error.reason or str(error)).replace("_", " ").lower()


def _kind(host: str) -> str:
    """Of the entry that names it; neither another one nor the common name would do."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "a DNS"
    return "an IP"


def tunnel(
    connection: socket.socket, given: Contexts, called_host: str | None, until: float
) -> socket.socket:
    """A plain socket to the other side of the connection, which this takes over.

    called_host: that this side has called; None if it was called. Raises Distrusted and other
    OSErrors.
    """
    connection.settimeout(max(0.001, until - time.monotonic()))
    try:
        if called_host is None:
            secure = given.listening.wrap_socket(connection, server_side=True)
        else:
            secure = given.calling.wrap_socket(connection, server_hostname=called_host)
    except ssl.SSLCertVerificationError as error:
        raise Distrusted(f"its certificate cannot be trusted: {_words(error)}") from None
    except ssl.SSLError as error:  # its number is none of the system's errors
        raise OSError(f"TLS: {_words(error)}") from None
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(one) for one in (secure, *socket.socketpair())]
        threads.start("agent-tls", _carry, secure, ends[2])
        stack.pop_all()
    return ends[1]


class _Way:
    """One direction: bytes that were read and are not yet written."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(ROOM))
        self.left = self.room[:0]
        self.ended = False

    def fill(self, count: int) -> None:
        self.left = self.room[:count]
        self.ended = not count


def _carry(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carries bytes both ways until one side ends."""
    outward, inward = _Way(), _Way()
    until = math.inf
    with secure, plain, contextlib.suppress(OSError):
        secure.setblocking(False)
        plain.setblocking(False)
        while time.monotonic() < until:
            wants = _step(secure, plain, outward, inward)
            if (outward.ended and not outward.left) or (inward.ended and not inward.left):
                return
            poll = select.poll()
            if wants:  # otherwise its end would be told again and again
                poll.register(secure, wants)
            of_plain = 0 if outward.left else select.POLLIN
            of_plain |= select.POLLOUT if inward.left else 0
            if of_plain or until == math.inf:
                poll.register(plain, of_plain)
            left = None if until == math.inf else max(0.0, until - time.monotonic()) * 1000
            for fd, seen in poll.poll(left):
                if fd == plain.fileno() and seen & select.POLLHUP:
                    until = min(until, time.monotonic() + LINGER_S)


def _step(secure: ssl.SSLSocket, plain: socket.socket, outward: _Way, inward: _Way) -> int:
    """Moves what can be moved. Returns what to wait for on the secure side."""
    wants = 0
    moved = True
    while moved:
        moved = False
        wants = 0
        with contextlib.suppress(BlockingIOError):
            if not outward.left and not outward.ended:
                outward.fill(plain.recv_into(outward.room))
                moved = moved or not outward.ended
        with contextlib.suppress(BlockingIOError):
            if inward.left:
                inward.left = inward.left[plain.send(inward.left) :]
                moved = True
        try:
            if outward.left:
                outward.left = outward.left[secure.send(outward.left) :]
                moved = True
        except ssl.SSLWantWriteError:
            wants |= select.POLLOUT
        except ssl.SSLWantReadError:
            wants |= select.POLLIN
        try:
            if not inward.left and not inward.ended:
                inward.fill(secure.recv_into(inward.room))
                moved = moved or not inward.ended
        except ssl.SSLWantReadError:
            wants |= select.POLLIN
        except ssl.SSLWantWriteError:
            wants |= select.POLLOUT
        if (outward.ended and not outward.left) or (inward.ended and not inward.left):
            break
    return wants
