"""Notifications of the watchdog to systemd: ready, current action, still alive, stopping.

The protocol of sd_notify(3): datagrams of NAME=VALUE lines to the socket in $NOTIFY_SOCKET. Nothing
here waits or fails: without that socket, or if no process reads it, every call does nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Hashable, Iterator, MutableMapping
from typing import Self

DIGITS = re.compile("[0-9]{1,19}")  # of an unsigned 64-bit number
EXTENSION_INTERVAL_S = 5.0  # a manager that is executed again forgets what it was asked for
PASSING = ("WATCHDOG", "EXTEND_TIMEOUT_USEC")  # true at this moment only


class Notify:
    """The connection of a service to its manager."""

    def __init__(self, address: str | None = None, interval_s: float | None = None) -> None:
        """`address`: a path, or @NAME for the abstract namespace; None: no manager."""
        self.interval_s = interval_s
        self._address = ""
        self._socket: socket.socket | None = None
        self._completes = False
        self._status = ""
        self._done: Hashable = None
        self._pinged = -float("inf")
        self._until = self._asked = -float("inf")  # more time is asked for; when it was last
        # What the manager could not take yet. A lost READY would fail the whole start.
        self._unsent: dict[str, str] = {}
        if address and address[0] in "/@":
            self._address = "\0" + address[1:] if address[0] == "@" else address
            kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, kind)

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Self:
        """Read systemd's variables, and remove them: children must not send in our name."""
        address = environ.pop("NOTIFY_SOCKET", None)
        within_us = environ.pop("WATCHDOG_USEC", "")
        ours = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        asked = ours and DIGITS.fullmatch(within_us) is not None and int(within_us) > 0
        # Half of what is allowed, as sd_watchdog_enabled(3) recommends.
        return cls(address, int(within_us) / 2e6 if asked else None)

    @property
    def enabled(self) -> bool:
        """Whether there is a manager to notify."""
        return self._socket is not None

    @contextlib.contextmanager
    def completing_stop(self) -> Iterator[None]:
        """Complete the stop of an earlier incarnation of the service, as a part of its start.

        Meanwhile the service is neither ready nor stopping; it asks for the time that this takes.
        """
        self._completes = True
        try:
            yield
        finally:
            self._completes = False

    def ready(self) -> None:
        """The start is complete."""
        if not self._completes:
            self._send(READY="1")

    def starting(self, timeout_s: float, done: Hashable) -> None:
        """The start has got on to `done`, and takes at most `timeout_s` until it does so again.

        The manager then waits beyond the unit's TimeoutStartSec, if it is notified before that.
        """
        if done != self._done:
            self._done = done
            self._send(EXTEND_TIMEOUT_USEC=str(round(timeout_s * 1e6)))

    def progress(self, timeout_s: float) -> None:
        """The start has begun to wait for servers, or got on, as in starting()."""
        self.starting(timeout_s, object())

    def stopping(self, timeout_s: float = 0.0) -> None:
        """The end begins, and takes at most `timeout_s` where that is more than the unit allows."""
        if self._completes:
            self.more_time(timeout_s)
            return
        now = time.monotonic()
        self._until = now + timeout_s
        self._send(STOPPING="1", **self._extension(now))

    def more_time(self, timeout_s: float) -> None:
        """The end has got on: from now it takes at most `timeout_s`, or this is called again.

        watchdog() notifies the manager, and repeats that as long as it holds.
        """
        self._until = max(self._until, time.monotonic() + timeout_s)

    def _extension(self, now: float) -> dict[str, str]:
        if now >= self._until:
            return {}
        self._asked = now
        return {"EXTEND_TIMEOUT_USEC": str(round((self._until - now) * 1e6))}

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent only when it is another one."""
        text = " ".join(f"{'completing an interrupted stop: ' * self._completes}{text}".split())
        if text != self._status:
            self._status = text
            self._send(STATUS=text)

    def failed(self, why: object) -> None:
        """The reason of the end, which `systemctl status` shows afterwards."""
        self.status(f"failed: {why}")

    def watchdog(self) -> None:
        """Still alive. Called on every turn of the main loop; sends once in `interval_s`."""
        now = time.monotonic()
        if now >= self._asked + EXTENSION_INTERVAL_S and (extension := self._extension(now)):
            self._send(**extension)
        if self.interval_s is None:
            if self._unsent:
                self._send()
        elif now >= self._pinged + self.interval_s:
            self._pinged = now
            self._send(WATCHDOG="1")

    def close(self) -> None:
        if self._socket is not None and not self._completes:
            self._socket.close()
            self._socket = None

    def _send(self, **values: str) -> None:
        if self._socket is None:
            return
        self._unsent |= values
        message = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(message.encode(errors="replace"), self._address)
        except OSError:
            # The manager is slow or restarts: the next call sends it again.
            for name in PASSING:
                self._unsent.pop(name, None)
        else:
            self._unsent.clear()
