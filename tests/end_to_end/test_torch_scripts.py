"""Models of odd tensors, and other things that ordinary scripts do to model and optimizer."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import batch_norm_model, data, plain_model
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

STEPS = 10


class Odd(nn.Module):
    """More than 8,192 tensors, tensors without values, a long name, a layer of 300 names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("nothing", torch.empty(0))
        self.add_module("long_" * 60, nn.Linear(10, 3))
        self.layers = nn.ModuleList([nn.Linear(10, 10)] * 150)
        self.many = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(8200))
        self.end = nn.Parameter(torch.empty(4, 0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            inputs = layer(inputs).tanh()
        outputs: torch.Tensor = self.get_submodule("long_" * 60)(inputs)
        return outputs + self.many[0] + self.many[8199] + self.empty.sum() + self.end.sum()


@pytest.mark.parametrize(
    "how", [{"view": False}, {"wait": True}, {"free_gradients": True}], ids=str
)
def test_odd_tensors(how: dict[str, bool], job_name: str) -> None:
    model = Odd()
    twin = copy.deepcopy(model)
    theirs = torch.optim.Adam(twin.parameters())
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="adam", **({"wait": True} | how))
        by: Any
        for inputs, targets in data(STEPS):
            for one, by in ((model, optimizer), (twin, theirs)):
                by.zero_grad()
                nn.functional.cross_entropy(one(inputs), targets).backward()
                by.step()
        saved = optimizer.state_dict()["state"]
        assert len(saved) == len(list(model.parameters()))
        optimizer.load_state_dict(theirs.state_dict())
        optimizer.close()
    for (name, mine), other in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def clamp_in_place(model: nn.Module) -> None:
    for one in model.parameters():
        one.data.clamp_(-0.1, 0.1)


def clamp_in_new_memory(model: nn.Module) -> None:
    for one in model.parameters():
        one.data = one.data.clamp(-0.1, 0.1)


def clamp_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.clamp(-0.1, 0.1), model.parameters())


COPY = {"view": False}
FLOAT64 = {"dtype": torch.float64}


@pytest.mark.filterwarnings("ignore:parameter .* was given other memory:UserWarning")
@pytest.mark.parametrize("looks", ["alone", "batches"])
@pytest.mark.parametrize(
    ("clamp", "how"),
    [
        (clamp_in_place, COPY),
        (clamp_in_place, FLOAT64),
        (clamp_in_new_memory, COPY),
        (clamp_in_new_memory, FLOAT64),
        (clamp_in_new_memory, {"wait": True}),
        (clamp_a_vector, {"wait": True}),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_what_a_script_writes_comes_to_the_job(
    clamp: Any, how: dict[str, Any], looks: str, job_name: str
) -> None:
    how = dict(how)
    model = plain_model().to(how.pop("dtype", torch.float32))
    twin = copy.deepcopy(model)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="sgd", lr=0.1, **how)
        rounds = range(STEPS) if looks == "alone" else optimizer.batches(4 * STEPS, 4, 1)
        by: Any
        for _, (inputs, targets) in zip(rounds, data(), strict=False):
            for one, by in ((model, optimizer), (twin, theirs)):
                by.zero_grad()
                outputs = one(inputs.to(next(one.parameters()).dtype))
                nn.functional.cross_entropy(outputs, targets).backward()
                by.step()
                clamp(one)
        assert status(job_name)["gradients_refused"] == 0
        optimizer.zero_grad()
        optimizer.step()  # no gradient, but what was written
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)
            of_job = torch.from_numpy(optimizer.client.weights[name].copy())
            torch.testing.assert_close(of_job, other.float(), rtol=1e-4, atol=1e-5, msg=name)
        optimizer.close()
        assert max(one.abs().max() for one in model.parameters()) < 0.1001


def test_what_is_written_last_stays_in_the_model(job_name: str) -> None:
    model = plain_model()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="sgd", lr=0.1, view=False)
        before = optimizer.client.weights["0.bias"].copy()
        nn.init.constant_(model[0].bias, 7.0)
        with optimizer.pause():
            assert model[0].bias.eq(7.0).all()
        assert model[0].bias.eq(7.0).all()
        assert (optimizer.client.weights["0.bias"] == before).all()
        with pytest.warns(UserWarning, match="stays in this model; optimizer.assign gives it to"):
            optimizer.close()
        assert model[0].bias.eq(7.0).all()


def test_a_table_with_max_norm_is_no_write(job_name: str) -> None:
    table = nn.Embedding(5, 2, max_norm=0.1)
    own = nn.Identity()
    own.max_norm = 1.0  # a layer of the script's, without a weight
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(nn.Sequential(own, table), job_name, kind="sgd", lr=0.1, view=False)
        table(torch.arange(5)).sum().backward()
        optimizer.step()
        assert optimizer.client.assigned == 0
        optimizer.close()


@pytest.mark.parametrize("view", [True, False])
def test_a_model_that_is_sent_to_another_process(view: bool, job_name: str) -> None:
    """torch.multiprocessing moves what it sends to shared memory, as share_memory_() does."""
    model, twin = plain_model(), plain_model()
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="sgd", lr=0.1, view=view, wait=True)
        by: Any
        for number, (inputs, targets) in enumerate(data(STEPS)):
            for one, by in ((model, optimizer), (twin, theirs)):
                by.zero_grad()
                nn.functional.cross_entropy(one(inputs), targets).backward()
                if number == 1 and by is optimizer:
                    with pytest.warns(UserWarning, match="was sent to another process"):
                        by.step()
                else:
                    by.step()
            for sent in model.state_dict().values():
                sent.share_memory_()
        optimizer.close()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("view", [True, False])
def test_evaluation_under_inference_mode(view: bool, job_name: str) -> None:
    model = batch_norm_model()
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, kind="sgd", lr=0.1, view=view)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 10)).sum().backward()
            optimizer.step()

        step()
        with torch.inference_mode(), optimizer.pause():
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict({name: torch.zeros_like(one) for name, one in own.items()})
            model(torch.randn(8, 10))
            model.load_state_dict(own)
        step()
        with torch.inference_mode():
            model.load_state_dict(own)
        step()
        with torch.inference_mode():
            optimizer.close()
        model(torch.randn(8, 10)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_second_model_of_a_process(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one as each fold of a cross-validation does; it would begin with the first's weights."""
    monkeypatch.setenv("GADEI_PS_JOB", job_name)
    model = plain_model()
    with daemon(job_name, optimizer={}):
        for one in (model, model, nn.ModuleList([model])[0]):
            optimizer = Optimizer(one, kind="sgd", lr=0.1, wait=True)
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
            optimizer.close()
        Optimizer(copy.deepcopy(model), kind="sgd", lr=0.1).close()
        assert not weakref.getweakrefcount(model[0].weight), (
            "torch.utils.swap_tensors refuses these"
        )
        del model, one, optimizer  # a cell of a notebook that runs again drops them
        for _ in range(2):
            gc.collect()
            match = f"another model of this process has .*{job_name!r}"
            with pytest.raises(UsageError, match=match):
                Optimizer(plain_model(), kind="sgd", lr=0.1)
        eventually(lambda: not status(job_name)["learners"])
        Optimizer(plain_model(), job_name, kind="sgd", lr=0.1).close()


def of_class(kind: str, parameters: Any, **given: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, **given)
    return made


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("Adam", {}),
        ("AdamW", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {}),
        ("Adagrad", {}),
        ("RMSprop", {"momentum": 0.5}),
    ],
)
def test_momentum_and_moments_can_be_read(
    kind: str, given: dict[str, float], job_name: str
) -> None:
    model, twin = plain_model(), plain_model()
    given = {"lr": 0.01} | given
    theirs = of_class(kind, twin.parameters(), **given)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, like=getattr(torch.optim, kind), wait=True, **given)
        assert not optimizer.state[model[0].weight]
        by: Any
        for inputs, targets in data(3):
            for one, by in ((model, optimizer), (twin, theirs)):
                by.zero_grad()
                nn.functional.cross_entropy(one(inputs), targets).backward()
                by.step()
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                has = {n: v for n, v in theirs.state[other].items() if v is not None}
                assert optimizer.state[mine].keys() == has.keys()
                for name, value in optimizer.state[mine].items():
                    torch.testing.assert_close(value, has[name], rtol=1e-3, atol=1e-5)
        for one, values in optimizer.state.items():
            for value in values.values():
                with pytest.raises(RuntimeError, match="Inplace update"):
                    value.zero_()
            optimizer.state[one] = dict(values)  # as Lightning moves them to the same device
        refused: list[Any] = [
            lambda: optimizer.state.clear(),
            lambda: setattr(optimizer, "state", {}),
            lambda: optimizer.state.update({}),
            lambda: optimizer.state.__setitem__(model[0].weight, {"x": torch.ones(1)}),
        ]
        for write in refused:
            with pytest.raises(UsageError, match="can only be read: load_state_dict"):
                write()
        with pytest.warns(UserWarning, match="there is nothing to share"):
            optimizer.share_memory()
        optimizer.close()
        assert not optimizer.state


def with_zero(kind: str, model: nn.Module) -> Any:
    if kind == "groups":
        return {"kind": "sgd", "lr": 0.1, "groups": [{"params": "*.bias", "lr": 0.0}]}
    if kind == "like":
        return {"like": torch.optim.SGD(model.parameters(), lr=0)}
    return {"kind": "sgd", "lr": 0.0}


@pytest.mark.parametrize("kind", ["keywords", "like", "groups"])
def test_a_rate_of_zero_to_begin_with(kind: str, job_name: str) -> None:
    """A wrapper sets it before each step."""
    model, twin = plain_model(), plain_model()
    theirs = torch.optim.SGD(twin.parameters(), lr=0)
    with daemon(job_name, optimizer={}):
        optimizer = Optimizer(model, job_name, wait=True, **with_zero(kind, model))
        assert optimizer.param_groups[0]["lr"] == 0
        by: Any
        for number, (inputs, targets) in enumerate(data(STEPS)):
            for one, by in ((model, optimizer), (twin, theirs)):
                for group in by.param_groups:
                    group["lr"] = 0.01 * number
                by.zero_grad()
                nn.functional.cross_entropy(one(inputs), targets).backward()
                by.step()
        optimizer.close()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
