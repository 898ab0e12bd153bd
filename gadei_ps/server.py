"""The parameter server process: shard threads that apply, and a manager that decides.

    startup     attach control, load the compiled kernels, take the lease
    main_loop   map the model and new rings, drive the sync model, let the dead go
    shutdown    stop the shards

The manager thread is the only one that runs Python. For models that need to hear of pushes it is
woken by the shards; under ASP a gradient never passes through it.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from gadei_ps import _native, apply, layout, log, process, segment, shard, sync
from gadei_ps import places as place
from gadei_ps.errors import GadeiError, JobFailed, SegmentError
from gadei_ps.layout import CONTROL, ENTRY, RING, STATE, Action, Phase, Reason, SegmentKind, Work
from gadei_ps.segment import Segment, segment_name

WAIT_NS = 100_000_000
SHARD_EXIT_S = 2.0


@dataclass(eq=False)
class Member:
    """A ring that is served."""

    row: int
    generation: int
    ring: Segment
    reported: int = 0  # frames that the sync model has heard of
    joined: bool = False
    leaving: bool = False
    granted: int = -1


class Server:
    """The manager of one job."""

    def __init__(self, job: str, model: sync.SyncModel) -> None:
        self.job = job
        self.sync = model
        self.log = log.get(job=job)
        self.control_segment = segment.attach(
            segment_name(job, "control"), SegmentKind.CONTROL, writable=True
        )
        self.control = self.control_segment.view(CONTROL)
        self.roster = self.control["roster"]
        self.job_id = self.control["header"]["job_id"].tobytes()
        self.weights: Segment | None = None
        self.state: Segment | None = None
        self.members: dict[int, Member] = {}
        self.threads: list[threading.Thread] = []
        self.table = np.zeros((layout.MAX_LEARNERS, place.TABLE), np.uint64)
        self.words = np.zeros(place.WORDS, np.uint64)
        self.commits: collections.deque[sync.Commit] = collections.deque()
        self.refusals: dict[
            tuple[int, int], int
        ] = {}  # (row, sequence) -> reason, until carried out
        self.crashed: BaseException | None = None
        self.stop_asked = False
        self._manager_bell = self._word("manager_bell")
        self._shard_bell = self._word("shard_bell")

    def _word(self, field: str) -> int:
        return self.control_segment.address + layout.offset(CONTROL, field)

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> int:
        """The whole life; returns the exit code."""
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
        """Loads or compiles the kernels, then takes the lease."""
        begin = time.monotonic()
        shard.load()
        self.log.debug("kernels loaded", seconds=round(time.monotonic() - begin, 2))
        self.control["lease_pid"] = os.getpid()
        self.control["lease_start"] = process.start_ticks(os.getpid())
        _native.store(self._word("lease_generation"), int(self.control["lease_generation"]) + 1)
        _native.store32(self._word("lease_state"), 1)

    def main_loop(self) -> None:
        """Until the job stops or a shard thread fails."""
        while not self.stop_asked and self.crashed is None:
            bell = _native.load32(self._manager_bell)
            if int(self.control["phase"]) >= Phase.STOPPED:
                return
            if self.weights is None and int(self.control["model_ready"]):
                self._map_model()
            if self.weights is not None:
                self._look_at_roster()
                if self.sync.uses_pushes:
                    self._report_pushes()
                    self._carry_out()
                self._publish_grants()
                self._retire()
            _native.futex_wait(self._manager_bell, bell, WAIT_NS)

    def shutdown(self) -> None:
        """Stops the shards at the end of the gradient in hand."""
        self.words[place.QUIT] = 1
        _native.bell(self._shard_bell)
        for thread in self.threads:
            thread.join(SHARD_EXIT_S)

    # -- model and shards -----------------------------------------------------------------------

    def _map_model(self) -> None:
        self.weights = segment.attach(
            segment_name(self.job, "weights"),
            SegmentKind.WEIGHTS,
            writable=True,
            job_id=self.job_id,
        )
        self.state = segment.attach(
            segment_name(self.job, "state"), SegmentKind.STATE, writable=True, job_id=self.job_id
        )
        head = self.weights.view(layout.WEIGHTS)
        elements = int(head["elements"])
        shards = int(self.control["shards"])
        for index in range(shards):
            low, high = layout.shard_range(elements, shards, index)
            places = self._places(index, elements, int(head["parameters"]))
            apply.recover(index, low, high, places)
            thread = threading.Thread(
                target=self._run_shard,
                args=(index, low, high, places),
                name=f"shard-{index}",
                daemon=True,
            )
            thread.start()
            self.threads.append(thread)
        self.log.debug("serving", elements=elements, shards=shards)

    def _places(self, index: int, elements: int, parameters: int) -> np.ndarray:
        assert self.weights is not None
        assert self.state is not None
        state = self.state.view(STATE)
        slot = [0, 0]
        for stream in range(int(state["streams"])):
            at = int(state["slots_at"]) + stream * int(state["slot_bytes"])
            slot[stream] = self.state.address + at
        undo_bytes = layout.MAX_STREAMS * layout.CHUNK * 4
        places = np.zeros(place.PLACES, np.uint64)
        places[place.CONTROL_AT] = self.control_segment.address
        places[place.STATE_AT] = self.state.address
        places[place.WEIGHTS_AT] = self.weights.address + int(
            self.weights.view(layout.WEIGHTS)["data_at"]
        )
        places[place.SLOT0_AT], places[place.SLOT1_AT] = slot
        places[place.UNDO_AT] = self.state.address + int(state["undo_at"]) + index * undo_bytes
        places[place.TABLE_AT] = self.table.ctypes.data
        places[place.WORDS_AT] = self.words.ctypes.data
        places[place.ELEMENTS] = elements
        places[place.PARAMETERS] = parameters
        return places

    def _run_shard(self, index: int, low: int, high: int, places: np.ndarray) -> None:
        self.control["shard"][index]["tid"] = threading.get_native_id()
        try:
            shard.serve(index, low, high, places)
        except BaseException as error:
            self.crashed = error
            _native.bell(self._manager_bell)
            raise

    # -- roster ---------------------------------------------------------------------------------

    def _look_at_roster(self) -> None:
        generation, retired = self.roster["generation"], self.roster["retired"]
        for row in np.flatnonzero(generation != retired):
            if int(row) not in self.members:
                self._take_in(int(row), int(generation[row]))
        for member in self.members.values():
            if not member.leaving and int(self.roster[member.row]["wanted"]) != member.generation:
                member.leaving = True

    def _take_in(self, row: int, generation: int) -> None:
        """Maps a new learner's ring and shows it to the shards."""
        assert self.state is not None
        try:
            ring = segment.attach(
                segment_name(self.job, f"ring.{row}"),
                SegmentKind.RING,
                writable=True,
                job_id=self.job_id,
            )
            slot_bytes, slots_at = self._geometry(ring)
        except SegmentError as error:  # the learner has written over its own ring
            self.log.error("a learner is refused", row=row, reason=str(error))
            self.roster[row]["retired"] = generation
            return
        except FileNotFoundError:
            # Not to be passed over: the learner would wait for a grant that never comes.
            raise JobFailed(
                f"the ring of learner {row} has lost its name; did logind remove it (RemoveIPC)?"
            ) from None
        member = Member(row, generation, ring)
        self.members[row] = member
        self.state.view(STATE)["applied"][:, row] = 0
        entry = self.roster[row]
        entry["drained"] = 0
        entry["outstanding"] = layout.NO_BATCH
        entry["grant"] = 0 if self.sync.uses_pushes else layout.UNBOUNDED
        self.table[row] = (0, generation, slot_bytes, slots_at)
        # The address last: a shard may be looking at the table for the sake of another row.
        address = self.table.ctypes.data + row * self.table.strides[0]
        _native.store(address + 8 * place.RING_ADDRESS, ring.address)
        self._table_changed()
        entry["served"] = generation
        self._wake_grant(row)

    def _geometry(self, ring: Segment) -> tuple[int, int]:
        """Bytes of a slot and where slots begin; read once, because a learner can write there."""
        assert self.weights is not None
        head = ring.view(RING)
        slot_bytes, slots_at = int(head["slot_bytes"]), int(head["slots_at"])
        payload = int(self.weights.view(layout.WEIGHTS)["elements"]) * 4
        end = slots_at + int(self.control["slots"]) * slot_bytes
        if slots_at < RING.itemsize or slot_bytes < layout.PAYLOAD_AT + payload or end > ring.size:
            raise SegmentError(f"{ring.name}: sizes that cannot be")
        return slot_bytes, slots_at

    def _table_changed(self) -> None:
        address = self.words.ctypes.data + 8 * place.TABLE_VERSION
        _native.store(address, int(self.words[place.TABLE_VERSION]) + 1)
        _native.bell(self._shard_bell)

    def _seen_by_all(self) -> bool:
        shards = int(self.control["shards"])
        seen = self.control["shard"]["seen_table"][:shards]
        return bool((seen == self.words[place.TABLE_VERSION]).all())

    def _retire(self) -> None:
        """Lets go of drained rings: first the shards forget them, then the mapping goes."""
        for member in list(self.members.values()):
            if not member.leaving or member.joined or not int(self.roster[member.row]["drained"]):
                continue
            if not self.sync.on_arrival and self._applied(member) < member.reported:
                continue  # a commit will still name it
            if int(self.table[member.row, place.RING_ADDRESS]) == member.ring.address:
                # The address only: a shard that is a table behind compares the generation.
                self.table[member.row, place.RING_ADDRESS] = 0
                self._table_changed()
            if self._seen_by_all():
                del self.members[member.row]
                entry = self.roster[member.row]
                entry["served"] = 0
                entry["retired"] = member.generation

    # -- synchronization model ------------------------------------------------------------------

    def _published(self, member: Member) -> int:
        """Frames that the model may hear of: published for a collecting model, else applied."""
        applied = self._applied(member)
        slots = int(self.control["slots"])
        if self.sync.on_arrival:
            if applied > max(member.granted, member.reported) + slots:
                member.reported = applied  # it wrote over its head; those were no iterations
            return applied
        head = _native.load(member.ring.address + layout.offset(RING, "head"))
        # Of one that wrote over its head nothing more can be told.
        return head if 0 <= head - applied <= slots else member.reported

    def _applied(self, member: Member) -> int:
        """Frames that every shard has consumed."""
        assert self.state is not None
        applied = self.state.view(STATE)["applied"]
        return int(applied[: int(self.control["shards"]), member.row].min())

    def _has_work(self, member: Member) -> bool:
        """Whether barriers are to wait for this learner.

        Not for one that only reads, nor while the work ledger has nothing for one that takes work.
        """
        wants = _native.load32(member.ring.address + layout.offset(RING, "wants"))
        if wants & layout.WANTS_WORK and int(self.control["work"]) != Work.NONE:
            return bool((self.roster[member.row]["outstanding"] != layout.NO_BATCH).any())
        return bool(wants & layout.WANTS_TURN)

    def _report_pushes(self) -> None:
        now = time.monotonic()
        for member in list(self.members.values()):
            if not member.joined and not member.leaving and self._has_work(member):
                self.sync.join(member.row, now)
                member.joined = True
            held = self._report_member(member, now)
            if held and member.leaving and self.sync.on_arrival:
                # Applied, though nobody had granted it; the clock of the gone matters no more.
                member.reported = self._published(member)
            behind = member.reported < self._published(member)
            if member.joined and not behind and (member.leaving or not self._has_work(member)):
                self.commits.extend(self.sync.leave(member.row, now))
                member.joined = False

    def _report_member(self, member: Member, now: float) -> bool:
        """Tells the model of what is new. True if some of that has not been granted yet."""
        published = self._published(member)
        while member.reported < published:
            if not member.joined:
                # Frames of a learner that is out of the membership: it published what it was not
                # granted, or left its last batch unnamed. They count as one more iteration.
                self.sync.join(member.row, now)
                member.joined = True
            if self.sync.clock(member.row) >= self.sync.grant(member.row):
                return True
            refused = False
            started = None
            if not self.sync.on_arrival:
                frame = self._frame(member, member.reported)
                reason = self._check(member, frame)
                refused = reason != Reason.OK
                started = float(frame[0]["started"])
                if refused:
                    self.refusals[member.row, member.reported] = reason
            commits = self.sync.push(member.row, now, started=started, refused=refused)
            member.reported += 1
            self.commits.extend(commits)
        return False

    def _frame(self, member: Member, sequence: int) -> np.ndarray:
        # Not by the words in the ring: the learner can write over them.
        slot_bytes = int(self.table[member.row, place.RING_SLOT_BYTES])
        slots_at = int(self.table[member.row, place.RING_SLOTS_AT])
        slot = sequence % int(self.control["slots"]) * slot_bytes
        return member.ring.array(layout.FRAME, 1, slots_at + slot)

    def _check(self, member: Member, frame: np.ndarray) -> int:
        assert self.weights is not None
        control = self.control_segment.array(CONTROL, 1, 0)
        elements = int(self.weights.view(layout.WEIGHTS)["elements"])
        return int(
            apply.check_frame(
                control,
                frame,
                np.uint64(member.generation),
                np.uint64(member.reported),
                elements,
            )
        )

    def _carry_out(self) -> None:
        """Publishes the next superstep once every shard is done with the one before."""
        if not self.commits or not self._supersteps_done():
            return
        commit = self.commits.popleft()
        action, upto = self.control["superstep_action"], self.control["superstep_upto"]
        action[:] = Action.SKIP
        tail = self._tails()
        for row in commit.apply:
            action[row] = Action.APPLY
            upto[row] = tail[row] + 1
        for row in commit.drop:
            reason = self.refusals.pop((row, tail[row]), Reason.OK)
            action[row] = Action.DROP if reason == Reason.OK else Action.REFUSE
            self.control["superstep_reason"][row] = reason
            upto[row] = tail[row] + 1
        self.control["superstep_applies"] = len(commit.apply)
        _native.store(self._word("superstep"), int(self.control["superstep"]) + 1)
        _native.bell(self._shard_bell)

    def _tails(self) -> dict[int, int]:
        assert self.state is not None
        applied = self.state.view(STATE)["applied"][0]
        return {row: int(applied[row]) for row in self.members}

    def _supersteps_done(self) -> bool:
        assert self.state is not None
        shards = int(self.control["shards"])
        done = self.state.view(STATE)["record"]["supersteps"][:shards]
        finished = bool((done == self.control["superstep"]).all())
        if finished:
            self.control["supersteps_done"] = self.control["superstep"]
        return finished

    def _publish_grants(self) -> None:
        """In a learner's own clock: iterations begun since it attached."""
        if not self.sync.uses_pushes:
            return
        if self.commits or not self._supersteps_done():
            return  # a grant tells that all it stands on is in the weights
        for member in self.members.values():
            if not member.joined:
                continue
            ahead = self.sync.grant(member.row) - self.sync.clock(member.row)
            grant = min(member.reported + ahead, layout.UNBOUNDED)
            if grant != member.granted:
                member.granted = grant
                at = self.control_segment.address + layout.offset(CONTROL, "roster")
                at += member.row * ENTRY.itemsize
                _native.store(at + layout.offset(ENTRY, "grant"), grant)
                self._wake_grant(member.row)

    def _wake_grant(self, row: int) -> None:
        at = self.control_segment.address + layout.offset(CONTROL, "roster")
        _native.bell(at + row * ENTRY.itemsize + layout.offset(ENTRY, "grant_seq"))


def main() -> None:
    """`python -m gadei_ps.server JOB SYNC`: started by the watchdog, not by hand."""
    parser = argparse.ArgumentParser(prog="gadei-ps server", description=main.__doc__)
    parser.add_argument("job")
    parser.add_argument("sync")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    log.set_up(as_json=args.json, verbose=args.verbose, quiet=args.quiet)
    try:
        code = Server(args.job, sync.parse(args.sync)).run()
    except (GadeiError, OSError) as error:
        log.get(job=args.job).error("parameter server", reason=str(error))
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
