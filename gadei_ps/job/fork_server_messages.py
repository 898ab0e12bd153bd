"""Messages between a watchdog and its fork server, over a pair of sockets.

Each message is one datagram: a JSON object of its fields and its kind. Both run the same build: a
fork server of another build than its watchdog's exits.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Load:
    """Request to the fork server to load the compiled code of an optimizer, if there is any."""

    optimizer: int


@dataclass(frozen=True)
class Start:
    """Request to the fork server to fork a server. arguments: of gadei_ps.server.manager."""

    number: int
    arguments: list[str]


@dataclass(frozen=True)
class Ready:
    """Notice that the fork server has loaded the compiled code, and listens."""


@dataclass(frozen=True)
class Started:
    """Notice of a forked server, with its pidfd. start: from process.start_ticks."""

    number: int
    pid: int
    start: int


@dataclass(frozen=True)
class NotStarted:
    """There is no memory, process or descriptor for it. errno: the system's word for that."""

    number: int
    errno: int


@dataclass(frozen=True)
class Ended:
    """A server that was forked has ended. code: its exit code, negative for a signal."""

    pid: int
    code: int


Message = Load | Start | Ready | Started | NotStarted | Ended
KINDS = {kind.__name__: kind for kind in (Load, Start, Ready, Started, NotStarted, Ended)}


def send(end: socket.socket, message: Message, *descriptors: int) -> None:
    """Raise OSError, BlockingIOError where the other one does not read."""
    text = json.dumps({"kind": type(message).__name__} | asdict(message)).encode()
    socket.send_fds(end, [text], descriptors)


def receive(end: socket.socket) -> tuple[Message | None, int | None]:
    """Receive the next message and its descriptor; no message: the other process is gone.

    Raises BlockingIOError if there is none yet, ValueError if it is not a valid message.
    """
    try:
        text, descriptors, _, _ = socket.recv_fds(end, MOST_BYTES, 1)
    except ConnectionResetError:  # it is dead and has not read all; what it sent before comes now
        text, descriptors, _, _ = socket.recv_fds(end, MOST_BYTES, 1)
    if not text:
        return None, None
    for fd in descriptors:
        os.set_inheritable(fd, False)
    try:
        fields = json.loads(text)
        message = KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message: {error!r}") from None
    return message, (descriptors[0] if descriptors else None)
