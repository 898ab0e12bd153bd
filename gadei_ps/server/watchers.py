"""Threads that sleep on the heads of rings in the place of the shards.

One system call watches at most 128 words, and takes longer the more it watches. So from some
learners on, the shards watch only rings that have lately pushed, when they sleep. The others are
watched by watcher threads, one for each GROUP rows, which stay asleep meanwhile. When a head moves,
the watcher leaves that ring to the shards and rings their bell.

    watcher   load head; then `watched` := generation              SYNC POINT: watched
              sleep unless the head has moved since
              a head has moved: `watched` := 0, or not; ring the bell
    shard     load the bell; load `watched`; then look at the head; sleep on the bell, and on the
              head if it is not watched

A head that moves after the shard has looked has moved after the watcher loaded it: the watcher
does not sleep, or is woken. Either way it rings the bell, which the shard has loaded before.
"""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass

import numpy as np

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import RING
from gadei_ps.server.rings import Mapped, Rings
from gadei_ps.server.structs import BOARD

FROM = 16
"""So many rings the shards watch themselves."""
GROUP = 127
"""Rows of a watcher; one more word is the version of the table."""
DIRECT = 16
"""Rings of a group that are left to the shards at most, while others are silent."""
PERIOD_S = 0.1
"""A ring that has been silent for so long is watched again."""
IDLE_S = 1.0
LOST_S = 0.01
WORD = 8


@dataclass
class _Ring:
    """State of a ring in a watcher."""

    head: int
    """Head at the watcher's last look."""
    mark: int
    """Head at the start of the last period."""
    watched: bool = False


class Watcher:
    """Watcher thread of the rows of one group."""

    def __init__(self, rings: Rings, group: int) -> None:
        self._rings = rings
        self._group = group
        self._known: dict[Mapped, _Ring] = {}
        self._due = 0.0
        board = rings.board.ctypes.data
        self._version_at = board + layout.offset(BOARD, "table_version")
        self._watched_at = board + layout.offset(BOARD, "watched")

    def run(self) -> None:
        """Watch until the server ends, or the kernel cannot watch several words."""
        while not self._rings.board[0]["quit"]:
            version = _native.load(self._version_at)
            if self.look(time.monotonic()):
                _native.bell(self._rings.shard_bell)
            error = self._sleep(version)
            if error == errno.EFAULT:  # a ring is lost; the next look at it puts zeros there
                time.sleep(LOST_S)
            elif error:
                for one in self._known:
                    self._watch(one.row, 0)
                return

    def look(self, now: float) -> bool:
        """Look at all heads; return whether a watched one has moved. now: in seconds."""
        mapped = [one for one in self._rings.all() if one.row // GROUP == self._group]
        before, self._known = self._known, {}
        for one in mapped:
            head = one.head
            self._known[one] = before.get(one, _Ring(head, head))
        period = now >= self._due
        if period:
            self._due = now + PERIOD_S
        direct = sum(not ring.watched for ring in self._known.values())
        news = False
        for one, ring in self._known.items():
            head = one.head  # before `watched` is stored
            moved, ring.head = head != ring.head, head
            if ring.watched and moved:
                news = True
                if direct < DIRECT:
                    self._watch(one.row, 0)
                    ring.watched = False
                    direct += 1
            elif period and not ring.watched and (head == ring.mark or direct > DIRECT):
                self._watch(one.row, one.generation)
                ring.watched = True
                direct -= 1
            if period:
                ring.mark = head
        return news

    def _watch(self, row: int, generation: int) -> None:
        _native.store(self._watched_at + WORD * row, generation)  # SYNC POINT: watched

    def _sleep(self, version: int) -> int:
        """Sleep until a watched head moves or the table changes; return the kernel's errno."""
        heads = [(one.ring.word(RING, "head"), ring) for one, ring in self._known.items()]
        watched = [(at, ring.head) for at, ring in heads if ring.watched]
        words, values = zip((self._version_at, version), *watched, strict=True)
        at, value = np.array(words, np.uint64), np.array(values, np.uint64)
        until = IDLE_S if len(watched) == len(heads) else PERIOD_S
        return _native.wait_any(at.ctypes.data, value.ctypes.data, len(at), int(until * 1e9))


class Watchers:
    """The threads of one server process."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._groups: set[int] = set()

    def follow(self) -> None:
        """Start the threads that the rings need which are mapped now, once the shards serve."""
        rows = [one.row for one in self._rings.all()]
        if len(rows) <= FROM or self._rings.held < self._rings.shards:
            return
        for group in {row // GROUP for row in rows} - self._groups:
            one = Watcher(self._rings, group)
            thread = threading.Thread(target=one.run, name=f"watcher-{group}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: the shards watch the rings themselves
                return
            self._groups.add(group)
