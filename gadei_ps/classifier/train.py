"""`gadei-ps train`: training as a service (GaDei, section 2.2). A CSV file in, a model out.

The launcher reads the data and starts a job and its learners. After each epoch it measures the
shared weights on the held-out tenth, while training continues. Of the CNN, it keeps the best
weights, and stops when neither accuracy nor loss improves. It computes no gradients. It replaces
learners that die. Those of an ensemble on the host are forks of a process that imports what they
need while the launcher reads.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gadei_ps.classifier.measuring import Measuring, Tensors, ended_by
from gadei_ps.classifier.model_directory import check_result_directory
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.classifier.training_settings import CNN, Settings
from gadei_ps.commands.daemon import Daemon, kept_version
from gadei_ps.errors import DeviceError, JobFailed, JobInUse, JobStopped
from gadei_ps.job.config import JobConfig, check_sync, from_mapping, with_curves
from gadei_ps.job.control import Measured, SetWork, Status, StopJob
from gadei_ps.machine import interrupts, process
from gadei_ps.machine.foreground import suspends
from gadei_ps.machine.forks import Loaded
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.machine.launch import Compute, Ended, Learners
from gadei_ps.memory import layout, segment, shm, weights
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.weights import FloatArray
from gadei_ps.show import view
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display
from gadei_ps.watchdog.liveness import Watch

LEARNER = "gadei_ps.classifier.learner"
POLL_S = 0.25
STALLED_S = 120.0
"""Time without a gradient after which a training with joined learners has failed (s)."""
LATE_S = 10.0
"""A longer time than this between two looks at the gradients is that of a measurement (s)."""
MAX_REFUSED = 20
MAX_DEATHS = 20
"""Deaths of learners without a gradient in between after which no other one is started."""
Start = Callable[..., Learners]


def train(settings: Settings, display_silent: bool = False) -> dict[str, Any]:
    """Run the whole training; return the summary that `train --json` prints.

    The first signal, and a stop of the job, end it with the best weights so far; `exit_code` is 128
    + the signal's number, or that of JobStopped. A second signal, and one before the first
    gradient, raises Interrupted. Raises GadeiError. Errors have a note on where the best weights
    are: in the model directory, which is written at each improvement, or in memory.
    """
    settings.check()
    begin = time.monotonic()
    compute = _compute(settings)
    with _starting(settings, compute) as start:
        plan = Plan.read(settings)
        config = _config(settings, plan)
        check_result_directory(settings.out or Path("model-1"))
        second = plan.second()
        planned = plan.epochs * (1 if second is None else 2)
        display = Display(planned, silent=display_silent)
        plan.print(display, counted(settings.learners, "learner"))
        display.event(_where(compute, settings.learners))
        display.event(f"job {config.name}; its history is in {config.history_file()}")
        measuring = Measuring(plan, display, compute.device or "host")
        if (version := kept_version(config.name)) is not None:
            raise JobInUse(_kept(config.name, version))
        with display, interrupts.first_told() as signalled:
            first = _run(plan, config, display, start, measuring, signalled)
            runs = [first]
            if second is not None and not first.stopped and signalled() is None:
                display.event(f"once more, on all {len(second.corpus.train):,} sentences")
                measuring.begin_second(second)
                config = _config(settings, second)
                runs += [_run(second, config, display, start, measuring, signalled, plan.epochs)]
            return finish(runs, begin, planned)


@contextlib.contextmanager
def _starting(settings: Settings, compute: Compute) -> Iterator[Start]:
    """Yield a function that starts the learners of a run."""
    start = partial(Learners, stdout=2, compute=compute)
    # PyTorch's threads, and what CUDA does, cannot be forked.
    if settings.model == CNN or compute.device != "host":
        yield start
        return
    with contextlib.closing(Loaded(process.module_command(LEARNER))) as loaded:
        yield partial(start, spawn=loaded.spawn)


def _config(settings: Settings, plan: Plan) -> JobConfig:
    """The job's configuration. Raises UsageError."""
    config = from_mapping(
        {
            "name": settings.job or f"train-{os.getpid()}",
            "optimizer": plan.optimizer(),
            "sync": settings.sync,
        },
        "train",
    )
    check_sync(config, settings.learners, f"train --learners {settings.learners}")
    return with_curves(config, vars(settings), "train")


def _run(
    plan: Plan,
    config: JobConfig,
    display: Display,
    start: Start,
    measuring: Measuring,
    signalled: Callable[[], int | None],
    earlier: int = 0,
) -> _Run:
    """Train as the plan says. earlier: epochs of an earlier run. Raises GadeiError."""
    settings = plan.settings
    # The operations of an ensemble are too small for several threads.
    threads = max(1, process.cores() // settings.learners) if plan.is_cnn else 1
    daemon = Daemon(
        config, verbose=settings.verbose, learners=settings.learners, fresh=True, survives=True
    )
    try:
        # A file in memory: it disappears with its processes, and only its owner can open it.
        with os.fdopen(os.memfd_create("gadei-ps-data"), "wb") as data, daemon:
            plan.write(data, plan.options(measuring.device, threads))
            run = _Run(plan, daemon, display, start, measuring, signalled, earlier)
            run.run(Path(f"/proc/{os.getpid()}/fd/{data.fileno()}"))
            return run
    except BaseException as error:
        version = kept_version(config.name)
        if not measuring.note(error) and daemon.keeps and version is not None:
            error.add_note(_kept(config.name, version))
        raise


def _kept(job: str, version: int) -> str:
    kept = {"job": job, "kept_in": "memory", "kept_version": version}
    return view.kept(kept, "gadei-ps train does not continue it")


def _compute(settings: Settings) -> Compute:
    """The device on which learners compute. Raises UsageError or DeviceError."""
    # If the user names GPUs, they must be used.
    device = "cuda" if settings.gpus is not None and settings.device == "auto" else settings.device
    compute = Compute.choose(device, settings.gpus).settled()
    if compute.device == "cuda" and (why := _torch_lacks()):
        if device == "cuda":
            raise DeviceError(f"device cuda: {why}")
        return Compute("host", why=why)
    return compute


def _torch_lacks() -> str:
    """Explain why PyTorch cannot use a GPU that CuPy can use. Empty if it can."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed: pip install 'gadei-ps[torch]'"
    if torch.version.cuda:
        return ""
    return f"PyTorch {torch.__version__} is built for the CPU alone; install one built for CUDA"


def _where(compute: Compute, learners: int) -> str:
    """One line that says where the learners compute."""
    if compute.device == "host":
        return "learners compute on the host" + (f": {compute.why}" if compute.why else "")
    used = ", ".join(dict.fromkeys(compute.gpus[:learners]))
    return "learners compute with CUDA" + (f" on GPU {used}" if used else "")


def handed_out(work: Mapping[str, int]) -> float:
    """Return the epochs that the server has handed out, with the part of the current one.

    work: as the job's status has it. Learners may already have batches of the next epoch while the
    last ones of an epoch are not answered.
    """
    return work["epoch"] + work["next"] / work["batches"]


class _Run:
    """One running training."""

    def __init__(
        self,
        plan: Plan,
        daemon: Daemon,
        display: Display,
        start: Start,
        measuring: Measuring,
        signalled: Callable[[], int | None],
        earlier: int,
    ) -> None:
        """signalled: says which signal has asked for the end, if one has. earlier: epochs."""
        self.plan = plan
        self.earlier = earlier
        self.settings = plan.settings
        self.daemon = daemon
        self.display = display
        self.epochs = plan.epochs
        self.start = start
        self.signalled = signalled
        self.measuring = measuring
        self.stopped = False  # by another process
        self.completed = False
        self.status: dict[str, Any] = {}
        self.deaths = 0
        self._deaths_since_gradient = 0
        self.train_seconds = 0.0
        self._flat: FloatArray | None = None

    def run(self, data: Path) -> None:
        """Train until the epochs are done or the held-out accuracy no longer improves."""
        work = SetWork(batches=self.plan.batches, epochs=self.epochs, seed=self.settings.seed)
        self.daemon.request(work)
        command = process.module_command(LEARNER, str(data))
        learners = self.start(command, self.settings.learners, str(self.daemon.socket))
        try:
            try:
                with suspends(learners.suspend):
                    self._watch(learners)
            except JobStopped:
                self._take_last()
            if self.completed and not self.plan.measures:
                self.measuring.complete_second()
            self.daemon.keeps = self.measuring.best.tensors is not None
            self.measuring.secure(self.daemon.config.name)
            self.daemon.keeps = False  # as the model is on the disk
            if not self.stopped:
                finished = self.signalled() is None
                stop = StopJob(drain=True, timeout_s=30.0, finished=finished)
                self.status = self.daemon.request(stop, 60.0)
            learners.stop()
        except BaseException:
            self.daemon.keeps &= self.measuring.directory is None
            raise
        finally:
            learners.kill()

    def _take_last(self) -> None:
        """Measure the last weights of a job that another process has stopped.

        Raises JobStopped if there are none: no gradient was applied.
        """
        self.stopped = True
        if not self.plan.measures:
            self.display.event("the job was stopped: the weights of the first run are kept")
            return
        if self._flat is None or not int(self._control["version"]):
            job = self.daemon.config.name
            raise JobStopped(f"job {job!r} was stopped before its first gradient")
        self.display.event("the job was stopped: the best weights so far are kept")
        self._measure(round(handed_out(self.status["work"]), 2))

    def _watch(self, learners: Learners) -> None:
        evaluated = 0
        version, first_gradient, now = 0, 0.0, time.monotonic()
        stalled = Watch(STALLED_S, LATE_S)
        while True:
            self.daemon.check()
            ended = learners.ended()  # before the status, which then has all that they have done
            version_before, self.status = version, self.daemon.request(Status())
            self._replace_dead(learners, ended)
            self._check_refused()
            if self.status["model"]:
                self._map()  # before a stop can take the weights away
            work, version = self.status["work"], self.status["version"]
            before, now = now, time.monotonic()
            if version != version_before:
                self._deaths_since_gradient = 0
            # Not before a learner has joined: on a busy machine, imports alone take minutes.
            if stalled.check(now, {"version": version} if self.status["learners"] else {}):
                raise JobFailed(f"no gradient was applied for {STALLED_S:.0f} s")
            # Since the look before it: all of a short run may be done within one.
            first_gradient = first_gradient or (before if version else 0.0)
            if first_gradient:
                self.train_seconds = now - first_gradient
            begun = handed_out(work)
            self.display.update(self.status, self.earlier + begun, self._left(begun))
            if (number := self.signalled()) is not None:
                self._wind_up(number, round(begun, 2) if begun > evaluated else None)
                return
            if work["epochs_done"] > evaluated:
                evaluated = work["epochs_done"]
                if self._evaluate(evaluated) or evaluated >= self.epochs:
                    self.completed = True
                    return
            time.sleep(POLL_S)

    def _wind_up(self, number: int, epoch: float | None) -> None:
        """Measure what there is for the last time. epoch: of weights not measured yet.

        Raises Interrupted if there is nothing to be kept.
        """
        if not self.status["version"] and self.measuring.best.tensors is None:
            raise Interrupted(number)
        name = signal.Signals(number).name
        self.display.event(f"{name}: the best weights so far are kept; once more ends at once")
        if epoch is not None and self.plan.measures:
            self._evaluate(epoch)

    def _check_refused(self) -> None:
        """Raise JobFailed if most gradients are refused: the training has diverged."""
        refused, applied = self.status["gradients_refused"], self.status["gradients_applied"]
        if refused > MAX_REFUSED and refused > applied:
            reasons = {one["refused_because"] for one in self.status["learners"]} - {""}
            self.daemon.keeps = False  # nobody wants these weights
            raise JobFailed(
                f"{refused} of {refused + applied} gradients were refused "
                f"({', '.join(sorted(reasons)) or 'not finite'}): try a smaller --lr"
            )

    def _left(self, done: float) -> float | None:
        if done < 0.05 or not self.train_seconds:
            return None
        return self.train_seconds / done * (self.epochs - done)

    def _replace_dead(self, learners: Learners, ended: Sequence[Ended]) -> None:
        for one in ended:
            finished = self.status.get("work", {}).get("state") == "done"
            if one.code == 0 and (finished or self.status.get("phase") == "draining"):
                continue
            self.deaths += 1
            self._deaths_since_gradient += not one.lost
            self.display.event(f"learner {one.index} (pid {one.pid}) {one.how}")
            if learners.hopeless or self._deaths_since_gradient >= MAX_DEATHS:
                raise JobFailed("learners die again and again; read their messages above")
            if self.settings.replace:
                learners.start(one.index)
            elif not learners.pids:
                raise JobFailed("no learner is left")

    def _map(self) -> None:
        """Map the weights and their version, which outlive a stop of the job by another process."""
        if self._flat is not None:
            return
        control, mapped = (
            segment.attach(
                shm.segment_name(self.daemon.config.name, kind.name.lower()), kind, writable=False
            )
            for kind in (SegmentKind.CONTROL, SegmentKind.WEIGHTS)
        )
        self._control = control.view(layout.CONTROL)
        self._placed = weights.read_table(mapped)
        self._flat = weights.data(mapped)

    def _weights(self) -> Tensors:
        """A copy of the current weights. Gradients may be applied during the copy (Hogwild)."""
        self._map()
        assert self._flat is not None
        return self._placed.views(self._flat.copy())

    def _evaluate(self, epoch: float) -> bool:
        """Measure the held-out tenth. True if it has not improved for `patience` epochs."""
        is_over = self._measure(epoch)
        last = self.measuring.history[-1]
        measured = {
            "epoch": last["epoch"],
            "accuracy": last["validation_accuracy"],
            "validation_loss": last["validation_loss"],
        }
        self.daemon.request(
            Measured(values={name: one for name, one in measured.items() if math.isfinite(one)})
        )
        return is_over

    def _measure(self, epoch: float) -> bool:
        losses = [one["loss"] for one in self.status["learners"] if one["loss"] is not None]
        return self.measuring.measure(
            self._weights(), self.earlier + epoch, losses, self.train_seconds, self.samples_per_s()
        )

    def samples_per_s(self) -> float:
        samples = self.status.get("samples", 0)
        return float(samples / self.train_seconds) if self.train_seconds > 0 else 0.0


def finish(runs: Sequence[_Run], begin: float, planned: int) -> dict[str, Any]:
    """Write the model directory, return the summary.

    begin: by the monotonic clock. planned: epochs of all runs.
    """
    seconds = time.monotonic() - begin
    last = runs[-1]

    def total(name: str) -> int:
        return sum(run.status.get(name, 0) for run in runs)

    facts = {
        "planned_epochs": planned,
        "samples_per_s": runs[0].samples_per_s(),
        "gradients_applied": total("gradients_applied"),
        "gradients_dropped": total("gradients_dropped"),
        "gradients_refused": total("gradients_refused"),
        "seconds": seconds,
        "training_seconds": sum(run.train_seconds for run in runs),
        "learners": last.settings.learners,
        "learner_deaths": sum(run.deaths for run in runs),
    } | ended_by(last.signalled(), last.stopped)
    return last.measuring.finish(facts)
