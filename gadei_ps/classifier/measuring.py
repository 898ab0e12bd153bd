"""Measures weights on the held-out tenth, keeps the best ones, and writes the model at the end."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gadei_ps.classifier import words
from gadei_ps.classifier.plan import Plan
from gadei_ps.errors import JobFailed
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
        """Keeps these weights if they are better: by accuracy, then by loss."""
        if not math.isfinite(loss) or (accuracy, -loss) <= (self.accuracy, -self.loss):
            return False
        self.accuracy, self.loss, self.epoch, self.tensors = accuracy, loss, epoch, tensors
        return True


class Measuring:
    """The measurements of one training."""

    def __init__(self, plan: Plan, display: Display) -> None:
        from gadei_ps.classifier import network

        corpus = plan.corpus
        self._plan = plan
        self._display = display
        self._model = network.SentenceClassifier(
            len(corpus.vocabulary), len(corpus.train.label_names), dropout=plan.settings.dropout
        )
        self._held_out = words.encode(corpus.held_out.texts, corpus.vocabulary).padded()
        self.best = Best()
        self.history: list[dict[str, float]] = []

    def measure(
        self,
        tensors: Tensors,
        epoch: float,
        losses: Sequence[float],
        seconds: float,
        samples_per_s: float,
    ) -> bool:
        """Measures weights that nobody changes any more. epoch: how many they have seen.

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
        return epoch - self.best.epoch >= self._plan.settings.patience

    def _load(self, tensors: Tensors) -> None:
        import torch

        self._model.load_state_dict(
            {name: torch.from_numpy(view) for name, view in tensors.items()}
        )

    def finish(self, facts: Mapping[str, Any], device: str) -> dict[str, Any]:
        """Measures the best weights on the test file, writes the model directory, returns the
        summary.

        facts: of it, how the training went. device: that learners computed on. Raises JobFailed.
        """
        from gadei_ps.classifier import network

        corpus, settings = self._plan.corpus, self._plan.settings
        if self.best.tensors is None:
            raise JobFailed("no epoch ended with a finite loss: try a smaller --lr")
        self._load(self.best.tensors)
        test_accuracy = None
        if corpus.test is not None:
            encoded = words.encode(corpus.test.texts, corpus.vocabulary)
            test_accuracy, _ = network.evaluate(self._model, encoded.padded(), corpus.test.labels)
        summary: dict[str, Any] = {
            "test_accuracy": test_accuracy,
            "validation_accuracy": self.best.accuracy,
            "validation_loss": self.best.loss,
            "epochs": len(self.history) and int(self.history[-1]["epoch"]),
            "best_epoch": self.best.epoch,
            **facts,
            "device": device,
            "rows": len(corpus.train) + len(corpus.held_out),
            "model_dir": str(settings.out),
            "notices": list(corpus.notices),
            "warnings": list(corpus.warnings),
        }
        config = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in asdict(settings).items()
        } | {
            "batch_size": self._plan.batch_size,
            "lr": self._plan.lr,
            "max_epochs": self._plan.epochs,
            "device": device,
        }
        network.save_result(
            settings.out,
            self._model,
            corpus.vocabulary,
            corpus.train.label_names,
            config,
            {**summary, "history": self.history},
        )
        return summary


def ended_by(number: int | None) -> dict[str, Any]:
    """What the summary says of a signal. None: there was none."""
    if number is None:
        return {"interrupted": None, "exit_code": 0}
    return {"interrupted": signal.Signals(number).name, "exit_code": 128 + number}
