"""Learners of `gadei-ps train` that compute with PyTorch: those of the CNN, and all on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from gadei_ps.classifier import ensemble
from gadei_ps.classifier.dataset import LabelSets
from gadei_ps.classifier.ensemble import Losses
from gadei_ps.classifier.features import Rows
from gadei_ps.classifier.gradients import frequencies
from gadei_ps.classifier.inference import EnsembleSizes
from gadei_ps.classifier.network import SentenceClassifier
from gadei_ps.classifier.training_settings import ENSEMBLE
from gadei_ps.classifier.words import Encoded
from gadei_ps.learners.torch import Optimizer, embedding, linear
from gadei_ps.machine import cuda
from gadei_ps.machine.launch import DEVICE_VARIABLE

NUMBER_VARIABLE = "GADEI_PS_MACHINE"
"""Number of the machine."""


def learn(data: Mapping[str, NDArray[Any]], settings: Mapping[str, Any]) -> None:
    """Learn until the server has no more batches. Raises what the client raises."""
    labels = data["labels"]
    device = _device(settings["device"])
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    machine = int(os.environ.get(NUMBER_VARIABLE, "0"))
    model, losses_of = (_ensemble if settings["model"] == ENSEMBLE else _cnn)(data, settings)
    model.to(device)
    optimizer = Optimizer(model, wire=settings["wire"], error_feedback=settings["error_feedback"])
    # So that two learners do not drop the same units in the same order.
    stream = machine << 32 | optimizer.client.generation
    torch.manual_seed((settings["seed"] * 1_000_003 + stream) % 2**63)
    model.train()
    for batch in optimizer.batches(
        len(labels),
        settings["batch_size"],
        settings["epochs"],
        (settings["seed"] + (machine if settings["own_order"] else 0)) % 2**63,
    ):
        with optimizer.iteration():
            optimizer.zero_grad()
            losses = losses_of(batch.indices, _brought(labels[batch.indices], device))
            losses.minimized.backward()  # type: ignore[no-untyped-call]
            optimizer.report(loss=losses.reported)
            optimizer.step()
    optimizer.client.detach()


LossesOf = Callable[[NDArray[np.int64], torch.Tensor], Losses]
"""Losses of rows by their numbers and labels."""
# Pushes only the rows of the filters that the batch changes; a GPU reads only the words of a batch.
_PUSHED: Final[dict[str, Any]] = {"linear": linear, "lookup": embedding}


def _cnn(
    data: Mapping[str, NDArray[Any]], settings: Mapping[str, Any]
) -> tuple[torch.nn.Module, LossesOf]:
    sentences = Encoded(data["tokens"], data["lengths"])
    model = SentenceClassifier(
        **settings["sizes"],
        seed=settings["seed"],
        sparse=True,  # pushes only the words of a batch, not the vocabulary
        **_PUSHED,
    )

    def losses_of(rows: NDArray[np.int64], labels: torch.Tensor) -> Losses:
        logits = model(_brought(sentences.batch(rows), labels.device))
        loss = functional.cross_entropy(logits, labels)
        return Losses(loss, loss)

    return model, losses_of


def _ensemble(
    data: Mapping[str, NDArray[Any]], settings: Mapping[str, Any]
) -> tuple[torch.nn.Module, LossesOf]:
    texts = Rows(**{one.name: data[one.name] for one in fields(Rows)})
    sizes = EnsembleSizes(**settings["sizes"])
    model = ensemble.Ensemble(sizes, seed=settings["seed"], **_PUSHED)
    if not settings["multi_label"]:
        frequency = frequencies(texts, sizes.features)

        def with_penalty(rows: NDArray[np.int64], labels: torch.Tensor) -> Losses:
            minimized, reported = ensemble.losses(model(texts, rows), labels)
            return Losses(minimized + model.penalty(texts, rows, frequency), reported)

        return model, with_penalty
    sets = LabelSets(data["label_starts"], data["label_values"])

    def losses_of(rows: NDArray[np.int64], labels: torch.Tensor) -> Losses:
        truth = _brought(sets.matrix(rows, sizes.classes), labels.device)
        return ensemble.multi_label_losses(model(texts, rows), truth)

    return model, losses_of


def _device(name: str) -> torch.device:
    """cuda or host by its name; auto is decided here."""
    if name == "auto":
        has_cuda = not cuda.missing() and torch.cuda.is_available()
        name = os.environ[DEVICE_VARIABLE] = "cuda" if has_cuda else "host"
    return torch.device("cuda" if name == "cuda" else "cpu")


def _brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device. Does not wait until the copy is complete."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
