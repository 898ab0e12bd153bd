"""Damaged checkpoints, restoring a version, and exporting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import support
from safetensors.numpy import load_file
from saved_jobs import (
    ADAM,
    ALONE,
    COUNTED,
    MODEL,
    SGD,
    VALUES,
    again,
    count,
    die,
    refused,
    stop,
    take,
    there,
    truncate,
    weights,
    write,
)
from shell import Cli, is_running

from gadei_ps.commands import saved
from gadei_ps.errors import CheckpointError
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def dead(cli: Cli, job_name: str) -> str:
    """A dead job with checkpoints of versions 1, 2 and 3."""
    write(cli, job_name, COUNTED, range(1, 4))
    return job_name


def test_damaged_ones_are_named_and_passed_over(dead: str, cli: Cli) -> None:
    newest, middle, oldest = there(dead, cli)
    truncate(newest)
    daemon = again(cli, dead)
    assert str(newest / "weights.safetensors") in daemon.err
    assert str(middle) in daemon.err
    np.testing.assert_array_equal(weights(dead), -2)
    with Client(dead) as client:
        count(client, 5)
        np.testing.assert_array_equal(weights(dead), -7)
    die(dead)

    (middle / "manifest.json").write_bytes(b"{}")
    (oldest / "SHA256SUMS").unlink()
    failed = cli("serve", f"{dead}.toml")
    assert failed.code == 2
    for path in (newest, middle, oldest):
        assert f"{path}/" in failed.err, "each is named"
    last = failed.err.splitlines()[-1]
    assert "none of 3 checkpoints" in last
    assert "serve --fresh" in last
    assert not support.segments(dead)

    again(cli, dead, "--fresh")
    assert support.status(dead)["version"] == 0
    with Client(dead) as client:
        count(client, 1)
    take(dead)
    die(dead)
    again(cli, dead)
    assert support.status(dead)["version"] == 1, "the damaged ones of before are out of the way"


def test_a_directory_that_is_not_one(cli: Cli, job_name: str) -> None:
    (cli.directory / "file").write_text("")
    text = COUNTED + "[checkpoint]\nevery_s = 0\ndirectory = 'file/below'\n"
    (cli.directory / f"{job_name}.toml").write_text(text)
    assert "file/below: cannot be written" in refused(cli, job_name)


@pytest.mark.parametrize("before", ["sgd", "adam"])
def test_another_optimizer(before: str, cli: Cli, job_name: str) -> None:
    texts = {"sgd": ALONE + SGD + MODEL, "adam": ALONE + ADAM + MODEL}
    write(cli, job_name, texts[before], range(1, 2), 2 * (before == "adam"))
    file = cli.directory / f"{job_name}.toml"
    after = "adam" if before == "sgd" else "sgd"
    file.write_text(texts[after])
    message = refused(cli, job_name)
    assert f"the checkpoint is of optimizer {before}, the job of {after}: " in message
    assert "--fresh" in message
    # Only the numbers of an optimizer may change.
    file.write_text(texts[before].replace("lr = ", "weight_decay = 0.1\nlr = 1"))
    again(cli, job_name)
    assert support.status(job_name)["version"] == 1


def test_another_model(dead: str, cli: Cli) -> None:
    (cli.directory / f"{dead}.toml").write_text(COUNTED.replace("'w'", "'v'"))
    assert "'v'" in refused(cli, dead)


# -- restore ----------------------------------------------------------------------------------


def restored(cli: Cli, job: str, *arguments: object) -> int:
    """Restore, serve and stop a job. Return the version that it had."""
    daemon = cli.start("restore", *arguments)
    support.eventually(
        lambda: is_running(job) or daemon.process.poll() is not None, what=lambda: daemon.err
    )
    assert daemon.process.poll() is None, daemon.err
    now = support.status(job)
    np.testing.assert_array_equal(weights(job), -now["version"])
    stop(job)
    assert daemon.wait().code == 0
    return int(now["version"])


def test_restore(dead: str, cli: Cli) -> None:
    oldest = there(dead, cli)[-1]
    assert restored(cli, dead, f"{dead}.toml", "--version", 1) == 1
    assert [path.name for path in there(dead, cli)] == [
        f"checkpoint-{version:012}" for version in (3, 2, 1)
    ]
    assert restored(cli, dead, dead) == 3
    assert restored(cli, dead, oldest) == 1
    assert [path.name for path in there(dead, cli)] == ["checkpoint-000000000001.2"]


def test_a_checkpoint_names_no_program_and_no_path(cli: Cli, job_name: str) -> None:
    """Only a job file does. Without one there are no learners, and checkpoints lie beside it."""
    ran, elsewhere, copied = (cli.directory / name for name in ("ran", "elsewhere", "copied"))
    learners = f"[learners]\ncommand = ['touch', '{ran}']\n"
    text = f"{COUNTED}{learners}[checkpoint]\ndirectory = '{elsewhere}'\n"
    write(cli, job_name, text, range(1, 3))
    path = elsewhere / "checkpoint-000000000002"
    shutil.copytree(path, copied / path.name)
    before = sorted(elsewhere.iterdir())

    daemon = cli.start("restore", copied)
    support.eventually(lambda: is_running(job_name), what=lambda: daemon.err)
    message = f"the job starts no learners, and writes its checkpoints to {copied}"
    support.eventually(lambda: message in daemon.err, what=lambda: daemon.err)
    assert (weights(job_name) == -2).all()
    assert Path(take(job_name)["path"]).parent == copied
    stop(job_name)
    assert daemon.wait().code == 0
    assert not ran.exists()
    assert sorted(elsewhere.iterdir()) == before

    (newest,) = copied.glob("checkpoint-*")
    daemon = cli.start("restore", newest, "--job-file", f"{job_name}.toml")
    support.eventually(ran.exists, what=lambda: daemon.err)
    support.eventually(lambda: is_running(job_name), what=lambda: daemon.err)
    assert "without a job file" not in daemon.err
    stop(job_name)
    assert daemon.wait().code == 0
    for arguments, why in (
        ((f"{job_name}.toml", "--job-file", f"{job_name}.toml"), "is a job file already"),
        ((copied, "--job-file", "none.toml"), "none.toml"),
    ):
        assert why in cli("restore", *arguments).error


def test_a_checkpoint_of_a_job_that_is_kept(dead: str, cli: Cli) -> None:
    """Use its name as the checkpoint's word: the memory of the user's own job is not dropped."""
    again(cli, dead)
    support.kill_all(dead)
    message = cli("restore", cli.directory / "state" / dead).error
    assert f"job '{dead}', whose memory is still there" in message
    assert support.segments(dead)
    assert restored(cli, dead, dead, "--version", 1) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's files")
def test_a_directory_of_another_user(dead: str, cli: Cli) -> None:
    directory = cli.directory / "state" / dead
    os.chown(directory, 65534, 65534)
    message = cli("restore", directory).error
    assert f"{directory}: " in message
    assert "belongs to user nobody: copy the checkpoint" in message
    assert not support.segments(dead)


def test_restore_goes_back(dead: str, cli: Cli) -> None:
    """Check that an abandoned later version is not used as the newest after the next checkpoint."""
    cli.start("restore", dead, "--version", 1)
    support.eventually(lambda: is_running(dead))
    assert "running already" in cli("restore", dead).error
    with Client(dead) as client:
        count(client, 1)
        np.testing.assert_array_equal(weights(dead), -2)
    assert take(dead)["version"] == 2
    die(dead)
    again(cli, dead)
    assert support.status(dead)["version"] == 2


def test_what_cannot_be_restored(dead: str, cli: Cli) -> None:
    message = cli("restore", dead, "--version", 9).error
    assert "no checkpoint of version 9; there are: 3, 2, 1" in message
    assert "no such directory" in cli("restore", "no-such-job").error
    assert "--version" in cli("restore", there(dead, cli)[0], "--version", 1).error
    truncate(there(dead, cli)[0])
    assert "weights.safetensors" in cli("restore", there(dead, cli)[0]).error
    assert not support.segments(dead)


# -- export -----------------------------------------------------------------------------------


def test_export(cli: Cli, job_name: str) -> None:
    """The weights of a live job and of a checkpoint are the same in every format."""
    import torch

    text = ALONE + SGD + MODEL + "[[tensors]]\nname = 'm.b'\nshape = [2, 3]\nrole = 'buffer'\n"
    cli.serve(job_name, text)
    random = np.random.default_rng(1)
    with Client(job_name) as client:
        client.assign({"m.b": np.arange(6).reshape(2, 3)})
        client.push({"w": random.standard_normal(VALUES)})
        client.wait_applied()
        expected = {name: values.copy() for name, values in client.weights.items()}
        live = [cli("export", job_name, f"live{suffix}", "--json").json for suffix in SUFFIXES]
        path = Path(take(job_name)["path"])
        client.push({"w": random.standard_normal(VALUES)})
        client.wait_applied()
    assert [one["version"] for one in live] == [2, 2, 2]
    assert (live[0]["job"], live[0]["tensors"], live[0]["values"]) == (job_name, 2, VALUES + 6)
    stop(job_name)
    output = cli("export", path, "one.npz").out
    assert output.startswith("2 tensors of version 2 written: one.npz")
    (cli.directory / "one.npz").unlink()
    for suffix in SUFFIXES:
        saved.export(str(path), cli.directory / f"one{suffix}")
        saved.export(job_name, cli.directory / f"name{suffix}", 2)
        saved.export(str(path.parent), cli.directory / f"directory{suffix}")
    for name in ("live", "one", "name", "directory"):
        file = cli.directory / name
        for loaded in (
            load_file(f"{file}.safetensors"),
            np.load(f"{file}.npz"),
            {key: value.numpy() for key, value in torch.load(f"{file}.pt").items()},
        ):
            assert set(loaded.keys()) == set(expected)
            for key, values in expected.items():
                np.testing.assert_array_equal(loaded[key], values, strict=True)
    assert "ends in .safetensors" in cli("export", path, "out.onnx").error
    assert "no such directory" in cli("export", "no-such-job", "out.npz").error
    with pytest.raises(CheckpointError, match="no checkpoint of version 7; there are: 2"):
        saved.export(job_name, cli.directory / "out.npz", 7)


def test_export_tells_where_from(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, COUNTED)
    with Client(job_name) as client:
        count(client, 3)
        take(job_name)
        count(client, 2)
    support.kill_all(job_name)
    dead = cli("export", job_name, "dead.npz", "--json").json
    assert (dead["version"], dead["from"], dead["problems"]) == (5, f"memory of job {job_name}", [])
    again(cli, job_name)
    for name in support.segments(job_name):
        segment.unlink(name)
    shown = cli("export", job_name, "lost.npz")
    (path,) = there(job_name, cli)
    assert f"of version 3 written: lost.npz (from {path})" in shown.out
    assert "the weights of its newest checkpoint, not its current ones" in shown.err


SUFFIXES = (".safetensors", ".npz", ".pt")


def test_without_a_model(cli: Cli, job_name: str) -> None:
    daemon = cli.serve(job_name, ALONE + "[checkpoint]\nevery_s = 0.1\n")
    for command in (("checkpoint", job_name), ("export", job_name, "out.npz")):
        assert "no model yet" in cli(*command).error
    cli("stop", job_name)
    assert daemon.wait().code == 0
    assert not there(job_name, cli)
    assert "no job" in cli("checkpoint", job_name).error


def test_a_directory_here_is_no_job(cli: Cli) -> None:
    """Use a name without a slash, as that of a job."""
    (cli.directory / "kept").mkdir()
    failed = cli("export", "kept", "out.npz")
    assert failed.code == 2 and failed.error == "kept: there is no checkpoint in this directory"
