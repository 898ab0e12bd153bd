"""Groups of parameters: set by scripts or the job file, kept, shown, and sent by all alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from saved_jobs import again, die, take
from shell import Cli
from support import daemon, eventually, status
from support.grouped import BIASES, FILE, GROUP, LAST, SAID, TENSORS, Expected, learner

from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec
from gadei_ps.learners.client import Client, Rows
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Tensor


def refused(job: str, tensors: Mapping[str, Any] | None = TENSORS, **settings: Any) -> str:
    with pytest.raises(UsageError) as info:
        learner(job, tensors, **settings)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_a_scripts_groups(job_name: str) -> None:
    with daemon(job_name, optimizer={}, shards=2):
        assert "groups[1]: 'nothing' names no parameter that is in no group before it" in refused(
            job_name, **{**SAID, "groups": [BIASES, {"params": ["nothing"]}]}
        )
        assert "groups name parameters: give tensors" in refused(job_name, None, **SAID)
        with learner(job_name, **SAID) as first:
            assert first.hyper.shape[0] == 3
            assert {one.name: one.group for one in first.model.tensors} == GROUP
            rows = status(job_name)["settings"]["groups"]
            assert [(one["tensors"], one["lr"], one["weight_decay"]) for one in rows] == [
                (2, 0.01, 0.0),
                (1, 0.5, 0.1),
            ]
            expected = Expected()
            expected.push(first)
            np.testing.assert_array_equal(first.flat[: first.model.elements] == 0, padding(first))
            with learner(job_name, **SAID) as same, learner(job_name) as silent:
                expected.push(same, (0.5, 2.0, 0.0))
                expected.push(silent)
            for groups, why in (
                (
                    [{**BIASES, "weight_decay": 0.2}, LAST],
                    "has weight_decay 0 in parameter group 0",
                ),
                ([BIASES, {**LAST, "lr": 0.2}], "lr 0.5 in parameter group 1 from its first lear"),
                ([BIASES], "has 2 parameter groups from its first learner, but this script has 1"),
                ([], "but this script has no parameter groups: use the same groups in all scr"),
                (
                    [{**BIASES, "params": "first.bias"}, LAST],
                    "has parameter 'last.bias' in parameter group 0, but this script has it in "
                    "parameter group 1: use the same groups",
                ),
            ):
                assert why in refused(job_name, **{**SAID, "groups": groups})
            assert "script has no parameter groups" in refused(job_name, **{**SAID, "groups": None})
            learner(job_name, lr=0.01).detach()  # says nothing of groups
            expected.push(first)


def padding(client: Client) -> np.ndarray:
    """Return which values of the model belong to no tensor."""
    ones = client.model.flatten({name: np.ones_like(value) for name, value in TENSORS.items()})
    return ones == 0


def test_rows_move_with_their_group(job_name: str) -> None:
    groups = [{"params": "*.weight", "lr": 0.25}]
    with (
        daemon(job_name, optimizer={}),
        learner(job_name, kind="sgd", lr=1.0, groups=groups) as one,
    ):
        one.push({"last.weight": Rows([3, 69], np.ones((2, 2))), "last.bias": np.ones(7)})
        one.wait_applied()
        wanted = {name: value.copy() for name, value in TENSORS.items()}
        wanted["last.weight"][[3, 69]] -= 0.25
        wanted["last.bias"] -= 1
        for name, value in wanted.items():
            np.testing.assert_array_equal(one.weights[name], value)


def test_the_job_files_groups_count(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, FILE)
    with pytest.warns(UserWarning, match="has its parameter groups from its job file, which"):
        client = Client(job_name, tensors=TENSORS, optimizer={**SAID, "groups": [LAST]})
    with client, learner(job_name, **{**SAID, "groups": None}) as other:
        expected = Expected()
        expected.push(client)
        expected.push(other)
        shown = cli("status", job_name).out
        assert "group 0 (*.bias, 2 tensors): weight decay 0" in " ".join(shown.split())
        file = cli.directory / f"{job_name}.toml"
        file.write_text(FILE.replace("lr = 0.5", "lr = 0.25"))
        assert cli("reload", file, "--json").json["changed"] == {"optimizer.groups[1].lr": 0.25}
        eventually(lambda: not status(job_name)["settings_pending"])
        expected.specs[1] = OptimizerSpec(Kind.ADAMW, 0.25, weight_decay=0.1)
        expected.push(client)
        # What a group does not say follows what is said for all.
        cli("set", job_name, "lr=0.125", "weight_decay=0.5")
        expected.specs = [
            OptimizerSpec(Kind.ADAMW, 0.125, weight_decay=0.0),
            OptimizerSpec(Kind.ADAMW, 0.25, weight_decay=0.5),
            OptimizerSpec(Kind.ADAMW, 0.125, weight_decay=0.5),
        ]
        expected.push(client)
        assert [row[1] for row in client.hyper] == [0.125, 0.25, 0.125]
        file.write_text(FILE.replace("*.bias", "first.bias"))
        assert "optimizer.groups[0].match cannot change" in cli("reload", file, "--json").error


def test_a_pattern_that_matches_nothing_is_told(cli: Cli, job_name: str) -> None:
    service = cli.serve(job_name, FILE.replace("*.bias", "*.biases"))
    with pytest.warns(UserWarning, match=r"\*\.biases.*no parameter of the model that is in no gr"):
        client = Client(job_name, tensors=TENSORS)
    with client:
        Expected(dict.fromkeys(TENSORS, 2) | {"last.weight": 1, "last.bias": 1}).push(client)
        eventually(lambda: "'*.biases'" in service.err)


@pytest.mark.parametrize("says", ["script", "file"])
def test_groups_outlive_every_process(says: str, cli: Cli, job_name: str) -> None:
    """Kill servers, the watchdog, and all; later their numbers may change, not their members."""
    text = FILE if says == "file" else "standby = false\n[checkpoint]\nevery_s = 0\n"
    settings = SAID if says == "script" else {}
    watchdog = cli.serve(job_name, text.replace("standby = false", "standby = true"))
    expected = Expected()
    with learner(job_name, **settings) as client:
        expected.push(client)
        eventually(lambda: status(job_name)["standby_pid"])
        os.kill(status(job_name)["server_pid"], signal.SIGKILL)
        expected.push(client)
        watchdog.signal(signal.SIGKILL)
        again(cli, job_name)
        expected.push(client)
        if says == "script":
            assert "from its first learner" in refused(job_name, **{**SAID, "groups": []})
    take(job_name)
    die(job_name)
    resumed = again(cli, job_name)
    assert "2 tensors): weight decay 0; group 1 (" in resumed.err
    with learner(job_name) as client:
        expected.push(client)
        if says == "script":
            assert "from its checkpoint" in refused(job_name, **{**SAID, "groups": []})
    take(job_name)
    die(job_name)
    again(cli, job_name)
    if says == "script":
        with learner(job_name, **{**SAID, "groups": [BIASES, {**LAST, "lr": 0.125}]}) as client:
            expected.specs[1] = OptimizerSpec(Kind.ADAMW, 0.125, weight_decay=0.1)
            expected.push(client)


def test_a_job_file_groups_what_a_checkpoint_has(cli: Cli, job_name: str) -> None:
    """The state goes with its tensor, wherever that lies."""
    cli.serve(job_name, FILE)
    expected = Expected()
    with learner(job_name) as client:
        expected.push(client)
    take(job_name)
    die(job_name)
    file = cli.directory / f"{job_name}.toml"
    file.write_text(FILE.replace('"*.bias"', '"last.bias"'))
    again(cli, job_name)
    expected.group = GROUP | {"first.bias": 2}
    with learner(job_name) as client:
        assert {one.name: one.group for one in client.model.tensors} == expected.group
        expected.push(client)


def test_a_model_of_the_job_file(cli: Cli, job_name: str) -> None:
    """Set its groups in the job file."""
    model = "".join(
        f'[[tensors]]\nname = "{name}"\nshape = {list(value.shape)}\n'
        for name, value in TENSORS.items()
    )
    cli.serve(job_name, model)
    assert "has no parameter groups, but this script has 1 parameter group: set them in" in refused(
        job_name, kind="sgd", lr=0.01, groups=[{"params": "*.bias", "lr": 0.5}]
    )
    cli("stop", job_name)
    cli.serve(job_name, FILE + model)
    with learner(job_name) as client:
        assert {one.name: one.group for one in client.model.tensors} == GROUP
        assert all(
            isinstance(one, Tensor) and one.role is Role.PARAMETER for one in client.model.tensors
        )
