"""Metrics of jobs for Prometheus, collected from shared memory when they are asked for.

Names derive from the tables of gadei_ps/metrics.py: `gradients_applied` of a job is
`gadei_gradients_applied_total`, and `queue` of a learner is `gadei_learner_queue`. Labels are
`gadei_job`, `user` and `learner`: Prometheus renames a label `job`, and a pid would make a new time
series of each restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from prometheus_client.samples import Sample

import gadei_ps
from gadei_ps import metrics
from gadei_ps.job import paths
from gadei_ps.metrics import Kind, Metric, Values
from gadei_ps.monitoring.following import Follower, scalars
from gadei_ps.monitoring.reading import Job, Reader, State, Value

MOST_S: Final = 2**53  # of an interval, in a job file of another user
MOST_NAMES: Final = 1000  # of measurements of a job
FRESH_S: Final = 0.25  # in which a second request gets the same answer
Labels = dict[str, str]


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


def _is_missing(value: Value, one: Metric) -> bool:
    return value is None or (one.values is Values.TIME and not value)


def _checkpoint_interval(job: Job) -> Value:
    checkpoint = job.config.get("checkpoint")
    seconds = checkpoint.get("every_s") if isinstance(checkpoint, dict) else None
    return seconds if isinstance(seconds, int | float) and 0 < seconds < MOST_S else None


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


class JobCollector:
    """Metrics of all jobs that a reader sees, or of one."""

    def __init__(self, reader: Reader, job: str | None = None) -> None:
        self._reader = reader
        self._job = job
        self._scalars: dict[str, tuple[Follower, dict[str, float]]] = {}
        self._users: dict[int, str] = {}

    def describe(self) -> list[Family]:
        """Nothing, so that a registry does not collect when it is made."""
        return []

    def collect(self) -> Iterator[Family]:
        """Read the jobs, and yield one family after the other."""
        jobs = self._reader.jobs() if self._job is None else [self._reader.job(self._job)]
        found = [(one, self._labels(one)) for one in jobs if one is not None]
        yield from _states(found)
        read = [one for one in found if one[0].state is not State.UNREADABLE]
        for one in metrics.JOB:
            yield _family(
                one, exported(one), [(labels, job.metrics[one.name]) for job, labels in read]
            )
        for name, (help_, value) in GAUGES.items():
            family = GaugeMetricFamily(name, help_)
            family.samples += [
                Sample(name, labels, told)
                for job, labels in read
                if (told := value(job)) is not None
            ]
            yield family
        yield from self._named(read)
        rows = [
            (learner.metrics, {**labels, "learner": str(learner.row)})
            for job, labels in read
            for learner in job.learners
        ]
        for one in metrics.LEARNER:
            values = [(labels, told[one.name]) for told, labels in rows]
            yield _family(one, exported(one, "learner_"), values)

    def _labels(self, job: Job) -> Labels:
        if job.uid not in self._users:
            self._users[job.uid] = paths.user(job.uid)
        return {"gadei_job": job.name, "user": self._users[job.uid]}

    def _named(self, read: list[tuple[Job, Labels]]) -> Iterator[Family]:
        """Yield hyperparameters and measurements, each by its name."""
        for name, help_, values in (
            (
                "gadei_hyperparameter",
                "Setting of the optimizer, of parameters without a group",
                lambda job: job.hyperparameters,
            ),
            ("gadei_scalar", "Last value that was measured or reported", self._reported),
        ):
            family = GaugeMetricFamily(name, help_)
            family.samples += [
                Sample(name, {**labels, "name": key}, value)
                for job, labels in read
                for key, value in values(job).items()
            ]
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


def _states(found: list[tuple[Job, Labels]]) -> Iterator[Family]:
    info = InfoMetricFamily("gadei_job", "Settings of a job")
    state = GaugeMetricFamily("gadei_job_state", "1 for the state that the job is in")
    for job, labels in found:
        state.samples.append(Sample("gadei_job_state", labels | {"state": job.state.value}, 1))
        if job.state is not State.UNREADABLE:
            facts = {"sync": job.sync, "optimizer": job.optimizer, "version": gadei_ps.__version__}
            info.samples.append(Sample("gadei_job_info", labels | facts, 1))
    yield info
    yield state


def _family(one: Metric, name: str, values: list[tuple[Labels, Value]]) -> Family:
    if one.kind is Kind.COUNTER:
        family: Family = CounterMetricFamily(name, one.help)
        name = f"{name}_total"
    else:
        family = GaugeMetricFamily(name, one.help)
    family.samples += [
        Sample(name, labels, value)
        for labels, value in values
        if value is not None and not _is_missing(value, one)
    ]
    return family


class Exporter:
    """The text of the metrics, in the format that a client accepts."""

    def __init__(self, job: str | None = None) -> None:
        """job: the only one whose metrics are exported; by default all of the user."""
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(Reader(), job))
        self._made: dict[str, tuple[float, bytes]] = {}

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the client's header of that name."""
        encode, kind = choose_encoder(accept)
        at, text = self._made.get(kind, (float("-inf"), b""))
        if time.monotonic() - at > FRESH_S:
            text = encode(self._registry)
            self._made[kind] = time.monotonic(), text
        return text, kind
