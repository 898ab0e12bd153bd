"""Virtual workers that are made or used wrongly: one line each, and they have left the job."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import one_thread as one_thread
from support.torch_models import pipeline_layers as layers
from support.torch_models import with_momentum as momentum
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import LocalOptimizer
from gadei_ps.learners.virtual import VirtualWorker, cutting

CRITERION = nn.functional.cross_entropy
HOSTS = ["host", "host"]


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    while True:
        inputs = torch.randn(8, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long()


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("here", torch.ones(3))


def test_what_cannot_be_a_pipeline_is_refused(job_name: str) -> None:
    """Refuse it before the job is asked: there is no job."""
    shared, two = nn.Linear(3, 3), ["host", "host"]
    pair: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    wrong: list[tuple[str, list[nn.Module], Any, Any]] = [
        ("stages 0 and 1 share the parameter '0.weight'", [shared, nn.Tanh(), shared], two, [1]),
        (
            "'1' \\(BatchNorm1d\\) keeps running statistics",
            [*pair[:1], nn.BatchNorm1d(3)],
            two,
            None,
        ),
        ("layers: give a list of modules", [], two, None),
        ("layers: give a list of modules", nn.Linear(3, 3), two, None),  # type: ignore[list-item]
        ("layers: give a list of modules", 3, two, None),  # type: ignore[list-item]
        ("the model has no parameters", [nn.Tanh(), nn.Tanh()], two, None),
        ("stages 0 and 1 share the buffer '0.here'", [*2 * [Buffered()], *pair], two, [1]),
        ("cuts 2: give a list of numbers", pair, two, 2),
        ("layer 1 is a int: give modules of torch", [*pair[:1], 3], two, None),  # type: ignore[list-item]
        ("cuts '2': give a list of numbers", pair, two, "2"),
        ("device 'host:999': this process may use", pair, ["host:999", "host"], None),
        ("parameter '0.weight' has no values yet", [nn.LazyLinear(3), *pair], two, None),
        ("devices: 3 for 2 layers", pair, [*two, "host"], None),
        ("devices: give a list", pair, "host", None),
        ("devices: give a list", pair, [], None),
        ("device 'host:0': give 'host'", pair, ["host", "host:0"], None),
        ("device 'cuda:0': PyTorch .* sees no GPU here", pair, ["host", "cuda:0"], None),
        ("cuts \\[2\\]: for 2 devices and 2 layers give 1 number, ascending", pair, two, [2]),
        ("cuts \\['a'\\]: give a list of numbers", pair, two, ["a"]),
        ("devices: give a list", pair, 3, None),
        ("cuts \\[1, 1\\]: for 3 devices", [*pair, nn.Tanh()], [*two, "host"], [1, 1]),
    ]
    for why, made, devices, cuts in wrong:
        with pytest.raises(UsageError, match=why) as refused:
            VirtualWorker(made, devices, momentum, job_name, cuts=cuts)
        assert "\n" not in str(refused.value)
    ready = momentum([*nn.Linear(3, 3).parameters()])
    with pytest.raises(UsageError, match="optimizer is a SGD: give a function"):
        VirtualWorker(pair, two, ready, job_name)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plan is a int: give a plan, or the path"):
        VirtualWorker(pair, None, momentum, job_name, plan=3)  # type: ignore[arg-type]


def test_layers_of_another_worker(job_name: str) -> None:
    """Both would write to them, and one of them push nothing."""
    with daemon(job_name, optimizer={}):
        mine = layers()
        worker = VirtualWorker((one for one in mine), HOSTS, momentum, job_name)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="belongs to a VirtualWorker that has not left"):
            VirtualWorker(mine, HOSTS, momentum, job_name)
        worker.close()
        VirtualWorker(nn.ModuleList(mine), HOSTS, momentum, job_name).close()  # type: ignore[arg-type]


def test_wrong_mini_batches(job_name: str) -> None:
    """Check that inputs are validated before anything is sent; a wrong loss ends the worker."""
    inputs, targets = next(data())
    with daemon(job_name, optimizer={}, sync="wsp:D=1,s_local=3"):
        worker = VirtualWorker(layers(), ["host", "host"], momentum, job_name)
        for wrong in ([1.0], torch.tensor(1.0)):
            with pytest.raises(UsageError, match="inputs must be a tensor with the samples"):
                worker.train(wrong, targets, CRITERION)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="inputs must be a tensor with the samples"):
                worker.predict(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="inputs has no samples: leave out"):
            worker.train(inputs[:0], targets[:0], CRITERION)
        with pytest.raises(UsageError, match="loss_function is a int: give a function"):
            worker.train(inputs, targets, 3)  # type: ignore[arg-type]
        worker.train(inputs, targets, CRITERION)
        for loss in (lambda made, _: made, lambda *_: 1.0, lambda *_: torch.ones(())):
            with pytest.raises(UsageError, match="loss function: it must return one number"):
                worker.train(inputs, targets, loss)
                worker.drain()
            worker = VirtualWorker(layers(), ["host", "host"], momentum, job_name)
        worker.close()


def test_optimizers_that_would_train_nothing(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        for wrong, why in (
            (lambda _: momentum(list(layers()[0].parameters())), "SGD of other parameters"),
            (torch.optim.LBFGS, "LBFGS, which computes gradients several times"),
        ):
            with pytest.raises(UsageError, match=why):
                VirtualWorker(layers(), HOSTS, wrong, job_name)
            eventually(lambda: not status(job_name)["learners"])


@pytest.mark.parametrize("kind", ["virtual", "sums", "local"])
def test_one_gradient_that_is_not_finite(
    kind: str, job_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is left out; the learner's weights and its optimizer's moments stay finite."""
    batches = itertools.islice(data(), 12)
    settings = {"kind": "momentum", "lr": 0.01} if kind == "sums" else {}
    with daemon(job_name, optimizer=settings, sync="wsp:D=1,s_local=1"):
        model = nn.Sequential(*layers())
        if kind != "local":
            make = momentum if kind == "virtual" else None
            worker = VirtualWorker(list(model), HOSTS, make, job_name)
            for number, (inputs, targets) in enumerate(batches):
                worker.train(inputs * torch.nan if number == 4 else inputs, targets, CRITERION)
            worker.close()
        else:
            optimizer = LocalOptimizer(model, momentum, job_name)
            for number, (inputs, targets) in enumerate(batches):
                optimizer.zero_grad()
                loss = CRITERION(model(inputs), targets)
                (loss * torch.inf if number == 4 else loss).backward()
                optimizer.step()
            optimizer.close()
        assert all(one.isfinite().all() for one in model.parameters())
        eventually(lambda: status(job_name)["gradients_applied"] == 6)
        assert not status(job_name)["gradients_refused"]
    assert capfd.readouterr().err.count("NaN or an infinity: it is left out") == 1


def test_one_thread_at_a_time(job_name: str) -> None:
    inputs, targets = next(data())
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inside.set()
            go_on.wait()

    with (
        daemon(job_name, optimizer={}, sync="wsp:D=1,s_local=1"),
        VirtualWorker(layers(), HOSTS, lambda p: Waiting(p, 0.1), job_name) as worker,
    ):
        worker.train(inputs, targets, CRITERION)
        drains = threading.Thread(target=worker.drain)
        drains.start()
        inside.wait()
        with pytest.raises(UsageError, match="another thread uses this virtual worker"):
            worker.train(inputs, targets, CRITERION)
        go_on.set()
        drains.join()


def test_batches_that_nobody_takes(job_name: str) -> None:
    with (
        daemon(job_name, optimizer={}, sync="wsp:D=1,s_local=1"),
        VirtualWorker(layers(), HOSTS, momentum, job_name) as worker,
    ):
        some = torch.randn(16, 10)
        with pytest.raises(UsageError, match="inputs has 16 samples and targets 15"):
            worker.train_on(some, torch.zeros(15).long(), CRITERION, batch_size=4, epochs=1)
        with pytest.warns(UserWarning, match="nothing was trained: write for batch, loss in work"):
            worker.train_on(some, torch.zeros(16).long(), CRITERION, batch_size=4, epochs=1)


def test_layers_are_cut_evenly() -> None:
    assert cutting.even_cuts([220, 0, 420, 0, 63], 2) == [2]
    assert cutting.even_cuts([220, 0, 420, 0, 63], 3) == [2, 4]
    assert cutting.even_cuts([0, 0, 5], 3) == [1, 2]
    assert cutting.even_cuts([1, 1, 1, 9], 1) == []
    assert cutting.even_cuts([9, 1, 1, 1], 3) == [1, 3]  # the later one of equal cuts
