"""Devices of PyTorch models under test: the CPU with an emulated device, and a GPU.

The emulated cases compute on the CPU, and all that comes and goes takes the way of the GPU's code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import emulator
import pytest
import torch
from torch import nn

from gadei_ps.learners.torch import Optimizer
from gadei_ps.learners.torch import gpu_backend as gpu_backend
from gadei_ps.machine.cuda import missing as cuda_missing

# Results are compared with the CPU's; by default cuDNN's recurrent layers may compute in TF32.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


def need_cuda() -> None:
    if why := cuda_missing():
        pytest.skip(why)
    if not torch.cuda.is_available():
        pytest.skip(f"PyTorch {torch.__version__} sees no GPU")


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulator.Device]:
    """Let PyTorch's models on the CPU be on the emulated device."""
    monkeypatch.setattr(gpu_backend, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(gpu_backend, "current_stream", lambda device: 0)
    with emulator.installed(inline=True) as device:
        device.foreign = True
        yield device


def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with installed(monkeypatch):
        yield "cpu"


def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    need_cuda()
    yield "cuda"


@pytest.fixture(params=[emulated, pytest.param(cuda, marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Torch's name of the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from request.param(monkeypatch)
    torch.set_num_threads(threads)


class Words(nn.Module):
    """An embedding of which a mini-batch names few rows, some twice, padding among them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=0, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs() * 7).long() % 50
        return self.out(self.table(tokens).mean(1))


def arrived(optimizer: Optimizer, version: int) -> bool:
    """Load newer weights; return whether the model has those of this version."""
    optimizer.backend.refresh()
    return optimizer.backend.version == version
