"""Layers of a model, in bytes, where it is not cut, and how they are measured."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch.model import Trained
from gadei_ps.learners.virtual import profiler, stages
from gadei_ps.learners.virtual.activations import analyze
from gadei_ps.learners.virtual.partition import Activation, Chain, Piece, Times
from gadei_ps.learners.virtual.profiler import Sample

ROWS = 8
F = 4  # bytes of a float


def analyzed(
    layers: list[nn.Module], inputs: Any = None, loss: Any = cross_entropy, **state: int
) -> Chain:
    given = torch.randn(100, 10)[:ROWS] if inputs is None else inputs
    trained = Trained.of(nn.Sequential(*layers))
    return analyze(trained, given, torch.zeros(ROWS, dtype=torch.int64), loss, state)


def test_the_bytes_of_a_small_model() -> None:
    """Linear keeps what enters it, Tanh what it returns: one storage, if they are neighbours."""
    frozen = nn.Linear(20, 20)
    frozen.bias.requires_grad_(False)
    layers = [nn.Linear(10, 20), nn.Tanh(), frozen, nn.ReLU(), nn.Linear(20, 3)]
    found = analyzed(
        layers, loss=lambda outputs, _: outputs.sum(), **{"0.weight": 800, "2.weight": 7}
    )
    wide, narrow = ROWS * 20 * F, ROWS * 10 * F
    assert found.pieces == (
        Piece(0, 1, 220 * F, 0, 800, narrow, False),
        Piece(1, 2, 0, 0, 0, wide, True),
        Piece(2, 3, 400 * F, 20 * F, 7, wide, True),
        Piece(3, 4, 0, 0, 0, wide, True),
        Piece(4, 5, 63 * F, 0, 0, wide, True),
    )
    assert found.leaving == ROWS * 3 * F

    def held(size: int, pieces: set[int], *borders: int) -> Activation:
        return Activation(size, frozenset(pieces), frozenset(borders))

    assert sorted(found.held, key=lambda one: (sorted(one.borders), sorted(one.pieces))) == [
        held(narrow, {0}, 0),  # and not the data set that the sample is a part of
        held(wide, set(), 1),
        held(wide, {1, 2}, 2),
        held(wide, set(), 3),
        held(wide, {3, 4}, 4),
    ]
    # Two in flight: weights once, two copies and two gradients; a backward pass has two gradients
    # of activations in flight, and one of what the stage hands on may wait; the last stage has the
    # activations of one mini-batch.
    needs = found.memory(2)
    own = 220 * F * 5 + 800
    assert needs[0, 2] == own + 2 * wide + wide + 2 * (narrow + wide)
    assert needs[3, 5] == 63 * F * 5 + 2 * wide + (wide + wide)


def test_what_the_loss_keeps_is_the_last_layers() -> None:
    found = analyzed([nn.Linear(10, 3), nn.Tanh()])
    log_softmax = ROWS * 3 * F
    assert Activation(log_softmax, frozenset({1}), frozenset()) in found.held
    assert Activation(ROWS * 8, frozenset({1}), frozenset()) in found.held  # the targets


class First(nn.Module):
    def forward(self, inputs: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return inputs[0]


def test_where_no_cut_may_be() -> None:
    shared, gelu = nn.Linear(10, 10), nn.GELU()
    cases: list[tuple[list[nn.Module], list[tuple[int, int]]]] = [
        ([nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)], [(0, 2), (2, 3)]),
        # A view of what is changed in place.
        (
            [nn.Linear(10, 10), nn.Flatten(0, -1), nn.ReLU(True), nn.Unflatten(0, (8, 10)), gelu],
            [(0, 3), (3, 4), (4, 5)],
        ),
        ([gelu, nn.LSTM(10, 4), First(), nn.Linear(4, 3)], [(0, 1), (1, 3), (3, 4)]),
        ([gelu, shared, nn.Tanh(), shared, nn.Linear(10, 3)], [(0, 1), (1, 4), (4, 5)]),
        ([nn.ReLU(inplace=True), nn.Linear(10, 3)], [(0, 1), (1, 2)]),
    ]
    for layers, pieces in cases:
        found = analyzed(layers).pieces
        assert [(one.first, one.end) for one in found] == pieces


def test_what_is_no_sample() -> None:
    layers: list[nn.Module] = [nn.Linear(10, 3), nn.Tanh()]
    wrong: list[tuple[str, Any, Any]] = [
        ("layer 0 \\(Linear\\), given a tensor of shape \\(8, 9\\): mat1", torch.ones(8, 9), None),
        ("the sample's inputs: give a tensor", [1, 2], None),
        ("the sample's inputs: give a tensor", torch.tensor(1.0), None),
        ("loss function: 'int' object is not callable", None, 3),
        ("loss function: it must return one number", None, lambda outputs, _: outputs),
        ("loss function: it must return one number", None, lambda *_: torch.tensor(1.0)),
    ]
    for why, inputs, loss in wrong:
        with pytest.raises(UsageError, match=why) as refused:
            analyzed(layers, inputs, loss or cross_entropy)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="layer 1 \\(Linear\\), given a tuple: linear\\(\\)"):
        analyzed([nn.LSTM(10, 4), nn.Linear(4, 3)])


# -- times ---------------------------------------------------------------------------------------


class Clock:
    """A clock that is a microsecond later each time that it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        context.clock = clock
        clock.now += seconds
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.clock.now += 0.004
        return gradient, None, None


class Sleeping(nn.Module):
    """Notes the threads that compute it."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.seen: set[tuple[str, int]] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        found: torch.Tensor = Slow.apply(inputs, self.clock, self.seconds)
        return found


@pytest.mark.parametrize("far", [False, True])
def test_layers_are_measured_where_they_compute(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """far: one after another, as on a GPU. In a thread with the cores of the place."""
    clock = Clock()
    monkeypatch.setattr(stages.time, "perf_counter", clock)
    slow = Sleeping(clock, 0.008)
    layers = [nn.Linear(10, 10), slow, nn.Linear(10, 3)]
    if far:
        monkeypatch.setattr(stages.StageDevice, "has_own_memory", property(lambda one: True))
        monkeypatch.setattr(stages.StageDevice, "kind", property(lambda one: "far"))
    chain = analyzed([*layers])
    slow.seen.clear()
    threads = torch.get_num_threads()
    sample = Sample(torch.randn(ROWS, 10), torch.zeros(ROWS, dtype=torch.int64), cross_entropy)
    found = profiler.times(layers, chain, sample, stages.StageDevice(torch.device("cpu"), 2), 2, 3)
    assert slow.seen == {("gadei-measure_0", 2)}
    assert found.forward[1] > 7_000_000 > found.stage_forward > 0
    assert found.backward[1] > 3_000_000 > found.stage_backward > 0
    assert len(found.forward) == len(found.backward) == 3
    assert all(one.grad is None for layer in layers for one in layer.parameters())
    assert torch.get_num_threads() == threads


def test_what_a_stage_takes_besides_its_layers_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure by a clock that is one second later each time that it is read."""
    clock = itertools.count()
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(clock))
    layers: list[nn.Module] = [nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)]
    sample = Sample(torch.randn(ROWS, 10), torch.zeros(ROWS, dtype=torch.int64), cross_entropy)
    place = stages.StageDevice(torch.device("cpu"), 1)
    found = profiler.times(layers, analyzed(layers), sample, place, 4, 2)
    assert found == Times((0, 0, 0), (0, 0, 0), 10**9, 10**9)


def test_the_learners_thread_is_measured_on_copies() -> None:
    model = nn.Linear(10, 3)
    before = model.weight.clone()
    trained = Trained.of(model)
    found = profiler.learner(trained, lambda p: torch.optim.Adam(p, lr=1.0), 1)
    assert found.state == {"weight": 2 * 30 * F + F, "bias": 2 * 3 * F + F}  # and counts of steps
    assert found.copy > 0 < found.step
    assert profiler.learner(trained, None, 1).state == {"weight": 30 * F, "bias": 3 * F}
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
