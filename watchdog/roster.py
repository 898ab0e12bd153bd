"""The roster's rows: which learners are attached, and when a row and its ring are free again.

A row's life, each word with one writer (layout in native/ps_layout.h):

    free      retired == generation                                  (its ring is being made)
    attached  watchdog: ring made, `wanted` and then `generation` = g     server: `served` = g
    leaving   watchdog: `wanted` = 0 (detached, or the kernel reported its death)
    drained   server: all that was published is consumed, the ring unmapped: `retired` = g
    free      watchdog: ring unlinked
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import signal
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import ControlError, Evicted
from gadei_ps.machine import ownership, process
from gadei_ps.memory import layout, owned, shm
from gadei_ps.memory.layout import Gone
from gadei_ps.memory.segment import Segment
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.liveness import Awaited, HangDetector, Sign

HUNG_LATE_S = 3.0  # far longer than the time between two calls of kill_hung
RING_TIMEOUT_S = 5.0  # from the answer that gives a place until the learner has its ring mapped
# Counted by the server for one learner; cleared for the next one.
COUNTS = (*layout.PAST, "version", "clock", "unasked")
STALENESS = ("staleness_sum", "staleness_max", "histogram", "reason")


@dataclass(frozen=True)
class JoiningLearner:
    """A learner whose ring is being made: the row that is kept for it, and its pidfd."""

    row: int
    generation: int
    pid: int
    start: int
    pidfd: int
    name: str
    has_buffers: bool


@dataclass(eq=False)
class Roster:
    """Attached learners and their pidfds. Watchdog only.

    timeout_s: how long a learner that others wait for may do nothing; 0: for ever. drop: is given
    the rings that are free.
    """

    memory: JobMemory
    selector: selectors.BaseSelector
    log: Any
    timeout_s: InitVar[float]
    drop: Callable[[Segment], None]
    joining: set[int] = field(default_factory=set)
    """Rows of learners whose rings are being made."""
    had_any: bool = False
    """Whether a learner has been attached, however briefly."""
    _hung: HangDetector = field(init=False)
    _killed: set[int] = field(default_factory=set)  # rows of learners that hung
    _pidfds: dict[int, int] = field(default_factory=dict)  # by row
    _unmapped: dict[int, float] = field(default_factory=dict)
    """Adopted rows whose rings no process has mapped, and since when."""
    _generation: int = 0

    def __post_init__(self, timeout_s: float) -> None:
        self._hung = HangDetector(timeout_s, HUNG_LATE_S, process.tree_cpu_s)

    def limit(self, timeout_s: float) -> None:
        """Set the time after which learners that hold up others are killed (s); 0: never."""
        self._hung.limit_s = timeout_s

    @property
    def _entries(self) -> np.ndarray:
        entries: np.ndarray = self.memory.words["roster"]
        return entries

    @property
    def rows(self) -> list[int]:
        """Rows of the learners that are attached."""
        return sorted(self._pidfds)

    @property
    def leaving(self) -> bool:
        """Whether a learner is gone whose ring is not free yet."""
        return len(self._pidfds) != len(self.memory.rings)

    def adopt(self, now: float) -> None:
        """Watch the learners that a dead watchdog has left; those that died meanwhile leave.

        A place may have been given away in an answer that was never sent: see look().
        """
        entries = self._entries
        self._generation = int(max(entries["generation"].max(), entries["wanted"].max()))
        # Rows that the dead watchdog was about to give away, and those whose rings are lost.
        entries["wanted"][entries["wanted"] != entries["generation"]] = 0
        lost = np.setdiff1d(np.flatnonzero(entries["wanted"]), list(self.memory.rings))
        entries["wanted"][lost] = 0
        for row, ring in self.memory.rings.items():
            entry = entries[row]
            generation = int(entry["generation"])
            if int(entry["wanted"]) != generation:
                continue  # it is leaving
            pid = int(entry["pid"])
            pidfd = ownership.watch_process(pid, int(entry["pid_start"]))
            if pidfd is not None:
                self._watch(row, pidfd)
                if int(ring.view(layout.RING)["detached"]):
                    self._leave(row, Gone.DETACHED)
                else:
                    self._unmapped[row] = now
                    self.log.info("learner adopted", row=row, pid=pid)
                continue
            entry["gone"] = Gone.DIED
            entry["wanted"] = 0
            self.memory.words["learner_deaths"] += 1
            # Of a learner in another pid namespace no pid is known here.
            self.log.warning("learner died", row=row, **({"pid": pid} if pid else {}))
        self.memory.ring_bells()

    def tick(self, now: float) -> None:
        """Free adopted rows that no learner has taken, as others would wait for them.

        The learner was not notified of its row, and has asked the next watchdog for another one.
        """
        for row, since in list(self._unmapped.items()):
            if row not in self._pidfds or self._has_its_ring(row):
                del self._unmapped[row]
            elif now >= since + RING_TIMEOUT_S:
                pid = int(self._entries[row]["pid"])
                self.log.warning("a learner has no ring mapped: evicted", row=row, pid=pid)
                self._leave(row, Gone.DETACHED)

    def begin(
        self, pid: int, name: str, number: int = -1, *, has_buffers: bool = False
    ) -> JoiningLearner:
        """Keep a row for the process, whose ring is still to be made; then admit() or release().

        number: of the row that it gets if that is free. Gradients of a superstep are added up in
        the order of rows, which must not depend on who comes first. Raises ControlError when the
        roster is full or the process cannot be watched.
        """
        entries = self._entries
        unused = set(np.flatnonzero(entries["retired"] == entries["generation"]).tolist())
        free = sorted(unused - self.memory.rings.keys() - self.joining)
        if not free:
            raise ControlError(f"the job has {layout.MAX_LEARNERS} learners, which is the limit")
        preferred = [number] * (number in free) + free
        row = next(filter(self._has_free_name, preferred), None)
        if row is None:
            raise ControlError("the names of all free rings are taken in /dev/shm: gadei-ps ls")
        pidfd, start = self._open(pid)
        self._generation += 1
        self.joining.add(row)
        return JoiningLearner(row, self._generation, pid, start, pidfd, name, has_buffers)

    def release(self, joining: JoiningLearner) -> None:
        """There is no ring for it, or nobody wants it any more."""
        self.joining.discard(joining.row)
        os.close(joining.pidfd)

    def admit(self, joining: JoiningLearner, ring: Segment) -> None:
        """The process is a learner from now on, with this ring. It may be dead already."""
        row, pid = joining.row, joining.pid
        self.joining.discard(row)
        self.memory.enter_ring(row, ring)
        entry = self._entries[row]
        entry["pid"] = pid
        entry["pid_start"] = joining.start
        entry["name"] = joining.name.encode()[:31]
        for name in ("gone", "drained", "grant", "obsolete", "handed", *COUNTS, *STALENESS):
            entry[name] = 0
        entry["loss"] = math.nan  # none is reported yet
        entry["outstanding"] = layout.NO_BATCH
        self.memory.words["has_buffers"][row] = joining.has_buffers
        # Before `generation`: monitors read no row that never had an inode.
        self.memory.words["ring_inode"][row] = ring.inode
        entry["wanted"] = joining.generation
        at = self.memory.control.word(layout.CONTROL, "roster")
        at += row * layout.ENTRY.itemsize + layout.offset(layout.ENTRY, "generation")
        _native.store(at, joining.generation)
        self._watch(row, joining.pidfd)
        self.memory.ring_bells()
        self.log.info("learner attached", row=row, pid=pid)

    @staticmethod
    def _open(pid: int) -> tuple[int, int]:
        """A pidfd of a learner, and its start time.

        Raises ControlError where its pid and ours do not mean the same, or without descriptors.
        """
        if not pid:  # the kernel's pid of a process that this namespace does not show
            raise ControlError(
                "the learner is in a pid namespace that the watchdog does not see; "
                "learners must share the watchdog's pid namespace"
            )
        try:
            if process.is_deeper(pid):
                raise OSError(errno.EXDEV, "it is in a pid namespace of its own")
            start = process.start_ticks(pid)
            return os.pidfd_open(pid), start
        except OSError as error:
            remedy = "learners must share the watchdog's pid namespace"
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                remedy = "attach again when some are free"
            raise ControlError(
                f"the watchdog cannot watch process {pid}: {error.strerror}; {remedy}"
            ) from None

    def _has_free_name(self, row: int) -> bool:
        """Return whether the name of the row's ring is free; every user can take one."""
        name = shm.segment_name(self.memory.config.name, f"ring.{row}")
        return not os.path.lexists(shm.path_of(name))

    def _watch(self, row: int, pidfd: int) -> None:
        self.had_any = True
        self._pidfds[row] = pidfd
        self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._died(row))

    def detach(self, pid: int, row: int, generation: int) -> None:
        """A learner leaves by itself. Raises Evicted or ControlError if it is not this one."""
        if not 0 <= row < layout.MAX_LEARNERS:
            raise ControlError(f"no row {row}")
        entry = self._entries[row]
        if int(entry["wanted"]) != generation or not generation:
            raise Evicted("this learner is not attached (any more)")
        if int(entry["pid"]) != pid:
            raise ControlError("a learner can detach only itself")
        self._leave(row, Gone.DETACHED)
        self.log.info("learner detached", row=row)

    def _died(self, row: int) -> None:
        if row not in self._pidfds:
            return  # it detached in the same round of events
        if row in self._killed:
            self._lose(row, Gone.HUNG, "learner killed: it hung")
        else:
            self._lose(row, Gone.DIED, "learner died")

    def _lose(self, row: int, gone: Gone, message: str) -> None:
        self.memory.words["learner_deaths"] += 1
        self.log.warning(message, row=row, pid=int(self._entries[row]["pid"]))
        self._leave(row, gone)

    def look_at(self, row: int, generation: int) -> None:
        """The connection has ended by which this learner attached; the learner may live."""
        if row not in self._pidfds or int(self._entries[row]["generation"]) != generation:
            return
        if int(self.memory.rings[row].view(layout.RING)["detached"]):  # it was interrupted then
            self._leave(row, Gone.DETACHED)
        else:
            self._is_another_program(row)

    def _is_another_program(self, row: int) -> bool:
        """Evict a learner whose process has replaced itself by another program (exec).

        The pid and the start time stay, the ring does not. The program is not a learner, and lives.
        A learner that was interrupted while it attached has no ring either.
        """
        if self._has_its_ring(row):
            return False
        what = "learner gone: its process runs another program, or was interrupted"
        self._lose(row, Gone.DIED, what)
        return True

    def _has_its_ring(self, row: int) -> bool:
        """Return whether the learner's process has mapped its ring, or that is unknown."""
        try:
            device = shm.SHM.stat().st_dev
        except OSError:
            return True
        return process.maps(int(self._entries[row]["pid"]), device, self.memory.rings[row].inode)

    def kill_hung(self, now: float) -> None:
        """Kill learners that hold up others and do nothing, after a warning.

        Their death is then like any other. Not evicted alive: what it publishes after that some
        shards might apply and others not.
        """
        signs: dict[int, Sign] = {}
        control, shards = self.memory.words, int(self.memory.words["shards"])
        # While other batches are left to hand out, no learner waits for those that it holds.
        left = int(control["next"]) & 0xFFFFFFFF != int(control["batches"])
        if owned.is_on(control):
            left = owned.left(control)
        left = left or bool(int(control["requeued"]))
        rings = {row: self.memory.rings[row].view(layout.RING) for row in self._pidfds}
        # One that has paused waits for nobody.
        paused = {row for row, one in rings.items() if int(one["wants"]) & layout.WANTS_PAUSE}
        waiting = rings.keys() - paused
        for row, ring in rings.items():
            entry = self._entries[row]
            head, tail = int(ring["head"]), int(entry["applied"])
            holds = bool((entry["outstanding"] != layout.NO_BATCH).any())
            pauses = int(entry["exclusive"])  # all others pause for it
            awaited = waiting - {row} and (int(entry["member"]) or (holds and not left) or pauses)
            # One that waits itself, for a slot or for its turn, is not to blame. Not the ring's
            # tails: the learner can write over them.
            applied = int(self.memory.state_words["applied"][:shards, row].min())
            is_full = head - applied >= int(control["slots"])
            may_go_on = pauses or (head < int(entry["grant"]) and not is_full)
            if awaited and may_go_on and not process.is_suspended(int(entry["pid"])):
                beat = int(ring["heartbeat"]), int(ring["work_tail"]), int(ring["pulled"])
                moves = (head, tail, *beat, int(entry["generation"]))
                signs[row] = Sign(moves, int(entry["pid"]), row in paused)
        hung, late = self._hung.check(now, signs)
        for row in late:
            one = self.awaited[row]
            self.log.warning(
                "others wait for a learner, which is killed if it neither pushes nor computes; "
                "validate within optimizer.pause(), or raise learner_timeout_s",
                row=row,
                pid=signs[row].pid,
                waited_s=round(one.waited_s),
                killed_in_s=round(one.left_s),
            )
        for row in hung:
            self.kill(row)

    @property
    def awaited(self) -> Mapping[int, Awaited]:
        """Learners that others wait for, by row."""
        return self._hung.awaited

    def kill(self, row: int) -> None:
        """Kill a learner that hangs."""
        if row in self._killed or self._is_another_program(row):
            return
        self._killed.add(row)
        try:
            if process.owner(int(self._entries[row]["pid"])) not in (None, os.geteuid()):
                raise PermissionError
            signal.pidfd_send_signal(self._pidfds[row], signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just died
        except PermissionError:
            self.log.error("a learner hangs and is another user's: kill it", row=row)

    def close_rings(self, hung: bool) -> None:
        """Evict all learners, each as soon as nothing more of it can come.

        To be called again and again after the stop word is CLOSED. hung: those that are still
        publishing are killed. What they have published is applied.
        """
        for row in self.rows:
            ring = self.memory.rings[row]
            if not _native.load32(ring.word(layout.RING, "publishing")):
                self._leave(row, Gone.STOPPED)
            elif hung:
                self.kill(row)

    def _leave(self, row: int, gone: int) -> None:
        fd = self._pidfds.pop(row)
        self._killed.discard(row)
        self._unmapped.pop(row, None)
        self.selector.unregister(fd)
        os.close(fd)
        entry = self._entries[row]
        entry["gone"] = gone
        entry["wanted"] = 0
        self.memory.ring_bells()

    def free_rows(self) -> None:
        """Remove the rings that the servers no longer use."""
        entries = self._entries
        for row in list(self.memory.rings):
            if entries[row]["retired"] == entries[row]["generation"]:
                if row in self._pidfds:  # the server has refused its ring, or found it damaged
                    self._leave(row, Gone.DAMAGED)
                ring = self.memory.remove_ring(row)
                if ring is not None:
                    self.drop(ring)

    def close(self) -> None:
        """Stop watching the learners, at the end of the job."""
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
