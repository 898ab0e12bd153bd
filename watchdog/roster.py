"""The roster's rows: who is attached, since when, and when a row and its ring may be used again.

A row's life, each word with one writer (layout in native/ps_layout.h):

    free      retired == generation
    attached  watchdog: ring made, `wanted` and then `generation` = g     server: `served` = g
    leaving   watchdog: `wanted` = 0 (detached, or the kernel told of its death)
    drained   server: all that was published is consumed, the ring unmapped: `retired` = g
    free      watchdog: ring unlinked
"""

from __future__ import annotations

import os
import selectors
from typing import Any

import numpy as np

from gadei_ps import _native, layout, process
from gadei_ps.errors import ControlError, Evicted
from gadei_ps.watchdog.memory import JobMemory

DETACHED = 1
DIED = 2
# Counted by the server for one learner; cleared for the next one.
COUNTS = ("applied", "dropped", "refused", "samples", "version", "clock", "unasked", "loss")
STALENESS = ("staleness_sum", "staleness_max", "histogram", "reason")


class Roster:
    """Attached learners and their pidfds. Watchdog only."""

    def __init__(self, memory: JobMemory, selector: selectors.BaseSelector, log: Any) -> None:
        self._memory = memory
        self._selector = selector
        self._log = log
        self._pidfds: dict[int, int] = {}  # row -> pidfd of its learner
        self._generation = 0

    @property
    def _entries(self) -> np.ndarray:
        entries: np.ndarray = self._memory.control.view(layout.CONTROL)["roster"]
        return entries

    @property
    def rows(self) -> list[int]:
        """Rows of the learners that are attached."""
        return sorted(self._pidfds)

    @property
    def leaving(self) -> bool:
        """Whether a learner is gone whose ring is not free yet."""
        return len(self._pidfds) != len(self._memory.rings)

    def attach(self, pid: int, name: str) -> tuple[int, int]:
        """Gives the process a row and a ring; returns row and generation.

        Raises ControlError when the roster is full or the process cannot be watched, NoSharedMemory
        when there is no room for its ring.
        """
        entries = self._entries
        free = np.flatnonzero(entries["retired"] == entries["generation"])
        free = free[[int(row) not in self._memory.rings for row in free]]
        if not len(free):
            raise ControlError(f"the job has {layout.MAX_LEARNERS} learners, which is the limit")
        row = int(free[0])
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ControlError(
                f"cannot watch process {pid}: {error.strerror}; learners must share the "
                "daemon's pid namespace"
            ) from None
        self._generation += 1
        try:
            self._memory.create_ring(row, self._generation)
        except BaseException:
            os.close(pidfd)
            raise
        entry = entries[row]
        entry["pid"] = pid
        entry["pid_start"] = process.start_ticks(pid)
        entry["name"] = name.encode()[:31]
        for field in ("gone", "drained", "grant", *COUNTS, *STALENESS):
            entry[field] = 0
        entry["wanted"] = self._generation
        at = self._memory.control.address + layout.offset(layout.CONTROL, "roster")
        at += row * layout.ENTRY.itemsize + layout.offset(layout.ENTRY, "generation")
        _native.store(at, self._generation)
        self._pidfds[row] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._died(row))
        self._memory.ring_bells()
        self._log.info("learner attached", row=row, pid=pid)
        return row, self._generation

    def detach(self, pid: int, row: int, generation: int) -> None:
        """A learner leaves by itself. Raises Evicted or ControlError if it is not this one."""
        if not 0 <= row < layout.MAX_LEARNERS:
            raise ControlError(f"no row {row}")
        entry = self._entries[row]
        if int(entry["wanted"]) != generation or not generation:
            raise Evicted("this learner is not attached (any more)")
        if int(entry["pid"]) != pid:
            raise ControlError("a learner can detach only itself")
        self._leave(row, DETACHED)
        self._log.info("learner detached", row=row)

    def _died(self, row: int) -> None:
        if row not in self._pidfds:
            return  # it detached in the same round of events
        self._log.warning("learner died", row=row, pid=int(self._entries[row]["pid"]))
        self._leave(row, DIED)

    def _leave(self, row: int, gone: int) -> None:
        fd = self._pidfds.pop(row)
        self._selector.unregister(fd)
        os.close(fd)
        entry = self._entries[row]
        entry["gone"] = gone
        entry["wanted"] = 0
        self._memory.ring_bells()

    def free_rows(self) -> None:
        """Removes the rings that the server is done with."""
        entries = self._entries
        for row in list(self._memory.rings):
            if row not in self._pidfds and entries[row]["retired"] == entries[row]["generation"]:
                self._memory.remove_ring(row)

    def close(self) -> None:
        """Stops watching; at the end of the job."""
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
