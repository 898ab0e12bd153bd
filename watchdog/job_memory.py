"""The job's segments: the watchdog owns them; it makes, fills, adopts and removes them.

The next watchdog of a job adopts the memory that a dead one has left if all of this holds:

- no watchdog of the job lives: the job's lock is free, and so is the watchdog's lock on the control
  segment (gadei_ps/memory/holds.py);
- the job's other processes are dead, or live in this pid namespace: no server holds a lock there,
  and no ring is open for writing, if the memory is of another namespace;
- the control segment is whole, and of this layout and this build of gadei-ps (`server_build`);
- the job has not been stopped (`phase` is not STOPPED), and its model is there;
- weights and state carry the job's id;
- the fields settings.ADOPTED of the job file have the same digests as when the memory was made.

If the job's processes were in another pid namespace, for example in a container that is gone, its
pids mean nothing here: they may be other processes', even with the same start times. So only the
kernel's evidence is used: locks on the control segment, and whether a ring is open for writing.

Nothing else of the job file is compared. The synchronization model stays the one in memory. A ring
is adopted if the roster's row holds a learner and the ring is of the same generation.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import JobInUse, NoSharedMemory, NotOurs, OtherVersion, SegmentError
from gadei_ps.job import changes, hyperparameters, paths, recorded, sync_change
from gadei_ps.job.changes import NO_CHANGES, Changes
from gadei_ps.job.config import JobConfig
from gadei_ps.kernels import optimizers
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.machine import process
from gadei_ps.memory import build, holds, layout, presence, reserve, segment, shm, totals, weights
from gadei_ps.memory import ring as shared
from gadei_ps.memory.holds import Hold
from gadei_ps.memory.layout import Phase, SegmentKind, ServerState, Stop
from gadei_ps.memory.reserve import Progress
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model
from gadei_ps.storage.snapshot import Snapshot
from gadei_ps.sync import SyncModel
from gadei_ps.watchdog import model_segments, script, settings
from gadei_ps.watchdog.cleanup import differs, name_taken
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.script import Script

OWN_FILE = "start it with the job file or the options that it had, or drop it with --fresh"
OWN_BUILD = "start it with its own gadei-ps, or drop it with --fresh"
LOCK_INTERVAL_S = 0.001  # between two tries to take a lock
NOWHERE = 0  # no namespace has this number: pids in the memory mean nothing to any process
ELSEWHERE_END_S = 15.0  # for a server that has lost its watchdog while it started


@dataclass(eq=False)
class JobMemory:
    """All segments of a job, as the watchdog sees them."""

    config: JobConfig
    learners: int = 1
    """Number of learners to come, whose rings must fit beside the model."""
    job_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    model: Model | None = None
    script: Script = field(default_factory=Script)
    """Settings of the optimizer from the learners' scripts."""
    changes: Changes = NO_CHANGES
    """Changes of them by `gadei-ps set`."""
    control: Segment = field(init=False)
    weights: Segment | None = field(default=None, init=False)
    state: Segment | None = field(default=None, init=False)
    rings: dict[int, Segment] = field(default_factory=dict, init=False)
    adopted: bool = field(default=False, init=False)
    """Whether another watchdog has made the memory: then a start that fails does not remove it."""
    unnamed: bool = field(default=False, init=False)
    """Whether names were seen to be lost; set by the supervisor, as looking costs time."""
    _lost: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64), init=False)
    """A word for the guards of rings, which is never read: the servers report that a ring is lost
    (Gone.DAMAGED). The guards here only keep the watchdog alive."""
    files: dict[str, int] = field(default_factory=dict, init=False)
    """Open segments that a checkpoint is made of: it can be made even when their names are lost."""
    _hold: Hold | None = field(default=None, init=False)
    """The watchdog's lock on the control segment."""

    @property
    def words(self) -> np.void:
        """Words of the control segment."""
        return self.control.view(layout.CONTROL)

    @property
    def state_words(self) -> np.void:
        """Words of the state segment, which exists as soon as the job has a model."""
        assert self.state is not None
        return self.state.view(layout.STATE)

    def create_control(self, sync: SyncModel) -> None:
        """Make the control segment. Raises JobInUse or NoSharedMemory."""
        hold = None
        with contextlib.suppress(FileExistsError, FileNotFoundError, NotOurs):
            made = segment.create(
                self.config.name,
                "control",
                SegmentKind.CONTROL,
                layout.CONTROL.itemsize + recorded.room(self.config),
                job_id=self.job_id,
            )
            hold = self._lock(made)
        # What another process has locked already, or put in its place, is not ours to remove.
        if hold is None or hold.inode != made.inode:
            raise JobInUse(f"job {self.config.name!r} has just been started by another")
        self.control, self._hold = made, hold
        control = self.words
        control["server_build"] = build.of_server()
        control["slots"] = self.config.slots
        control["ahead"] = self.config.ahead
        control["owned"] = self.config.owned
        sync_change.initialize(self.control, sync)
        control["refuse_nonfinite"] = self.config.nonfinite == "refuse"
        control["spin_ns"] = int(self.config.resolved_spin_us() * 1e3)
        control["roster"]["outstanding"] = layout.NO_BATCH
        control["started"] = int(time.time())
        self.enter_settings()
        self._own()
        self.control.publish()

    def _lock(self, made: Segment) -> Hold | None:
        """The watchdog's lock on a control segment that is just made; None if another has it.

        Another start, which looks whether there is anything to adopt, holds it for an instant. As
        it finds nothing, both would be refused. Raises FileNotFoundError or NotOurs.
        """
        until = time.monotonic() + presence.HALF_MADE_S  # then others may take it for stale
        while True:
            hold = holds.take(self.config.name, holds.WATCHDOG)
            if hold is not None or time.monotonic() > until:
                return hold
            if not segment.is_named(made):
                return None
            time.sleep(LOCK_INTERVAL_S)

    def _own(self) -> None:
        """Enter this process as the job's watchdog and as the owner of its segments."""
        control = self.words
        start = process.start_ticks(os.getpid())
        control["watchdog_pid"] = 0  # so that at no instant the words of two stand together
        parts = (self.control, self.weights, self.state, *self.rings.values())
        for part in parts:
            if part is not None:
                segment.enter_owner(part.header)
        control["watchdog_start"] = start
        control["watchdog_pid"] = os.getpid()
        control["watchdog_starts"] += 1

    # -- adoption -------------------------------------------------------------------------------

    def adopt(self, *, is_own: bool = False) -> bool:
        """Adopt the memory that a dead watchdog has left; return whether there was memory to use.

        is_own: the configuration was read from this memory. The caller holds the job's lock. Raises
        JobInUse where the memory is of another configuration or version; only --fresh drops it
        then. Raises it too where a process of the job lives in another pid namespace, or a name is
        taken by what is not ours.
        """
        name = self.config.name
        try:
            hold = holds.take(name, holds.WATCHDOG)
        except FileNotFoundError:
            return False
        except NotOurs as error:
            raise name_taken(str(error)) from None
        if hold is None:
            raise JobInUse(self._who_holds())
        try:
            self.adopted = self._adopt(hold, is_own)
        finally:
            if self.adopted:
                self._hold = hold
            else:
                hold.release()
        return self.adopted

    def _who_holds(self) -> str:
        name = self.config.name
        control = presence.peek(name)
        if control is None or not presence.is_here(control["header"]):
            return presence.elsewhere(name)
        pid = int(control["watchdog_pid"])
        where = paths.of_watchdog(name, pid)
        at = f" (with {paths.variable(where)})" if where else ""
        return (
            f"job {name!r} is in use: its watchdog is process {pid}{at}; "
            "choose another name or stop it (gadei-ps stop)"
        )

    def _adopt(self, hold: Hold, is_own: bool) -> bool:
        try:
            # Kept in a local name until it is accepted: a start that fails removes self.control.
            found = segment.attach(
                shm.segment_name(self.config.name, "control"), SegmentKind.CONTROL, writable=True
            )
        except OtherVersion as error:
            raise differs(
                self.config.name, f"is still in memory, {error.what}", OWN_BUILD
            ) from None
        except (FileNotFoundError, SegmentError):
            return False  # half made, or damaged
        if found.inode != hold.inode:
            raise JobInUse(f"job {self.config.name!r} has just been started by another")
        control = found.view(layout.CONTROL)
        here = presence.is_here(found.header)
        if not here:
            check_dead_elsewhere(self.config.name, control)
        elif process.alive(int(control["watchdog_pid"]), int(control["watchdog_start"])):
            raise JobInUse(self._who_holds())
        if int(control["phase"]) == Phase.STOPPED or not int(control["model_ready"]):
            return False
        other = build.server_difference(int(control["server_build"]))
        if other is not None:
            raise differs(self.config.name, f"is still in memory, {other}", OWN_BUILD)
        had = dict(zip(settings.ADOPTED, control["config"].tolist(), strict=False))
        changed = [name for name, one in settings.digests(self.config).items() if had[name] != one]
        if changed and not is_own:  # only a reload that was under way can differ then
            raise differs(
                self.config.name, f"is still in memory, with another {', '.join(changed)}", OWN_FILE
            )
        self.job_id = control["header"]["job_id"].tobytes()
        try:
            self.weights = self._attach("weights", SegmentKind.WEIGHTS)
            self.state = self._attach("state", SegmentKind.STATE)
            self.model = weights.read_table(self.weights)
            self.script = script.read(found)
            self.changes = recorded.read_changes(found).still(self.config)
            Stop(int(control["stop"]))
        except (FileNotFoundError, SegmentError, ValueError, OverflowError):
            self.weights = self.state = self.model = None
            self.script, self.changes = Script(), NO_CHANGES
            self.job_id = secrets.token_bytes(16)
            return False
        # In this order: until no server lives elsewhere, the memory must not say that it is of this
        # namespace. The next watchdog would ask pids then, and not look at the servers' locks.
        if not here:
            take_from_elsewhere(self.config.name, control)
        self.control, self.adopted = found, True
        self.enter_settings()
        self._open_files()
        self._adopt_rings()
        self._own()
        if int(control["phase"]) in (Phase.KEPT, Phase.FAILED):
            control["stop"] = Stop.GO
            control["phase"] = Phase.STARTING  # servers end in a job that has failed
        return True

    def _attach(self, part: str, kind: SegmentKind) -> Segment:
        name = shm.segment_name(self.config.name, part)
        return segment.attach(name, kind, writable=True, job_id=self.job_id)

    def _adopt_rings(self) -> None:
        """Adopt rings of learners that are served or leaving, and remove all others."""
        for row in range(layout.MAX_LEARNERS):
            name = shm.segment_name(self.config.name, f"ring.{row}")
            if not self._adopt_ring(row, name):
                segment.unlink(name)

    def _adopt_ring(self, row: int, name: str) -> bool:
        entry, inode = self.words["roster"][row], int(self.words["ring_inode"][row])
        if int(entry["generation"]) == int(entry["retired"]):
            return False
        # Servers have a ring mapped whose name may be lost.
        servers = [pid for pid in self.words["server"]["pid"].tolist() if pid]
        try:
            ring = shared.attach(name, self._ring_sizes().bytes, inode, servers)
        except (FileNotFoundError, SegmentError):
            return False
        self._guard(ring)
        self.rings[row] = ring
        return True

    def names_lost(self) -> list[str]:
        """Return names of mapped segments that another process removed from /dev/shm.

        Not those of rings: a learner may remove its own, and servers find it without (ring.py).
        """
        parts = (self.control, self.weights, self.state)
        return [part.name for part in parts if part is not None and not segment.is_named(part)]

    # -- making ---------------------------------------------------------------------------------
    #
    # make_...() takes long if the model is large. Any thread may call it, because it touches only
    # what nobody else knows of yet; the watchdog's own thread then enters what was made.

    def needs(self, model: Model, streams: int) -> dict[str, int]:
        """Return the size of each segment (bytes) of a job with that model and optimizer slots."""
        ring = model_segments.ring_shape(model, self.config.slots).bytes
        return {
            "weights": weights.segment_bytes(model),
            "optimizer": model_segments.state_bytes(model, streams),
            "ring" if self.learners == 1 else f"{self.learners} rings": self.learners * ring,
        }

    def make_model(
        self, first: InitialModel, progress: Progress | None = None
    ) -> tuple[Segment, Segment]:
        """Make weights and state; any thread. Room for the learners' rings must be there, too.

        Raises NoSharedMemory, reserve.Cancelled and what first.values raises; then nothing of it is
        left.
        """
        name = self.config.name
        streams = optimizers.slots(self.effective.optimizer.spec(first.script.settings).kind)
        needs = self.needs(first.model, streams)
        reserve.check(needs, f"job {name!r}")
        if progress is not None:
            progress.total = needs["weights"] + needs["optimizer"]
        try:
            made = model_segments.weights_segment(name, self.job_id, first, progress)
            try:
                return made, model_segments.state_segment(
                    name, self.job_id, first, streams, progress
                )
            except BaseException:
                segment.unlink(made.name)
                raise
        except FileExistsError as error:
            raise NoSharedMemory(
                f"{shm.path_of(str(error.filename))} is there already: have it removed by its "
                "owner or root, or choose another name for the job"
            ) from None

    def enter_model(self, first: InitialModel, made: tuple[Segment, Segment]) -> None:
        """The model is there: other processes may attach to it from now on."""
        self.weights, self.state = made
        try:
            self._open_files()
        except BaseException:
            self._drop_model()
            raise
        control = self.words
        control["shards"] = self.config.resolved_shards(first.model.elements)
        if first.snapshot is not None:
            restore(control, self.state.view(layout.STATE), first.snapshot)
            self.changes = first.changes
        self.enter_script(first.script)
        self.weights.publish()
        self.state.publish()
        self.model = first.model

    def enter_script(self, new: Script) -> None:
        """Record the scripts' settings, before their first gradient."""
        settings.enter(self.control, self.config, new, self.changes)
        script.write(self.control, new)
        self.script = new

    def reopen_script(self) -> None:
        """Let the first script to come set what it wants of the optimizer, as after a checkpoint.

        No learner may be attached.
        """
        new = replace(self.script, is_open=True, saved=True)
        script.write(self.control, new)
        self.script = new

    def enter_settings(self) -> None:
        """Enter what counts of the job file, the scripts and `gadei-ps set`.

        Without a model, or before the first learner is let in, no gradient can be under way.
        """
        begins = self.model is None or self.script.is_open
        settings.enter(self.control, self.config, self.script, self.changes, begins=begins)

    @property
    def specs(self) -> list[OptimizerSpec]:
        """Resulting settings of each group of parameters, and at last of the others."""
        return self.changes.specs(self.config, self.script.settings)

    def change_settings(self, values: Mapping[str, Any]) -> dict[str, list[str | float | None]]:
        """Apply the request of `gadei-ps set`; return the changed fields, each with both values.

        The change is first recorded in memory. From then on this watchdog, or the next one, asks
        the servers for it until it is in force (job/hyperparameters.py). Raises UsageError, and
        changes nothing, for settings that the job's optimizer cannot have.
        """
        before = self.specs
        values = changes.checked(values, before[-1].kind.name.lower(), len(before) - 1)
        new = self.changes.with_(values, self.config)
        after = new.specs(self.config, self.script.settings)
        if new != self.changes:
            self.changes = new
            self.enter_settings()
        was, now = settings.fields(before), settings.fields(after)
        return {name: [was[name], now[name]] for name in values if was[name] != now[name]}

    @property
    def is_settled(self) -> bool:
        """Whether the servers apply gradients with the resulting settings."""
        return hyperparameters.are_in_force(self.control, settings.packed(self.specs))

    def ask_for_settings(self) -> None:
        """Ask for what is not in force yet: a change may have come amid another one. Every tick."""
        if self.model is not None and not self.is_settled:
            hyperparameters.request(self.control, settings.packed(self.specs))

    @property
    def effective(self) -> JobConfig:
        """The job file with what `gadei-ps set` has changed."""
        return self.changes.applied(self.config)

    def _open_files(self) -> None:
        for part in ("control", "weights", "state"):
            name = shm.segment_name(self.config.name, part)
            self.files[part] = shm.open_segment(name, writable=part == "control")

    def _drop_model(self) -> None:
        self.close()
        for made in (self.weights, self.state):
            if made is not None:
                segment.unlink(made.name)
        self.weights = self.state = None

    def make_ring(self, row: int, generation: int, progress: Progress | None = None) -> Segment:
        """Make the ring of a new learner; any thread. Raises NoSharedMemory, reserve.Cancelled."""
        control = self.words
        shape = self._ring_sizes()
        if progress is not None:
            progress.total = shape.bytes
        ring = segment.create(
            self.config.name,
            f"ring.{row}",
            SegmentKind.RING,
            shape.bytes,
            job_id=self.job_id,
            generation=generation,
            index=row,
            progress=progress,
        )
        self._guard(ring)
        head = ring.view(layout.RING)
        head["slots"] = control["slots"]
        head["shards"] = control["shards"]
        head["slot_bytes"] = shape.slot_bytes
        head["slots_at"] = shared.SLOTS_AT
        head["capacity"] = shape.capacity
        return ring

    def enter_ring(self, row: int, ring: Segment) -> None:
        """The ring is there: the learner and the servers may map it."""
        ring.publish()
        self.rings[row] = ring

    def _ring_sizes(self) -> shared.Sizes:
        assert self.model is not None
        return model_segments.ring_shape(self.model, int(self.words["slots"]))

    def _guard(self, ring: Segment) -> None:
        """A learner that truncates its ring must not end this process; servers let it go."""
        shared.guard(ring, self._lost.ctypes.data, 1, self._lost)

    def ring_bells(self) -> None:
        """Wake the servers, after a change in the control segment."""
        for word in ("manager_bell", "shard_bell"):
            _native.bell(self.control.word(layout.CONTROL, word))

    def remove_ring(self, row: int) -> Segment | None:
        """Take the ring's name away. Freeing a large one takes time, where its mapping goes last.

        Returns that mapping, if there was such a ring.
        """
        ring = self.rings.pop(row, None)
        if ring is not None:
            segment.unlink(ring.name)
        return ring

    def close(self) -> None:
        while self.files:
            os.close(self.files.popitem()[1])

    def remove(self) -> None:
        """Remove every segment of the job."""
        for row in list(self.rings):
            self.remove_ring(row)
        self._drop_model()
        for part in ("weights", "state"):  # a thread may be in the middle of making it
            segment.unlink(shm.segment_name(self.config.name, part))
        segment.unlink(self.control.name)
        self.release()

    def release(self) -> None:
        """Let another watchdog have what is left of the job; this one touches nothing any more."""
        if self._hold is not None:
            self._hold.release()
            self._hold = None


def check_dead_elsewhere(job: str, control: np.void) -> None:
    """Raise JobInUse if a server or a learner of the job lives. The caller holds the watchdog's
    lock."""
    if presence.living(job).servers:
        raise JobInUse(presence.elsewhere(job))
    roster = control["roster"]
    for row in np.flatnonzero(roster["generation"] != roster["retired"]).tolist():
        try:
            written = holds.is_written(shm.segment_name(job, f"ring.{row}"))
        except (FileNotFoundError, NotOurs):
            continue
        if written:
            raise JobInUse(
                f"learner {row} of job {job!r} is running elsewhere (in another container or pid "
                "namespace): end it there first"
            )


def take_from_elsewhere(job: str, control: np.void) -> None:
    """Ensure, after check_dead_elsewhere(), that no server of the job begins to serve there.

    One may just have been starting when its watchdog died. It takes its lock, then looks whether it
    is still named; here the names are removed first, and then the locks are looked at. The memory
    is of no namespace meanwhile: if this fails, or its process is killed, every next watchdog looks
    at the locks again, in whichever namespace it starts. Raises JobInUse.
    """
    # First, so that nobody reads pids that are removed as those of the dead.
    control["header"]["owner_namespace"] = NOWHERE
    _forget_processes(control)
    until = time.monotonic() + ELSEWHERE_END_S
    while presence.living(job).servers:  # one that is not named any more ends
        if time.monotonic() > until:
            raise JobInUse(presence.elsewhere(job))
        time.sleep(0.01)
    # Again: a server that had its lock may have entered itself until it ended.
    _forget_processes(control)


def _forget_processes(control: np.void) -> None:
    """Clear the pids of the dead, before the job's pids are those of this namespace."""
    control["watchdog_pid"] = control["lease_pid"] = control["fork_server_pid"] = 0
    control["server"]["pid"] = 0
    control["server"]["state"] = ServerState.NONE
    control["roster"]["pid"] = 0


def restore(control: np.void, state: np.void, snapshot: Snapshot) -> None:
    """Enter a checkpoint's counts and batch ledger into new memory."""
    state["record"]["steps"] = snapshot.steps
    state["record"]["supersteps"] = snapshot.supersteps
    control["superstep"] = control["supersteps_done"] = snapshot.supersteps
    state["record"]["gradients"] = snapshot.version
    control["version"] = snapshot.version
    control["checkpoint_version"] = snapshot.version
    for field_ in ("batches", "epochs", "seed", "next", "epochs_done"):
        control[field_] = snapshot.work[field_]
    control["requeue"][: snapshot.requeue.size] = snapshot.requeue
    control["requeued"] = snapshot.requeue.size
    totals.restore(control, snapshot.counts)
    control["past_loss_sum"] = snapshot.loss_sum
    control["work"] = snapshot.work["state"]
