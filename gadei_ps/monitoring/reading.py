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

import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
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
from gadei_ps.memory import holds, layout, shm
from gadei_ps.memory.layout import CONTROL, RECORD, RING, STATE, WEIGHTS, Phase, Work
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
_ENTRY: Final = layout.ENTRY.names or ()
_WORDS: Final = [name for name in CONTROL.names or () if CONTROL[name].kind in "uif"]
_WORDS_ONLY: Final = np.dtype(
    {
        "names": _WORDS,
        "formats": [CONTROL[name] for name in _WORDS],
        "offsets": [layout.offset(CONTROL, name) for name in _WORDS],
        "itemsize": CONTROL.itemsize,
    }
)
"""The single words of CONTROL."""
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
    name: str
    leaving: bool
    paused: bool
    """Whether it has asked not to be waited for."""
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
    phase: Phase = Phase.STARTING
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


class Reader:
    """Reads jobs again and again. One thread uses it at a time.

    Between two readings of a job its counters never decrease: a server that dies in the middle of
    a transaction leaves counts that the next server reverts.
    """

    def __init__(self, uid: int | None = None) -> None:
        """uid: whose jobs are read; by default ours, and for root those of all users."""
        self._uid = uid if uid is not None else os.geteuid() or None
        self._before: dict[tuple[str, int], Job] = {}
        self._unsure: set[tuple[str, int]] = set()
        """Jobs that no reading was whole of."""
        self._recorded: dict[tuple[str, int], tuple[bytes, dict[str, Any]]] = {}
        self._buffer = bytearray(CONTROL.itemsize)  # new memory for each job would cost page faults

    def names(self) -> list[tuple[str, int]]:
        """Return the names of all jobs that have memory, with their users, sorted."""
        try:
            with os.scandir(shm.SHM) as files:
                names = [one.name for one in files if one.name.endswith(".control")]
        except FileNotFoundError:
            return []
        found = map(shm.SEGMENT_NAME.fullmatch, names)
        named = [(one["job"], int(one["uid"])) for one in found if one]
        return sorted(one for one in named if self._uid in (None, one[1]))

    def jobs(self) -> list[Job]:
        """All jobs of the user. Raises nothing for a job that cannot be read."""
        names = self.names()
        for known in (self._before, self._recorded):
            for gone in known.keys() - set(names):
                del known[gone]
        self._unsure.intersection_update(names)
        read = (self.job(name, uid) for name, uid in names)
        return [one for one in read if one is not None]

    def job(self, name: str, uid: int | None = None) -> Job | None:
        """One job; None if there is no memory of it. uid: whose it is, by default ours."""
        uid = (os.geteuid() if self._uid is None else self._uid) if uid is None else uid
        key = name, uid
        try:
            made, is_whole = self._read(key)
        except FileNotFoundError:
            return None
        except NotOurs as error:
            return Job(name, uid, State.UNREADABLE, str(error))
        except (OSError, ValueError, OverflowError) as error:
            return Job(name, uid, State.UNREADABLE, in_words(error))
        if made.state is State.UNREADABLE:
            return made
        before = self._before.get(key)
        if before is not None and before.job_id == made.job_id and key not in self._unsure:
            made = _never_less(made, before)
        self._before[key] = made
        if is_whole:
            self._unsure.discard(key)
        elif before is None or before.job_id != made.job_id:
            self._unsure.add(key)  # its counts may be too large
        return made

    def _read(self, key: tuple[str, int]) -> tuple[Job, bool]:
        """Read a job; False if it is unreadable, or a server has died in a transaction.

        Raises FileNotFoundError, NotOurs, OSError, ValueError.
        """
        with _Files(*key, self._buffer) as files:
            control, whole = files.control()
            if control is None:
                return Job(*key, State.UNREADABLE, files.problem), False
            before = self._before.get(key)
            heads = recorded.heads(files.fd, files.size)
            if self._recorded.get(key, (b"",))[0] != heads:
                self._recorded[key] = heads, recorded.parsed(recorded.texts(files.fd, files.size))
            made = _job(files, control, self._recorded[key][1])
            if not whole and before is not None and before.job_id == made.job_id:
                # A server has died in the middle of a transaction, and no other has recovered yet.
                made = replace(made, metrics=before.metrics, learners=before.learners)
            return made, whole


def _never_less(now: Job, before: Job) -> Job:
    """Replace counters that have decreased by their last values."""
    known = {(one.row, one.generation): one.metrics for one in before.learners}
    learners = list(now.learners)
    for number, one in enumerate(learners):
        old = known.get((one.row, one.generation))
        if old is not None and (less := _less(one.metrics, old, _LEARNER_COUNTERS)):
            learners[number] = replace(one, metrics={**one.metrics, **less})
    less = _less(now.metrics, before.metrics, _COUNTERS)
    return replace(now, metrics={**now.metrics, **less}, learners=tuple(learners))


def _less(
    now: Mapping[str, Value], before: Mapping[str, Value], names: Sequence[str]
) -> dict[str, Value]:
    """Return the values before, of those that have decreased."""
    return {name: before[name] for name in names if (now[name] or 0) < (before[name] or 0)}


class _Files:
    """The open segments of one job. Raises FileNotFoundError, NotOurs, OSError."""

    def __init__(self, job: str, uid: int, buffer: bytearray) -> None:
        """buffer: for the control record, which control() returns a view of."""
        self.job, self.uid, self._buffer = job, uid, buffer
        self.problem = ""
        self.fd = self._open("control")
        try:
            self.size = os.fstat(self.fd).st_size
            self.state = self._open_if_there("state")
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.fd, self.state):
            if fd >= 0:
                os.close(fd)

    def _open(self, part: str) -> int:
        name = shm.segment_name(self.job, part, self.uid)
        return shm.open_segment(name, writable=False, owner=self.uid)

    def _open_if_there(self, part: str) -> int:
        try:
            return self._open(part)
        except (FileNotFoundError, NotOurs):
            return -1

    def control(self) -> tuple[np.void | None, bool]:
        """Copy the control record; None with a `problem`.

        The second value is True if the server was between two transactions: within one, the counts
        of a learner that leaves may be there twice (server/statistics.py).
        """
        control = None
        for _ in range(TRIES):
            idle = not self._in_use()
            control = self._checked(os.preadv(self.fd, [self._buffer], 0))
            if control is None:
                return None, False
            past = os.pread(self.fd, _PAST.stop - _PAST.start, _PAST.start)
            if idle and self._buffer[_PAST] == past and not self._in_use():
                return control, True
            time.sleep(TRY_S)
        return control, False

    def _checked(self, size: int) -> np.void | None:
        """Return the record of which `size` bytes were read; None with a `problem`."""
        self._buffer[size:] = bytes(CONTROL.itemsize - size)
        header = np.frombuffer(self._buffer, layout.HEADER, 1)[0]
        version = int(header["layout_version"])
        if int(header["magic"]) != layout.MAGIC:
            self.problem = "half made, or not the memory of a job"
        elif version != layout.LAYOUT_VERSION:
            self.problem = (
                f"made with layout version {version}, this program reads {layout.LAYOUT_VERSION}"
            )
        elif size < CONTROL.itemsize:
            self.problem = f"its control segment is truncated ({size} bytes)"
        else:
            control: np.void = np.frombuffer(self._buffer, CONTROL)[0]
            return control
        return None

    def _in_use(self) -> bool:
        """Return whether the server is within a transaction."""
        return self.state >= 0 and any(os.pread(self.state, 8, _IN_USE_AT))

    def torn(self, shards: int) -> int | None:
        """Return the parts of gradients that were torn; None before the state is made."""
        size = min(shards, layout.MAX_SHARDS) * RECORD.itemsize
        raw = os.pread(self.state, size, _RECORD_AT) if self.state >= 0 else b""
        return sum(np.frombuffer(raw, RECORD)["torn"].tolist()) if len(raw) == size > 0 else None

    def weights(self) -> tuple[np.void | None, int]:
        """The head of the weights segment, and the segment's size."""
        return _head(self._open_if_there("weights"), WEIGHTS)

    def ring(self, row: int, inode: int) -> tuple[np.void | None, int]:
        """The head of a learner's ring, whose file is this inode, and the segment's size."""
        path = f"{shm.SHM}{shm.segment_name(self.job, f'ring.{row}', self.uid)}"
        try:
            fd = os.open(path, os.O_RDONLY | ownership.SAFELY)
        except OSError:
            return None, 0
        return _head(fd, RING, inode)


def _head(fd: int, kind: np.dtype[Any], inode: int | None = None) -> tuple[np.void | None, int]:
    """Copy the head of a segment and close its file; return it with the segment's size (bytes).

    None without a file (-1), or of another inode than the given one.
    """
    if fd < 0:
        return None, 0
    try:
        status, raw = os.fstat(fd), os.pread(fd, kind.itemsize, 0)
    finally:
        os.close(fd)
    if len(raw) < kind.itemsize or inode not in (None, status.st_ino):
        return None, 0
    return np.frombuffer(raw, kind)[0], status.st_size


def _job(files: _Files, control: np.void, record: dict[str, Any]) -> Job:
    words = dict(zip(_WORDS, control.view(_WORDS_ONLY).item(), strict=True))
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
        phase=phase,
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
    roster = control["roster"]
    numbers = np.flatnonzero(roster["generation"] != roster["retired"])
    rows = [dict(zip(_ENTRY, one, strict=True)) for one in roster[numbers].tolist()]
    made, size = [], 0
    for row, entry in zip(numbers.tolist(), rows, strict=True):
        ring, ring_bytes = files.ring(row, int(control["ring_inode"][row]))
        if entry["name"] != layout.REPLICA:
            made.append(_learner(row, entry, ring, min(shards, layout.MAX_SHARDS)))
        size += ring_bytes
    return rows, tuple(made), size


def _learner(row: int, entry: Mapping[str, Any], ring: np.void | None, shards: int) -> Learner:
    applied, published, queue = entry["applied"], None, None
    if ring is not None:
        published = int(ring["head"])
        queue = max(0, published - min(ring["tail"]["value"][:shards].tolist(), default=0))
    norm, loss = (
        entry[word] if applied and math.isfinite(entry[word]) else None for word in ("norm", "loss")
    )
    return Learner(
        row=row,
        generation=entry["generation"],
        pid=entry["pid"],
        name=entry["name"].decode(errors="replace"),
        leaving=entry["wanted"] != entry["generation"],
        paused=ring is not None and bool(int(ring["wants"]) & layout.WANTS_PAUSE),
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
