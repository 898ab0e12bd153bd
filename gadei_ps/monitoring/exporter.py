"""Metrics of jobs for Prometheus, collected from shared memory when they are asked for.

Names derive from the tables of gadei_ps/metrics.py: `gradients_applied` of a job is
`gadei_gradients_applied_total`, and `queue` of a learner is `gadei_learner_queue`. Labels are
`gadei_job`, `user` and `learner`: Prometheus renames a label `job`, and a pid would make a new time
series of each restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Final, NamedTuple

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

from gadei_ps import __version__, metrics
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
Rows = Sequence[tuple[Labels, Value]]


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


class Table(NamedTuple):
    """One family of metrics, with the labels and the value of each sample; None: it is unknown."""

    kind: type[Family]
    name: str
    help: str
    rows: Rows

    def family(self) -> Family:
        """Return it as prometheus-client takes it."""
        made = self.kind(self.name, self.help)
        name = self.name + {"counter": "_total", "info": "_info"}.get(made.type, "")
        made.samples += [Sample(name, *row) for row in self.rows if row[1] is not None]
        return made


class JobCollector:
    """Metrics of all jobs that a reader sees, or of one."""

    def __init__(self, reader: Reader, job: str | None = None) -> None:
        self._reader = reader
        self._job = job
        self._scalars: dict[str, tuple[Follower, dict[str, float]]] = {}

    def collect(self) -> Iterator[Family]:
        """Read the jobs, and yield one family after the other."""
        return (one.family() for one in self.tables())

    def tables(self) -> Iterator[Table]:
        """Read the jobs, and yield one family after the other, without the objects of a library."""
        found = [
            ({"gadei_job": job.name, "user": paths.user(job.uid)}, job)
            for job in self._reader.jobs(self._job)
        ]
        jobs = [(labels, job) for labels, job in found if job.state is not State.UNREADABLE]
        states = [(labels | {"state": job.state.value}, 1) for labels, job in found]
        info = [
            (labels | {"sync": job.sync, "optimizer": job.optimizer, "version": __version__}, 1)
            for labels, job in jobs
        ]
        yield Table(InfoMetricFamily, "gadei_job", "Settings of a job", info)
        yield _gauge("gadei_job_state", "1 for the state that the job is in", states)
        learners = [
            ({**labels, "learner": str(one.row)}, one.metrics)
            for labels, job in jobs
            for one in job.learners
        ]
        of_jobs = [(labels, job.metrics) for labels, job in jobs]
        for table, of, read in (metrics.JOB, "", of_jobs), (metrics.LEARNER, "learner_", learners):
            for one in table:
                rows = [(labels, values[one.name]) for labels, values in read]
                if one.values is Values.TIME:
                    rows = [row for row in rows if row[1]]  # 0: it has not happened
                kind = CounterMetricFamily if one.kind is Kind.COUNTER else GaugeMetricFamily
                yield Table(kind, exported(one, of), one.help, rows)
        for name, (text, value) in GAUGES.items():
            yield _gauge(name, text, [(labels, value(job)) for labels, job in jobs])
        yield _named(
            "gadei_hyperparameter",
            "Setting of the optimizer, of parameters without a group",
            [(labels, job.hyperparameters) for labels, job in jobs],
        )
        self._scalars = {
            job.job_id: self._scalars.get(job.job_id) or (Follower(job.history, job.uid), {})
            for _, job in jobs
        }
        yield _named(
            "gadei_scalar",
            "Last value that was measured or reported",
            [(labels, self._reported(job.job_id)) for labels, job in jobs],
        )

    def _reported(self, job_id: str) -> dict[str, float]:
        follower, known = self._scalars[job_id]
        for line in follower.read():
            known.update(scalars(line))
            while len(known) > MOST_NAMES:
                known.pop(next(iter(known)))
        return known


def _gauge(name: str, text: str, rows: Rows) -> Table:
    return Table(GaugeMetricFamily, name, text, rows)


def _named(name: str, text: str, of_jobs: list[tuple[Labels, Mapping[str, float]]]) -> Table:
    """Return gauges with a label `name`."""
    rows = [
        ({**labels, "name": key}, value)
        for labels, values in of_jobs
        for key, value in values.items()
    ]
    return _gauge(name, text, rows)


class Exporter:
    """The text of the metrics, in the format that a client accepts."""

    def __init__(self, job: str | None = None) -> None:
        """job: the only one whose metrics are exported; by default all of the user."""
        self._collector = JobCollector(Reader(), job)
        self._made: dict[str, tuple[float, bytes]] = {}
        self._parts: dict[tuple[str, str], tuple[Table, bytes]] = {}

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text, and its content type. accept: the client's header of that name."""
        is_open = "openmetrics" in choose_encoder(accept)[1]
        encode, kind = choose_encoder(OPENMETRICS if is_open else "")
        at, text = self._made.get(kind, (float("-inf"), b""))
        if time.monotonic() - at > FRESH_S:
            parts = [self._encoded(one, encode, kind) for one in self._collector.tables()]
            text = b"".join(parts) + (END if is_open else b"")
            self._made[kind] = time.monotonic(), text
        return text, kind

    def _encoded(self, table: Table, encode: Callable[..., bytes], kind: str) -> bytes:
        """Return the text of a table: the last one if no value has changed, as of most."""
        before, text = self._parts.get((kind, table.name), (None, b""))
        if before != table:
            text = encode(SimpleNamespace(collect=lambda: [table.family()])).removesuffix(END)
            self._parts[kind, table.name] = table, text
        return text
