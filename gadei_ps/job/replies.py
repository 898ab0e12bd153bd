"""Replies of a watchdog, checked: another user's program may answer at the socket.

Each request names the model of its reply (`Request.reply` in control.py). A field that the model
lacks is ignored. Text is bounded, but may have any characters: what prints it escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, create_model, model_validator

from gadei_ps import metrics
from gadei_ps.memory import layout, shm
from gadei_ps.metrics import Metric, Values

MOST_TEXT: Final = 1 << 14
M = TypeVar("M", bound=BaseModel)
Count = Annotated[int, Field(ge=0, lt=2**64)]
Pid = Annotated[int, Field(ge=0, lt=2**31)]
Row = Annotated[int, Field(ge=0, lt=layout.MAX_LEARNERS)]
Index = Annotated[int, Field(ge=0, lt=2**32)]
Number = Annotated[FiniteFloat, Field(ge=0)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
JobName = Annotated[str, Field(pattern=shm.WHOLE_JOB_NAME)]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
SegmentName = Annotated[str, Field(pattern=f"^/{shm.SEGMENT_NAME.pattern}$")]
Field_ = Annotated[str, Field(max_length=200)]
Value = bool | int | FiniteFloat | Text | None
Source = Literal["set", "job", "script", "checkpoint", "default"]


class Checked(BaseModel):
    """An object of a reply."""

    model_config = ConfigDict(strict=True, frozen=True)


class Reply(Checked):
    """A reply to a request that was done, with nothing to report."""

    v: Literal[1]
    ok: Literal[True]


class Refusal(Checked):
    """A reply to a request that was refused, or failed. kind: name of the error's class."""

    v: Literal[1]
    ok: Literal[False]
    error: Text = "refused without a reason"
    kind: Any = ""


class Making(Checked):
    """Progress of segments that are made for the request (bytes)."""

    what: Text
    done: Count
    total: Count


class Note(Checked):
    """A message before the reply. It has a text, or the fields of Making."""

    v: Literal[1]
    ok: Literal[True]
    note: Literal["making", "waiting"]
    text: Text = ""
    what: Text = ""
    done: Count = 0
    total: Count = 0

    @model_validator(mode="after")
    def _whole(self) -> Self:
        wanted = {"making": {"what", "done", "total"}, "waiting": {"text"}}[self.note]
        if not wanted <= self.model_fields_set:
            raise ValueError(f"a note of kind {self.note} lacks {', '.join(sorted(wanted))}")
        return self


class Attached(Reply):
    """The place of a learner."""

    job: JobName
    job_id: JobId
    row: Row
    generation: Count
    control: SegmentName
    weights: SegmentName
    ring: SegmentName
    notice: Text = ""


class Begun(Reply):
    """alike: another learner has begun with the same mini-batch."""

    alike: bool


class Offered(Reply):
    """made: whether this offer made the model."""

    made: bool


class Launched(Reply):
    """Numbers of learners that are reserved. others: learners that have other numbers."""

    first: Annotated[int, Field(ge=0, lt=2**31)]
    others: Count


class WorkSet(Reply):
    """set: whether this request set the work; another learner may have been first."""

    set: bool


class SyncSet(Reply):
    """changes: whether the model changes at the next barrier."""

    changes: bool
    sync: Text


class Changed(Reply):
    """Old and new value of each field."""

    changed: dict[Field_, Annotated[list[Value], Field(min_length=2, max_length=2)]]


class Reloaded(Reply):
    """The new values of the fields that differ."""

    changed: dict[Field_, Value | list[Text]]


class Saved(Reply):
    """A checkpoint that is on the disk."""

    path: Text
    bytes: Count
    version: Count
    pause_ms: Number
    write_s: Number = 0.0
    problem: Text | None = None
    aside: Text | None = None


class Copied(Reply):
    """A copy of the job in the caller's file. unanswered: ranges of batches of an epoch."""

    version: Count
    steps: Count
    samples: Count
    unanswered: list[Annotated[list[Index], Field(min_length=3, max_length=3)]]
    pause_ms: Number


class Given(Reply):
    """given: ranges of batches that the job was given so far."""

    given: Count


class Answered(Reply):
    """Decision on the state that a learner's script loads."""

    answer: Text


_VALUES: Final[dict[Values, tuple[Any, Any]]] = {
    Values.COUNT: (Count, 0),
    Values.TIME: (Annotated[int, Field(ge=0, lt=2**40)], 0),
    Values.AMOUNT: (Number, 0.0),
    Values.AMOUNT_OR_NONE: (Number | None, None),
    Values.NUMBER: (FiniteFloat, 0.0),
    Values.NUMBER_OR_NONE: (FiniteFloat | None, None),
}


def _with_metrics(table: Iterable[Metric]) -> Callable[[type[M]], type[M]]:
    """Make a decorator that adds a field for each metric; older releases lack the added ones."""
    fields: dict[str, Any] = {}
    for one in table:
        values, default = _VALUES[one.values]
        fields[one.name] = values, default if one.added else ...

    def decorate(model: type[M]) -> type[M]:
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)

    return decorate


class WorkStatus(Checked):
    """The batch ledger."""

    state: Field_
    batches: Count
    epochs: Count
    seed: Count
    epoch: Count
    next: Count
    epochs_done: Count
    waits: bool = False


@_with_metrics(metrics.LEARNER)
class LearnerStatus(Checked):
    """A learner of a job."""

    row: Row
    generation: Count
    name: Text
    pid: Pid
    leaving: bool
    refused_because: Text
    staleness_histogram: list[Count] = Field(
        min_length=layout.HISTOGRAM, max_length=layout.HISTOGRAM
    )
    paused: bool
    others_stand_still: bool = False


class _Numbers(Checked):
    lr: FiniteFloat
    momentum: FiniteFloat = 0.0
    beta1: FiniteFloat = 0.0
    beta2: FiniteFloat = 0.0
    alpha: FiniteFloat = 0.0
    eps: FiniteFloat = 0.0
    weight_decay: FiniteFloat = 0.0


class GroupStatus(_Numbers):
    """A group of parameters. tensors: how many it has."""

    match: list[Text] | None
    tensors: Count


class SettingsStatus(_Numbers):
    """The optimizer; `from`: who set each field."""

    kind: Field_
    clip_norm: FiniteFloat = 0.0
    staleness_aware: bool = False
    spike_compensation: bool = True
    schedule: Field_ = "constant"
    sources: dict[Field_, Source] = Field({}, alias="from")
    groups: list[GroupStatus] = []

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.sources and "kind" not in self.sources:
            raise ValueError("nothing set the kind of the optimizer")
        return self


class ModelStatus(Checked):
    """The size of a model."""

    tensors: Count
    values: Count
    bytes: Count


class StartStatus(Checked):
    """Learners that have come, of those that begin together."""

    learners: Count
    of: Count


class LastCheckpoint(Checked):
    """The outcome of the last checkpoint."""

    ok: bool
    time: Number = 0.0
    error: Text = ""
    mistake: bool = False
    path: Text = ""
    bytes: Count = 0
    version: Count = 0
    pause_ms: Number = 0.0
    write_s: Number = 0.0
    problem: Text | None = None
    aside: Text | None = None


class LaunchStatus(Checked):
    """A command that starts learners of the job, and its numbers."""

    pid: Pid
    first: int = Field(ge=-1, lt=2**31)
    count: Count
    command: Text
    directory: Text


@_with_metrics(metrics.JOB)
class JobStatus(Reply):
    """The status of a job, and its last one."""

    job: JobName
    job_id: JobId
    phase: Field_
    sync: Text
    sync_wanted: Text | None
    optimizer: Field_
    settings: SettingsStatus
    history: Text | None
    settings_pending: bool
    when_idle: Field_
    work: WorkStatus
    learners: list[LearnerStatus] = Field(max_length=layout.MAX_LEARNERS)
    replicas: list[LearnerStatus] = Field([], max_length=layout.MAX_LEARNERS)
    model: ModelStatus | None
    watchdog_pid: Pid
    server_pid: Pid
    fork_server_pid: Pid = 0
    standby_pid: Pid | None = None
    standby_missing: Text | None = None
    last_checkpoint: LastCheckpoint | None = None
    checkpoint_warning: Text | None = None
    newer_checkpoint: Count | None = None
    names_lost: bool = False
    saves_on_stop: bool = False
    stop_reason: Text | None = None
    server_stuck: Text | None = None
    making: Making | None = None
    start: StartStatus | None = None
    commands: list[LaunchStatus] = []
