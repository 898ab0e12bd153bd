"""The parameter server process: shard threads that apply, and a manager that decides.

Two servers run, and each has everything compiled and mapped. Leases (native/ps_lease.h) decide
which one is active: a shard's thread serves while it holds the shard's lease, the manager decides
while it holds the managers'. The standby's threads wait for the same leases, and the kernel hands
them over when their holders can no longer run. So a failover needs no other process, and no shard
waits for another.

    startup     attach control, load the compiled kernels
    main_loop   map the model and the rings; once active drive the sync model, evict the dead
    shutdown    stop the shards

The manager thread is the only one that runs Python. For models that need reports of pushes it is
woken by the shards; under ASP a gradient never passes through it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import GadeiError, OtherVersion, SegmentError, in_words
from gadei_ps.machine import log, placement, process
from gadei_ps.memory import build, holds, layout, ring, segment
from gadei_ps.memory.layout import CONTROL, SERVER, Gone, Phase, SegmentKind, ServerState
from gadei_ps.memory.lifecycle import Leases
from gadei_ps.memory.shm import segment_name
from gadei_ps.server.code import Code
from gadei_ps.server.driver import Driver, Member, Start
from gadei_ps.server.rings import Rings
from gadei_ps.server.shards import Shards, new_board
from gadei_ps.server.watchers import Watchers
from gadei_ps.sync import SpecError

WAIT_NS = 100_000_000
LEASE_WAIT_NS = 100_000_000
ORPHAN_LOOK_S = 1.0
UNNAMED_S = 10.0  # until the watchdog has written down whom it started


@dataclass(frozen=True)
class Asked:
    """Settings of a server from the watchdog."""

    job: str
    number: int
    """Its line in control, 0 or 1."""
    orphan_s: float
    cores: list[int]
    """Cores of the shards."""
    learners: int = 0
    """See driver.Start."""
    patience_s: float = 0.0
    core_dumps: bool = False
    verbose: bool = False
    quiet: bool = False
    json: bool = False


class Server:
    """One server of a job."""

    def __init__(self, asked: Asked) -> None:
        self.job = asked.job
        self.cores = asked.cores
        self.orphan_s = asked.orphan_s
        self.log = log.get(job=self.job)
        self._start_of_job = Start(asked.learners, asked.patience_s, self.log)
        self.control_segment = segment.attach(
            segment_name(self.job, "control"), SegmentKind.CONTROL, writable=True
        )
        self.control = self.control_segment.view(CONTROL)
        other = build.server_difference(int(self.control["server_build"]))
        if other is not None:
            raise OtherVersion(f"job {self.job!r}", other)
        self.roster = self.control["roster"]
        self.job_id = self.control["header"]["job_id"].tobytes()
        self.shards: Shards | None = None  # once there is a model
        self.rings: Rings | None = None
        self.driver: Driver | None = None
        self.leases = Leases.NONE
        self.stop_asked = False
        self._line = self.control["server"][asked.number]
        self._code = Code(self.control_segment, asked.number)
        self._start = process.start_ticks(os.getpid())
        self._namespace = process.namespace()
        self._byte = holds.SERVERS[asked.number]
        self._hold: holds.Hold | None = None  # by which others see that this server lives
        word = self.control_segment.word
        self._beat_at = word(CONTROL, "server") + asked.number * SERVER.itemsize
        self._beat_at += layout.offset(SERVER, "beat")
        self._beats = 0
        self._alone_since = 0.0
        self._looked = 0.0
        self._unnamed_since = 0.0
        self._manager_bell = word(CONTROL, "manager_bell")
        self._shard_bell = word(CONTROL, "shard_bell")

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the server from start to end; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self.startup()
            self.main_loop()
        finally:
            self.shutdown()
        return 1 if self.crashed else 0

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_asked = True

    def startup(self) -> None:
        """Load or compile the kernels."""
        self._code.load(logs=self._byte == holds.SERVERS[0])

    def main_loop(self) -> None:
        """Run until the job stops or a shard thread fails."""
        while not self.stop_asked and not self.crashed:
            bell = _native.load32(self._manager_bell)  # SYNC POINT: bells
            self._beats += 1
            _native.store(self._beat_at, self._beats)
            over = int(self.control["phase"]) >= Phase.STOPPED
            if over or self._abandoned() or self._replaced():
                return
            self._try_leases()
            if self.leases >= Leases.HEIR:
                if self.shards is None and self._code.is_ready(self.active):
                    self._map_model()
                if self.rings is not None:
                    self._follow()
                    self._start_shards()
                    self._drive()
                self._report_ready()
            _native.futex_wait(self._manager_bell, bell, WAIT_NS)

    def _drive(self) -> None:
        """Drive the synchronization model; a standby follows the server that does."""
        assert self.driver is not None
        if self.active:
            self.driver.run(self._all_serve)
            self._retire()
        else:
            self.driver.follow()

    def shutdown(self) -> None:
        """Stop the shards at the end of the current gradient."""
        if self.shards is not None:
            self.shards.stop()

    @property
    def active(self) -> bool:
        """Whether this server has the managers' lease."""
        return self.leases >= Leases.MANAGERS

    @property
    def crashed(self) -> bool:
        """Whether the thread of a shard has failed."""
        return self.shards is not None and self.shards.crashed is not None

    def _abandoned(self) -> bool:
        """Evict dead learners without a watchdog, and exit when no learner is left."""
        now = time.monotonic()
        if now - self._looked < ORPHAN_LOOK_S:
            return False
        self._looked = now
        if process.alive(int(self.control["watchdog_pid"]), int(self.control["watchdog_start"])):
            self._alone_since = 0.0
            return False
        if not self._alone_since:
            self._alone_since = now
            if self.active:  # not also the standby
                self.log.warning("the watchdog is gone; continuing until another one is started")
            if self.active and not self._is_found():
                self.log.error(
                    "no watchdog can adopt this job: its segments have lost their names "
                    "(RemoveIPC?); exiting with the last learner"
                )
        someone = False
        gone = 0
        wanted = self.roster["wanted"]
        there = (wanted != 0) & (wanted == self.roster["generation"])  # not half given away
        for row in np.flatnonzero(there).tolist():
            entry = self.roster[row]
            if not self._has_left(row) and process.alive(
                int(entry["pid"]), int(entry["pid_start"])
            ):
                someone = True
            elif self.active:
                # Else a barrier would wait for the dead until the next watchdog comes.
                entry["wanted"] = 0
                gone += 1
        if gone:
            _native.bell(self._shard_bell)
        if someone:
            self._alone_since = now
        if now - self._alone_since < self.orphan_s and (someone or self._is_found()):
            return False
        self.log.warning("no watchdog and no learner: ending; the job's memory stays")
        return True

    def _has_left(self, row: int) -> bool:
        """Return whether a learner noted its end in its ring, as no watchdog was there."""
        one = self.rings.mapped.get(row) if self.rings is not None else None
        return one is not None and one.has_detached

    def _is_found(self) -> bool:
        """Return whether the job's name still leads to this memory, for a watchdog to adopt."""
        name = segment_name(self.job, "control")
        try:
            segment.attach(name, SegmentKind.CONTROL, writable=False, job_id=self.job_id)
        except (FileNotFoundError, SegmentError):
            return False
        except OSError:  # no descriptor is free
            return True
        return True

    # -- leases -------------------------------------------------------------------------------

    def _try_leases(self) -> None:
        """Become the next in line, then the active server, when those before have ended."""
        word = self.control_segment.word
        if self.leases < Leases.HEIR and self._is_named() and self._take_hold():
            self.leases = Leases(self._take(word(CONTROL, "standby_lease")))
        if self.leases != Leases.HEIR:
            return
        # Once a shard's lease has come, the managers' is sure to follow.
        succeeding = self.rings is not None and self.rings.begun
        if self._take(word(CONTROL, "lease"), LEASE_WAIT_NS if succeeding else 0):
            self.leases = Leases.MANAGERS
            self.control["lease_pid"] = os.getpid()
            self.control["lease_start"] = self._start
            _native.store(word(CONTROL, "lease_generation"), self._generation + 1)
            if self._generation > 1:
                self.log.warning("failover", server=os.getpid(), generation=self._generation)

    def _is_named(self) -> bool:
        """Return whether the watchdog, or the next one, has recorded this server."""
        named = int(self._line["pid"]), int(self._line["start"])
        here = int(self.control["header"]["owner_namespace"]) == self._namespace
        return here and named == (os.getpid(), self._start)

    def _take_hold(self) -> bool:
        """Take this server's lock; return False while the one that had the line before still ends.

        Raises FileNotFoundError or SegmentError if the control segment has lost its name.
        """
        if self._hold is None:
            hold = holds.take(self.job, self._byte)
            if hold is not None and hold.inode != self.control_segment.inode:
                raise SegmentError(f"job {self.job!r} has been replaced by another of its name")
            # A watchdog of another pid namespace, which looks for the lock, may just have adopted
            # the job: it clears the line first and looks again afterwards.
            if hold is not None and self._is_named():
                self._hold = hold
            elif hold is not None:
                hold.release()
        return self._hold is not None

    def _replaced(self) -> bool:
        """Return whether no watchdog has recorded this server: it may die right after a start."""
        if self._is_named():
            self._unnamed_since = 0.0
            return False
        now = time.monotonic()
        self._unnamed_since = self._unnamed_since or now
        return int(self._line["pid"]) > 0 or now - self._unnamed_since > UNNAMED_S

    @property
    def _generation(self) -> int:
        return int(self.control["lease_generation"])

    def _take(self, lease: int, timeout_ns: int = 0) -> bool:
        return _native.lease_take(lease, timeout_ns) != _native.PS_TIMEOUT

    @property
    def _all_serve(self) -> bool:
        """Whether every shard holds its lease in this process."""
        return self.rings is not None and self.rings.held == int(self.control["shards"])

    def _report_ready(self) -> None:
        """Report that it serves, or has mapped everything and waits for its leases."""
        complete = self.shards is not None or not int(self.control["model_ready"])
        shards = self.shards.count if self.shards is not None else 0
        if self.active:
            if complete and (self.rings is None or self.rings.held == shards):
                if shards:
                    self.control["lease_shards"] = 1
                self._line["state"] = ServerState.READY
                if self.leases < Leases.ALL:
                    self.leases = Leases.ALL  # the next server may begin to wait for us
                    self._line["confirmed"] = 1
                    _native.lease_release(self.control_segment.word(CONTROL, "standby_lease"))
                if not int(self.control["lease_state"]):
                    _native.store32(self.control_segment.word(CONTROL, "lease_state"), 1)
        elif complete and (self.shards is None or self.shards.started):
            self._line["state"] = ServerState.READY

    # -- model and shards -----------------------------------------------------------------------

    def _map_model(self) -> None:
        weights, state = (
            segment.attach(segment_name(self.job, name), kind, writable=True, job_id=self.job_id)
            for name, kind in (("weights", SegmentKind.WEIGHTS), ("state", SegmentKind.STATE))
        )
        if not self.active:
            for one in (weights, state):
                _native.populate(one.address, one.size)
        board = new_board()
        self.shards = Shards(self.control_segment, weights, state, board)
        self.rings = Rings(
            self.job,
            ring.sizes(self.shards.payload_bytes, int(self.control["slots"])),
            board,
            self.shards.count,
            self._shard_bell,
        )
        self.watchers = Watchers(self.rings)
        self.driver = Driver(self.control_segment, state, self.shards.part(0), self._start_of_job)
        self.log.debug("model mapped", elements=self.shards.elements, shards=self.shards.count)

    def _start_shards(self) -> None:
        """Have the shards' threads take, or wait for, their leases.

        A standby waits until the active server holds them all. Otherwise it could take some leases
        of a new model and leave the others to a manager in another process.
        """
        assert self.shards is not None
        if not self.shards.started and (self.active or int(self.control["lease_shards"])):
            self.shards.start(self.cores, lambda: _native.bell(self._manager_bell))

    # -- roster ---------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Map the rings in the roster, and forget the others."""
        assert self.rings is not None and self.driver is not None
        rings = self.rings
        generation, retired = self.roster["generation"], self.roster["retired"]
        for row, one in list(rings.mapped.items()):
            if int(retired[row]) >= one.generation:  # later ones too, if this process was stopped
                rings.forget(row)
        rings.tidy()
        members = self.driver.members  # also those that the shards are forgetting
        for row in np.flatnonzero(generation != retired).tolist():
            wanted = int(generation[row])
            served = int(self.roster[row]["served"]) == wanted
            known = row in rings.mapped or row in members or row in rings.forgotten
            if not known and (served or self.active):
                self._map_ring(row, wanted, served)
        if self.active:
            self.watchers.follow()
            self._look_at_members()

    def _map_ring(self, row: int, generation: int, served: bool) -> None:
        """Show a learner's ring to the shards, one already served or (active only) a new one.

        One that is served and cannot be mapped is replaced by zeros: a shard that has to finish a
        gradient of it must not wait.
        """
        assert self.rings is not None and self.driver is not None
        entry = self.roster[row]
        try:
            one = self.rings.map(row, generation, self.control, populate=not self.active)
        except (FileNotFoundError, SegmentError) as error:
            if not self.active:
                return  # it may be late: the row has just been retired
            self.log.error("a learner's ring cannot be mapped", row=row, reason=in_words(error))
            if not served:
                entry["retired"] = generation
                return
            one = self.rings.replace(row, generation)
        # The name is used again: what was opened is this learner's if it has not been retired yet.
        if int(entry["retired"]) >= generation:
            return
        if int(entry["broken"]) == generation:
            self.rings.break_(row, generation)
        if not served:
            self.driver.take_in(one)
        self.rings.show(one)

    def _look_at_members(self) -> None:
        assert self.rings is not None and self.driver is not None
        members = self.driver.members
        for row, one in self.rings.mapped.items():
            if row not in members:
                members[row] = Member(one)
            member = members[row]
            if int(self.roster[row]["broken"]) == member.generation:
                self.rings.break_(row, member.generation)
            if self.rings.is_broken(one) or self.driver.sees_nonsense(member):
                self._evict(member)
            if not member.leaving and int(self.roster[row]["wanted"]) != member.generation:
                member.leaving = True

    def _evict(self, member: Member) -> None:
        """Evict a learner with a damaged ring once the model has decided on what the ring holds."""
        assert self.rings is not None and self.driver is not None
        entry = self.roster[member.row]
        if not self.rings.notify_broken(member.mapped):
            return
        if int(entry["broken"]) != member.generation:
            self.log.error(
                "a learner has damaged its ring, or truncated it, and is evicted",
                row=member.row,
                pid=int(entry["pid"]),
            )
            self.driver.note_broken(member)
        if int(entry["wanted"]) == member.generation and not self.driver.holds(member):
            entry["gone"] = Gone.DAMAGED
            entry["wanted"] = 0
            _native.bell(self._shard_bell)

    def _retire(self) -> None:
        """Retire drained rings: first the shards forget them, then the row becomes free."""
        assert self.rings is not None and self.driver is not None
        if self.rings.held != int(self.control["shards"]):
            return  # one that has not recovered yet may look for any ring of its record
        for row, member in list(self.driver.members.items()):
            if not member.leaving or not int(self.roster[row]["drained"]):
                continue
            if not self.driver.done_with(member):
                continue
            if row in self.rings.mapped:
                if self.rings.is_broken(member.mapped) and not self.driver.is_settled(member):
                    continue
                self.rings.forget(row)
            # Also the shards that have not recovered yet: their record may name this row.
            if self.rings.seen_by_all():
                del self.driver.members[row]
                self.rings.tidy()
                at = self.control_segment.word(CONTROL, "roster") + row * layout.ENTRY.itemsize
                _native.store(at + layout.offset(layout.ENTRY, "retired"), member.generation)
                _native.bell(self._manager_bell)  # the standby unmaps it too


def _parse() -> Asked:
    """Parse the command line, which the watchdog writes."""
    parser = argparse.ArgumentParser(prog="gadei-ps server", description=main.__doc__)
    parser.add_argument("job")
    parser.add_argument("number", type=int)
    parser.add_argument("orphan_s", type=float)
    parser.add_argument("--cores", type=placement.parse, default=[])
    parser.add_argument("--learners", type=int, default=0)
    parser.add_argument("--patience", type=float, default=0.0, dest="patience_s")
    parser.add_argument("--core-dumps", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", action="store_true")
    return Asked(**vars(parser.parse_args()))


def main() -> None:
    """Run `python -m gadei_ps.server.manager JOB NUMBER ORPHAN_S`, which the watchdog starts."""
    asked = _parse()
    log.set_up(as_json=asked.json, verbose=asked.verbose, quiet=asked.quiet)
    if not asked.core_dumps:
        process.forbid_core_dump()
    try:
        code = Server(asked).run()
    except OtherVersion as error:
        log.get(job=asked.job).error("not started", reason=str(error))
        code = build.REFUSED
    except (GadeiError, SpecError, OSError) as error:
        log.get(job=asked.job).error("parameter server", reason=in_words(error))
        code = 1
    except Exception:
        log.get(job=asked.job).exception("parameter server")
        code = 1
    # At once: the interpreter would unmap the leases that threads hold before these end, and the
    # kernel could not show the next server that their holder is dead.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
