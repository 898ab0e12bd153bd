"""`gadei-ps train --groups`: machines in worker groups train the classifier together.

Ray places the machines and carries the encoded sentences to them. Each has a job and learners of
its own. The launcher does what it does on one machine: after each pass it measures a copy of the
weights, keeps the best ones, and ends the run when they no longer improve.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from gadei_ps.classifier.counting import Counts, sources
from gadei_ps.classifier.measuring import Measuring, ended_by
from gadei_ps.classifier.plan import Plan
from gadei_ps.classifier.settings import Settings
from gadei_ps.classifier.train import MAX_REFUSED, STALLED_S
from gadei_ps.cluster import config
from gadei_ps.cluster.program import Program
from gadei_ps.cluster.training import Training
from gadei_ps.errors import JobFailed, JobStopped, UsageError
from gadei_ps.groups.shares import MOST_OPEN
from gadei_ps.machine import interrupts
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display

LEARNER = "gadei_ps.classifier.learner"
RESTARTS = 10**6
"""Of a machine's learners, as `train` restarts them."""
SAID_TWICE = ("learners", "optimizer", "lr", "sync")
"""What options and GROUPS.toml may both say."""
_REFUSED = {
    "job": "the run has the name that GROUPS.toml gives it: name = ...",
    "gpus": "learners take the GPUs of their machine in turn; GROUPS.toml reserves them: resources",
    "verbose": "each machine has a log of its own, NAME-NUMBER.log in its state directory",
}


def train(
    settings: Settings, given: Collection[str], display_silent: bool = False
) -> dict[str, Any]:
    """As classifier.train.train, on the machines of `settings.groups`.

    given: options, by their names in Settings, whose values are not the defaults of `train`. In the
    summary, `learners` are those of all machines. Raises GadeiError.
    """
    begin = time.monotonic()
    file = settings.groups
    assert file is not None
    run = config.load(file)
    settings = combined(settings, given, run)
    settings.check()
    plan = Plan.read(settings)
    run = filled(run, plan)
    # Imported late: PyTorch takes seconds to load, and mistakes in the data are found before.
    from gadei_ps.classifier import network

    network.check_result_directory(settings.out)
    display = Display(plan.epochs, silent=display_silent)
    machines, groups = counted(run.machines, "machine"), counted(len(run.groups), "group")
    learners = counted(settings.learners, "learner")
    plan.tell(display, f"{learners} on each of {machines} in {groups}")
    options = plan.options(settings.device, None, own_order=not run.divide)
    program = Program(LEARNER, "torch", settings.device, plan.digest(options))

    def say(line: str, progress: bool) -> None:
        if not progress:
            display.event(line)

    with (
        os.fdopen(os.memfd_create("gadei-ps-data"), "wb") as data,
        display,
        interrupts.first_told() as signalled,
    ):
        plan.write(data, options)
        path = f"/proc/{os.getpid()}/fd/{data.fileno()}"
        with Training(run, file, settings.address, program, path, say) as training:
            launcher = _Launcher(plan, run, training, display, signalled)
            launcher.run()
        return launcher.finish(begin)


def combined(settings: Settings, given: Collection[str], run: config.Run) -> Settings:
    """What the options and GROUPS.toml say together. Raises UsageError where they disagree."""
    for name, why in _REFUSED.items():
        if getattr(settings, name):
            raise UsageError(f"--{name} cannot be combined with --groups: {why}")
    said = {name: getattr(run, name) for name in SAID_TWICE if name in run.model_fields_set}
    for name in given:
        ours, theirs = getattr(settings, name), said.get(name)
        if theirs is not None and theirs != ours:
            raise UsageError(
                f"--{name} {ours}: {settings.groups} says {name} = {theirs}; leave out one of them"
            )
    return replace(settings, **{name: one for name, one in said.items() if one is not None})


def filled(run: config.Run, plan: Plan) -> config.Run:
    """The run with all that its jobs are told. Raises UsageError."""
    settings = plan.settings
    values = {"divide": True, "restart": RESTARTS} | run.model_dump(mode="json", exclude_unset=True)
    values |= {"learners": settings.learners, "optimizer": settings.optimizer, "lr": plan.lr}
    return config.from_mapping(values | {"sync": settings.sync}, str(settings.groups))


class _Launcher:
    """One running training."""

    def __init__(
        self,
        plan: Plan,
        run: config.Run,
        training: Training,
        display: Display,
        signalled: Callable[[], int | None],
    ) -> None:
        """signalled: says which signal has asked for the end, if one has."""
        self.plan, self.groups = plan, run
        self.training = training
        self.display = display
        self.signalled = signalled
        self.measuring = Measuring(plan, display)
        self.counts = Counts()
        self.rounds = 0
        self.train_seconds = 0.0
        self._first_gradient = self._last_progress = 0.0
        self._samples, self._before = 0, 0
        """Now, and when the first gradient was seen."""

    def run(self) -> None:
        """Trains until the passes are done or the held-out accuracy no longer improves."""
        measured = 0
        while True:
            self.training.look()
            if self.training.summary is not None:
                self._check_end(self.training.summary)
                return
            self._hear()
            begun, passes = self._done()
            rows, left_s = self.training.rows, self._left(begun)
            if rows:
                self.display.machines(rows, self._samples_per_s(), begun, left_s)
            if (number := self.signalled()) is not None:
                self._wind_up(number, round(begun, 2) if begun > measured else None)
                break
            if passes > measured:
                measured = passes
                if self._measure(passes) or passes >= self.plan.epochs:
                    break
        self.training.stop()

    def _hear(self) -> None:
        """Takes over what the machines say. Raises JobFailed if training goes on no more."""
        rows = self.training.rows
        self.counts.hear(rows)
        agents = [row["agent"] for row in rows if row.get("agent")]
        self.rounds = max([self.rounds, *(one["rounds"] for one in agents)])
        refused, applied = self.counts["gradients_refused"], self.counts["gradients_applied"]
        if refused > MAX_REFUSED and refused > applied:
            raise JobFailed(
                f"{refused} of {refused + applied} gradients were refused: try a smaller --lr"
            )
        now, samples = time.monotonic(), self.counts["samples"]
        if samples != self._samples or not self._last_progress:
            self._last_progress = now if rows else 0.0
            if samples and not self._first_gradient:
                self._first_gradient, self._before = now, samples
            self._samples = samples
        elif now - self._last_progress > STALLED_S:
            raise JobFailed(f"no gradient was applied for {STALLED_S:.0f} s")
        if self._first_gradient:
            self.train_seconds = now - self._first_gradient

    def _done(self) -> tuple[float, int]:
        """Passes over the data: begun, with the part of those in hand, and whole ones."""
        begun = self._samples / len(self.plan.corpus.train)
        passes = int(begun)
        if self.groups.divide:  # samples of a machine that has died are trained again
            passes = self.counts.divided(len(self.groups.groups))
            begun = min(max(begun, passes), passes + MOST_OPEN)
        return min(begun, self.plan.epochs), min(passes, self.plan.epochs)

    def _left(self, done: float) -> float | None:
        if done < 0.05 or not self.train_seconds:
            return None
        return self.train_seconds / done * (self.plan.epochs - done)

    def _samples_per_s(self) -> float:
        seconds = self.train_seconds
        return (self._samples - self._before) / seconds if seconds > 0 else 0.0

    def _measure(self, epoch: float) -> bool:
        """Measures the held-out tenth. True if it has not improved for `patience` epochs."""
        rows = self.training.rows
        tensors = self.training.weights(sources(rows, int(epoch)))
        if tensors is None:
            self.display.event(f"epoch {epoch:g}: no machine gives a copy of its weights")
            return False
        learners = [one for row in rows for one in (row.get("job") or {}).get("learners", ())]
        losses = [one["loss"] for one in learners if one["loss"] is not None]
        return self.measuring.measure(
            tensors, epoch, losses, self.train_seconds, self._samples_per_s()
        )

    def _wind_up(self, number: int, epoch: float | None) -> None:
        """Measures what there is for the last time. epoch: of weights not measured yet.

        Raises Interrupted if there is nothing to be kept.
        """
        if not self._samples:
            raise Interrupted(number)
        name = signal.Signals(number).name
        self.display.event(f"{name}: the best weights so far are kept; once more ends at once")
        if epoch is not None:
            self._measure(epoch)

    def _check_end(self, summary: dict[str, Any]) -> None:
        """Raises GadeiError unless all machines have ended by themselves, and well."""
        if summary["stopped"]:
            raise JobStopped(f"run {summary['run']} was stopped meanwhile")
        for one in summary["machines"]:
            if one["exit_code"]:
                why = one.get("error") or one.get("said") or f"exit code {one['exit_code']}"
                raise JobFailed(f"machine {one['machine']} has failed: {why}")

    def finish(self, begin: float) -> dict[str, Any]:
        """Writes the model directory, returns the summary. begin: by the monotonic clock."""
        seconds = time.monotonic() - begin
        machines = self.groups.machines
        facts = {
            "samples_per_s": self._samples_per_s(),
            "gradients_applied": self.counts["gradients_applied"],
            "gradients_dropped": self.counts["gradients_dropped"],
            "gradients_refused": self.counts["gradients_refused"],
            "seconds": seconds,
            "training_seconds": self.train_seconds,
            "learners": self.plan.settings.learners * machines,
            "learner_deaths": self.counts["learner_deaths"],
            "machines": machines,
            "groups": len(self.groups.groups),
            "rounds": self.rounds,
        } | ended_by(self.signalled())
        return self.measuring.finish(facts, self.plan.settings.device)
