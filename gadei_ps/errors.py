"""Errors that a user may meet. Each message is one line: what, where, what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

# What stays so until a person changes something; all else may pass: space and descriptors come
# back, and a disk may answer again.
_LASTING: Final = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG),
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    )
)


_REMEDIES: Final = {
    errno.EACCES: "look at its owner and mode (ls -l)",
    errno.EPERM: "look at its owner and mode (ls -l)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close some files of other programs",
    errno.ENOMEM: "free some memory",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "name a place that can be written",
}


def in_words(error: BaseException) -> str:
    """An error's message; of the system's errors where, what, and what to do if that is known."""
    if isinstance(error, MemoryError):
        return "not enough memory"
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    return f"{error.filename}: {reason_of(error)}" if error.filename else reason_of(error)


def reason_of(error: OSError) -> str:
    """The same without where, for messages that have said it."""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{what}; {remedy}" if remedy else what


def printable(text: str) -> str:
    """The same text; what a terminal takes for a command is escaped, except line feeds and tabs."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


MOST_SHOWN: Final = 400  # characters that a line repeats of foreign input


def invalid(error: ValidationError, whole: str = "", model: type[BaseModel] | None = None) -> str:
    """The first problem that pydantic reports, as one short line: `FIELD: what is wrong`.

    whole: name of the input, for a problem that concerns no field of it. model: what was read; of
    an unknown field, the line then has the nearest name.
    """
    first = first_of(error)
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        what = "there is no such field" + (_nearest(model, first["loc"]) if model else "")
    where = ".".join(str(part) for part in first["loc"])[: MOST_SHOWN // 2] or whole
    return " ".join(f"{where}: {what[:MOST_SHOWN]}".removeprefix(": ").split())


def first_of(error: ValidationError) -> ErrorDetails:
    """The first problem; an unknown field, if there is one, since others may follow from it."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """`: did you mean 'sync'?` for a field `sinc` of the model, or of a table of it."""
    fields = model.model_fields
    for part in [one for one in place[:-1] if isinstance(one, str)]:
        kind = fields[part].annotation if part in fields else None
        tables = [one for one in (kind, *get_args(kind)) if hasattr(one, "model_fields")]
        if not tables:
            return ""
        fields = tables[0].model_fields
    close = difflib.get_close_matches(str(place[-1]), fields, 1)
    return f": did you mean {close[0]!r}?" if close else ""


def is_lasting(error: OSError) -> bool:
    """Return whether another try would fail as well: then it is a mistake, with exit code 2."""
    return error.errno in _LASTING


class GadeiError(Exception):
    """Base of all errors that gadei-ps raises on purpose. `exit_code` is the command line's."""

    exit_code = 1


class UsageError(GadeiError):
    """An invalid request; nothing was started or changed."""

    exit_code = 2


class JobNotFound(GadeiError):
    """No job of this name is running. `job`: the name that was looked for, if it was a name."""

    def __init__(self, message: str, job: str | None = None) -> None:
        super().__init__(message)
        self.job = job


class JobInUse(GadeiError):
    """A job of this name is running already."""


class JobDiffers(JobInUse):
    """Memory that fits neither the job file nor this build; another try would fail as well."""

    exit_code = 2


class NameTaken(JobInUse):
    """Something that is not of this project has the name of a segment; waiting does not help."""


class NoSharedMemory(GadeiError):
    """/dev/shm is missing, full, or too small for what is asked."""


class SegmentError(GadeiError):
    """A segment is foreign, truncated or half made."""


class NotOurs(SegmentError):
    """A file with the name of a segment or lock that this user is not alone to open."""


class OtherVersion(SegmentError):
    """A segment of another layout version, or of another build of gadei-ps; `what` names it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where = where
        self.what = what

    def __str__(self) -> str:
        advice = "use the same gadei-ps for the watchdog and the learners"
        return f"{self.where}: {self.what}: {advice}"


class ControlError(GadeiError):
    """The watchdog refused a request, or does not answer."""


class DirectoryMistake(ControlError):
    """The runtime directory cannot be used; another try would fail as well."""

    exit_code = 2


class ConnectionLost(ControlError):
    """The watchdog has gone away, perhaps to be replaced by another one."""


class NoAnswer(ControlError):
    """The watchdog does not answer in time; it may be stopped, or hang."""


class ModelMismatch(GadeiError):
    """The learner's tensors are not the job's."""


class DeviceError(GadeiError):
    """The GPU that was asked for is not there, cannot be used, or has too little memory."""


class JobStopped(GadeiError):
    """The job has been stopped; there is nothing left to do for a learner."""

    exit_code = 4


class JobFailed(GadeiError):
    """The job has failed: it has no parameter server, and nobody will start one."""


class Evicted(GadeiError):
    """The job has evicted this learner."""


class PushTimeout(GadeiError):
    """No slot came free, or no grant came, within the time asked for."""


class NotSaved(GadeiError):
    """The job has stopped without its last checkpoint: what it has learned stays in memory.

    The service manager must not start it again, for it was stopped.
    """

    exit_code = 3


class CheckpointError(GadeiError):
    """A checkpoint cannot be written, or is damaged or foreign."""

    may_be_whole = False
    """Whether it says nothing of the checkpoint itself: no older one takes its place then."""


class CheckpointMistake(CheckpointError):
    """Another try would fail as well: the checkpoint, its place or the job file must change."""

    exit_code = 2


class ExchangeFailed(GadeiError):
    """An exchange between replicas has failed: a member of the group has died or hangs."""


class ClusterError(GadeiError):
    """The cluster of hosts cannot do what was asked: Ray does not answer, or has no place."""


class ClusterLost(ClusterError):
    """It has ended, or is not reached any more, before it has answered."""


def of_kind(name: object, message: str, default: type[GadeiError]) -> GadeiError:
    """The error of another process. name: of its class; `default` where that cannot be made."""
    kind = globals().get(name) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, GadeiError)):
        return default(message)
    needs_more = issubclass(kind, OtherVersion)
    return default(message) if needs_more else kind(message)
