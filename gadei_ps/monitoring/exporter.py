"""Metrics of jobs for Prometheus, collected from shared memory when they are asked for.

Names derive from the tables of gadei_ps/metrics.py: `gradients_applied` of a job is
`gadei_gradients_applied_total`, and `queue` of a learner is `gadei_learner_queue`. Labels are
`gadei_job`, `user` and `learner`: Prometheus renames a label `job`, and a pid would make a new time
series of each restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
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
# All names are valid without escapes, and this encoder would copy them character by character.
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
END: Final = b"# EOF\n"  # of a text in OpenMetrics
Labels = dict[str, str]
Row = tuple[Labels, Value]


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

    def collect(self) -> Iterator[Family]:
        """Read the jobs, and yield one family after the other."""
        jobs = self._reader.jobs() if self._job is None else [self._reader.job(self._job)]
        found = [
            ({"gadei_job": job.name, "user": paths.user(job.uid)}, job)
            for job in jobs
            if job is not None
        ]
        yield from _states(found)
        read = [(labels, job) for labels, job in found if job.state is not State.UNREADABLE]
        of_jobs = [(labels, job.metrics) for labels, job in read]
        of_learners = [
            ({**labels, "learner": str(one.row)}, one.metrics)
            for labels, job in read
            for one in job.learners
        ]
        for table, of, rows in (
            (metrics.JOB, "", of_jobs),
            (metrics.LEARNER, "learner_", of_learners),
        ):
            for one in table:
                values = [(labels, values[one.name]) for labels, values in rows]
                if one.values is Values.TIME:
                    values = [row for row in values if row[1]]  # 0: it has not happened
                kind = CounterMetricFamily if one.kind is Kind.COUNTER else GaugeMetricFamily
                yield _family(kind(exported(one, of), one.help), values)
        for name, (help_, value) in GAUGES.items():
            yield _family(
                GaugeMetricFamily(name, help_), [(labels, value(job)) for labels, job in read]
            )
        for name, help_, named in (
            (
                "gadei_hyperparameter",
                "Setting of the optimizer, of parameters without a group",
                lambda job: job.hyperparameters,
            ),
            ("gadei_scalar", "Last value that was measured or reported", self._reported),
        ):
            values = [
                ({**labels, "name": key}, value)
                for labels, job in read
                for key, value in named(job).items()
            ]
            yield _family(GaugeMetricFamily(name, help_), values)

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


def _states(found: list[tuple[Labels, Job]]) -> Iterator[Family]:
    info, states = [], []
    for labels, job in found:
        states.append((labels | {"state": job.state.value}, 1))
        if job.state is not State.UNREADABLE:
            facts = {"sync": job.sync, "optimizer": job.optimizer, "version": gadei_ps.__version__}
            info.append((labels | facts, 1))
    yield _family(InfoMetricFamily("gadei_job", "Settings of a job"), info)
    yield _family(
        GaugeMetricFamily("gadei_job_state", "1 for the state that the job is in"), states
    )


def _family(family: Family, rows: Iterable[Row]) -> Family:
    """Add the values that are known."""
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    family.samples += [Sample(name, labels, value) for labels, value in rows if value is not None]
    return family


class Exporter:
    """The text of the metrics, in the format that a client accepts."""

    def __init__(self, job: str | None = None) -> None:
        """job: the only one whose metrics are exported; by default all of the user."""
        self._collector = JobCollector(Reader(), job)
        self._made: dict[str, tuple[float, bytes]] = {}
        self._parts: dict[tuple[str, str], tuple[Family, bytes]] = {}

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the client's header of that name."""
        is_open = "openmetrics" in choose_encoder(accept)[1]
        encode, kind = choose_encoder(OPENMETRICS if is_open else "")
        at, text = self._made.get(kind, (float("-inf"), b""))
        if time.monotonic() - at > FRESH_S:
            parts = [self._encoded(one, encode, kind) for one in self._collector.collect()]
            text = b"".join(parts) + (END if is_open else b"")
            self._made[kind] = time.monotonic(), text
        return text, kind

    def _encoded(self, family: Family, encode: Callable[..., bytes], kind: str) -> bytes:
        """Return the text of a family: the last one if no value has changed, as of most."""
        before = self._parts.get((kind, family.name))
        if before is None or before[0] != family:
            text = encode(SimpleNamespace(collect=lambda: [family])).removesuffix(END)
            before = self._parts[kind, family.name] = family, text
        return before[1]
