"""A learner process of `gadei-ps train`: takes batches of sentences and pushes gradients.

    python -m gadei_ps.classifier.learner DATA.npz

The environment names the job, and the machine in a run of groups. The launcher writes DATA.npz with
tokens (int32, all sentences), lengths (int32, (n,)), labels (int64, (n,)) and `settings`, a JSON
text. A learner has no state to lose: if it is killed, its batches go to other learners, and a new
one can replace it.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch
from torch.nn import functional

from gadei_ps.classifier.network import SentenceClassifier
from gadei_ps.classifier.words import Encoded
from gadei_ps.errors import GadeiError, JobNotFound, JobStopped
from gadei_ps.learners.torch import Optimizer, embedding, linear
from gadei_ps.machine import cuda
from gadei_ps.machine.launch import DEVICE_VARIABLE

NUMBER_VARIABLE = "GADEI_PS_MACHINE"
"""Number of the machine."""


def learn(path: str) -> None:
    """Learn until the server has no more batches. Raises what the client raises."""
    with np.load(path) as data:
        sentences = Encoded(data["tokens"], data["lengths"])
        settings = json.loads(str(data["settings"]))
        labels = data["labels"]
    device = _device(settings["device"])
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    machine = int(os.environ.get(NUMBER_VARIABLE, "0"))
    model = SentenceClassifier(
        settings["vocabulary_size"],
        settings["classes"],
        dropout=settings["dropout"],
        seed=settings["seed"],
        sparse=True,  # pushes only the words of a batch, not the vocabulary
        linear=linear,  # pushes only the rows of the filters that the batch changes
        lookup=embedding,  # a GPU reads only the words of a batch
    ).to(device)
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
            logits = model(_brought(sentences.batch(batch.indices), device))
            loss = functional.cross_entropy(logits, _brought(labels[batch.indices], device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.report(loss=loss)
            optimizer.step()
    optimizer.client.detach()


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


def main() -> None:
    try:
        learn(sys.argv[1])
    except (JobNotFound, JobStopped):
        pass  # the training has ended, perhaps before this process was ready
    except GadeiError as error:
        print(f"learner: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
