"""A learner process of `gadei-ps train`: takes batches of sentences and pushes gradients.

    python -m gadei_ps.classifier.learner [DATA.npz]

Without DATA.npz, it forks learners as its launcher requests them (machine/forks.py).

The environment names the job, and the machine in a run of groups. The launcher writes DATA.npz with
labels (int64, (n,)) and `settings`, a JSON text. For the CNN, it also has tokens (int32, all
sentences) and lengths (int32, (n,)); for an ensemble, the arrays of features.Rows, and of LabelSets
if rows may have several labels. A learner has no state to lose: if it is killed, its batches go to
other learners, and a new one can replace it.

An ensemble on the host needs no PyTorch, whose import takes longer than a training on few rows.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gadei_ps import _native
from gadei_ps.classifier.dataset import LabelSets
from gadei_ps.classifier.features import Rows as Texts
from gadei_ps.classifier.gradients import (
    Gradient,
    Product,
    first_weights,
    frequencies,
    gradients,
)
from gadei_ps.classifier.inference import EnsembleClassifier, EnsembleSizes
from gadei_ps.classifier.training_settings import ENSEMBLE
from gadei_ps.errors import GadeiError, JobNotFound, JobStopped
from gadei_ps.learners.client import Client, Where, product_at, rows_at, whole_at
from gadei_ps.learners.gradients import Rows
from gadei_ps.machine import forks


def learn(path: str) -> None:
    """Learn until the server has no more batches. Raises what the client raises."""
    data = mapped(path)
    settings = json.loads(str(data["settings"]))
    if settings["model"] == ENSEMBLE and settings["device"] == "host":
        _learn(data, settings)
        return
    from gadei_ps.classifier import torch_learner

    torch_learner.learn(data, settings)


def _learn(data: Mapping[str, NDArray[Any]], settings: Mapping[str, Any]) -> None:
    """Train an ensemble on the host."""
    texts = Texts(**{one.name: data[one.name] for one in fields(Texts)})
    sizes = EnsembleSizes(**settings["sizes"])
    labels, batch_size, seed = data["labels"], settings["batch_size"], settings["seed"]
    client = Client(
        tensors=first_weights(sizes, seed),
        wire=settings["wire"],
        error_feedback=settings["error_feedback"],
    )
    model = EnsembleClassifier(sizes, client.weights)
    multi_label = settings["multi_label"]
    sets = LabelSets(data["label_starts"], data["label_values"]) if multi_label else None
    frequency = None if multi_label else frequencies(texts, sizes.features)
    # So that two learners do not drop the same units in the same order.
    rng = np.random.default_rng([seed, client.generation])
    for batch in client.batches(len(labels), batch_size, settings["epochs"], seed):
        rows = batch.indices
        if sets is None:
            truth = np.zeros((len(rows), sizes.classes), np.float32)
            truth[np.arange(len(rows)), labels[rows]] = 1
        else:
            truth = sets.matrix(rows, sizes.classes)
        loss, found = gradients(
            model,
            texts,
            rows,
            truth,
            batch_size,
            multi_label=multi_label,
            frequency=frequency,
            rng=rng,
        )
        # Here for as long as their addresses are used.
        places = [_place(found[tensor.name]) for tensor in client.model.tensors]
        client.push_from([one for where in places for one in where], loss=loss, samples=len(rows))
    client.detach()


def _place(gradient: Gradient) -> Where:
    """Return the addresses of a gradient for Client.push_from."""

    def at(array: NDArray[Any], dtype: type = np.float32) -> int:
        assert array.flags.c_contiguous and array.dtype == dtype
        return _native.address(array)

    if isinstance(gradient, Rows):
        return rows_at(at(gradient.indices, np.int64), at(gradient.values), len(gradient.indices))
    if isinstance(gradient, Product):
        return product_at(at(gradient.factors), at(gradient.vectors), len(gradient.factors))
    return whole_at(at(gradient))


def mapped(path: str) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file that is not compressed. Learners share their memory."""
    with np.load(path) as archive, open(path, "rb") as file:
        arrays: dict[str, NDArray[Any]] = {}
        for member in archive.zip.infolist():
            file.seek(member.header_offset + 26)  # of a local header: the lengths of name and extra
            name, extra = struct.unpack("<HH", file.read(4))
            file.seek(name + extra, os.SEEK_CUR)
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            key = member.filename.removesuffix(".npy")
            if shape and all(shape):
                arrays[key] = np.memmap(path, dtype, "r", file.tell(), shape).view(np.ndarray)
            else:
                arrays[key] = archive[key]
    return arrays


def main() -> None:
    gc.freeze()  # what was imported stays; the collector need not look at it again and again
    path = (sys.argv[1:] or forks.serve())[-1]
    try:
        learn(path)
    except (JobNotFound, JobStopped):
        pass  # the training has ended, perhaps before this process was ready
    except GadeiError as error:
        print(f"learner: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
