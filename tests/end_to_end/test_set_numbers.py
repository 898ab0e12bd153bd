"""Hyperparameters change while a job runs: for all shards before the same gradient."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from saved_jobs import again, die, take
from shell import Cli
from support import PATIENCE_S, daemon, eventually, fork, live_weights, spin, status
from support.processes import Child
from support.steered import TENSORS, VALUES, all_granted, push_until_told, push_when_told, tell

from gadei_ps.commands import change
from gadei_ps.errors import ControlError, UsageError
from gadei_ps.job import control
from gadei_ps.job.control import SetOptimizer
from gadei_ps.learners.client import Client

ROUNDS = 12


class Rates:
    """Expected weights: each gradient of ones moves them by the learning rate of its version."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.taken: list[tuple[int, float]] = [(0, 1.0)]  # from which version on

    def set(self, rate: float) -> None:
        result = change.set_optimizer(self.job, {"lr": rate}, PATIENCE_S)
        self.note(rate, result["version"])

    def note(self, rate: float, version: int) -> None:
        self.taken.append((version, rate))

    def check(self) -> None:
        """Once nothing is pushed any more."""
        end = int(status(self.job)["version"])
        upto = [version for version, _ in self.taken[1:]] + [end]
        moved = sum(
            rate * (after - version)
            for (version, rate), after in zip(self.taken, upto, strict=True)
        )
        assert upto == sorted(upto)
        np.testing.assert_array_equal(live_weights(self.job)[:VALUES], -moved)


@contextlib.contextmanager
def pushing(job: str, learners: int = 3) -> Iterator[list[Child]]:
    """Run learners that push as fast as they can; at the end all is applied, and they have left."""
    with fork(learners, push_until_told, job) as team:
        all_granted(team)
        yield team
        pushed = sum(tell(child, "stop") for child in team)
        eventually(lambda: not status(job)["learners"])
        end = status(job)
        assert end["gradients_applied"] + end["gradients_dropped"] == pushed
        assert end["gradients_refused"] == 0


def moved(job: str, by: int = 20) -> None:
    """Wait until so many more gradients are applied."""
    before = status(job)["version"]
    eventually(lambda: status(job)["version"] > before + by, what=lambda: status(job))


@pytest.mark.parametrize("sync", ["asp", "ssp:s=2"])
def test_each_gradient_has_the_rate_of_its_version(sync: str, job_name: str) -> None:
    with daemon(job_name, sync=sync, tensors=TENSORS, shards=4) as job:
        rates = Rates(job_name)
        with pushing(job_name):
            for number in range(ROUNDS):
                moved(job_name)
                rates.set(float(number % 4 * 2))
                job.check()
        rates.check()


@pytest.mark.parametrize("sync", ["bsp", "cutoff:c=2"])
def test_each_superstep_has_one_rate(sync: str, job_name: str) -> None:
    with daemon(job_name, sync=sync, tensors=TENSORS, shards=4) as job:
        with pushing(job_name):
            for number in range(ROUNDS):
                moved(job_name)
                assert change.set_optimizer(job_name, {"lr": float(2 + number)}, PATIENCE_S)[
                    "changed"
                ]
                job.check()
        weights = live_weights(job_name)[:VALUES]
        assert np.ptp(weights) == 0
        assert weights[0] < 0


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_servers_die_amid_changes(sync: str, asked: str, job_name: str) -> None:
    """Whenever the server is killed, shards agree on the gradient with which the change begins."""
    chance = random.Random(f"{sync} {asked}")
    with daemon(job_name, sync=sync, tensors=TENSORS, shards=2, standby=True) as job:
        rates = Rates(job_name)
        with pushing(job_name):
            for number in range(ROUNDS):
                eventually(lambda: status(job_name)["standby_pid"], what="a standby")
                before = status(job_name)["server_pid"]
                rate = float(1 + (number + 1) % 3)
                if asked == "after":
                    os.kill(before, signal.SIGKILL)
                control.ask(job_name, SetOptimizer(values={"lr": rate}))
                if asked == "before":
                    spin(chance, 0.001)
                    os.kill(before, signal.SIGKILL)
                eventually(
                    lambda before=before: (
                        status(job_name)["server_pid"] != before
                        and not status(job_name)["settings_pending"]
                    ),
                    what=lambda: status(job_name),
                )
                rates.note(rate, status(job_name)["settings_version"])
                moved(job_name)
                job.check()
        if sync == "asp":
            rates.check()
        assert np.ptp(live_weights(job_name)[:VALUES]) == 0


def test_a_change_amid_a_change_of_the_model(job_name: str) -> None:
    """It does not wait for the barrier, and neither is taken for the other."""
    with (
        daemon(job_name, sync="ssp:9", tensors=TENSORS, shards=2),
        fork(2, push_when_told, job_name) as team,
    ):
        all_granted(team)
        with pytest.raises(ControlError, match="has not reached a barrier"):
            change.set_sync(job_name, "bsp", 0.2)
        assert change.set_optimizer(job_name, {"lr": 4.0}, PATIENCE_S)["version"] == 0
        for child in team:
            child.send(1)
        eventually(lambda: status(job_name)["sync"] == "bsp")
        all_granted(team)
        change.set_optimizer(job_name, {"lr": 8.0}, PATIENCE_S)
        for child in team:
            child.send(1)
        all_granted(team)
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -16)


@pytest.mark.parametrize(
    ("optimizer", "values", "why"),
    [
        ({}, {"kind": "adam"}, "kind cannot change while a job runs: .*start a job of its own"),
        ({}, {"nosuch": 1.0}, "nosuch cannot be set in a running job; these can: lr, "),
        ({}, {"momentum": 0.5}, "momentum: the job's optimizer is sgd, which has none"),
        ({}, {"lr": "high"}, "lr='high': give a finite number"),
        ({}, {"lr": -1.0}, "lr must be at least 0"),
        ({}, {"lr": 1e39}, r"lr must be at most 3\.4e\+38 \(float32\), not 1e\+39"),
        ({}, {"lr": 10**400}, "lr=10+: give a finite number"),
        ({}, {"lr": 1e-50}, r"lr must be 0, or at least 1\.4e-45 \(float32\)"),
        ({}, {"lr": 0.5, "weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({}, {"schedule": "fast"}, "schedule='fast': give constant, step or cosine"),
        ({}, {"schedule": "step"}, "step_size must be at least 1 for STEP"),
        ({}, {"warmup_steps": 1.5}, "warmup_steps=1.5: give a whole number"),
        ({}, {"staleness_aware": 3}, "staleness_aware=3: give true or false"),
        ({"kind": "adam"}, {"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"kind": "nesterov"}, {"momentum": 0.0}, "momentum must be above 0"),
    ],
)
def test_what_cannot_be_changes_nothing(
    optimizer: dict[str, Any], values: dict[str, Any], why: str, job_name: str
) -> None:
    with daemon(job_name, tensors=TENSORS, optimizer={"lr": 1.0} | optimizer):
        before = status(job_name)["settings"]
        with pytest.raises((UsageError, ControlError), match=why) as raised:
            change.set_optimizer(job_name, values, PATIENCE_S)
        assert "\n" not in str(raised.value)
        assert status(job_name)["settings"] == before
        assert not status(job_name)["settings_pending"]


def test_learners_in_any_framework_see_it(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, optimizer={"kind": "sgd", "lr": 1.0}),
        Client(job_name) as client,
    ):
        ones, zeros = np.ones(VALUES, np.float32), np.zeros(VALUES, np.float32)
        client.push({"w": ones})
        client.wait_applied()
        asked = {"lr": 0.5, "weight_decay": 1.0}
        result = change.set_optimizer(job_name, asked, PATIENCE_S)
        assert result["changed"] == {"lr": [1.0, 0.5], "weight_decay": [0.0, 1.0]}
        assert result["version"] == 1
        assert client.hyper_changes == 1
        client.push({"w": zeros})  # a row of zeros moves the weights now
        client.wait_applied()
        np.testing.assert_array_equal(client.pull()[:VALUES], -0.5)
        assert change.set_optimizer(job_name, asked, PATIENCE_S)["changed"] == {}
        assert status(job_name)["settings"]["from"]["lr"] == "set"


def test_clipping_staleness_and_schedules(job_name: str) -> None:
    with daemon(job_name, tensors=[{"name": "w", "shape": [4]}]), Client(job_name) as client:

        def push() -> float:
            before = float(client.pull()[0])
            client.push({"w": np.full(4, 2.0, np.float32)})
            client.wait_applied()
            return before - float(client.pull()[0])

        assert push() == 2.0
        change.set_optimizer(job_name, {"clip_norm": 2.0}, PATIENCE_S)
        assert push() == pytest.approx(1.0)
        asked = {"clip_norm": 0.0, "schedule": "step", "step_size": 3, "step_gamma": 0.5}
        change.set_optimizer(job_name, asked, PATIENCE_S)
        # The schedule counts gradients from the job's first one on.
        assert [push(), push()] == pytest.approx([2.0, 1.0])
        change.set_optimizer(
            job_name, {"schedule": "constant", "staleness_aware": True}, PATIENCE_S
        )
        settings = status(job_name)["settings"]
        assert (settings["schedule"], settings["staleness_aware"]) == ("constant", True)


FILE = """\
standby = false
[optimizer]
kind = "sgd"
lr = 1.0
[checkpoint]
every_s = 0
[[tensors]]
name = "w"
shape = [8]
"""


def _push(client: Client) -> float:
    before = float(client.pull()[0])
    client.push({"w": np.ones(8, np.float32)})
    client.wait_applied()
    return before - float(client.pull()[0])


def test_it_outlives_the_watchdog_and_the_memory(cli: Cli, job_name: str) -> None:
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        assert _push(client) == 1.0
        assert "lr 1 -> 0.5, from version 1 on" in cli("set", job_name, "lr=0.5").out
        assert _push(client) == 0.5
        service.signal(signal.SIGKILL)
        service = cli.serve(job_name, FILE)
        assert _push(client) == 0.5
        assert cli("set", job_name, "lr=0.25", "--json").json["version"] == 3
        take(job_name)
    die(job_name)
    again(cli, job_name)
    with Client(job_name) as client:
        assert _push(client) == 0.25
        assert "lr 0.25" in (output := cli("status", job_name).out)
        assert "from gadei-ps set" in output
        # The job file counts again once it says another value.
        file = cli.directory / f"{job_name}.toml"
        file.write_text(FILE.replace("every_s = 0", "every_s = 600"))
        cli("reload", file)
        assert _push(client) == 0.25
        file.write_text(FILE.replace("lr = 1.0", "lr = 2.0"))
        cli("reload", file)
        assert _push(client) == 2.0
        take(job_name)
    die(job_name)
    again(cli, job_name)
    with Client(job_name) as client:
        assert _push(client) == 2.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["lr"], "cannot read 'lr'; write FIELD=VALUE"),
        (["lr=fast"], "lr=fast: give a number"),
        (["lr=1", "lr=2"], "lr is given twice"),
        (["betas=0.9"], "betas=0.9: give two numbers"),
        (["total_steps=2.5"], "total_steps=2.5: give a whole number"),
        (["staleness_aware=perhaps"], "staleness_aware=perhaps: give true or false"),
        (["nosuch=1"], "nosuch cannot be set in a running job"),
        (["kind=adam"], "kind cannot change while a job runs"),
        (["sync=bsp", "lr=1"], "give sync=MODEL alone"),
    ],
)
def test_command_lines_that_are_wrong(given: list[str], why: str, cli: Cli, job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS):
        assert why in cli("set", job_name, *given).error
