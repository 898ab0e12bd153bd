"""A model whose layers share a weight: the job knows it by one name, and exports it under all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import daemon
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.commands import jobs, saved
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer
from gadei_ps.storage import checkpoint


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.middle(self.embedding(words)))
        return found


def exported(job: str, out: Path) -> dict[str, torch.Tensor]:
    saved.export(job, out)
    if out.suffix == ".pt":
        return dict(torch.load(out))
    from safetensors.torch import load_file

    return load_file(out)


def strict(state: dict[str, torch.Tensor]) -> nn.Module:
    model = Tied()
    model.load_state_dict(state)
    return model


def test_tied_weights(tmp_path: Path, job_name: str) -> None:
    words, optimizer = torch.arange(6), {"kind": "sgd", "lr": 0.1}
    keep = {"every_s": 0, "directory": str(tmp_path / "kept")}
    with daemon(job_name, optimizer=optimizer, checkpoint=keep) as job:
        model = Tied()
        mine = Optimizer(model, job_name, wait=True)
        nn.functional.cross_entropy(model(words), words).backward()
        mine.step()
        for suffix in ("safetensors", "pt"):
            state = exported(job_name, tmp_path / f"live.{suffix}")
            assert state.keys() == model.state_dict().keys()
            torch.testing.assert_close(strict(state)(words), model(words))
        tensors = {name: one.detach().numpy() for name, one in model.named_parameters()}
        with Client(job_name, tensors=tensors) as plain:
            assert plain.model.aliases == {"head.weight": "embedding.weight"}
            assert plain.weights.keys() == tensors.keys()
        mine.close()
        jobs.checkpoint(job_name)
        job.check()
    snapshot, _, _ = checkpoint.newest(tmp_path / "kept")
    assert snapshot is not None
    assert snapshot.model.aliases == {"head.weight": "embedding.weight"}
    # From the checkpoint, and from the exported file.
    for how in ({"checkpoint": keep}, {"weights": str(tmp_path / "live.safetensors")}):
        with daemon(job_name, optimizer=optimizer, **how) as job:
            again = Optimizer(Tied(), job_name)
            state = exported(job_name, tmp_path / "again.safetensors")
            expected = model.state_dict()["head.weight"].numpy()
            np.testing.assert_array_equal(state["head.weight"], expected)
            strict(state)
            again.close()
            job.check()


def test_an_alias_of_nothing(job_name: str) -> None:
    with daemon(job_name), pytest.raises(UsageError, match="'b' is given for 'x', and no tensor"):
        Client(job_name, tensors={"a": np.zeros(2)}, aliases={"b": "x"})
