"""A virtual worker with a plan: measured, written, read, trained; and plans for other layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PATIENCE_S, daemon, eventually, status
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.commands import change
from gadei_ps.errors import UsageError
from gadei_ps.learners.virtual import VirtualWorker, stage_devices, stages
from gadei_ps.learners.virtual.plan import Plan, Sample, make

CRITERION = nn.functional.cross_entropy


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Linear(10, 20),
        nn.ReLU(inplace=True),
        nn.Linear(20, 20),
        nn.Tanh(),
        nn.Linear(20, 3),
    ]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(11)
    for _ in range(11):
        inputs = torch.randn(8, 10, generator=source)
        yield inputs, (inputs.sum(1) > 0).long()


@pytest.fixture(scope="module")
def made() -> Plan:
    return make(layers(), Sample(*next(data()), CRITERION), ["host:1"] * 3, in_flight=4, repeats=1)


def test_a_job_with_more_in_flight(made: Plan, job_name: str) -> None:
    """The memory of the plan would not do."""
    with daemon(job_name, optimizer={}, sync="wsp:D=1,s_local=4"):
        with pytest.raises(UsageError, match="the plan is for 4 in flight and the job has 5"):
            VirtualWorker(layers(), plan=made, optimizer=sgd, job=job_name)
        eventually(lambda: not status(job_name)["learners"])


def test_a_job_that_gets_more_in_flight(made: Plan, job_name: str) -> None:
    """Use `set`, which does not plan: the worker stays within its memory."""
    with (
        daemon(job_name, sync="wsp:D=0,s_local=3", optimizer={"kind": "add"}),
        VirtualWorker(layers(), plan=made, optimizer=sgd, job=job_name) as worker,
    ):
        assert change.set_sync(job_name, "wsp:D=0,s_local=7", PATIENCE_S)["changed"]
        flying = 0
        for inputs, targets in data():
            worker.train(inputs, targets, CRITERION)
            flying = max(flying, worker.waves.in_flight)
        assert (worker.client.wave, flying) == (8, 4)


def test_a_plan_is_trained(made: Plan, job_name: str, tmp_path: Path) -> None:
    """It computes what other stages compute."""
    file = tmp_path / "plan.json"
    file.write_text(made.model_dump_json())
    assert Plan.load(file) == made
    assert made.layers == [220, 0, 420, 0, 63]
    first, *_, last = made.stages
    parts = [first.model_copy(update={"end_layer": 3}), last.model_copy(update={"first_layer": 3})]
    other = made.model_copy(update={"stages": parts})  # cut where it would not be without a plan
    trained = []
    for number, how in enumerate(
        ({"plan": file}, {"plan": other}, {"devices": ["host:1", "host:1"], "cuts": [2]})
    ):
        job = f"{job_name}-{number}"
        with (
            daemon(job, sync="wsp:D=1,s_local=3", optimizer={"kind": "add"}),
            VirtualWorker(layers(), optimizer=sgd, job=job, **how) as worker,  # type: ignore[arg-type]
        ):
            for inputs, targets in data():
                worker.train(inputs, targets, CRITERION)
            worker.drain()
            lengths = [len(stage.module) for stage in worker._stages]  # type: ignore[arg-type]
            planned = [one.end_layer - one.first_layer for one in made.stages]
            assert lengths == [planned, [3, 2], [2, 3]][number]
        trained.append([one.detach() for one in worker.model.parameters()])
    for weights in zip(*trained, strict=True):
        assert all(torch.equal(one, weights[0]) for one in weights)


def test_a_plan_for_other_layers_is_refused(made: Plan, job_name: str, tmp_path: Path) -> None:
    """Refuse it before the job is asked: there is no job."""
    dumped = json.loads(made.model_dump_json())
    files = {
        "list": [],
        "twice": dumped | {"stages": dumped["stages"] * 2},
        "later": dumped | {"format": 2},
        "negative": dumped | {"in_flight": 0},
        "more": dumped | {"colour": "red"},
    }
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    other = [nn.Linear(10, 21), nn.Tanh(), nn.Linear(21, 20), nn.Tanh(), nn.Linear(20, 3)]
    wrong: list[tuple[str, list[nn.Module], Any, dict[str, Any]]] = [
        ("the plan is for 5 layers and the model has 4: make it again", layers()[1:], made, {}),
        (r"layer 0 \(Linear\) has 231 parameters, and 220 in the plan", other, made, {}),
        ("plan sets the devices and the cuts", layers(), made, {"devices": ["host"]}),
        ("plan sets the devices and the cuts", layers(), made, {"cuts": [1]}),
    ]
    for name, why in (
        ("none", "No such file or directory; make it with gadei-ps"),
        ("list", "Input should be an object; make it"),
        ("twice", "the stages do not have each layer once, in order; make it"),
        ("later", "format: Input should be 1; make it"),
        ("negative", "in_flight: Input should be greater than or equal to 1; make it"),
        ("more", "colour: there is no such field; make it"),
    ):
        file = tmp_path / f"{name}.json"
        wrong.append((f"plan {file}: {why}", layers(), file, {}))
    for why, given, plan, more in wrong:
        with pytest.raises(UsageError, match=why) as refused:
            VirtualWorker(given, plan=plan, optimizer=sgd, job=job_name, **more)
        assert "\n" not in str(refused.value)


def test_the_learner_leaves_the_cores_to_the_stages(
    made: Plan, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps with what they leave, and has its threads again between the calls."""
    monkeypatch.setattr(stage_devices, "cores", lambda: len(made.stages) + 1)
    seen: set[int] = set()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.add(torch.get_num_threads())
            super().step()

    torch.set_num_threads(3)
    with (
        daemon(job_name, optimizer={"kind": "add"}),
        VirtualWorker(layers(), plan=made, optimizer=lambda p: Noting(p, 0.1), job=job_name) as one,
    ):
        for inputs, targets in data():
            one.train(inputs, targets, CRITERION)
            assert torch.get_num_threads() == 3
    assert seen == {1}
    assert torch.get_num_threads() == 3


def test_what_is_brought_from_another_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with one core has its own memory here, as a GPU has; no device holds all layers."""
    monkeypatch.setattr(stages.StageDevice, "has_own_memory", property(lambda one: one.cores == 1))
    kind = property(lambda one: f"{one.cores} cores")
    monkeypatch.setattr(stages.StageDevice, "kind", kind)
    sample, how = Sample(*next(data()), CRITERION), {"in_flight": 2, "optimizer": sgd, "repeats": 1}
    (whole,) = make(layers(), sample, ["host:2"], **how).stages  # type: ignore[arg-type]
    assert whole.transfer_s == 0
    limits = [whole.memory_bytes - 1] * 2
    both = make(layers(), sample, ["host:1", "host:2"], limits=limits, **how)  # type: ignore[arg-type]
    assert [one.transfer_s > 0 for one in both.stages] == [False, True]
    assert both.pieces[0].times.keys() == {"1 cores", "2 cores"}
    for one in both.stages:
        assert one.total_s == pytest.approx(one.forward_s + one.backward_s + one.transfer_s)
    assert len(both.passes(6)) == 6 * 2 * 2
