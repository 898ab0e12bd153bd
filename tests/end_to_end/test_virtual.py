"""Virtual workers: a pipeline of stages against the sequential program with delayed weights."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, eventually, fork, status
from support.torch_models import one_thread as one_thread
from support.torch_models import pipeline_layers as layers
from support.torch_models import with_momentum as momentum
from torch import nn
from torch.func import functional_call

from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import epoch_order
from gadei_ps.learners.torch import LocalOptimizer, Optimizer
from gadei_ps.learners.virtual import VirtualWorker, stages

CRITERION = nn.functional.cross_entropy
COUNT = 11  # mini-batches
ADDS = {"optimizer": {"kind": "add"}}


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    for _ in range(COUNT):
        inputs = torch.randn(8, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long()


def of_job(job: str) -> list[torch.Tensor]:
    """The weights that a learner gets that joins now, one that has no stages."""
    model = nn.Sequential(*layers())
    LocalOptimizer(model, momentum, job).close()
    return [one.detach() for one in model.parameters()]


def has_left(job: str) -> bool:
    stages_left = [one for one in threading.enumerate() if one.name.startswith("gadei-stage")]
    return not status(job)["learners"] and not stages_left


def delayed(wave: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """One after another in one thread, each from the weights of `wave` mini-batches before.

    With the arithmetic of a job: what is pulled, what is pushed, and what is made again. Returns
    the server's weights, the learner's own and the losses.
    """
    model = nn.Sequential(*layers())
    own = list(model.parameters())
    optimizer = momentum(own)
    server = [one.detach().clone() for one in own]
    base = [one.clone() for one in server]
    flying: deque[tuple[torch.Tensor, ...]] = deque()
    losses, ended = [], 0

    def end() -> None:
        nonlocal base, ended
        for parameter, gradient in zip(own, flying.popleft(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        ended += 1
        if ended % wave == 0 or ended == COUNT:
            for held, mine, was in zip(server, own, base, strict=True):
                held += mine.detach() - was
            base = [one.detach().clone() for one in own]

    for number, (inputs, targets) in enumerate(data()):
        if len(flying) == wave:
            end()
        if number == 0 or number % wave == wave - 1:
            with torch.no_grad():
                for mine, held, was in zip(own, server, base, strict=True):
                    mine.copy_(held + (mine - was))
            base = [one.clone() for one in server]
        leaves = {
            name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()
        }
        loss = CRITERION(functional_call(model, leaves, (inputs,)), targets)
        flying.append(torch.autograd.grad(loss, list(leaves.values())))
        losses.append(float(loss.detach()))
    while flying:
        end()
    return server, [one.detach() for one in own], losses


CASES = [(s_local, count, False) for s_local in range(4) for count in (2, 3)] + [(3, 3, True)]


@pytest.mark.parametrize(("s_local", "count", "far"), CASES)
def test_it_is_the_sequential_program_with_delayed_weights(
    s_local: int, count: int, far: bool, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. far: the weights of stages 0 and 2 come and go as those on a GPU."""
    expected, own, losses = delayed(s_local + 1)
    devices = ["host:1"] * count
    if far:
        devices = ["host:1", "host:2", "host:1"]
        monkeypatch.setattr(
            stages.StageDevice, "has_own_memory", property(lambda one: one.cores == 1)
        )
    with daemon(job_name, sync=f"wsp:D=1,s_local={s_local}", **ADDS):
        with VirtualWorker(layers(), devices, momentum, job_name) as worker:
            seen = [worker.train(inputs, targets, CRITERION) for inputs, targets in data()]
            assert seen[: s_local + 1] == [None] * (s_local + 1)
            assert seen[s_local + 1 :] == losses[: COUNT - s_local - 1]
            assert worker.drain() == pytest.approx(np.mean(losses[COUNT - s_local - 1 :]))
            for times in worker.stage_times():
                assert times.forward == times.backward == COUNT
                assert times.forward_s > 0 < times.backward_s
            inputs = next(data())[0]
            predicted = worker.predict(inputs)
            assert torch.equal(predicted, nn.Sequential(*worker.model)(inputs))
        assert worker.client.published == -(-COUNT // (s_local + 1))
        for got, wanted in zip(worker.model.parameters(), own, strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(of_job(job_name), expected, strict=True):
            assert torch.equal(got, wanted)


def test_without_a_pipeline_it_is_the_plain_learner(job_name: str) -> None:
    with daemon(job_name, **ADDS):
        plain = nn.Sequential(*layers())
        optimizer = LocalOptimizer(plain, momentum, job_name)
        for inputs, targets in data():
            optimizer.zero_grad()
            CRITERION(plain(inputs), targets).backward()
            optimizer.step()
        optimizer.close()
    with (
        daemon(f"{job_name}-v", optimizer={}),  # it says itself that the job adds
        VirtualWorker(layers(), ["host:1", "host:1"], momentum, f"{job_name}-v") as worker,
    ):
        for inputs, targets in data():
            worker.train(inputs, targets, CRITERION)
        with pytest.raises(UsageError, match="has kind add from its first learner"):
            Optimizer(nn.Sequential(*layers()), f"{job_name}-v", kind="sgd")
    for mine, theirs in zip(worker.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# -- batches of the server's --------------------------------------------------------------------

SAMPLES = torch.randn(13, 10, generator=torch.Generator().manual_seed(5))
LABELS = (SAMPLES.sum(1) > 0).long()


@pytest.mark.parametrize("ahead", [1, 4])
def test_batches_of_the_server(ahead: int, job_name: str) -> None:
    """Two epochs of 7 mini-batches in waves of three: the last wave is shorter."""
    with daemon(job_name, sync="wsp:D=0,s_local=2", **ADDS, ahead=ahead):
        with VirtualWorker(layers(), ["host:1"], momentum, job_name) as worker:
            for _ in worker.train_on(SAMPLES, LABELS, CRITERION, batch_size=2, epochs=2):
                break  # its wave goes to the next one, whole
        assert not worker.client.published
        worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name)
        taken: dict[int, list[int]] = {0: [], 1: []}
        for batch, _ in worker.train_on(SAMPLES, LABELS, CRITERION, batch_size=2, epochs=2):
            taken[batch.epoch] += batch.indices.tolist()
        assert [sorted(one) for one in taken.values()] == [list(range(13))] * 2
        worker.client.wait_applied()
        report = status(job_name)
        assert (report["gradients_applied"], report["learners"][0]["samples"]) == (6, 26)
        assert report["work"]["state"] == "done"
        worker.close()


class Acting(nn.Module):
    """Does something before a forward pass: with the number of it, from 1."""

    def __init__(self, what: Callable[[int], object]) -> None:
        super().__init__()
        self.what = what
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.what(self.number)
        return inputs


def _train_until(pipe: Connection, job: str, blocked: int) -> None:
    """Send each mini-batch that enters; the last stage blocks at one of them."""
    torch.set_num_threads(1)
    still = Acting(lambda number: threading.Event().wait() if number == blocked else None)
    worker = VirtualWorker([*layers(), still], ["host:1", "host:1"], momentum, job, cuts=[3])
    for batch, _ in worker.train_on(SAMPLES, LABELS, CRITERION, batch_size=1, epochs=2):
        pipe.send((batch.epoch, batch.indices.tolist()))


def test_batches_of_a_killed_worker_go_to_others(job_name: str) -> None:
    """SIGKILL with mini-batches 5 to 7 in flight, of two waves: both go back, whole."""
    with (
        daemon(job_name, sync="wsp:D=0,s_local=2", **ADDS, ahead=4),
        fork(1, _train_until, job_name, 5) as (victim,),
    ):
        entered = [victim.receive() for _ in range(7)]
        assert not victim.has_sent
        victim.kill()
        eventually(lambda: not status(job_name)["learners"])
        taken: dict[int, list[int]] = {0: [], 1: []}
        for epoch, indices in entered[:3]:  # the wave that it has pushed
            taken[epoch] += indices
        with VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name) as worker:
            for batch, _ in worker.train_on(SAMPLES, LABELS, CRITERION, batch_size=1, epochs=2):
                taken[batch.epoch] += batch.indices.tolist()
            worker.client.wait_applied()
            report = status(job_name)
        assert [sorted(one) for one in taken.values()] == [list(range(13))] * 2
        assert entered[0] == (0, epoch_order(13, 0, 0)[:1].tolist())
        assert (report["gradients_applied"], report["work"]["state"]) == (10, "done")
        assert report["batches_requeued"] >= 2


# -- the end ------------------------------------------------------------------------------------


@pytest.fixture
def job(job_name: str) -> Iterator[Daemon]:
    with daemon(job_name, sync="wsp:D=0,s_local=3", **ADDS) as one:
        yield one


def refuse(number: int) -> None:
    if number == 2:
        raise ArithmeticError("the second mini-batch")


@pytest.mark.parametrize("backward", [False, True])
def test_what_a_layer_raises_ends_the_worker(job: Daemon, job_name: str, backward: bool) -> None:
    numbers = itertools.count(1)
    made = layers()
    if backward:
        made[2].register_full_backward_hook(lambda *_: refuse(next(numbers)))
    else:
        made[2].register_forward_pre_hook(lambda *_: refuse(next(numbers)))
    worker = VirtualWorker(made, ["host:1", "host:1"], momentum, job_name, cuts=[1])
    with pytest.raises(ArithmeticError, match="the second mini-batch") as failed:
        for inputs, targets in data():
            worker.train(inputs, targets, CRITERION)
    layer = [] if backward else [f"in layer 2, {type(made[2]).__name__}"]
    where = "in stage 1 of the virtual worker, on host:1"
    assert failed.value.__notes__ == [*layer, where]
    eventually(lambda: has_left(job_name))
    assert not status(job_name)["gradients_applied"]  # of a wave that is not whole
    for again in (lambda: worker.train(inputs, targets, CRITERION), worker.drain):
        with pytest.raises(UsageError, match=r"it failed \(ArithmeticError\): make a new"):
            again()
    worker.close()
    worker.model(inputs)  # of its own memory
    # One that fails while no train() is to come is reported by close().
    worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name)
    worker.train(torch.ones(2, 9), torch.zeros(2, dtype=torch.int64), CRITERION)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        worker.close()
    eventually(lambda: has_left(job_name))


def test_an_interrupt_ends_the_worker(job_name: str) -> None:
    """Control-C while train() waits for a mini-batch."""
    calls: list[int] = []

    def waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return len(calls) == 2 and "_end_oldest" in names

    def interrupt(_: int) -> None:
        eventually(waits)
        os.kill(os.getpid(), signal.SIGINT)

    with daemon(job_name, **ADDS):
        with (
            pytest.raises(KeyboardInterrupt),
            VirtualWorker(
                [*layers(), Acting(interrupt)], ["host:1", "host:1"], momentum, job_name
            ) as worker,
        ):
            for inputs, targets in data():
                calls.append(1)
                worker.train(inputs, targets, CRITERION)
        assert len(calls) == 2
        eventually(lambda: has_left(job_name))
        assert not status(job_name)["gradients_applied"]


def test_an_exception_in_the_block_drops_what_is_not_pushed(job: Daemon, job_name: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name) as worker,
    ):
        worker.train(*next(data()), CRITERION)
        raise ZeroDivisionError
    eventually(lambda: has_left(job_name))
    assert not status(job_name)["gradients_applied"]


def test_one_that_is_dropped_leaves(job: Daemon, job_name: str) -> None:
    """Drop it at once, as a notebook's cell that is run again: others may wait for it."""
    gc.disable()
    try:
        worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name)
        worker.train(*next(data()), CRITERION)
        del worker
        eventually(lambda: has_left(job_name))
    finally:
        gc.enable()


# -- layers, devices, cuts ----------------------------------------------------------------------


def test_frozen_layers_and_tables_stay_as_they_are(job: Daemon, job_name: str) -> None:
    """Nothing is trained in the first stage; a table belongs to the job, which does not change."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.randn(10))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs + self.rows

    made = [Table(), *layers()]
    made[1].requires_grad_(False)
    frozen, tables = made[1].weight.clone(), made[0].rows.clone()  # type: ignore[operator, union-attr]
    with VirtualWorker(made, ["host:1"] * 3, momentum, job_name, cuts=[1, 2]) as worker:
        before = made[3].weight.clone()  # type: ignore[operator, union-attr]
        for inputs, targets in data():
            worker.train(inputs, targets, CRITERION)
    assert torch.equal(made[1].weight, frozen)  # type: ignore[arg-type]
    assert torch.equal(made[0].rows, tables)  # type: ignore[arg-type]
    assert not torch.equal(made[3].weight, before)  # type: ignore[arg-type]
    late = [Table(), *layers()]
    late[1].requires_grad_(False)
    VirtualWorker(late, ["host:1"], momentum, job_name).close()
    assert torch.equal(late[0].rows, tables)  # type: ignore[arg-type]


def test_targets_in_parts_and_copies_of_the_weights(job_name: str) -> None:
    inputs, targets = next(data())

    def loss(outputs: torch.Tensor, parts: Any) -> torch.Tensor:
        return CRITERION(outputs, parts["classes"][0])

    with daemon(job_name, optimizer={}, sync="wsp:D=1,s_local=3"):
        with VirtualWorker(layers(), ["host", "host"], momentum, job_name) as worker:
            for _ in range(6):
                worker.train(inputs, {"classes": [targets, None]}, loss)
            kept = worker.state_dict()
            assert not worker.waves.in_flight
            own = {name: one.clone() for name, one in worker.model.state_dict().items()}
            worker.train(inputs, {"classes": (targets,)}, loss)
            worker.drain()
        assert kept.keys() == own.keys()
        for name, one in kept.items():
            torch.testing.assert_close(one, own[name], rtol=0, atol=0)


def test_one_tensor_between_stages(job: Daemon, job_name: str) -> None:
    recurrent: list[nn.Module] = [nn.LSTM(10, 4), nn.Linear(4, 3)]
    worker = VirtualWorker(recurrent, ["host", "host"], momentum, job_name)
    with pytest.raises(UsageError, match="stage 0 hands on tuple: between stages there is one"):
        worker.train(*next(data()), CRITERION)
        worker.drain()
    # With batches of the server's nothing is awaited at the end, but this is not kept silent.
    worker = VirtualWorker(recurrent, ["host", "host"], momentum, job_name)
    for _ in worker.train_on(SAMPLES, LABELS, CRITERION, batch_size=2, epochs=1):
        break
    eventually(lambda: worker._flying[0].failure is not None)
    with pytest.raises(UsageError, match="stage 0 hands on tuple"):
        worker.close()
    eventually(lambda: has_left(job_name))
