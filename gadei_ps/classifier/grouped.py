"""`gadei-ps train --groups`: replicas in worker groups train the classifier together.

Ray places the replicas and brings the encoded sentences to them. Each has a job and learners of
its own. The launcher does what it does on one machine: after each pass it measures a copy of the
weights, keeps the best ones, and ends the run when they no longer improve.
"""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gadei_ps.classifier.counting import Progress, sources
from gadei_ps.classifier.measuring import Measuring, Tensors, ended_by
from gadei_ps.classifier.model_directory import check_result_directory
from gadei_ps.classifier.train import LATE_S, LEARNER, MAX_REFUSED, STALLED_S
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.errors import ClusterError, JobFailed, JobStopped, UsageError
from gadei_ps.machine import interrupts
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.replicas import commands, config
from gadei_ps.replicas.program import Program
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display
from gadei_ps.watchdog.liveness import Watch

if TYPE_CHECKING:  # Ray takes a second to load
    from gadei_ps.replicas.following import Following

RESTARTS = 10**6
"""Number of restarts of a replica's learners, as in `train`."""
RULE = "outer:1:0"
"""Replicas continue with the mean of their weights. With DiLoCo's momentum, the loss of this small
network on held-out rows rose from the second pass on."""
MOST_RATE = 4
"""So many replicas of Adagrad at most raise the rate. The mean of m replicas moves as far as one of
them, with one m-th of the samples; it was measured up to 4."""
SAID_TWICE = ("learners", "optimizer", "lr", "sync")
"""Settings that options and GROUPS.toml may both have."""
_REFUSED = {
    "job": "the run has the name that GROUPS.toml gives it: name = ...",
    "gpus": "learners take the GPUs of their host in turn; GROUPS.toml reserves them: resources",
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), "each replica is a job of its own"),
    "verbose": "each replica has a log of its own, NAME-NUMBER.log in its state directory",
}


def train(
    settings: Settings, given: Collection[str], display_silent: bool = False
) -> dict[str, Any]:
    """Run classifier.train.train on the replicas of `settings.groups`.

    given: options, by their names in Settings, whose values are not the defaults of `train`. In the
    summary, `learners` are those of all replicas. Raises GadeiError.
    """
    begin = time.monotonic()
    file = settings.groups
    assert file is not None
    run = config.load(file)
    settings = combined(settings, given, run)
    settings.check()
    plan = raised(Plan.read(settings), run.machines)
    run = filled(run, plan)
    check_result_directory(settings.out or Path("model-1"))
    display = Display(plan.epochs, silent=display_silent)
    machines, groups = counted(run.machines, "replica"), counted(len(run.groups), "group")
    learners = counted(settings.learners, "learner")
    plan.print(display, f"{learners} on each of {machines} in {groups}")
    options = plan.options(settings.device, None, own_order=not run.divide)
    program = Program(LEARNER, "torch", settings.device, plan.digest(options))

    def say(line: str, progress: bool) -> None:
        if not progress:
            display.event(line)

    with display, interrupts.first_told() as signalled:
        plan.write(stream := io.BytesIO(), options)
        data = np.frombuffer(stream.getbuffer(), np.uint8)
        measuring = Measuring(plan, display, settings.device)
        try:
            with commands.program_run(run, file, settings.address, program, data, say) as training:
                launcher = _Launcher(plan, run, training, display, measuring, signalled)
                launcher.run()
                error = launcher.end()
            summary = launcher.finish(begin)
        except BaseException as other:
            measuring.note(other)
            raise
    if error is not None:
        raise ClusterError(f"{error}; the model is in {measuring.directory}")
    return summary


def combined(settings: Settings, given: Collection[str], run: config.Run) -> Settings:
    """Merge the settings of the options and GROUPS.toml. Raises UsageError if they differ."""
    for name, why in _REFUSED.items():
        if getattr(settings, name):
            raise UsageError(f"--{name} cannot be combined with --groups: {why}")
    said = {name: getattr(run, name) for name in SAID_TWICE if name in run.model_fields_set}
    for name in given:
        ours, theirs = getattr(settings, name), said.get(name)
        if theirs is not None and theirs != ours:
            raise UsageError(
                f"--{name} {ours}: {settings.groups} has {name} = {theirs}; leave out one of them"
            )
    return replace(settings, **{name: one for name, one in said.items() if one is not None})


def raised(plan: Plan, machines: int) -> Plan:
    """Return the plan with the learning rate of so many replicas, unless the user sets one."""
    if plan.settings.lr is not None or plan.settings.optimizer != "adagrad":
        return plan
    return replace(plan, lr=plan.lr * min(machines, MOST_RATE))


def filled(run: config.Run, plan: Plan) -> config.Run:
    """Return the run with all settings of its jobs. Raises UsageError."""
    settings = plan.settings
    values: dict[str, Any] = {"divide": True, "restart": RESTARTS, "rule": RULE}
    values |= run.model_dump(mode="json", exclude_unset=True)
    values |= {"learners": settings.learners, "optimizer": settings.optimizer, "lr": plan.lr}
    # The file alone was checked before: what is wrong now comes from an option.
    return config.from_mapping(
        values | {"sync": settings.sync}, f"train --groups {settings.groups}"
    )


class _Launcher:
    """One running training."""

    def __init__(
        self,
        plan: Plan,
        run: config.Run,
        training: Following,
        display: Display,
        measuring: Measuring,
        signalled: Callable[[], int | None],
    ) -> None:
        """signalled: says which signal has asked for the end, if one has."""
        self.plan, self.groups = plan, run
        self.training = training
        self.display = display
        self.signalled = signalled
        self.measuring = measuring
        divided = len(run.groups) if run.divide else None
        self.progress = Progress(len(plan.corpus.train), plan.epochs, divided)
        self._stalled = Watch(STALLED_S, LATE_S)
        self.rounds = 0

    def run(self) -> None:
        """Train until the passes are done or the held-out accuracy no longer improves."""
        measured = 0
        while True:
            self.training.look()
            if self.training.summary is not None:
                self._check_end(self.training.summary)
                return
            self._hear()
            rows, now = self.training.rows, self.progress
            if rows:
                self.display.machines(rows, now.samples_per_s, now.begun, now.left_s)
            if (number := self.signalled()) is not None:
                self._wind_up(number, round(now.begun, 2) if now.begun > measured else None)
                return
            if now.passes > measured and (tensors := self._weights(now.passes)) is not None:
                measured = now.passes
                if self._measure(tensors, measured) or measured >= self.plan.epochs:
                    return

    def _hear(self) -> None:
        """Read the replicas' status. Raises JobFailed if training has stopped."""
        rows, now = self.training.rows, time.monotonic()
        self.progress.hear(rows, now)
        exchanges = [row["exchange"] for row in rows if row.get("exchange")]
        self.rounds = max([self.rounds, *(one["rounds"] for one in exchanges)])
        counts = self.progress.counts
        refused, applied = counts["gradients_refused"], counts["gradients_applied"]
        if refused > MAX_REFUSED and refused > applied:
            raise JobFailed(
                f"{refused} of {refused + applied} gradients were refused: try a smaller --lr"
            )
        joined = any(row["job"]["learners"] for row in rows if row.get("job"))
        if self._stalled.check(now, {"samples": self.progress.samples} if joined else {}):
            raise JobFailed(f"no gradient was applied for {STALLED_S:.0f} s")

    def _weights(self, passes: int) -> Tensors | None:
        """A copy of the run's weights; None while no replica can give one."""
        return self.training.weights(sources(self.training.rows, passes))

    def _measure(self, tensors: Tensors, epoch: float) -> bool:
        """Measure the held-out tenth. True if it has not improved for `patience` epochs."""
        jobs = [row.get("job") or {} for row in self.training.rows]
        learners = [one for job in jobs for one in job.get("learners", ())]
        losses = [one["loss"] for one in learners if one["loss"] is not None]
        return self.measuring.measure(
            tensors, epoch, losses, self.progress.train_seconds, self.progress.samples_per_s
        )

    def _wind_up(self, number: int, epoch: float | None) -> None:
        """Measure what there is for the last time. epoch: of weights not measured yet.

        Raises Interrupted if there is nothing to be kept.
        """
        if not self.progress.samples:
            raise Interrupted(number)
        name = signal.Signals(number).name
        self.display.event(f"{name}: the best weights so far are kept; once more ends at once")
        with contextlib.suppress(ClusterError):  # of a cluster that is lost, end() says so
            if epoch is not None and (tensors := self._weights(int(epoch))) is not None:
                self._measure(tensors, epoch)

    def end(self) -> ClusterError | None:
        """End all replicas. Returns why they may train on, where there is a model all the same."""
        try:
            if self.training.summary is None:
                self.training.stop()
        except ClusterError as error:
            if self.measuring.best.tensors is None:
                raise
            return error
        return None

    def _check_end(self, summary: dict[str, Any]) -> None:
        """Raise GadeiError unless all replicas have ended by themselves, and well."""
        if summary["stopped"]:
            raise JobStopped(f"run {summary['run']} was stopped meanwhile")
        for one in summary["machines"]:
            if one["exit_code"]:
                why = one.get("error") or one.get("reason") or f"exit code {one['exit_code']}"
                raise JobFailed(f"replica {one['machine']} has failed: {why}")

    def finish(self, begin: float) -> dict[str, Any]:
        """Write the model directory, return the summary. begin: by the monotonic clock."""
        seconds = time.monotonic() - begin
        machines, counts = self.groups.machines, self.progress.counts
        facts = {
            "planned_epochs": self.plan.epochs,
            "samples_per_s": self.progress.samples_per_s,
            "gradients_applied": counts["gradients_applied"],
            "gradients_dropped": counts["gradients_dropped"],
            "gradients_refused": counts["gradients_refused"],
            "seconds": seconds,
            "training_seconds": self.progress.train_seconds,
            "learners": self.plan.settings.learners * machines,
            "learner_deaths": counts["learner_deaths"],
            "machines": machines,
            "groups": len(self.groups.groups),
            "rounds": self.rounds,
        } | ended_by(self.signalled())
        return self.measuring.finish(facts)
