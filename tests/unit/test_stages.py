"""Threads of stages: which passes they compute, and when."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch
from support import PATIENCE_S, eventually

from gadei_ps.learners.virtual import stages
from gadei_ps.learners.virtual.stage_devices import StageDevice
from gadei_ps.learners.virtual.stages import MiniBatch, Stage

CPU = torch.device("cpu")


class Gate(torch.nn.Module):
    """A layer whose passes wait at a gate; reports which pass of which mini-batch waits there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.open = threading.Semaphore(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._wait(f"forward {len(inputs)}")
        outputs = self.linear(inputs)
        outputs.register_hook(lambda gradient: self._wait(f"backward {len(gradient)}"))
        return outputs

    def _wait(self, name: str) -> None:
        self.reached.put(name)
        assert self.open.acquire(timeout=PATIENCE_S)


@pytest.fixture
def gates() -> Iterator[tuple[list[Stage], list[Gate]]]:
    """Two stages whose every pass waits."""
    layers = [Gate(), Gate()]
    first, last = (
        Stage(at, torch.nn.Sequential(one), StageDevice(CPU, 1)) for at, one in enumerate(layers)
    )
    first.after, last.before = last, first
    first.begin()
    last.begin()
    yield [first, last], layers
    for layer in layers:
        layer.open.release(100)
    stages.stop_stages([first, last])


def enter(first: Stage, last: Stage, size: int) -> MiniBatch:
    """A mini-batch of that many samples, by which the gates name it."""
    weights = [
        {name: one.detach().clone().requires_grad_() for name, one in stage.parameters.items()}
        for stage in (first, last)
    ]
    one = MiniBatch(None, lambda outputs, targets: outputs.sum(), size, weights)
    first.forward(one, torch.ones(size, 1))
    return one


def test_stages_compute_at_once_and_prefer_a_backward_pass(
    gates: tuple[list[Stage], list[Gate]],
) -> None:
    (first, last), (a, b) = gates
    entered = [enter(first, last, size) for size in (1, 2, 3)]

    def expect(gate: Gate, name: str) -> None:
        assert gate.reached.get(timeout=PATIENCE_S) == name

    expect(a, "forward 1")
    a.open.release()
    # Both stages are in a pass now.
    expect(b, "forward 1")
    expect(a, "forward 2")
    b.open.release()
    expect(b, "backward 1")
    b.open.release()  # its gradient goes to the first stage, where mini-batch 3 waits as well
    eventually(lambda: first._backward)
    a.open.release()
    expect(a, "backward 1")
    a.open.release()
    expect(a, "forward 3")
    a.open.release(3)
    b.open.release(4)
    for one in entered:
        assert one.done.wait(PATIENCE_S)
        assert one.failure is None


def test_a_stage_whose_place_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: StageDevice) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StageDevice, "use", fail)
    stage = Stage(0, torch.nn.Linear(1, 1), StageDevice(CPU, 1))
    with pytest.raises(RuntimeError, match="out of memory"):
        stage.begin()
    stages.stop_stages(
        [stage, Stage(1, torch.nn.Linear(1, 1), StageDevice(CPU, 1))]
    )  # also one never begun
