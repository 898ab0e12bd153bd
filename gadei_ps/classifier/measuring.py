"""Measures weights on the held-out rows and writes the model directory.

Of the CNN, the best weights are kept; of an ensemble the last ones, as its learning rate ends at 0.
A second run of an ensemble has no held-out rows: what was measured in the first one stays.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps.classifier import report
from gadei_ps.classifier.calibration import (
    Calibration,
    calibration_error,
    fit,
    fit_multi_label,
    micro_f1,
    multi_label_scores,
    scores,
)
from gadei_ps.classifier.dataset import UNSEEN_LABEL, Dataset
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.inference import Floats
from gadei_ps.classifier.model_directory import CONFUSION, PICTURE, ModelDirectoryError, save_result
from gadei_ps.classifier.report import Confusion, LabelQuality
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.classifier.words import Encoded
from gadei_ps.errors import JobFailed, JobStopped
from gadei_ps.job import paths
from gadei_ps.job.config import state_directory
from gadei_ps.memory.weights import FloatArray
from gadei_ps.show.counts import counted
from gadei_ps.show.display import Display

Tensors = Mapping[str, FloatArray]
"""Weights by the names of their tensors."""

FEW_HELD_OUT = 40
"""Held-out rows below which `train` prints their number: the threshold refuses fewer than two."""
WRITE_EVERY_S = 30.0
"""Time between two writes of the model directory before the last one, of an ensemble (s)."""


@dataclass
class Best:
    """The best weights so far.

    measured_epoch: of the weights with this accuracy. It differs from `epoch` after a run on all
    rows.
    """

    accuracy: float = -1.0
    loss: float = float("inf")
    epoch: float = 0
    measured_epoch: float = 0
    tensors: Tensors | None = None

    def offer(
        self, accuracy: float, loss: float, epoch: float, tensors: Tensors, always: bool = False
    ) -> bool:
        """Keep these weights if they are better, by accuracy, then by loss; or always."""
        if not math.isfinite(loss):
            return False
        if not always and (accuracy, -loss) <= (self.accuracy, -self.loss):
            return False
        self.accuracy, self.loss, self.tensors = accuracy, loss, tensors
        self.epoch = self.measured_epoch = epoch
        return True


class Measuring:
    """The measurements of one training."""

    def __init__(self, plan: Plan, display: Display, device: str) -> None:
        """device: that learners compute on."""
        self._plan = plan
        """The run whose weights are kept."""
        self._running = plan
        self._display = display
        self.device = device
        self.best = Best()
        self.history: list[dict[str, float]] = []
        self.directory: Path | None = None
        """Directory of the best model so far; None while it is not on the disk."""
        self._written_at = -math.inf
        self._written_epoch: float | None = None
        self._calibration = Calibration()
        self._error: float | None = None
        self._micro_f1: float | None = None
        self._labels: list[LabelQuality] = []
        self._confusion: Confusion | None = None
        self._last: Tensors | None = None

    def measure(
        self,
        tensors: Tensors,
        epoch: float,
        losses: Sequence[float],
        seconds: float,
        samples_per_s: float,
    ) -> bool:
        """Measure weights that nobody changes any more. epoch: how many they have seen.

        losses: of the learners. seconds: of training. True if the weights have not become better
        for `patience` epochs. The last entry of `history` is of these weights.
        """
        accuracy = loss = math.nan
        better = False
        is_cnn = self._plan.is_cnn
        if self._running.measures:
            corpus = self._plan.corpus
            parts = self._parts(tensors, corpus.held_out_encoded)
            if np.isfinite(parts).all():  # else training has diverged: nothing can be fitted
                calibration = self._calibrated(parts)
                scored = Calibration() if is_cnn else calibration
                accuracy, loss = self._scores(scored, parts, corpus.held_out)
                better = self.best.offer(accuracy, loss, epoch, tensors, always=not is_cnn)
                if better:
                    self._note_quality(calibration, parts)
        else:
            self._last = tensors
        self.history.append(
            {
                "epoch": epoch,
                "validation_accuracy": accuracy,
                "validation_loss": loss,
                "training_loss": sum(losses) / len(losses) if losses else float("nan"),
                "seconds": seconds,
                "samples_per_s": samples_per_s,
            }
        )
        measured = f"validation accuracy {accuracy:.4f}, loss {loss:.4f}"
        self._display.event(
            f"epoch {epoch:g}: {measured if self._running.measures else 'on all rows'}, "
            f"{samples_per_s:,.0f} samples/s{' (best)' if better and is_cnn else ''}"
        )
        if better and (is_cnn or time.monotonic() > self._written_at + WRITE_EVERY_S):
            try:
                self._save({"finished": False})
            except ModelDirectoryError as error:
                self._written_at = time.monotonic()
                self._display.event(f"warning: {error}; training continues")
        return is_cnn and epoch - self.best.epoch >= self._plan.settings.patience

    def _note_quality(self, calibration: Calibration, parts: Floats) -> None:
        """Keep what the model directory has on weights that are kept."""
        corpus = self._plan.corpus
        self._calibration = calibration
        probabilities = calibration.probabilities(parts)
        if calibration.multi_label:
            chosen, truth = probabilities >= calibration.threshold, _truth(corpus.held_out)
            counts = (truth.sum(0), chosen.sum(0), (truth * chosen).sum(0))
            assert corpus.train.sets is not None
            learned = np.bincount(corpus.train.sets.labels, minlength=truth.shape[1])
            self._labels = report.quality(self._plan.label_names, *counts, learned)
            self._micro_f1 = micro_f1(chosen, truth)
            return
        labels = corpus.held_out.labels
        self._error = calibration_error(probabilities, labels)
        self._confusion = Confusion(labels, probabilities.argmax(axis=1), self._plan.label_names)
        self._labels = self._confusion.labels(corpus.train.labels)

    def _calibrated(self, parts: Floats) -> Calibration:
        held_out = self._plan.corpus.held_out
        if held_out.sets is None:
            return fit(parts, held_out.labels)
        return fit_multi_label(parts, _truth(held_out))

    @staticmethod
    def _scores(calibration: Calibration, parts: Floats, rows: Dataset) -> tuple[float, float]:
        """Return accuracy and mean loss (nats) on these rows."""
        probabilities = calibration.probabilities(parts)
        if not calibration.multi_label:
            return scores(probabilities, rows.labels)
        unseen = rows.labels == UNSEEN_LABEL
        return multi_label_scores(probabilities, _truth(rows), calibration.threshold, unseen)

    def begin_second(self, plan: Plan) -> None:
        """Continue with a run on all rows."""
        self._running = plan

    def complete_second(self) -> None:
        """Take the last weights of the run on all rows for the best ones, if they are finite."""
        assert self._last is not None
        if not all(np.isfinite(one).all() for one in self._last.values()):
            self._display.event(
                "warning: training on all rows has diverged; the run before it is kept"
            )
            return
        self._plan = self._running
        self.best.tensors = self._last
        self.best.epoch = self.history[-1]["epoch"]

    def _parts(self, tensors: Tensors, encoded: Encoded | Rows) -> Floats:
        """Return log probabilities (parts, n, classes), or logits if rows have several labels."""
        logits = self._plan.settings.label_separator is not None
        found: Floats = self._plan.classifier(tensors).parts(encoded, logits)  # type: ignore[arg-type]
        return found

    def _save(self, metrics: Mapping[str, Any]) -> None:
        """Write the model directory with the best weights. Raises ModelDirectoryError.

        metrics: what is to be said of the training besides its history.
        """
        directory = self.directory or self._claimed()
        self._write(directory, metrics)
        self.directory = directory
        self._written_at = time.monotonic()
        self._written_epoch = self.best.epoch

    def _claimed(self) -> Path:
        """A directory for the model that has no other one, unless that is to be overwritten."""
        out = self._plan.settings.out
        if out is not None and self._plan.settings.overwrite:
            return out
        for number in itertools.count(1):
            path = Path(f"model-{number}") if out is None else out
            if out is not None and number > 1:  # another training has written there meanwhile
                path = out.with_name(f"{out.name}-{number}")
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                if out is not None and path.is_dir() and not any(path.iterdir()):
                    return path
            except OSError:  # which the write names
                return path
        raise AssertionError("there is always a free number")

    def _write(self, directory: Path, metrics: Mapping[str, Any]) -> None:
        corpus, settings = self._plan.corpus, self._plan.settings
        assert self.best.tensors is not None
        more = {}
        if self._confusion is not None:
            more = {CONFUSION: self._confusion.to_json(), PICTURE: self._confusion.to_svg()}
        config = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(settings).items()
        } | {
            "out": str(directory),
            "batch_size": self._plan.batch_size,
            "lr": self._plan.lr,
            "max_epochs": self._plan.epochs,
            "device": self.device,
        }
        save_result(
            directory,
            self._plan.classifier(self.best.tensors),
            corpus.vocabulary,
            corpus.train.label_names,
            config,
            {
                **self._measured(),
                **metrics,
                "labels": report.as_metrics(self._labels),
                "history": self.history,
            },
            self._calibration,
            more,
        )

    def _measured(self) -> dict[str, Any]:
        return {
            "validation_accuracy": self.best.accuracy,
            "validation_loss": self.best.loss,
            "held_out_rows": len(self._plan.corpus.held_out),
            "epochs": self.history[-1]["epoch"] if self.history else 0,
            "best_epoch": self.best.epoch,
            "measured_epoch": self.best.measured_epoch,
            "calibration_error": self._error,
            "micro_f1": self._micro_f1,
            "threshold": self._calibration.threshold,
        }

    def note(self, error: BaseException) -> bool:
        """Add to the error of a training where its best model is; False if there is none."""
        if self.directory is None:
            return False
        error.add_note(
            f"the best model so far, of epoch {self.best.epoch:g}, is in {self.directory}"
        )
        return True

    def secure(self, job: str) -> None:
        """Save the best model before its job ends, in another place if its own cannot be written.

        Raises ModelDirectoryError, and JobFailed if there is none.
        """
        if self.best.tensors is None:
            raise JobFailed("no epoch ended with a finite loss: try a smaller --lr")
        if self.directory is not None and self._written_epoch == self.best.epoch:
            return
        try:
            self._save({"finished": False})
        except ModelDirectoryError as error:
            for directory in (state_directory(), paths.directory()):
                rescue = directory / f"{job}.model"
                with contextlib.suppress(ModelDirectoryError):
                    self._write(rescue, {"finished": False})
                    self.directory = rescue
                    break
            raise error

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Measure the best weights on the test file, write the model directory again with all
        that is known now, and returns the summary.

        facts: of it, how the training went. Raises JobFailed or ModelDirectoryError.
        """
        corpus = self._plan.corpus
        if self.best.tensors is None:
            raise JobFailed("no epoch ended with a finite loss: try a smaller --lr")
        test_accuracy = None
        if corpus.test is not None:
            parts = self._parts(self.best.tensors, corpus.test_encoded)
            test_accuracy, _ = self._scores(self._calibration, parts, corpus.test)
        if self.directory is None:
            self.directory = self._claimed()
        summary: dict[str, Any] = {
            "test_accuracy": test_accuracy,
            **self._measured(),
            **facts,
            "device": self.device,
            "rows": len(corpus.train) + len(corpus.held_out) * self._plan.measures,
            "model_dir": str(self.directory),
            "notices": list(corpus.notices),
            "warnings": list(corpus.warnings),
            "worst_labels": report.as_metrics(self._labels[: report.WORST]),
        }
        for line in report.lines(self._labels):
            self._display.event(line)
        if (held_out := summary["held_out_rows"]) < FEW_HELD_OUT:
            rows = counted(held_out, "held-out row")
            self._display.event(f"probabilities and threshold of predict rest on {rows}")
        self._write(self.directory, {**summary, "finished": not summary["exit_code"]})
        return summary


def _truth(rows: Dataset) -> Floats:
    """Return 1 for each label of these rows, else 0: (n, classes)."""
    assert rows.sets is not None
    return rows.sets.matrix(np.arange(len(rows)), len(rows.label_names))


def ended_by(number: int | None, stopped: bool = False) -> dict[str, Any]:
    """Return the summary's fields of a signal, and of a stop. None: there was no signal."""
    if number is None:
        return {"interrupted": None, "exit_code": JobStopped.exit_code if stopped else 0}
    return {"interrupted": signal.Signals(number).name, "exit_code": 128 + number}
