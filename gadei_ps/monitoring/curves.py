"""Curves of a job for TensorBoard, MLflow and Weights & Biases, made of its history.

The watchdog starts a process for each program, and starts it again if it dies. Each begins with
the first line of the history, and replaces what was written before: so nothing is lost or twice,
whatever was killed. A step is a version of the weights. A run is named JOB-DATE-TIME, after the
first point of the history: a job that begins from zero has another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import posixpath
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gadei_ps.job.config import LIBRARIES
from gadei_ps.monitoring.following import Follower
from gadei_ps.monitoring.series import numbers
from gadei_ps.show.history_view import event_text

POLL_S: Final = 1.0
NICE: Final = 10
"""Learners come first: some of the libraries need seconds of a core to start."""
PROJECT: Final = "gadei-ps"
MOST_METRICS: Final = 1000  # in a request to MLflow
TAGS: Final = {
    "loss": "loss/train",
    "samples_per_s": "samples_per_second",
    "validation_loss": "loss/held_out",
}
"""Tags that are not the names in the history."""
SILENT: Final = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Settings of the libraries: a job sends nothing to a host that its user has not named."""
Line = Mapping[str, Any]


class _TensorBoard:
    """A run of TensorBoard. The other sinks have the same methods."""

    def __init__(self, where: str, name: str, version: str) -> None:
        """version: the name, or another one for each return to a checkpoint."""
        from tensorboardX import SummaryWriter

        directory = Path(where) / name
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, which have whole seconds.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(str(directory), purge_step=0, filename_suffix=suffix)
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, line: Line, values: Mapping[str, float], event: str) -> None:
        """Write the values and the event of a line, if it has any."""
        at = {"global_step": line["version"], "walltime": line["time"]}
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, **at)
        if event:
            self._writer.add_text("events", event, **at)


class _MLflow:
    """It keeps points for ever, and a point that is written again once."""

    def __init__(self, where: str, name: str, version: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        artifacts = None
        if where.startswith("/"):
            Path(where).mkdir(parents=True, exist_ok=True)
            artifacts = (Path(where) / "artifacts").as_uri()  # not in the current directory
            where = f"sqlite:///{where}/mlflow.db"
        self._metric = Metric
        self._waiting: list[Any] = []
        self._client = client = MlflowClient(tracking_uri=where)
        known = client.get_experiment_by_name(PROJECT)
        of = known.experiment_id if known else client.create_experiment(PROJECT, artifacts)
        there = client.search_runs([of], f"attributes.run_name = '{version}'")
        run = there[0] if there else client.create_run(of, run_name=version)
        self._run = run.info.run_id
        client.update_run(self._run, status="RUNNING")

    def write(self, line: Line, values: Mapping[str, float], event: str) -> None:
        at = int(1000 * line["time"]), line["version"]
        self._waiting += [self._metric(_path(tag), value, *at) for tag, value in values.items()]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:MOST_METRICS])
            del self._waiting[:MOST_METRICS]

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _path(tag: str) -> str:
    """Return a name that MLflow accepts: it refuses `a//b`, `a/` and `a/../b`."""
    return posixpath.normpath(f"/{tag}").lstrip("/") or "_"


class _WandB:
    """It cannot continue an offline run, but `wandb sync` replaces a run by a later one."""

    def __init__(self, where: str, name: str, version: str) -> None:
        import wandb

        Path(where).mkdir(parents=True, exist_ok=True)
        how = wandb.Settings(console="off", disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=PROJECT, name=name, id=name, dir=where, mode="offline", settings=how
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")
        self.close = self._run.finish

    def write(self, line: Line, values: Mapping[str, float], event: str) -> None:
        self._run.log({**values, **({"event": event} if event else {}), "version": line["version"]})

    def flush(self) -> None:
        """Nothing: the library writes as it goes."""


Sink = _TensorBoard | _MLflow | _WandB
SINKS: Final[dict[str, Callable[[str, str, str], Sink]]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
}


def tagged(line: Line) -> dict[str, float]:
    """Return the values of a line by their tags; one of TAGS replaces a reported value."""
    found = numbers(line)
    if not line.get("samples"):  # no learner reports them
        found.pop("samples_per_s", None)
    return {TAGS.get(name, name): found[name] for name in sorted(found, key=TAGS.__contains__)}


def current(lines: Iterable[Line]) -> list[Line]:
    """Return the lines without those that a return to a checkpoint has undone."""
    found: list[Line] = []
    for one in lines:
        if one.get("event") == "restored":
            found = [each for each in found if each["version"] <= one["version"]]
        if type(one.get("version")) is int:
            found.append(one)
    return found


class Writer:
    """Writes the curves of one job for one program."""

    def __init__(self, job: str, history: Path, program: str, place: str, begun: float) -> None:
        """program: one of SINKS. begun: time of the watchdog's start (s since 1970)."""
        self._job, self._history, self._begun = job, history, begun
        self._program, self._place = program, place
        self._follower = Follower(history)
        self._sink: Sink | None = None
        self._seen: tuple[int, ...] = ()
        """The state of the history that the last look found without a line of this job."""

    def write(self) -> bool:
        """Write the lines that have come; return whether there are any."""
        lines = current(self._follower.read()) if self._sink else self._open()
        if self._sink is not None:
            for one in lines:
                event = "" if "samples" in one or "measured" in one else event_text(one)
                self._sink.write(one, tagged(one), event)
            self._sink.flush()
        return bool(lines)

    def _open(self) -> list[Line]:
        """Begin or continue the run; return its lines, none if it has no point yet.

        Before this watchdog's first line, the history may be that of a job before.
        """
        try:
            status = self._history.stat()
        except OSError:
            return []
        seen = status.st_ino, status.st_size, status.st_mtime_ns
        if seen == self._seen:
            return []
        self._seen = seen
        self._follower = Follower(self._history)
        lines: list[Line] = []
        while part := self._follower.read():
            lines += part
        begun = next((one["time"] for one in lines if "samples" in one), None)
        if begun is None or lines[-1]["time"] < self._begun:
            return []
        name = time.strftime(f"{self._job}-%Y%m%d-%H%M%S", time.localtime(begun))
        restored = [f"{name}-{one['version']}" for one in lines if one.get("event") == "restored"]
        version = [name, *restored][-1]
        self._sink = SINKS[self._program](self._place, name, version)
        return current(lines)

    def close(self) -> None:
        """End the run for now."""
        if self._sink is not None:
            self._sink.close()


def _follow(writer: Writer) -> None:
    """Write until standard input has ended, and all lines are written."""
    over = False
    while writer.write() or not over:
        if not over and select.select([0], [], [], POLL_S)[0]:
            over = not os.read(0, 4096)
    writer.close()


def main() -> None:
    """`python -m gadei_ps.monitoring.curves JOB HISTORY PROGRAM PLACE TIME`: see Writer.

    The watchdog starts it. It ends with its standard input, once all lines are written. It prints a
    problem in one line; the libraries print to nowhere.
    """
    job, history, program, place, begun = sys.argv[1:]
    watchdog, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.nice(NICE)
    os.environ.update({name: one for name, one in SILENT.items() if name not in os.environ})

    def fail(error: BaseException | None) -> None:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        with contextlib.suppress(OSError):  # the watchdog may be dead
            os.write(watchdog, f"{text}\n".encode())
        os._exit(1)

    # A thread of a library that dies, as on a full disk, would keep the others waiting for ever.
    threading.excepthook = lambda thread: fail(thread.exc_value)
    try:
        writer = Writer(job, Path(history), program, place, float(begun))
        importlib.import_module(LIBRARIES[program])  # before the first line comes
        _follow(writer)
    except Exception as error:  # of whichever library
        fail(error)


if __name__ == "__main__":
    main()
