"""`gadei-ps set` of one group of parameters, while the job runs."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace

import pytest
import torch
from saved_jobs import again, die, take
from shell import Cli
from support import PATIENCE_S, daemon, eventually, status
from support.grouped import FILE, SAID, TENSORS, Expected, learner
from support.torch_models import one_thread as one_thread

from gadei_ps.commands import change
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer


def test_a_scripts_groups(cli: Cli, job_name: str) -> None:
    """Compare with torch for these numbers; other groups keep theirs. Learners with the old groups
    may attach, and everybody sees the change."""
    with daemon(job_name, optimizer={}, history=True, shards=2), learner(job_name, **SAID) as one:
        expected = Expected()
        expected.push(one)
        result = cli("set", job_name, "groups.1.lr=0.25", "groups.0.betas=0.8,0.9", "lr=0.02")
        assert result.out == (
            f"{job_name}: groups.1.lr 0.5 -> 0.25, groups.0.beta1 0.9 -> 0.8, "
            "groups.0.beta2 0.999 -> 0.9, lr 0.01 -> 0.02, from version 1 on\n"
        )
        first, second, rest = expected.specs
        expected.specs = [
            replace(first, lr=0.02, beta1=0.8, beta2=0.9),
            replace(second, lr=0.25),
            replace(rest, lr=0.02),
        ]
        for _ in range(3):
            expected.push(one)
        groups = status(job_name)["settings"]["groups"]
        assert [(each["lr"], each["beta1"]) for each in groups] == [(0.02, 0.8), (0.25, 0.9)]
        with pytest.warns(UserWarning, match=r"has lr 0\.02 from gadei-ps set, which overrides"):
            other = Client(job_name, tensors=TENSORS, optimizer=SAID)
        expected.push(other)
        other.detach()
        assert cli("set", job_name, "groups.1.lr=0.25").out == f"{job_name}: already so\n"
        rates = itertools.cycle((0.5, 0.75))

        def is_noted() -> bool:
            """The history begins a moment after the model."""
            cli("set", job_name, f"groups.1.lr={next(rates)}")
            return "set groups.1.lr 0.5 -> 0.75" in cli("history", job_name).out

        eventually(is_noted)


def test_the_job_files_groups(cli: Cli, job_name: str) -> None:
    """It outlives the watchdog and the memory, until the job file says another value."""
    service = cli.serve(job_name, FILE)
    with Client(job_name, tensors=TENSORS) as client:
        expected = Expected()
        expected.push(client)
        cli("set", job_name, "groups.1.lr=0.25", "groups.0.weight_decay=0.3")
        first, second, rest = expected.specs
        expected.specs = [replace(first, weight_decay=0.3), replace(second, lr=0.25), rest]
        expected.push(client)
        service.signal(signal.SIGKILL)
        cli.serve(job_name, FILE)
        expected.push(client)
        take(job_name)
    die(job_name)
    again(cli, job_name)
    file = cli.directory / f"{job_name}.toml"
    with Client(job_name) as client:
        expected.push(client)
        file.write_text(FILE.replace("every_s = 0", "every_s = 600"))
        cli("reload", file)
        expected.push(client)
        file.write_text(FILE.replace("lr = 0.5", "lr = 0.75"))
        cli("reload", file)
        expected.specs[1] = replace(second, lr=0.75)
        expected.push(client)


def test_param_groups_and_schedulers_follow(job_name: str) -> None:
    """A rate that the script has set keeps its ratio to the job's."""
    with daemon(job_name, optimizer={}):
        model = torch.nn.Linear(3, 2)
        groups = [{"params": "bias", "lr": 0.5}]
        optimizer = Optimizer(model, job_name, lr=0.1, groups=groups, wait=True)
        optimizer.param_groups[0]["lr"] = 0.25
        change.set_optimizer(job_name, {"groups.0.lr": 5.0}, PATIENCE_S)
        before = model.bias.detach().clone(), model.weight.detach().clone()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert torch.allclose(before[0] - model.bias, torch.full((2,), 2.5))
        assert torch.allclose(before[1] - model.weight, torch.full((2, 3), 0.1))
        assert [one["lr"] for one in optimizer.param_groups] == [2.5, 0.1]
        optimizer.close()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("groups.2.lr=1", "groups.2.lr: the job has groups 0 to 1; gadei-ps status shows them"),
        ("groups.1.lr=fast", "groups.1.lr=fast: give a number"),
        ("groups.1.lr=-1", "optimizer: groups[1]: lr"),
        ("groups.1.betas=1", "groups.1.betas=1: give two numbers, as groups.1.betas=0.9,0.999"),
        (
            "groups.1.momentum=0.5",
            "groups.1.momentum: the job's optimizer is adamw, which has none",
        ),
        ("groups.1.clip_norm=1", "groups.1.clip_norm cannot be set in a running job"),
        ("groups.1.match=w", "groups.1.match cannot be set in a running job"),
        ("groups.01.lr=1", "groups.01.lr cannot be set in a running job"),
    ],
)
def test_what_cannot_be(given: str, why: str, cli: Cli, job_name: str) -> None:
    """Refuse it in one line; nothing changes."""
    with daemon(job_name, optimizer={}), learner(job_name, **SAID) as one:
        expected = Expected()
        expected.push(one)
        assert why in cli("set", job_name, given).error
        expected.push(one)


def test_a_job_without_groups(job_name: str) -> None:
    with (
        daemon(job_name, tensors=[{"name": "w", "shape": [4]}]),
        pytest.raises(UsageError, match=r"groups\.0\.lr: the job has no parameter groups"),
    ):
        change.set_optimizer(job_name, {"groups.0.lr": 1.0}, PATIENCE_S)
