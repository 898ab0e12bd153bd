"""Loops that are left and entered again, interrupts and forks amid a learner's waves."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import daemon, eventually, fork, status
from support.torch_models import one_thread as one_thread
from support.torch_models import pipeline_layers as layers
from support.torch_models import with_momentum as momentum
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners import devices
from gadei_ps.learners.client import Batch, Client
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.learners.torch import LocalOptimizer, Optimizer
from gadei_ps.learners.virtual import VirtualWorker
from gadei_ps.learners.waves import GradientWaves, Waves

CRITERION = nn.functional.cross_entropy
ADDS = {"optimizer": {"kind": "add"}}
INPUTS = torch.randn(26, 10, generator=torch.Generator().manual_seed(5))
LABELS = (INPUTS.sum(1) > 0).long()
WORK = {"batch_size": 2, "epochs": 1}


# -- a loop that is left ------------------------------------------------------------------------


def _virtual(job: str) -> tuple[Callable[..., Any], Callable[..., object], Client]:
    worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job)

    def loop(**work: int) -> Any:
        return worker.train_on(INPUTS, LABELS, CRITERION, **work)  # type: ignore[arg-type]

    return loop, lambda _: None, worker.client


def _local(job: str) -> tuple[Callable[..., Any], Callable[..., object], Client]:
    model = nn.Sequential(*layers())
    optimizer = LocalOptimizer(model, momentum, job)

    def loop(**work: int) -> Any:
        return ((batch, None) for batch in optimizer.batches(len(INPUTS), **work))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        CRITERION(model(INPUTS[batch.indices]), LABELS[batch.indices]).backward()
        optimizer.step()

    return loop, step, optimizer.client


def _pipeline(job: str) -> tuple[Callable[..., Any], Callable[..., object], Client]:
    client = Client(job, tensors={"w": np.zeros(3, np.float32)})
    pipeline = Pipeline(client, devices.choose("host"))

    def loop(**work: int) -> Any:
        return ((batch, None) for batch in pipeline.batches(len(INPUTS), **work))

    def push(batch: Any) -> None:
        pipeline.weights()
        pipeline.push({"w": np.ones(3, np.float32)}, samples=len(batch.indices))
        pipeline.flush()

    return loop, push, client


def _optimizer(job: str) -> tuple[Callable[..., Any], Callable[..., object], Client]:
    model = nn.Sequential(*layers())
    optimizer = Optimizer(model, job)

    def loop(**work: int) -> Any:
        return ((batch, None) for batch in optimizer.batches(len(INPUTS), **work))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        CRITERION(model(INPUTS[batch.indices]), LABELS[batch.indices]).backward()
        optimizer.step()

    return loop, step, optimizer.client


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("make", [_virtual, _local, _pipeline])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_loop_that_is_left_in_the_middle_of_a_batch(
    make: Callable[[str], Any], stepped: bool, ahead: int, job_name: str
) -> None:
    """The next one takes the rest of it: each sample once, each batch answered once.

    stepped: the last mini-batch of the first loop is trained before the loop is left.
    """
    if make is _virtual and not stepped:
        return  # it is trained by the loop itself
    with daemon(job_name, sync="wsp:D=0,s_local=2", **ADDS, ahead=ahead):
        loop, train, client = make(job_name)
        seen: Counter[int] = Counter()
        for number, (batch, _) in enumerate(loop(**WORK)):
            if number == 4 and not stepped:
                break
            train(batch)
            seen.update(batch.indices.tolist())
            if number == 4:
                break
        for batch, _ in loop(**WORK):
            train(batch)
            seen.update(batch.indices.tolist())
        assert seen == Counter(range(26))
        assert not client.unanswered
        client.wait_applied()
        report = status(job_name)
        assert (report["work"]["state"], report["gradients_applied"]) == ("done", 5)
        assert report["learners"][0]["samples"] in (26, 0)  # LocalOptimizer: of batches() alone
        client.detach()


@pytest.mark.parametrize("make", [_local, _pipeline, _optimizer])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_own_data_around_the_servers(
    make: Callable[[str], Any], before: int, job_name: str
) -> None:
    """An unfinished wave of own data is pushed first; in the middle of a batch it is refused."""
    settings = ADDS if make is _local else {}
    with daemon(job_name, sync="wsp:D=0,s_local=2", **settings):
        loop, train, client = make(job_name)
        own = Batch(0, 0, np.arange(2))
        for _ in range(before):
            train(own)
        seen: Counter[int] = Counter()
        for batch, _ in loop(**WORK):
            train(batch)
            seen.update(batch.indices.tolist())
            break
        assert client.published == (before > 0)
        with pytest.raises(UsageError, match="a batch of the server's has begun: take the rest"):
            train(own)
        if make is _optimizer:
            seen.clear()  # it drops what it has of the batch, which comes again whole
        for batch, _ in loop(**WORK):
            train(batch)
            seen.update(batch.indices.tolist())
        assert seen == Counter(range(26))
        assert client.published == (before > 0) + 5
        for _ in range(3):
            train(own)
        client.wait_applied()
        report = status(job_name)
        assert (report["work"]["state"], report["gradients_applied"]) == ("done", (before > 0) + 6)
        client.detach()


def test_own_data_and_the_servers_have_no_wave_in_common(job_name: str) -> None:
    """Else a wave would be longer than others count on."""
    with daemon(job_name, sync="wsp:D=0,s_local=3", **ADDS):
        worker = VirtualWorker(layers(), ["host:1"], momentum, job_name)
        for _ in range(3):
            worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        loop = iter(worker.train_on(INPUTS, LABELS, CRITERION, **WORK))  # type: ignore[arg-type]
        next(loop)
        worker.client.wait_applied()
        assert status(job_name)["learners"][0]["samples"] == 6  # three of its own, before
        with pytest.raises(UsageError, match="a batch of the server's has begun: take the rest"):
            worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        assert len(list(loop)) == 12
        worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        worker.close()
        eventually(lambda: status(job_name)["gradients_applied"] == 1 + 4 + 1)


@pytest.mark.parametrize("sync", ["ssp:s=1", "bsp", "elastic-bsp:R=2", "cutoff:c=1", "wsp:D=0"])
def test_own_data_after_the_servers_batches(sync: str, job_name: str) -> None:
    """Train two learners, which took turns at the batches, too."""
    with (
        daemon(job_name, sync=f"{sync},s_local=0" if sync.startswith("wsp") else sync),
        fork(2, _both, job_name) as team,
    ):
        for one in team:
            assert one.receive() == "took all"
        for one in team:
            one.send("continue")
        assert [one.join() for one in team] == [0, 0]
        end = status(job_name)
        assert end["gradients_applied"] + end["gradients_dropped"] >= 8 + 2 * 5
        assert end["work"]["state"] == "done"


def _both(pipe: Any, job: str) -> None:
    given = {"w": np.ones(3, np.float32)}
    with Client(job, tensors={"w": np.zeros(3, np.float32)}) as client:
        for _ in client.batches(8, 1, 1):
            client.push(given)
        pipe.send("took all")
        pipe.recv()
        for _ in range(5):
            client.wait_turn()
            client.push(given)


def test_a_mini_batch_of_own_data_is_not_one_of_the_last_loop(job_name: str) -> None:
    with daemon(job_name, sync="wsp:D=0,s_local=0", **ADDS):
        model = nn.Sequential(*layers())
        optimizer = LocalOptimizer(model, momentum, job_name)
        for batch in optimizer.batches(len(INPUTS), **WORK):
            CRITERION(model(INPUTS[batch.indices]), LABELS[batch.indices]).backward()
            optimizer.step()
        model(INPUTS)  # begins one of its own data, which no step ends
        assert list(optimizer.batches(len(INPUTS), **WORK)) == []
        optimizer.step()
        optimizer.close()
        eventually(lambda: status(job_name)["gradients_applied"] == 13 + 1)


def test_the_last_steps_after_the_servers_batches(job_name: str) -> None:
    with daemon(job_name, sync="wsp:D=0,s_local=2", **ADDS):
        model = nn.Sequential(*layers())
        optimizer = LocalOptimizer(model, momentum, job_name)
        for batch in optimizer.batches(len(INPUTS), **WORK):
            CRITERION(model(INPUTS[batch.indices]), LABELS[batch.indices]).backward()
            optimizer.step()
        for _ in range(4):
            CRITERION(model(INPUTS), LABELS).backward()
            optimizer.step()
        optimizer.close()  # pushes the wave that has one mini-batch
        eventually(lambda: status(job_name)["gradients_applied"] == 5 + 2)


def test_a_scheduler_sees_the_workers_steps(
    job_name: str, recwarn: pytest.WarningsRecorder
) -> None:
    with (
        daemon(job_name, **ADDS),
        VirtualWorker(layers(), ["host:1"], momentum, job_name) as worker,
    ):
        assert worker.local is not None
        scheduler = torch.optim.lr_scheduler.StepLR(worker.local, 1)
        for _ in range(3):
            if worker.train(INPUTS[:2], LABELS[:2], CRITERION) is not None:
                scheduler.step()
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]


# -- interrupts ---------------------------------------------------------------------------------


class Interrupted:
    """The learner in C, of which each push is followed by Control-C."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._learner = client._learner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def push(self, *given: object) -> int:
        assert self._learner.push(*given) >= 0
        raise KeyboardInterrupt


def test_an_interrupt_right_after_a_push(job_name: str) -> None:
    """Python raises it when the C call has returned: the batch is answered all the same."""
    with (
        daemon(job_name, ahead=2),
        Client(job_name, tensors={"w": np.zeros(3, np.float32)}) as client,
    ):
        batches = client.batches(4, 1, 1)
        next(batches)
        given = {"w": np.ones(3, np.float32)}
        with (
            mock.patch.object(client, "_learner", Interrupted(client)),
            pytest.raises(KeyboardInterrupt),
        ):
            client.push(given)
        assert (client.published, client.unanswered) == (1, 0)
        for _ in batches:
            client.push(given)
        client.wait_applied()
        report = status(job_name)
        assert (report["gradients_applied"], report["work"]["state"]) == (4, "done")


@pytest.mark.parametrize("kind", ["add", "sgd"])
def test_a_wave_that_is_interrupted_when_it_is_pushed(kind: str, job_name: str) -> None:
    """It is pushed once, and no longer in flight."""
    settings = {"kind": kind} if kind == "add" else {"kind": kind, "lr": 1.0}
    with (
        daemon(job_name, optimizer=settings, sync="wsp:D=0,s_local=1"),
        Client(job_name, tensors={"w": np.zeros(3, np.float32)}) as client,
    ):
        waves = Waves(client) if kind == "add" else GradientWaves(client)
        changes = waves.weights if kind == "add" else waves.gradients  # type: ignore[attr-defined]
        for number in range(6):
            waves.begin()
            changes["w"] += 1
            if number != 3:
                waves.end()
                continue
            with (
                mock.patch.object(client, "_learner", Interrupted(client)),
                pytest.raises(KeyboardInterrupt),
            ):
                waves.end()
            assert not waves.in_flight
        client.wait_applied()
        assert client.published == 3
        np.testing.assert_array_equal(client.weights["w"], 6 if kind == "add" else -6)


def test_an_optimizers_wave_that_is_interrupted_when_it_is_pushed(job_name: str) -> None:
    """The next step begins another wave, with the same weights as without the interrupt."""
    trained = []
    for interrupt in (False, True):
        job = f"{job_name}-{int(interrupt)}"
        model = nn.Sequential(*layers())
        with daemon(job, optimizer={"kind": "sgd", "lr": 0.1}, sync="wsp:D=0,s_local=1"):
            optimizer = Optimizer(model, job)
            for number in range(6):
                optimizer.zero_grad()
                CRITERION(model(INPUTS), LABELS).backward()
                if number == 3 and interrupt:
                    broken = mock.patch.object(
                        optimizer.client, "_learner", Interrupted(optimizer.client)
                    )
                    with broken, pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                    optimizer.client.wait_applied()
                else:
                    optimizer.step()
            optimizer.client.wait_applied()
            assert optimizer.client.published == 3
            optimizer.close()
        trained.append([one.detach() for one in model.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


# -- forks --------------------------------------------------------------------------------------


def test_a_forked_child_is_told(job_name: str) -> None:
    """It has none of the stages' threads, and must not wait for them; its end is not held up."""
    with daemon(job_name, sync="wsp:D=0,s_local=3", **ADDS):
        hold = torch.ones(())
        worker = VirtualWorker([*layers(), Slow(hold)], ["host:1", "host:1"], momentum, job_name)
        worker.train(INPUTS[:2], LABELS[:2], CRITERION)

        def child(pipe: Any) -> None:
            errors = []
            for use in (
                worker.drain,
                worker.close,
                worker.state_dict,
                lambda: worker.predict(INPUTS),
                lambda: worker.train(INPUTS[:2], LABELS[:2], CRITERION),
            ):
                try:
                    use()
                except UsageError as error:
                    errors.append(str(error))
            pipe.send(errors)

        with fork(1, child) as (one,):
            why = "this learner belongs to the parent process; attach after the fork"
            assert one.receive() == [why] * 5
            assert one.join() == 0
        hold.zero_()
        worker.close()
        eventually(lambda: status(job_name)["gradients_applied"] == 1)
        assert os.getpid() == worker._process


class Slow(nn.Module):
    """Computes once `hold` is 0."""

    def __init__(self, hold: torch.Tensor) -> None:
        super().__init__()
        self.hold = [hold]  # no part of the state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        eventually(lambda: not self.hold[0])
        return inputs


def test_a_worker_that_pauses_holds_nobody_up(job_name: str) -> None:
    """Another one continues, past the waves that it may be ahead; the paused one's are pushed."""
    with (
        daemon(job_name, sync="wsp:D=0,s_local=0", **ADDS),
        fork(1, _until_five, job_name) as (one,),
    ):
        worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name)
        worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        one.send("continue")
        with worker.pause():
            assert worker.waves.in_flight == 0
            assert one.join() == 0
        worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        worker.close()
        eventually(lambda: status(job_name)["gradients_applied"] == 2 + 5)


def _until_five(pipe: Any, job: str) -> None:
    pipe.recv()
    with VirtualWorker(layers(), ["host:1"], momentum, job) as worker:
        for _ in range(5):
            worker.train(INPUTS[:2], LABELS[:2], CRITERION)


# -- what stays ---------------------------------------------------------------------------------


def test_a_worker_that_has_left_keeps_the_weights_alone(job_name: str) -> None:
    """Check that the memory of the pipeline, several times the weights, is freed."""
    with daemon(job_name, sync="wsp:D=0,s_local=3", **ADDS):
        worker = VirtualWorker(layers(), ["host:1", "host:1"], momentum, job_name)
        for _ in range(6):
            worker.train(INPUTS[:2], LABELS[:2], CRITERION)
        worker.close()
        assert not (worker._free or worker._flying)
        assert not any(stage._forward or stage._backward for stage in worker._stages)
