"""The counters and gauges of a job: one table for status, display, checkpoints and history.

A new one is a row of JOB or of LEARNER. If its value is a word of shared memory, the row names the
field of native/ps_layout.h. gadei_ps/memory/totals.py reads these words and checks, when it is
imported, that the table and the layout agree. The names are those of `gadei-ps status --json`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class Kind(Enum):
    """The type of a metric, as Prometheus defines it."""

    COUNTER = "counter"
    GAUGE = "gauge"


class Place(Enum):
    """Place of a metric's value."""

    CONTROL = auto()
    """A word of the control segment."""
    ROSTER = auto()
    """A word of each row of the roster; of a job, their sum plus `past_...` of CONTROL."""
    RECORDS = auto()
    """A word of the record of each shard, added up."""
    WATCHDOG = auto()
    """The watchdog computes it."""


class Lifetime(Enum):
    """End of a metric's value, after which it is lost or starts at zero."""

    NOW = auto()
    """It is measured when it is asked for, or is known to one watchdog only."""
    LEARNER = auto()
    """It ends when the learner's row of the roster is given to another one."""
    MEMORY = auto()
    """It ends with the memory of the job: it outlives learners, servers and watchdogs."""
    CHECKPOINT = auto()
    """It ends with the last checkpoint: a job that resumes from one continues to count."""


class Values(Enum):
    """Possible values of a metric."""

    COUNT = auto()
    """Whole numbers from 0."""
    TIME = auto()
    """Seconds since 1970."""
    AMOUNT = auto()
    """Finite numbers from 0."""
    AMOUNT_OR_NONE = auto()
    """Finite numbers from 0, or None if it is not known."""
    NUMBER = auto()
    """Finite numbers."""
    NUMBER_OR_NONE = auto()
    """Finite numbers, or None if it is not known."""


MOST: Final = {Values.COUNT: 2**64 - 1, Values.TIME: 2**40 - 1}
"""Largest values of the metrics that are whole numbers."""


@dataclass(frozen=True)
class Shown:
    """A number in a line of a job's status, as in `gradients   12 applied, 3 dropped`."""

    line: str
    one: str
    several: str = ""
    """The plural, if it is not the singular with an s."""
    base: int = 0
    """Subtracted before it is shown: the first start of a watchdog is not a death."""
    if_zero: bool = True
    """Whether it is shown even if it is 0, if another number of the line is not."""


@dataclass(frozen=True)
class Metric:
    """A counter or a gauge."""

    name: str
    """The field of `status --json`."""
    help: str
    """One line of explanation."""
    place: Place
    word: str = ""
    """The field of the struct in native/ps_layout.h; empty if the watchdog computes the value."""
    kind: Kind = Kind.COUNTER
    unit: str = ""
    """Counted thing, or the base unit of Prometheus: `seconds`, `bytes`."""
    lifetime: Lifetime = Lifetime.MEMORY
    values: Values = Values.COUNT
    shown: Shown | None = None
    """Its place in a line of the status; None: it has none, or is a part of a sentence."""
    added: bool = False
    """Whether older releases lack it: in their replies and checkpoints it is 0, or None."""
    own_field: bool = False
    """Whether a checkpoint has a field for it, apart from its counts."""
    in_history: bool = False
    """Whether each point of the job's history has it."""

    @property
    def is_saved(self) -> bool:
        """Whether it is one of the counts of a checkpoint, under the name of its word."""
        return self.lifetime is Lifetime.CHECKPOINT and not self.own_field

    def possible(self, value: int | float | None) -> int | float | None:
        """Return the possible value nearest to one in memory, or None or 0 if it is not finite.

        So one wrong value does not make a whole reply invalid.
        """
        if self.values in MOST:
            return min(max(value or 0, 0), MOST[self.values])
        if value is None or not math.isfinite(value):
            is_optional = self.values in (Values.AMOUNT_OR_NONE, Values.NUMBER_OR_NONE)
            return None if is_optional else 0.0
        is_amount = self.values in (Values.AMOUNT, Values.AMOUNT_OR_NONE)
        return max(value, 0.0) if is_amount else value


_CONTROL, _ROSTER, _RECORDS, _WATCHDOG = Place
_COUNTER, _GAUGE = Kind
_NOW, _LEARNER, _MEMORY, _SAVED = Lifetime


def _gradients(word: str, help: str, *, in_history: bool = False) -> Metric:
    """A count of gradients, which learners have and the job keeps."""
    shown = Shown("gradients", word, word)
    return Metric(
        f"gradients_{word}",
        help,
        _ROSTER,
        word,
        _COUNTER,
        "gradients",
        _SAVED,
        shown=shown,
        in_history=in_history,
    )


def _event(
    word: str, help: str, unit: str, shown: Shown | None = None, *, added: bool = False
) -> Metric:
    """A count of events that the watchdog sees."""
    return Metric(word, help, _CONTROL, word, _COUNTER, unit, shown=shown, added=added)


def _gauge(name: str, help: str, word: str, *, added: bool = False) -> Metric:
    """A gauge that is a word of the control segment."""
    return Metric(name, help, _CONTROL, word, _GAUGE, added=added)


def _measured(name: str, help: str, unit: str, values: Values = Values.COUNT) -> Metric:
    """A gauge that the watchdog computes."""
    return Metric(name, help, _WATCHDOG, "", _GAUGE, unit, _NOW, values, added=True)


JOB: Final = (
    _gradients("applied", "Gradients applied to the weights", in_history=True),
    _gradients("dropped", "Gradients dropped by the synchronization model or by their learners"),
    _gradients("refused", "Gradients refused, for example because a value was not finite"),
    Metric(
        "samples",
        "Samples of the gradients applied, as learners report them",
        _ROSTER,
        "samples",
        unit="samples",
        lifetime=_SAVED,
        in_history=True,
    ),
    Metric(
        "loss_sum",
        "Sum of the losses of gradients applied, without those that are not finite",
        _ROSTER,
        "loss_sum",
        _GAUGE,
        lifetime=_SAVED,
        values=Values.NUMBER,
        added=True,
        own_field=True,
        in_history=True,
    ),
    Metric(
        "loss_count",
        "Losses in that sum",
        _ROSTER,
        "loss_count",
        unit="losses",
        lifetime=_SAVED,
        added=True,
        in_history=True,
    ),
    Metric(
        "version",
        "Updates of the weights: gradients applied, and assignments",
        _CONTROL,
        "version",
        unit="updates",
        lifetime=_SAVED,
        own_field=True,
    ),
    Metric(
        "supersteps",
        "Supersteps finished",
        _CONTROL,
        "supersteps_done",
        unit="supersteps",
        lifetime=_SAVED,
        own_field=True,
    ),
    Metric(
        "batches_requeued",
        "Batches handed out again",
        _CONTROL,
        "requeued_total",
        unit="batches",
        lifetime=_SAVED,
    ),
    Metric(
        "parts_torn",
        "Parts of gradients, one for each shard, lost with damaged rings",
        _RECORDS,
        "torn",
        unit="parts",
    ),
    _gauge(
        "settings_version",
        "Version of the weights when hyperparameters changed last",
        "numbers_version",
    ),
    _gauge("shards", "Shards of the weights, each with one thread", "shards"),
    _gauge("slots", "Gradients that each learner's ring holds", "slots", added=True),
    Metric(
        "started",
        "Time when the memory of the job was made, since 1970",
        _CONTROL,
        "started",
        _GAUGE,
        "seconds",
        values=Values.TIME,
    ),
    Metric(
        "server_generation",
        "Servers that have been active, one after another",
        _CONTROL,
        "lease_generation",
        unit="servers",
    ),
    Metric(
        "failovers",
        "Servers that became active after the first one since the memory was made",
        _WATCHDOG,
        unit="failovers",
        added=True,
    ),
    _event("server_starts", "Server processes started, standbys included", "starts", added=True),
    _event("server_deaths", "Server processes that died", "deaths", Shown("deaths", "server")),
    _event("learner_deaths", "Learners that died", "deaths", Shown("deaths", "learner")),
    _event(
        "watchdog_starts",
        "Watchdogs that the job has had",
        "starts",
        Shown("deaths", "watchdog", base=1),
    ),
    _event(
        "fork_server_deaths",
        "Fork servers that died",
        "deaths",
        Shown("deaths", "fork server", "fork servers", if_zero=False),
        added=True,
    ),
    _event("checkpoints", "Checkpoints written", "checkpoints"),
    _event("checkpoint_failures", "Checkpoints that failed", "checkpoints"),
    _gauge(
        "checkpoint_version", "Version of the weights in the last checkpoint", "checkpoint_version"
    ),
    Metric(
        "checkpoint_time",
        "Time when this job's memory was last written to a checkpoint, since 1970; 0: never",
        _CONTROL,
        "checkpoint_time",
        _GAUGE,
        "seconds",
        values=Values.TIME,
        added=True,
    ),
    _measured(
        "checkpoint_age_s",
        "Age of the last checkpoint that this watchdog has had written",
        "seconds",
        Values.AMOUNT_OR_NONE,
    ),
    _measured("learners_attached", "Learners that have a ring", "learners"),
    Metric("shared_bytes", "Shared memory of the job", _WATCHDOG, "", _GAUGE, "bytes", _NOW),
    _measured(
        "server_private_bytes", "Private memory of the active server, at most 1 s old", "bytes"
    ),
)
"""Metrics of a job: fields of its status."""


def _of_learner(
    name: str,
    help: str,
    kind: Kind = _GAUGE,
    unit: str = "gradients",
    values: Values = Values.COUNT,
    *,
    word: str = "",
    added: bool = False,
) -> Metric:
    """A metric of a learner. word: of its row; without one, the watchdog computes it."""
    place = _ROSTER if word else _WATCHDOG
    return Metric(name, help, place, word, kind, unit, _LEARNER, values, added=added)


LEARNER: Final = (
    _of_learner("published", "Gradients pushed", _COUNTER),
    _of_learner("applied", "Gradients applied", _COUNTER, word="applied"),
    _of_learner("dropped", "Gradients dropped", _COUNTER, word="dropped"),
    _of_learner("refused", "Gradients refused", _COUNTER, word="refused"),
    _of_learner("samples", "Samples of the gradients applied", _COUNTER, "samples", word="samples"),
    _of_learner(
        "unasked", "Gradients of batches that the learner did not have", _COUNTER, word="unasked"
    ),
    _of_learner(
        "loss_sum",
        "Sum of the losses of its gradients applied, without those that are not finite",
        unit="",
        values=Values.NUMBER,
        word="loss_sum",
        added=True,
    ),
    _of_learner(
        "loss_count", "Losses in that sum", _COUNTER, "losses", word="loss_count", added=True
    ),
    _of_learner("queue", "Gradients in its ring"),
    _of_learner("outstanding", "Batches handed to it and not answered", unit="batches"),
    _of_learner("staleness_mean", "Mean staleness of its gradients", values=Values.AMOUNT),
    _of_learner("staleness_max", "Largest staleness of its gradients", word="staleness_max"),
    _of_learner(
        "gradient_norm",
        "Euclidean norm of its last gradient",
        unit="",
        values=Values.AMOUNT_OR_NONE,
    ),
    _of_learner("loss", "Loss of its last gradient", unit="", values=Values.NUMBER_OR_NONE),
    _of_learner(
        "holds_up_s",
        "Time for which others have waited for it",
        unit="seconds",
        values=Values.NUMBER_OR_NONE,
        added=True,
    ),
    _of_learner(
        "killed_in_s",
        "Time until it is killed as hung",
        unit="seconds",
        values=Values.NUMBER_OR_NONE,
        added=True,
    ),
)
"""Metrics of a learner: fields of `learners` in the status."""
