"""Measures weights on the held-out tenth, keeps the best ones, and writes the model at the end."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gadei_ps.classifier.inference import ModelDirectoryError
from gadei_ps.classifier.training_plan import Plan
from gadei_ps.errors import JobFailed, JobStopped
from gadei_ps.job import paths
from gadei_ps.job.config import state_directory
from gadei_ps.memory.weights import FloatArray
from gadei_ps.show.display import Display

Tensors = Mapping[str, FloatArray]
"""Weights by the names of their tensors."""


@dataclass
class Best:
    """The best weights so far."""

    accuracy: float = -1.0
    loss: float = float("inf")
    epoch: float = 0
    tensors: Tensors | None = None

    def offer(self, accuracy: float, loss: float, epoch: float, tensors: Tensors) -> bool:
        """Keep these weights if they are better: by accuracy, then by loss."""
        if not math.isfinite(loss) or (accuracy, -loss) <= (self.accuracy, -self.loss):
            return False
        self.accuracy, self.loss, self.epoch, self.tensors = accuracy, loss, epoch, tensors
        return True


class Measuring:
    """The measurements of one training."""

    def __init__(self, plan: Plan, display: Display, device: str) -> None:
        """device: that learners compute on."""
        from gadei_ps.classifier import network

        corpus = plan.corpus
        self._plan = plan
        self._display = display
        self._device = device
        self._model = network.SentenceClassifier(
            len(corpus.vocabulary), len(corpus.train.label_names), dropout=plan.settings.dropout
        )
        self._held_out = corpus.held_out_encoded.padded()
        self.best = Best()
        self.history: list[dict[str, float]] = []
        self.directory: Path | None = None
        """Directory of the best model so far; None while it is not on the disk."""

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
        from gadei_ps.classifier import network

        self._load(tensors)
        labels = self._plan.corpus.held_out.labels
        accuracy, loss = network.evaluate(self._model, self._held_out, labels)
        better = self.best.offer(accuracy, loss, epoch, tensors)
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
        self._display.event(
            f"epoch {epoch:g}: validation accuracy {accuracy:.4f}, loss {loss:.4f}, "
            f"{samples_per_s:,.0f} samples/s{' (best)' if better else ''}"
        )
        if better:
            try:
                self._save({"finished": False})
            except ModelDirectoryError as error:
                self._display.event(f"warning: {error}; training continues")
        return epoch - self.best.epoch >= self._plan.settings.patience

    def _load(self, tensors: Tensors) -> None:
        import torch

        self._model.load_state_dict(
            {name: torch.from_numpy(view) for name, view in tensors.items()}
        )

    def _save(self, metrics: Mapping[str, Any]) -> None:
        """Write the model directory; the loaded weights are the best. Raises ModelDirectoryError.

        metrics: what is to be said of the training besides its history.
        """
        directory = self.directory or self._claimed()
        self._write(directory, metrics)
        self.directory = directory

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
        from gadei_ps.classifier import network

        corpus, settings = self._plan.corpus, self._plan.settings
        config = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(settings).items()
        } | {
            "out": str(directory),
            "batch_size": self._plan.batch_size,
            "lr": self._plan.lr,
            "max_epochs": self._plan.epochs,
            "device": self._device,
        }
        network.save_result(
            directory,
            self._model,
            corpus.vocabulary,
            corpus.train.label_names,
            config,
            {**self._measured(), **metrics, "history": self.history},
        )

    def _measured(self) -> dict[str, Any]:
        return {
            "validation_accuracy": self.best.accuracy,
            "validation_loss": self.best.loss,
            "epochs": len(self.history) and int(self.history[-1]["epoch"]),
            "best_epoch": self.best.epoch,
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
        if self.directory is not None:
            return
        self._load(self.best.tensors)
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
        from gadei_ps.classifier import network

        corpus = self._plan.corpus
        if self.best.tensors is None:
            raise JobFailed("no epoch ended with a finite loss: try a smaller --lr")
        self._load(self.best.tensors)
        test_accuracy = None
        if corpus.test is not None:
            tokens = corpus.test_encoded.padded()
            test_accuracy, _ = network.evaluate(self._model, tokens, corpus.test.labels)
        if self.directory is None:
            self.directory = self._claimed()
        summary: dict[str, Any] = {
            "test_accuracy": test_accuracy,
            **self._measured(),
            **facts,
            "device": self._device,
            "rows": len(corpus.train) + len(corpus.held_out),
            "model_dir": str(self.directory),
            "notices": list(corpus.notices),
            "warnings": list(corpus.warnings),
        }
        self._write(self.directory, {**summary, "finished": True})
        return summary


def ended_by(number: int | None, stopped: bool = False) -> dict[str, Any]:
    """Return the summary's fields of a signal, and of a stop. None: there was no signal."""
    if number is None:
        return {"interrupted": None, "exit_code": JobStopped.exit_code if stopped else 0}
    return {"interrupted": signal.Signals(number).name, "exit_code": 128 + number}
