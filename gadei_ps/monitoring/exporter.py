"""Metrics of jobs for Prometheus, read from shared memory when a client asks for them.

Names derive from the tables of gadei_ps/metrics.py: `gradients_applied` of a job is
`gadei_gradients_applied_total`, and `queue` of a learner is `gadei_learner_queue`. Labels are
`gadei_job`, `user` and `learner`: Prometheus renames a label `job`, and a pid would make a new time
series of each restart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.exposition import choose_encoder

import gadei_ps
from gadei_ps import metrics
from gadei_ps.job import paths
from gadei_ps.metrics import Kind, Metric, Values
from gadei_ps.monitoring.following import Follower, scalars
from gadei_ps.monitoring.reading import Job, Reader, State, Value

MOST_S: Final = 2**53  # of an interval, in a job file of another user
MOST_NAMES: Final = 1000  # of measurements of a job
FRESH_S: Final = 0.25  # in which a second request gets the same answer
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def exported(one: Metric, of: str = "") -> str:
    """Return the name of a metric's family. of: `learner_` for those of learners."""
    stem = one.name
    if one.values is Values.TIME:
        stem = f"{stem.removesuffix('_time')}_timestamp_seconds"
    elif one.unit == "seconds":
        stem = f"{stem.removesuffix('_s')}_seconds"
    elif of and one.kind is Kind.COUNTER and one.unit == "gradients":
        stem = f"gradients_{stem}"
    return f"gadei_{of}{stem}"


def _checkpoint_interval(job: Job) -> Value:
    checkpoint = job.config.get("checkpoint")
    seconds = checkpoint.get("every_s") if isinstance(checkpoint, dict) else None
    if isinstance(seconds, int | float) and 0 < seconds < MOST_S:
        return float(seconds)
    return None


GAUGES: Final[dict[str, tuple[str, Callable[[Job], Value]]]] = {
    "gadei_watchdog_up": (
        "1 if the job's watchdog lives",
        lambda job: int(job.watchdog_pid is not None),
    ),
    "gadei_server_up": (
        "1 if the job has an active server",
        lambda job: int(job.server_pid is not None),
    ),
    "gadei_standby_up": (
        "1 if a second server can take over; absent if the job wants none",
        lambda job: int(job.standby_pid is not None) if job.config.get("standby") else None,
    ),
    "gadei_model_values": (
        "Values in the tensors of the model",
        lambda job: job.model.values if job.model else None,
    ),
    "gadei_model_bytes": (
        "Weights of the model in memory, as float32",
        lambda job: job.model.bytes if job.model else None,
    ),
    "gadei_checkpoint_interval_seconds": (
        "Time between two checkpoints; absent if none are written by time",
        _checkpoint_interval,
    ),
    "gadei_work_epochs": ("Epochs that the job hands out", lambda job: job.work.get("epochs")),
    "gadei_work_epochs_done": ("Epochs answered", lambda job: job.work.get("epochs_done")),
}
"""Gauges of a job that are not in the tables."""


class Family:
    """All samples of a metric, as text."""

    def __init__(self, name: str, help_: str, kind: str) -> None:
        """kind: type of the metric, as OpenMetrics names it."""
        self._name, self._help, self._kind = name, help_, kind
        self._sample = name + {"counter": "_total", "info": "_info"}.get(kind, "")
        self._lines: list[str] = []

    def add(self, labels: str, value: float) -> None:
        """Add a sample. labels: as _labels() writes them."""
        self._lines.append(f"{self._sample}{{{labels}}} {_number(value)}\n")

    def text(self, is_open: bool) -> str:
        """Return its lines. is_open: in OpenMetrics instead of the format of Prometheus."""
        name = self._name if is_open else self._sample
        kind = "gauge" if self._kind == "info" and not is_open else self._kind
        return f"# HELP {name} {self._help}\n# TYPE {name} {kind}\n{''.join(self._lines)}"


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{one.translate(_ESCAPES)}"' for name, one in labels.items())


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class Exporter:
    """The metrics of all jobs that a reader sees, or of one, in a format that a client accepts."""

    def __init__(self, job: str | None = None) -> None:
        """job: the only one whose metrics are exported; by default all of the user."""
        self._reader = Reader()
        self._job = job
        self._scalars: dict[str, tuple[Follower, dict[str, float]]] = {}
        self._users: dict[int, str] = {}
        self._made: dict[str, tuple[float, bytes]] = {}

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the client's header of that name."""
        kind: str = choose_encoder(accept)[1]
        at, text = self._made.get(kind, (float("-inf"), b""))
        if time.monotonic() - at > FRESH_S:
            is_open = kind.startswith("application/openmetrics-text")
            parts = [one.text(is_open) for one in self._families()]
            text = "".join([*parts, *["# EOF\n"] * is_open]).encode(errors="replace")
            self._made[kind] = time.monotonic(), text
        return text, kind

    def _families(self) -> Iterator[Family]:
        """Read the jobs, and yield one family after the other."""
        jobs = self._reader.jobs() if self._job is None else [self._reader.job(self._job)]
        found = [(one, self._labels(one)) for one in jobs if one is not None]
        yield from _states(found)
        read = [one for one in found if one[0].state is not State.UNREADABLE]
        for one in metrics.JOB:
            yield _family(one, exported(one), [(labels, job.metrics) for job, labels in read])
        for name, (help_, value) in GAUGES.items():
            family = Family(name, help_, "gauge")
            for job, labels in read:
                if (number := value(job)) is not None:
                    family.add(labels, number)
            yield family
        yield from self._named(read)
        rows = [
            (f'{labels},learner="{learner.row}"', learner.metrics)
            for job, labels in read
            for learner in job.learners
        ]
        for one in metrics.LEARNER:
            yield _family(one, exported(one, "learner_"), rows)

    def _labels(self, job: Job) -> str:
        if job.uid not in self._users:
            self._users[job.uid] = paths.user(job.uid)
        return _labels(gadei_job=job.name, user=self._users[job.uid])

    def _named(self, read: list[tuple[Job, str]]) -> Iterator[Family]:
        """Yield hyperparameters and measurements, each by its name."""
        for name, help_, values in (
            (
                "gadei_hyperparameter",
                "Setting of the optimizer, of parameters without a group",
                lambda job: job.hyperparameters,
            ),
            ("gadei_scalar", "Last value that was measured or reported", self._reported),
        ):
            family = Family(name, help_, "gauge")
            for job, labels in read:
                for key, value in values(job).items():
                    family.add(f"{labels},{_labels(name=key)}", value)
            yield family

    def _reported(self, job: Job) -> dict[str, float]:
        if job.history is None:
            return {}
        known = self._scalars.get(job.job_id)
        if known is None:
            self._scalars = dict(list(self._scalars.items())[-500:])
            known = self._scalars[job.job_id] = Follower(job.history, job.uid), {}
        for line in known[0].read():
            known[1].update(scalars(line))
            while len(known[1]) > MOST_NAMES:
                known[1].pop(next(iter(known[1])))
        return known[1]


def _states(found: list[tuple[Job, str]]) -> Iterator[Family]:
    info = Family("gadei_job", "Settings of a job", "info")
    state = Family("gadei_job_state", "1 for the state that the job is in", "gauge")
    for job, labels in found:
        state.add(f"{labels},{_labels(state=job.state.value)}", 1)
        if job.state is not State.UNREADABLE:
            facts = _labels(sync=job.sync, optimizer=job.optimizer, version=gadei_ps.__version__)
            info.add(f"{labels},{facts}", 1)
    yield info
    yield state


def _family(one: Metric, name: str, found: list[tuple[str, Mapping[str, Value]]]) -> Family:
    family = Family(name, one.help, one.kind.value)
    for labels, values in found:
        value = values[one.name]
        if value is not None and not (one.values is Values.TIME and not value):
            family.add(labels, value)
    return family
