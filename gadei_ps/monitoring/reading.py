"""Jobs as monitors read them: from shared memory, without a request to the watchdog.

    reader = Reader()
    for job in reader.jobs():
        print(job.name, job.state, job.metrics["gradients_applied"])

A reader never waits for a process, and changes nothing. It maps nothing either: a copy by pread()
of a file that has been truncated is short, where an access to a mapping would end the process. A
job that vanishes while it is read is left out, and a job that this program cannot read has a
`problem`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np

from gadei_ps import metrics
from gadei_ps.errors import NotOurs, in_words
from gadei_ps.job import recorded
from gadei_ps.kernels import optimizers
from gadei_ps.machine import ownership
from gadei_ps.memory import holds, layout, shm, totals
from gadei_ps.memory.layout import CONTROL, ENTRY, RECORD, RING, STATE, WEIGHTS, Phase, Work
from gadei_ps.metrics import Kind, Place

Value = int | float | None

TRIES: Final = 8  # to copy the control segment between two transactions of the server
TRY_S: Final = 0.0002
_COUNTERS: Final = [one.name for one in metrics.JOB if one.kind is Kind.COUNTER]
_LEARNER_COUNTERS: Final = [one.name for one in metrics.LEARNER if one.kind is Kind.COUNTER]
_UNKNOWN: Final = dict.fromkeys(one.name for one in metrics.JOB)
_OF_CONTROL, _OF_ROSTER = (
    [(one.name, one.word) for one in metrics.JOB if one.place is place]
    for place in (Place.CONTROL, Place.ROSTER)
)
_RECORD_AT: Final = layout.offset(STATE, "record")
_IN_USE_AT: Final = layout.offset(STATE, "journal")  # its first word
_PAST_AT: Final = [layout.offset(CONTROL, f"past_{word}") for word in layout.PAST]
_PAST: Final = slice(min(_PAST_AT), max(_PAST_AT) + 8)
_ROSTER_AT: Final = layout.offset(CONTROL, "roster")
_TEXT_AT: Final = layout.offset(CONTROL, "sync_text")  # with all that is read behind the roster


def _only(kind: np.dtype[Any], names: Sequence[str]) -> np.dtype[Any]:
    """Return a struct with some of its fields, each at its place."""
    return np.dtype(
        {
            "names": names,
            "formats": [kind[name] for name in names],
            "offsets": [layout.offset(kind, name) for name in names],
            "itemsize": kind.itemsize,
        }
    )


_WORDS: Final = _only(CONTROL, [one for one in CONTROL.names or () if CONTROL[one].kind in "uif"])
"""The single words of CONTROL."""
_OF_ENTRY: Final = {
    *(one.word for one in (*metrics.JOB, *metrics.LEARNER) if one.place is Place.ROSTER),
    *("generation", "wanted", "pid", "name"),
    *("staleness_sum", "norm", "loss", "histogram", "outstanding"),
}
_ENTRY: Final = _only(ENTRY, sorted(_OF_ENTRY))
"""The fields of a row of the roster that are read."""
_OPTIMIZERS: Final = {int(kind): kind.name.lower() for kind in optimizers.Kind}


class State(Enum):
    """Condition of a job, by the processes that hold it."""

    STARTING = "starting"
    """Its watchdog lives, and waits for a model or makes the memory."""
    RUNNING = "running"
    STOPPING = "stopping"
    ORPHANED = "orphaned"
    """Its servers live without a watchdog; training continues."""
    DEAD = "dead"
    """No process holds its memory."""
    UNREADABLE = "unreadable"
    """See `problem`."""


@dataclass(frozen=True)
class Learner:
    """A learner that is attached, or that has left and whose gradients are not all applied yet."""

    row: int
    generation: int
    pid: int
    leaving: bool
    metrics: Mapping[str, Value]
    """Values by the names of metrics.LEARNER; None: only its watchdog knows, or it is not known."""
    staleness_histogram: tuple[int, ...]
    """Gradients by staleness: 0 to 15 each, then powers of two."""


@dataclass(frozen=True)
class Model:
    """Size of a job's model."""

    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Job:
    """A job at one instant."""

    name: str
    uid: int
    """The user whose job it is."""
    state: State
    problem: str = ""
    """Reason why it cannot be read, in one line. Then only `name` and `uid` are known."""
    job_id: str = ""
    """Another one for each new memory of a job of this name."""
    metrics: Mapping[str, Value] = field(default_factory=dict)
    """Values by the names of metrics.JOB; None: only its watchdog knows.

    While a server counts a gradient, its loss may be in one of `loss_sum` and `loss_count` only.
    """
    learners: Sequence[Learner] = ()
    model: Model | None = None
    """None before the first learner has brought it."""
    sync: str = ""
    """Synchronization model in force."""
    sync_wanted: str = ""
    """The one that it changes to; empty if it does not change."""
    optimizer: str = ""
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    """Settings in force of the parameters without a group."""
    work: Mapping[str, int] = field(default_factory=dict)
    """Batch ledger: batches, epochs, epochs_done; empty without work."""
    watchdog_pid: int | None = None
    server_pid: int | None = None
    standby_pid: int | None = None
    fork_server_pid: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its job file as the watchdog has it, by field; unchecked. Empty if there is no record."""
    history: Path | None = None
    """The file of its history; None if it keeps none."""


@dataclass
class _Known:
    """The last reading of a job, and its record."""

    job: Job | None = None
    is_whole: bool = False
    """Whether a reading of this memory was whole; the counts of others may be too large."""
    heads: bytes = b""
    record: dict[str, Any] = field(default_factory=dict)


class Reader:
    """Reads jobs again and again. One thread uses it at a time.

    Between two readings of a job its counters never decrease: a server that dies in the middle of
    a transaction leaves counts that the next server reverts.
    """

    def __init__(self, uid: int | None = None) -> None:
        """uid: whose jobs are read; by default ours, and for root those of all users."""
        self._uid = uid if uid is not None else os.geteuid() or None
        self._known: dict[tuple[str, int], _Known] = {}
        self._buffer = bytearray(CONTROL.itemsize)  # new memory for each job would cost page faults

    def jobs(self, only: str | None = None) -> list[Job]:
        """All jobs of the user by name, or the one of this name. Raises nothing for a job."""
        uid = os.geteuid() if self._uid is None else self._uid
        names = self._names() if only is None else [(only, uid)]
        self._known = {key: self._known.get(key) or _Known() for key in names}
        read = (self._read(*key, known) for key, known in self._known.items())
        return [one for one in read if one is not None]

    def _names(self) -> list[tuple[str, int]]:
        """Return the names of all jobs that have memory, with their users, sorted."""
        try:
            with os.scandir(shm.SHM) as files:
                names = [one.name for one in files if one.name.endswith(".control")]
        except FileNotFoundError:
            return []
        found = map(shm.SEGMENT_NAME.fullmatch, names)
        named = [(one["job"], int(one["uid"])) for one in found if one]
        return sorted(one for one in named if self._uid in (None, one[1]))

    def _read(self, name: str, uid: int, known: _Known) -> Job | None:
        """Read a job; None if there is no memory of it."""
        try:
            with _opened(name, uid, "control") as fd, _opened(name, uid, "state") as state:
                files = _Files(name, uid, fd, state, os.fstat(fd).st_size)
                control, is_whole = files.control(self._buffer)
                heads = recorded.heads(fd, files.size)
                if known.heads != heads:
                    known.record = recorded.parsed(recorded.texts(fd, files.size))
                    known.heads = heads
                made = _job(files, control, known.record)
        except FileNotFoundError:
            return None
        except (NotOurs, OSError, ValueError, OverflowError) as error:
            return Job(name, uid, State.UNREADABLE, in_words(error))
        before = known.job
        if before is None or before.job_id != made.job_id:
            known.is_whole = is_whole
        elif not is_whole:
            # A server has died in the middle of a transaction, and no other has recovered yet.
            made = replace(made, metrics=before.metrics, learners=before.learners)
        elif known.is_whole:
            made = _never_less(made, before)
        else:
            known.is_whole = True
        known.job = made
        return made


def _never_less(now: Job, before: Job) -> Job:
    """Replace counters that have decreased by their last values."""
    known = {(one.row, one.generation): one.metrics for one in before.learners}
    learners = list(now.learners)
    for number, one in enumerate(learners):
        old = known.get((one.row, one.generation))
        if old is not None and (less := _less(one.metrics, old, _LEARNER_COUNTERS)):
            learners[number] = replace(one, metrics={**one.metrics, **less})
    if less := _less(now.metrics, before.metrics, _COUNTERS):
        now = replace(now, metrics={**now.metrics, **less})
    return replace(now, learners=tuple(learners))


def _less(
    now: Mapping[str, Value], before: Mapping[str, Value], names: Sequence[str]
) -> dict[str, Value]:
    """Return the values before, of those that have decreased."""
    return {name: before[name] for name in names if (now[name] or 0) < (before[name] or 0)}


@contextlib.contextmanager
def _opened(job: str, uid: int, part: str) -> Iterator[int]:
    """Open a segment; yield -1 for one that is not there, except `control`.

    Raises FileNotFoundError, NotOurs, OSError.
    """
    try:
        fd = shm.open_segment(shm.segment_name(job, part, uid), writable=False, owner=uid)
    except (FileNotFoundError, NotOurs):
        if part == "control":
            raise
        yield -1
        return
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Files:
    """The open segments of one job. state: -1 without one. size: of control (bytes)."""

    job: str
    uid: int
    fd: int
    state: int
    size: int

    def control(self, buffer: bytearray) -> tuple[np.void, bool]:
        """Copy the control record into the buffer, and return a view of it. Raises ValueError.

        The second value is True if the server was between two transactions: within one, the counts
        of a learner that leaves may be there twice (server/statistics.py).
        """
        view = memoryview(buffer)
        for _ in range(TRIES):
            idle = not self._in_use()
            rest = os.preadv(self.fd, [view[_TEXT_AT:]], _TEXT_AT)
            # A row of the roster is used once its ring has an inode. Most rows never are.
            used = np.flatnonzero(np.frombuffer(buffer, CONTROL)[0]["ring_inode"])
            size = _ROSTER_AT + (int(used[-1]) + 1 if len(used) else 0) * ENTRY.itemsize
            first = os.preadv(self.fd, [view[:size]], 0)
            is_whole = (first, rest) == (size, CONTROL.itemsize - _TEXT_AT)
            control = _checked(buffer, first, is_whole)
            past = os.pread(self.fd, _PAST.stop - _PAST.start, _PAST.start)
            if idle and buffer[_PAST] == past and not self._in_use():
                return control, True
            time.sleep(TRY_S)
        return control, False

    def _in_use(self) -> bool:
        """Return whether the server is within a transaction."""
        return self.state >= 0 and any(os.pread(self.state, 8, _IN_USE_AT))

    def torn(self, shards: int) -> int | None:
        """Return the parts of gradients that were torn; None before the state is made."""
        size = min(shards, layout.MAX_SHARDS) * RECORD.itemsize
        raw = os.pread(self.state, size, _RECORD_AT) if self.state >= 0 else b""
        return sum(np.frombuffer(raw, RECORD)["torn"].tolist()) if len(raw) == size > 0 else None

    def weights(self) -> tuple[np.void | None, int]:
        """The head of the weights segment, and the segment's size (bytes)."""
        with _opened(self.job, self.uid, "weights") as fd:
            return _head(fd, WEIGHTS)

    def ring(self, row: int, inode: int) -> tuple[np.void | None, int]:
        """The head of a learner's ring, whose file is this inode, and the segment's size."""
        path = f"{shm.SHM}{shm.segment_name(self.job, f'ring.{row}', self.uid)}"
        try:
            fd = os.open(path, os.O_RDONLY | ownership.SAFELY)
        except OSError:
            return None, 0
        try:
            return _head(fd, RING, inode)
        finally:
            os.close(fd)


def _checked(buffer: bytearray, size: int, is_whole: bool) -> np.void:
    """Return the control record. size: of what was read of its begin. Raises ValueError."""
    control: np.void = np.frombuffer(buffer, CONTROL)[0]
    version = int(control["header"]["layout_version"])
    if size < layout.HEADER.itemsize or int(control["header"]["magic"]) != layout.MAGIC:
        raise ValueError("half made, or not the memory of a job")
    if version != layout.LAYOUT_VERSION:
        raise ValueError(
            f"made with layout version {version}, this program reads {layout.LAYOUT_VERSION}"
        )
    if not is_whole:
        raise ValueError("its control segment is truncated")
    return control


def _head(fd: int, kind: np.dtype[Any], inode: int | None = None) -> tuple[np.void | None, int]:
    """Copy the head of a segment; return it with the segment's size (bytes).

    None without a file (-1), or of another inode than the given one.
    """
    if fd < 0:
        return None, 0
    status, raw = os.fstat(fd), os.pread(fd, kind.itemsize, 0)
    if len(raw) < kind.itemsize or inode not in (None, status.st_ino):
        return None, 0
    return np.frombuffer(raw, kind)[0], status.st_size


def _job(files: _Files, control: np.void, record: dict[str, Any]) -> Job:
    words = dict(zip(_WORDS.names or (), control.view(_WORDS).item(), strict=True))
    watchdog = holds.held(files.fd, holds.WATCHDOG)
    servers = [holds.held(files.fd, byte) for byte in holds.SERVERS]
    phase, lease = Phase(words["phase"]), words["lease_pid"]
    pids = control["server"]["pid"].tolist()
    living = [pid for pid, there in zip(pids, servers, strict=True) if there and pid]
    head, weights_bytes = files.weights() if words["model_ready"] else (None, 0)
    rows, learners, rings_bytes = _learners(files, control, words["shards"])
    state_bytes = os.fstat(files.state).st_size if files.state >= 0 else 0
    config, history = record.get("config"), record.get("history")
    return Job(
        name=files.job,
        uid=files.uid,
        state=_state(phase, watchdog, bool(living), bool(words["model_ready"])),
        job_id=control["header"]["job_id"].tobytes().hex(),
        metrics={
            **_UNKNOWN,
            **{name: words[word] for name, word in _OF_CONTROL},
            # Rows of learners that have left are zero, and their counts are in the past ones.
            **{n: words[f"past_{word}"] + sum(row[word] for row in rows) for n, word in _OF_ROSTER},
            "parts_torn": files.torn(words["shards"]),
            "failovers": max(0, words["lease_generation"] - 1),
            "learners_attached": len(learners),
            "shared_bytes": files.size + weights_bytes + state_bytes + rings_bytes,
        },
        learners=learners,
        model=None
        if head is None
        else Model(int(head["tensors"]), int(head["values"]), 4 * int(head["elements"])),
        **_settings(control, words),
        watchdog_pid=words["watchdog_pid"] if watchdog else None,
        server_pid=lease if lease in living else None,
        standby_pid=next((pid for pid in living if pid != lease), None),
        fork_server_pid=words["fork_server_pid"] or None if watchdog else None,
        config=config if isinstance(config, dict) else {},
        history=Path(history) if isinstance(history, str) else None,
    )


def _state(phase: Phase, watchdog: bool, servers: bool, has_model: bool) -> State:
    if not watchdog:
        return State.ORPHANED if servers else State.DEAD
    if phase > Phase.SERVING:
        return State.STOPPING
    return State.RUNNING if has_model and phase == Phase.SERVING else State.STARTING


def _settings(control: np.void, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Job on the synchronization model, the optimizer and the batches."""
    done, wanted = words["sync_done"], words["sync_wanted"]
    texts = [one.tobytes().rstrip(b"\0").decode(errors="replace") for one in control["sync_text"]]
    kind = _OPTIMIZERS.get(words["optimizer"], "")
    packed = control["hyper"][max(0, words["groups"] - 1) % layout.MAX_GROUPS].tolist()
    numbers = {name: packed[at] for name, at in _places(kind).items()}
    names = ("batches", "epochs", "epochs_done") if words["work"] != Work.NONE else ()
    return {
        "sync": texts[done % 2],
        "sync_wanted": texts[wanted % 2] if wanted != done else "",
        "optimizer": kind,
        "hyperparameters": {name: one for name, one in numbers.items() if math.isfinite(one)},
        "work": {name: words[name] for name in names},
    }


@functools.cache
def _places(kind: str) -> dict[str, int]:
    """Return the places of an optimizer's settings in their packed form."""
    if not kind:
        return {}
    names = ("lr", *optimizers.traits(kind).settings)
    at = {"alpha": optimizers.BETA2}
    return {name: at.get(name, getattr(optimizers, name.upper(), -1)) for name in names}


def _learners(
    files: _Files, control: np.void, shards: int
) -> tuple[list[dict[str, Any]], tuple[Learner, ...], int]:
    """The rows of learners, the learners, and the bytes of their rings."""
    roster, used = control["roster"], np.flatnonzero(control["ring_inode"])
    numbers = used[roster["generation"][used] != roster["retired"][used]]
    read, names = roster.view(_ENTRY)[numbers].tolist(), _ENTRY.names or ()
    rows = [dict(zip(names, one, strict=True)) for one in read]
    made, size = [], 0
    for row, entry in zip(numbers.tolist(), rows, strict=True):
        ring, ring_bytes = files.ring(row, int(control["ring_inode"][row]))
        if entry["name"] != layout.REPLICA:
            made.append(_learner(row, entry, ring, shards))
        size += ring_bytes
    return rows, tuple(made), size


def _learner(row: int, entry: Mapping[str, Any], ring: np.void | None, shards: int) -> Learner:
    applied, published, queue = entry["applied"], None, None
    if ring is not None:
        published, queue = totals.in_ring(ring, shards)
    norm, loss = (
        entry[word] if applied and math.isfinite(entry[word]) else None for word in ("norm", "loss")
    )
    return Learner(
        row=row,
        generation=entry["generation"],
        pid=entry["pid"],
        leaving=entry["wanted"] != entry["generation"],
        metrics={
            **{one.name: entry[one.word] if one.word else None for one in metrics.LEARNER},
            "published": published,
            "queue": queue,
            "outstanding": layout.AHEAD - entry["outstanding"].tolist().count(layout.NO_BATCH),
            "staleness_mean": entry["staleness_sum"] / applied if applied else 0.0,
            "gradient_norm": norm,
            "loss": loss,
        },
        staleness_histogram=tuple(entry["histogram"].tolist()),
    )
