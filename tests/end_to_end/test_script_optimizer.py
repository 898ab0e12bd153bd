"""A learner's script says the job's optimizer; job file and command line count before it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from saved_jobs import again, die, take
from shell import Cli
from support import FORK, daemon, eventually, gone, quick, status
from support import kernel_reference as reference
from support.supervised import Watched

from gadei_ps.errors import UsageError
from gadei_ps.job.faults import Processes
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, slots
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence
from gadei_ps.server import loading
from gadei_ps.server.units import Unit

TENSORS = {"w": np.ones(8, np.float32)}
ADAMW: dict[str, Any] = {"kind": "adamw", "lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
SPEC = OptimizerSpec(Kind.ADAMW, 0.01, beta1=0.8, beta2=0.99, weight_decay=0.1)


class Expected:
    """The weights as torch's optimizer of these settings would move them."""

    def __init__(self, spec: OptimizerSpec = SPEC) -> None:
        self.spec = spec
        self.weights = TENSORS["w"].copy()
        self.steps = 0
        self._state = [np.zeros(8, np.float32) for _ in range(slots(spec.kind))]

    def push(self, client: Client) -> None:
        """One gradient, of the job and of the other; then both are the same."""
        self.steps += 1
        gradient = np.linspace(-self.steps, 1, 8, dtype=np.float32)
        reference.step(self.spec, self.weights, self._state, gradient, self.steps, self.spec.lr)
        client.wait_turn()  # others may have pushed since
        client.push({"w": gradient})
        client.wait_applied()
        np.testing.assert_allclose(client.weights["w"], self.weights, rtol=1e-6)


def learner(job: str, tensors: Mapping[str, Any] | None = TENSORS, **settings: Any) -> Client:
    """Optimizer without settings of the job: the script's are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Client(job, tensors=tensors, optimizer=settings)


def refused(job: str, **settings: Any) -> str:
    with pytest.raises(UsageError) as info:
        learner(job, **settings)
    assert "\n" not in str(info.value)
    return str(info.value)


def sources(job: str) -> dict[str, str]:
    found: dict[str, str] = status(job)["settings"]["from"]
    return found


def test_the_first_script_settles_it(job_name: str) -> None:
    with daemon(job_name, optimizer={}):
        assert (status(job_name)["optimizer"], set(sources(job_name).values())) == (
            "sgd",
            {"default"},
        )
        # Nothing is made of what cannot be; the job still takes what can.
        assert "lr must be at least 0" in refused(job_name, kind="adam", lr=-1)
        with learner(job_name, **ADAMW) as first:
            now = status(job_name)["settings"]
            assert (now["kind"], now["lr"], now["beta1"]) == ("adamw", 0.01, 0.8)
            assert set(now["from"].values()) == {"script"}
            expected = Expected()
            expected.push(first)
            with learner(job_name, **ADAMW) as same, learner(job_name) as silent:
                expected.push(same)
                expected.push(silent)
            for settings in ({**ADAMW, "lr": 0.02}, {"lr": 0.02}):
                assert refused(job_name, **settings).startswith(
                    f"optimizer: job '{job_name}' has lr 0.01 from its first learner, but this "
                    "script has 0.02: use the same in all scripts, or set it in [optimizer] of "
                    "the job file or with --lr"
                )
            assert "has kind adamw from" in refused(job_name, kind="sgd", lr=0.01)
            with pytest.raises(UsageError, match=r"has beta1 0\.8 from .* this script has 0\.9"):
                learner(job_name, None, **{**ADAMW, "betas": (0.9, 0.99)})
            expected.push(first)
            eventually(lambda: len(status(job_name)["learners"]) == 1)


def test_a_first_script_that_says_nothing(job_name: str) -> None:
    """The defaults hold, as ever, and are not changed by a later learner."""
    with daemon(job_name, optimizer={}), learner(job_name) as first:
        Expected(OptimizerSpec(Kind.SGD, 0.01)).push(first)
        assert "has kind sgd by default" in refused(job_name, **ADAMW)


def test_the_job_counts_before_the_script(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 0.5}):
        with pytest.warns(
            UserWarning, match=r"has kind sgd, lr 0\.5 from its job file or"
        ) as warned:
            client = Client(job_name, tensors=TENSORS, optimizer=ADAMW)
        assert len(warned) == 1
        with client:
            Expected(OptimizerSpec(Kind.SGD, 0.5, weight_decay=0.1)).push(client)
        assert sources(job_name) == {"kind": "job", "lr": "job", "weight_decay": "script"}
        monkeypatch.setenv("GADEI_PS_LEARNER", "1")  # the first of a team has said it
        learner(job_name, **ADAMW).detach()


def test_a_model_of_the_job_file(job_name: str) -> None:
    """Create its optimizer before the learners, which may still set its numbers."""
    model = [{"name": "w", "shape": [8]}]
    with daemon(job_name, optimizer={}, tensors=model):
        assert "or start over (--fresh) with adamw in [optimizer]" in refused(job_name, **ADAMW)
        with learner(job_name, kind="sgd", lr=0.25) as client:
            client.push({"w": np.ones(8, np.float32)})
            client.wait_applied()
            np.testing.assert_array_equal(client.weights["w"], -0.25)
            assert "has lr 0.25 from its first learner" in refused(job_name, lr=0.5)


def kill_servers(job: str) -> None:
    """Both at once; returns when others serve."""
    pids = presence.server_pids(job)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a dead one, which is not replaced yet
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: all(map(gone, pids)))
    eventually(lambda: (now := Processes(job).server()) is not None and now not in pids)


def test_the_settings_outlive_every_process(cli: Cli, job_name: str) -> None:
    """Kill servers before and after the model came, the watchdog, and all of them."""
    watchdog = cli.serve(job_name, "standby = true\n[checkpoint]\nevery_s = 0\n")
    eventually(lambda: status(job_name)["standby_pid"])
    kill_servers(job_name)
    expected = Expected()
    with learner(job_name, **ADAMW) as client:
        expected.push(client)
        eventually(lambda: status(job_name)["standby_pid"])
        os.kill(status(job_name)["server_pid"], signal.SIGKILL)
        expected.push(client)
        kill_servers(job_name)
        expected.push(client)
        watchdog.signal(signal.SIGKILL)
        again(cli, job_name)
        assert set(sources(job_name).values()) == {"script"}
        assert "from its first learner" in refused(job_name, kind="adam")
        expected.push(client)
    take(job_name)

    for settings, where in ((ADAMW, "script"), ({}, "checkpoint")):
        die(job_name)
        resumed = again(cli, job_name)
        assert (
            "optimizer adamw, lr 0.01, beta1 0.8, beta2 0.99, weight decay 0.1 (from the chec"
            in (resumed.err)
        )
        assert "has kind adamw from its checkpoint" in refused(job_name, kind="sgd", lr=0.01)
        with learner(job_name, **settings) as client:
            expected.push(client)
            assert set(sources(job_name).values()) == {where}
        take(job_name)
    assert "from its checkpoint, but this script has 0.5" in refused(job_name, lr=0.5)

    # As numbers of the job file may change with a new start, so may the script's.
    die(job_name)
    again(cli, job_name)
    expected.spec = OptimizerSpec(Kind.ADAMW, 0.5, beta1=0.8, beta2=0.99, weight_decay=0.1)
    with learner(job_name, **{**ADAMW, "lr": 0.5}) as client:
        expected.push(client)
    assert "has lr 0.5 from its first learner" in refused(job_name, **ADAMW)


def test_a_changed_job_file(cli: Cli, job_name: str) -> None:
    def reload(text: str) -> Any:
        file.write_text(f"standby = false\n[optimizer]\n{text}\n")
        return cli("reload", file, "--json")

    service = cli.serve(job_name, "standby = false\n[optimizer]\n")
    file = cli.directory / f"{job_name}.toml"
    with learner(job_name, kind="sgd", lr=0.25) as client:
        assert reload("kind = 'sgd'").json["changed"] == {}, "it repeats what is in force"
        assert "optimizer.kind cannot change" in reload("kind = 'adam'").error
        assert reload("kind = 'sgd'\nlr = 0.5").json["changed"] == {"optimizer.lr": 0.5}
        expected = Expected(OptimizerSpec(Kind.SGD, 0.5))
        expected.push(client)
        service.signal(signal.SIGKILL)
        again(cli, job_name)
        expected.push(client)
        assert reload("").json["changed"] == {"optimizer.lr": 0.25}, "the script's again"
        expected.spec = OptimizerSpec(Kind.SGD, 0.25)
        expected.push(client)


def test_a_server_that_compiles_the_optimizer_is_not_hung(job_name: str) -> None:
    """It receives the optimizer with the model, when it has to show that it lives."""
    compiled = FORK.Event()

    def slow(program: str) -> None:
        load = loading.load
        loops = f"move-{int(Kind.ADAMW)}-"

        def wait(units: Sequence[Unit], *how: Any, **more: Any) -> None:
            while any(one.name.startswith(loops) for one in units) and not compiled.is_set():
                time.sleep(0.01)
            load(units, *how, **more)

        loading.load = wait  # in a fork of this process

    with (
        mock.patch.object(quick, "STARTING", [slow]),
        Watched(job_name, tensors=[], optimizer={}, hang_s=0.5) as watched,
        learner(job_name, **ADAMW) as client,
    ):
        watched.look(1.5)
        assert status(job_name)["server_deaths"] == 0
        compiled.set()
        Expected().push(client)


def test_settings_that_are_given_to_a_client(job_name: str) -> None:
    """Pass them as to an Optimizer."""
    with daemon(job_name):
        with pytest.raises(UsageError, match=r"write optimizer={'kind': 'sgd', 'lr': 0.1}"):
            Client(job_name, lr=0.1)
        with pytest.raises(UsageError, match=r"rate=0\.1: a client has no such argument$"):
            Client(job_name, rate=0.1)
