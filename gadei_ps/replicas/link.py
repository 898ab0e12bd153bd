"""Connection of a replica to the run's coordinator, through the Ray actor beside it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from gadei_ps.errors import ControlError, JobNotFound
from gadei_ps.groups.coordinator import Reply, Report
from gadei_ps.replicas import sockets

ANSWER_S = 10.0
"""Time limit of the coordinator (s)."""
FETCH_S = 120.0


class Link:
    """Reports of a replica, and the newest reply. For all threads of the replica.

    A report contains all that the replica has, so it does not matter if one is lost.
    """

    def __init__(self, run: str, number: int, report: Report) -> None:
        self._path = sockets.actor_path(run, number)
        self._lock = threading.Lock()
        self._report = report
        self.reply: Reply | None = None
        self.changes = 0
        """Number of the coordinator's state that the newest reply has seen."""
        self.host = ""
        """Address of this host in Ray's cluster."""
        self.began = 0
        """Random number of the coordinator."""
        self._answered = time.monotonic()

    def silent_s(self) -> float:
        """Return the time since the coordinator has answered (s)."""
        return time.monotonic() - self._answered

    @property
    def report(self) -> Report:
        """Facts that the replica reports."""
        return self._report

    def set(self, **facts: Any) -> None:
        """Change what the replica reports from now on."""
        with self._lock:
            self._report = replace(self._report, **facts)

    def forget(self) -> None:
        """Forget the newest reply, which was to an incarnation that has ended."""
        with self._lock:
            self.reply = None

    def sync(self, waits: bool = False) -> bool:
        """Report. waits: for a change, a moment. Returns whether the coordinator has answered."""
        with self._lock:
            self._report = replace(self._report, number=self._report.number + 1)
            report, seen = self._report, self.changes if waits else None
        try:
            answer = sockets.request(self._path, "report", ANSWER_S, report=report, seen=seen)
        except (JobNotFound, ControlError):
            return False
        with self._lock:
            if answer["began"] != self.began:  # another coordinator counts from 0
                self.began, self.changes = answer["began"], 0
            if report.member == self._report.member and answer["changes"] >= self.changes:
                self.reply = reply = answer["reply"]
                self.changes = answer["changes"]
                self.host = answer["host"]
                if reply.is_settled:
                    self._report = replace(self._report, state=reply.state)
            self._answered = time.monotonic()
        return True

    def publish(self, data: bytes) -> None:
        """Give a model to other groups. Raises JobNotFound, ControlError."""
        sockets.request(self._path, "publish", FETCH_S, data=data)

    def fetch(self, group: int, version: int) -> bytes:
        """Return a model of another group. Raises JobNotFound, ControlError."""
        data: bytes = sockets.request(self._path, "fetch", FETCH_S, group=group, version=version)
        return data
