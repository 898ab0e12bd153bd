"""The control protocol: messages of learners and tools to a job's watchdog over its Unix socket.

A message is a 4-byte length (network order) and that many bytes of JSON, at most MAX_REQUEST
of a request and MAX_MESSAGE of a reply.
Every request has `v` (the protocol's version) and `op`; every reply has `ok`, and if that is false
`error` (one line) and `kind` (name of the error's class). A request `offer` comes with the
descriptor of a file that holds the initial weights. While segments are made for a request, notes
come before its reply: `note` ("making"), `what` is made, and `done` and `total` in bytes. While it
waits for another learner, the notes are `note` ("waiting") and `text`.
"""

from __future__ import annotations

import array
import contextlib
import functools
import json
import operator
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
)

from gadei_ps import errors
from gadei_ps.errors import ConnectionLost, ControlError, JobNotFound, NoAnswer
from gadei_ps.job import paths, replies
from gadei_ps.job.optimizer_config import ScriptSettings
from gadei_ps.memory import shm
from gadei_ps.memory.layout import AHEAD, MAX_DIMS, MAX_GROUPS, MAX_LEARNERS, OWNED
from gadei_ps.memory.weights import DTYPES, F32, MAX_ELEMENTS, MAX_NAMES, NAME_BYTES

PROTOCOL: Final = 1
MAX_MESSAGE = 1 << 20  # of a reply
MAX_REQUEST = 1 << 25  # an offer names all tensors
LENGTH = struct.Struct("!I")
RECONNECT_S = 0.02
LEAST_TIMEOUT_S = 1e-3  # of a time-out; 0 would mean not to wait at all
UCRED = struct.Struct("3i")
REPORTED_NAME: Final = r"[A-Za-z][A-Za-z0-9_./-]{0,39}"
MOST_REPORTED: Final = 16  # names
OnNote = Callable[[dict[str, Any]], None]
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Request(BaseModel):
    """reply: the model of what is answered. noted: whether notes may come before that."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    reply: ClassVar[type[replies.Reply]] = replies.Reply
    noted: ClassVar[bool] = False
    v: Literal[1] = PROTOCOL

    @property
    def answer(self) -> type[replies.Reply]:
        """The model of the reply to this very message."""
        return self.reply


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"use one of {', '.join(DTYPES)}")
    return name


class TensorOffer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(max_length=NAME_BYTES)
    shape: list[Annotated[int, Field(ge=0, lt=MAX_ELEMENTS)]] = Field(max_length=MAX_DIMS)
    role: Literal[1, 2, 3] = 1
    aliases: list[Annotated[str, Field(max_length=NAME_BYTES)]] | None = Field(
        None, max_length=MAX_NAMES
    )
    """Its other names, where layers share it."""
    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS)] = 0
    dtype: Annotated[str, AfterValidator(_dtype)] = F32


class Attach(Request):
    """A learner asks for a row of the roster and a ring. The caller is the learner.

    number: that its launcher has given it; it gets the row of that number if that is free. -1: none
    optimizer: settings of its script.
    buffers: whether it has buffers of its own, which it may write to the job. replica: whether it
    exchanges the job's weights with a group and is not a learner; only then its name is `replica`.
    """

    reply = replies.Attached
    noted = True
    op: Literal["attach"] = "attach"
    name: str = Field("", max_length=31)
    number: int = Field(-1, ge=-1, lt=2**31)
    optimizer: ScriptSettings | None = None
    buffers: bool = False
    replica: bool = False


class FirstBatch(Request):
    """A learner asks whether another one has begun with the same mini-batch.

    digest: of the mini-batch and of the seed of its random numbers.
    """

    reply = replies.Begun
    op: Literal["first_batch"] = "first_batch"
    digest: int = Field(ge=0, lt=2**32)


class Detach(Request):
    """The learner will push no more; what it has published is applied."""

    op: Literal["detach"] = "detach"
    row: int
    generation: int


class Offer(Request):
    """The model: the first offer makes it, later ones must agree. Initial values come as a file.

    number: as in Attach. Where learners begin together, number 0 makes the model. optimizer: what
    settings of the script; the offer that makes the model fixes them.
    """

    reply = replies.Offered
    noted = True
    op: Literal["offer"] = "offer"
    number: int = Field(-1, ge=-1, lt=2**31)
    tensors: list[TensorOffer] = Field(min_length=1, max_length=MAX_NAMES)
    optimizer: ScriptSettings | None = None


class SetWork(Request):
    """Batches to hand out: `batches` an epoch, `epochs` times.

    ahead: how many of them a learner wants to have at once; 0: as many as the job hands out.
    """

    reply = replies.WorkSet
    op: Literal["work"] = "work"
    batches: int = Field(gt=0, lt=2**31)
    epochs: int = Field(gt=0, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**63)
    ahead: int = Field(default=0, ge=0, le=AHEAD)


class SetSync(Request):
    """Another synchronization model, from the next barrier on; the reply does not wait for it."""

    reply = replies.SyncSet
    op: Literal["sync"] = "sync"
    sync: str = Field(max_length=1024)


class SetOptimizer(Request):
    """Other numbers of the optimizer, by field; the reply does not wait until they are in force."""

    reply = replies.Changed
    op: Literal["set"] = "set"
    values: dict[Annotated[str, Field(max_length=40)], bool | int | float | str] = Field(
        min_length=1, max_length=32
    )


class Reload(Request):
    """The job file as it is now, all fields; what may not change while the job runs is refused."""

    reply = replies.Reloaded
    op: Literal["reload"] = "reload"
    config: dict[str, Any]


class Status(Request):
    reply = replies.JobStatus
    op: Literal["status"] = "status"


class Checkpoint(Request):
    """Writes a checkpoint now; the reply comes when it is on the disk."""

    reply = replies.Saved
    op: Literal["checkpoint"] = "checkpoint"


class Copy(Request):
    """Copies weights and optimizer state, as they are between two gradients, into the file that
    comes with the request: the weights, then each slot unless `slots` is false, `elements` float32
    each."""

    reply = replies.Copied
    op: Literal["copy"] = "copy"
    slots: bool = True


class Own(Request):
    """Batches of an epoch that are assigned to a job whose job file has `owned = true`.

    number: ranges that were given before. ranges: further ones, each an epoch, the first index and
    the one after the last. take_back: revoke all batches that were given before and are not handed
    out yet. passes: epochs of which no more will be given.
    """

    reply = replies.Given
    op: Literal["own"] = "own"
    number: int = Field(ge=0, lt=2**63)
    ranges: list[tuple[Index, Index, Index]] = Field(default=[], max_length=OWNED)
    take_back: bool = False
    passes: int = Field(default=0, ge=0, lt=2**31)


class Load(Request):
    """A learner asks whether it shall write what its script loads when it begins.

    what: the optimizer's state, or weights. generation: its own. digest: of what it loads. steps:
    that the job's optimizer counts, if no learner has made one since. gives: steps that it counts
    once the state is written. after: digest of what it has loaded before this, which takes that
    one's place. again: it loads in the middle of training, and will write in any case. done: it has
    written it. gives_up: it will not, or not all.
    """

    reply = replies.Answered
    op: Literal["load"] = "load"
    what: Literal["state", "weights"] = "state"
    steps: int = Field(0, ge=0, lt=2**63)
    gives: int = Field(0, ge=0, lt=2**63)
    after: int = Field(0, ge=0, lt=2**63)
    generation: int = Field(gt=0, lt=2**63)
    digest: int = Field(gt=0, lt=2**63)
    again: bool = False
    done: bool = False
    gives_up: bool = False


class Measured(Request):
    """Measurement of the weights by a user, such as an accuracy: a line of the history."""

    op: Literal["measured"] = "measured"
    values: dict[Annotated[str, Field(max_length=40)], FiniteFloat] = Field(
        min_length=1, max_length=16
    )


class Reported(Request):
    """Values that a learner's script has reported: for each name their mean and their number."""

    op: Literal["reported"] = "reported"
    values: dict[
        Annotated[str, Field(pattern=f"^{REPORTED_NAME}$")],
        tuple[FiniteFloat, Annotated[int, Field(gt=0, lt=2**53)]],
    ] = Field(min_length=1, max_length=MOST_REPORTED)


class Launch(Request):
    """Reserves numbers for learners that a command is about to start, as long as it runs.

    The caller is the command. count: of learners; 0: they have ended. first: the first number that
    an earlier watchdog has reserved; -1: the watchdog chooses. command, directory: the program and
    its arguments, and where it is started; empty for `attach`.
    """

    reply = replies.Launched
    op: Literal["launch"] = "launch"
    count: int = Field(default=1, ge=0, lt=2**20)
    first: int = Field(default=-1, ge=-1, lt=2**30)
    command: str = Field(default="", max_length=4096)
    directory: str = Field(default="", max_length=4096)


class LeaveOut(Request):
    """The learner of this number, of `run`, has ended for good: the start awaits it no longer."""

    op: Literal["leave_out"] = "leave_out"
    number: int = Field(ge=0, lt=MAX_LEARNERS)


class StopJob(Request):
    """Ends the job; with `drain` learners first finish and what they published is applied.

    reason: for the log and for the learners. wait: whether the reply waits for the end. finished:
    whether training is done, which the history notes.
    """

    reply = replies.JobStatus
    op: Literal["stop"] = "stop"
    drain: bool = False
    timeout_s: float = Field(30.0, gt=0, le=3600)
    reason: str = Field(default="", max_length=400)
    wait: bool = True
    finished: bool = False

    @property
    def answer(self) -> type[replies.Reply]:
        return self.reply if self.wait else replies.Reply


class Discard(Request):
    """Ends the job without its last checkpoint, for there is one newer than its memory."""

    reply = replies.JobStatus
    op: Literal["discard"] = "discard"


_EVERY: Any = functools.reduce(operator.or_, Request.__subclasses__())
REQUEST = TypeAdapter[Request](Annotated[_EVERY, Field(discriminator="op")])


def parse_request(raw: bytes) -> Request:
    """Check a request. Raises ControlError in one line."""
    try:
        return REQUEST.validate_json(raw)
    except ValidationError as error:
        raise ControlError(f"bad request: {errors.invalid(error)}") from None


def pack(message: Mapping[str, object], most: int = MAX_MESSAGE) -> bytes:
    """A message with its length in front. most: its bytes."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > most:
        raise ControlError(f"message of {len(raw)} bytes; the limit is {most}")
    return LENGTH.pack(len(raw)) + raw


class _Kind(BaseModel):
    """Fields that distinguish the kinds of messages."""

    model_config = ConfigDict(strict=True)
    ok: bool
    note: Any = None


def _reply(message: Request, raw: bytes) -> replies.Reply | replies.Refusal:
    """Parse a reply. Raises ValidationError if it is not one to the message."""
    kind = message.answer if _Kind.model_validate_json(raw).ok else replies.Refusal
    return kind.model_validate_json(raw)


class Connection:
    """A client's end of the control socket: one request, one reply, in turn."""

    def __init__(self, job_or_path: str, timeout_s: float = 10.0) -> None:
        """Connect to a job by its name or by its socket's path.

        Raises JobNotFound, or ControlError if something else answers.
        """
        path = (
            Path(job_or_path)
            if "/" in job_or_path
            else paths.socket_path(shm.check_job_name(job_or_path))
        )
        self.path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
        except (FileNotFoundError, ConnectionRefusedError):
            self._socket.close()
            if "/" in job_or_path:
                raise JobNotFound(
                    f"no job is running at the socket {path} (a job's name has no '/'); "
                    "gadei-ps ls shows the jobs there are"
                ) from None
            raise JobNotFound(
                f"no job {job_or_path!r} is running (looked at {path}); "
                "gadei-ps ls shows the jobs there are",
                job_or_path,
            ) from None
        except OSError as error:
            self._socket.close()
            why = error.strerror or "too long for a socket's path"
            raise ControlError(f"{path}: {why}") from None
        except BaseException:  # such as KeyboardInterrupt
            self._socket.close()
            raise
        peer: tuple[int, int, int] = UCRED.unpack(raw)
        self.peer_pid, self.peer_uid, _ = peer
        """Pid and user of the listening process, from the kernel; the pid is 0 if this pid
        namespace does not show it."""
        self._answered = True  # otherwise the next reply may be that to an earlier request

    def request(
        self, message: Request, fds: Sequence[int] = (), on_note: OnNote | None = None
    ) -> dict[str, Any]:
        """Send a request and return the reply. Raises the error that the watchdog reports.

        `on_note` is called with each note on the watchdog's progress; notes extend the time limit.
        Raises ConnectionLost after a request whose reply was not awaited, as after Ctrl-C.
        """
        if not self._answered:
            raise ConnectionLost(f"{self.path}: an earlier request was interrupted; connect again")
        self._answered = False
        data = pack(message.model_dump(exclude_none=True), MAX_REQUEST)
        try:
            # A watchdog without room answers before it is asked, and closes.
            with contextlib.suppress(BrokenPipeError):
                self._socket.settimeout(self._timeout_s)  # the last reply has shortened it
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sent = self._socket.sendmsg([data], rights)
                    data = data[sent:]
                self._socket.sendall(data)
            raw = self._read()
            while message.noted and _Kind.model_validate_json(raw).note is not None:
                note = replies.Note.model_validate_json(raw).model_dump(exclude_unset=True)
                if on_note is not None:
                    on_note(note)
                raw = self._read()
            reply = _reply(message, raw)
            self._answered = True
        except TimeoutError:
            raise NoAnswer(f"{self.path}: the watchdog does not answer") from None
        except OSError as error:
            raise ConnectionLost(f"{self.path}: {error.strerror or error}") from None
        except ValidationError as error:
            raise ControlError(
                f"{self.path}: the reply is not one of a watchdog; another program answers, or "
                f"another release ({errors.invalid(error)})"
            ) from None
        if isinstance(reply, replies.Refusal):
            raise errors.of_kind(reply.kind, reply.error, ControlError)
        return reply.model_dump(exclude_unset=True, by_alias=True)

    def _read(self) -> bytes:
        """The next message, which must be whole within the time-out."""
        until = time.monotonic() + self._timeout_s
        (length,) = LENGTH.unpack(self._receive(LENGTH.size, until))
        if length > MAX_MESSAGE:
            raise ControlError(f"{self.path}: the reply is too long")
        return self._receive(length, until)

    def _receive(self, count: int, until: float) -> bytes:
        parts = []
        while count:
            self._socket.settimeout(max(until - time.monotonic(), LEAST_TIMEOUT_S))
            part = self._socket.recv(min(count, 1 << 16))
            if not part:
                raise ConnectionLost(f"{self.path}: the watchdog has closed the connection")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LastingConnection:
    """A connection that outlives the watchdog at its other end: the next one is asked again."""

    def __init__(self, job_or_path: str, timeout_s: float = 10.0) -> None:
        """Raise JobNotFound or ControlError."""
        self._timeout_s = timeout_s
        self._connection = Connection(job_or_path, timeout_s)
        self.path = self._connection.path

    def request(
        self,
        message: Request,
        fds: Sequence[int] = (),
        patience_s: float = 10.0,
        on_note: OnNote | None = None,
    ) -> dict[str, Any]:
        """Connection.request, with a wait of `patience_s` for another watchdog."""
        until = time.monotonic() + patience_s

        def listen(note: dict[str, Any]) -> None:
            nonlocal until
            until = time.monotonic() + patience_s
            if on_note is not None:
                on_note(note)

        while True:
            try:
                return self._connection.request(message, fds, listen)
            except ConnectionLost:
                if not self._connect(until):
                    raise

    def _connect(self, until: float) -> bool:
        self._connection.close()
        while time.monotonic() < until:
            with contextlib.suppress(JobNotFound, ControlError):
                self._connection = Connection(str(self.path), self._timeout_s)
                return True
            time.sleep(RECONNECT_S)
        return False

    @property
    def peer_uid(self) -> int:
        """User of the watchdog."""
        return self._connection.peer_uid

    def close(self) -> None:
        self._connection.close()


def ask(job: str, message: Request, timeout_s: float = 10.0) -> dict[str, Any]:
    """One request to a job."""
    with Connection(job, timeout_s) as connection:
        return connection.request(message)


def memory_file(size: int, pieces: Iterable[tuple[int, memoryview]]) -> int:
    """A descriptor of an anonymous file; the caller closes it.

    size: of the file in bytes. pieces: where each begins in it, and its data; zeros between them.
    """
    fd = os.memfd_create("gadei-ps", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        for at, data in pieces:
            view = data.cast("B")
            while view:
                count = os.pwrite(fd, view, at)
                at, view = at + count, view[count:]
    except BaseException:
        os.close(fd)
        raise
    return fd
