"""A learner process of `gadei-ps train`: takes batches of sentences and pushes gradients.

    python -m gadei_ps.classifier.learner DATA.npz

The environment names the job. The launcher writes DATA.npz with tokens (int32, all sentences),
lengths (int32, (n,)), labels (int64, (n,)) and `settings`, a JSON text. A learner has no state to
lose: if it is killed, its batches go to other learners, and a new one can replace it.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch.nn import functional

from gadei_ps.classifier.network import SentenceClassifier
from gadei_ps.classifier.words import Encoded
from gadei_ps.errors import GadeiError, JobStopped
from gadei_ps.learners.torch import Optimizer, embedding, linear


def learn(path: str) -> None:
    """Learns until the server has no more batches. Raises what the client raises."""
    with np.load(path) as data:
        sentences = Encoded(data["tokens"], data["lengths"])
        settings = json.loads(str(data["settings"]))
        device = torch.device("cuda" if settings["device"] == "cuda" else "cpu")
        labels = data["labels"]
    torch.set_num_threads(settings["threads"])
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
    torch.manual_seed(settings["seed"] * 1_000_003 + optimizer.client.generation)
    model.train()
    for batch in optimizer.batches(
        len(labels), settings["batch_size"], settings["epochs"], settings["seed"]
    ):
        with optimizer.iteration():
            optimizer.zero_grad()
            logits = model(_brought(sentences.batch(batch.indices), device))
            loss = functional.cross_entropy(logits, _brought(labels[batch.indices], device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.report(loss=loss)
            optimizer.step()
    optimizer.client.detach()


def _brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device. Does not wait until the copy is complete."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def main() -> None:
    try:
        learn(sys.argv[1])
    except JobStopped:
        pass
    except GadeiError as error:
        print(f"learner: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
