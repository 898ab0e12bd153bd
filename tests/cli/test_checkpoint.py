"""Checkpoints as their users have them: made, kept, gone on from, exported, restored.

What a job goes on from after everything has died is looked at in the weights: integer gradients
under SGD with a rate of 1 can be counted in them.
"""

from __future__ import annotations

import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from safetensors.numpy import load_file
from shell import Cli, Running, is_running

from gadei_ps.commands import jobs, saved
from gadei_ps.job import config
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot

pytestmark = pytest.mark.usefixtures("compiled")

VALUES = 1000
ALONE = "standby = false\n"  # a second server would only make the start longer
SGD = "[optimizer]\nkind = 'sgd'\nlr = 1.0\n"
ADAM = "[optimizer]\nkind = 'adam'\nlr = 0.1\n"
MODEL = f"[[tensors]]\nname = 'w'\nshape = [{VALUES}]\n"
COUNTED = ALONE + "shards = 3\n" + SGD + MODEL


def count(client: Client, gradients: int) -> None:
    """So much less in every weight."""
    for _ in range(gradients):
        client.push({"w": np.ones(VALUES, np.float32)}, samples=1)
    client.wait_applied()


def weights(job: str) -> np.ndarray:
    return support.live_weights(job)[:VALUES]


def there(job: str, cli: Cli) -> list[Path]:
    """Its checkpoints, newest first."""
    return [one.path for one in checkpoint.found(cli.directory / "state" / job)]


def die(job: str) -> None:
    """As the machine does when its power fails: no process and no memory is left."""
    support.kill_all(job)
    for name in support.segments(job):
        segment.unlink(name)


def again(cli: Cli, job: str, *options: str) -> Running:
    """Serves the job file once more."""
    daemon = cli.start("serve", f"{job}.toml", *options)
    support.eventually(
        lambda: is_running(job) or daemon.process.poll() is not None, what=lambda: daemon.err
    )
    assert daemon.process.poll() is None, daemon.err
    return daemon


def refused(cli: Cli, job: str) -> str:
    """Why the job file cannot be served now; nothing of the job is left."""
    done = cli("serve", f"{job}.toml")
    assert done.code == 1, done
    assert not support.segments(job)
    line = done.err.splitlines()[-1]
    assert line.startswith("gadei-ps: ")
    return line


def take(job: str) -> dict[str, Any]:
    """As the command `checkpoint` asks for it."""
    return jobs.checkpoint(job)


def stop(job: str) -> dict[str, Any]:
    return jobs.stop(job, drain=False, timeout_s=5)


def truncate(path: Path) -> None:
    file = path / "weights.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


# -- when they are made -----------------------------------------------------------------------


def test_by_hand(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, COUNTED)
    with Client(job_name) as client:
        count(client, 3)
        made = cli("checkpoint", job_name, "--json").json
        count(client, 2)
    assert (made["version"], Path(made["path"]).parent) == (3, config.state_directory() / job_name)
    assert made["bytes"] > 4 * VALUES
    assert 0 < made["pause_ms"] < 1000
    assert made["problem"] is None
    shown = cli("checkpoint", job_name).out
    assert shown.startswith("checkpoint of version 5: ")
    now = cli("status", job_name, "--json").json
    assert (now["checkpoints"], now["checkpoint_version"], now["checkpoint_failures"]) == (2, 5, 0)
    assert now["last_checkpoint"]["version"] == 5
    one = checkpoint.read(Path(made["path"]))
    np.testing.assert_array_equal(one.model.views(one.weights)["w"], -3)
    assert (one.version, one.steps, one.counts["applied"], one.counts["samples"]) == (3, 3, 3, 3)
    assert one.config["name"] == one.job == job_name
    stop(job_name)
    assert len(there(job_name, cli)) == 2, "without [checkpoint] none is made on stop"


@pytest.mark.parametrize("when", ["every_s = 0.2", "every_s = 0\nevery_gradients = 10"])
def test_by_themselves(when: str, cli: Cli, job_name: str) -> None:
    cli.serve(job_name, f"{COUNTED}[checkpoint]\non_stop = false\nkeep = 1\n{when}\n")
    with Client(job_name) as client:
        for number in (10, 20):
            count(client, 10)
            support.eventually(lambda n=number: support.status(job_name)["checkpoint_version"] == n)
        count(client, 5)
    end = stop(job_name)
    (path,) = there(job_name, cli)
    one = checkpoint.read(path)
    if "gradients" in when:
        assert (end["checkpoints"], one.version) == (2, 20)
    np.testing.assert_array_equal(one.model.views(one.weights)["w"], -one.version)
    assert {path.name for path in path.parent.iterdir()} == {path.name, ".lock"}


def test_on_stop(cli: Cli, job_name: str) -> None:
    """Also of what was pushed a moment before; the next start goes on from there."""
    text = COUNTED + "[checkpoint]\nevery_s = 0\ndirectory = 'here'\n"
    daemon = cli.serve(job_name, text)
    with Client(job_name) as client:
        count(client, 7)
    assert stop(job_name)["gradients_applied"] == 7
    assert daemon.wait().code == 0
    here = cli.directory / "here"
    assert [one.version for one in checkpoint.found(here)] == [7]
    daemon = again(cli, job_name)
    assert "going on from a checkpoint" in daemon.err
    now = support.status(job_name)
    assert (now["version"], now["gradients_applied"], now["samples"]) == (7, 7, 7)
    np.testing.assert_array_equal(weights(job_name), -7)
    with Client(job_name) as client:
        count(client, 2)
    daemon.process.terminate()
    assert daemon.wait().code == 0, "SIGTERM is a stop too"
    assert [one.version for one in checkpoint.found(here)] == [9, 7]


# -- going on after everything has died -------------------------------------------------------


def test_as_if_nothing_had_happened(cli: Cli, job_name: str) -> None:
    """Adam's moments and step count come back: bit for bit what an undisturbed job computes."""
    text = ALONE + "shards = 2\n" + ADAM + MODEL
    random = np.random.default_rng(3)
    gradients = random.standard_normal((12, VALUES)).astype(np.float32)
    undisturbed = f"{job_name}-undisturbed"
    cli.serve(undisturbed, text)
    with Client(undisturbed) as client:
        for gradient in gradients:
            client.push({"w": gradient})
        client.wait_applied()
        expected = weights(undisturbed).copy()
    cli.serve(job_name, text)
    client = Client(job_name)
    for gradient in gradients[:5]:
        client.push({"w": gradient})
    client.wait_applied()
    assert take(job_name)["version"] == 5
    count(client, 4)  # lost
    die(job_name)
    client.detach()
    again(cli, job_name)
    assert support.status(job_name)["version"] == 5
    with Client(job_name) as client:
        for gradient in gradients[5:]:
            client.push({"w": gradient})
        client.wait_applied()
        np.testing.assert_array_equal(weights(job_name), expected)
    assert support.status(job_name)["gradients_applied"] == 12


SAMPLES, EPOCHS = 40, 3


def answer(client: Client, most: int | None = None) -> int:
    """Answers batches: each has a weight of its own, which it makes 1 more. How many it did."""
    done = 0
    for batch in client.batches(samples=SAMPLES, batch_size=1, epochs=EPOCHS, seed=5):
        gradient = np.zeros(SAMPLES * EPOCHS, np.float32)
        gradient[batch.epoch * SAMPLES + int(batch.indices[0])] = -1.0
        client.push({"w": gradient}, samples=1)
        done += 1
        if done == most:
            client.wait_applied()
            break
    return done


def test_the_work_ledger_goes_on(cli: Cli, job_name: str) -> None:
    """In the middle of an epoch, with batches in hand and handed back."""
    cli.serve(job_name, COUNTED.replace(f"[{VALUES}]", f"[{SAMPLES * EPOCHS}]"))
    idle, client = Client(job_name), Client(job_name)
    idle.set_work(SAMPLES, 1, EPOCHS, 5)
    idle.take_batch()
    with Client(job_name) as left:
        left.take_batch()
    answer(client, 55)
    version = take(job_name)["version"]
    answer(client, 10)  # lost
    die(job_name)
    idle.detach()
    client.detach()
    again(cli, job_name)
    assert support.status(job_name)["version"] == version
    with Client(job_name) as client:
        assert answer(client) == SAMPLES * EPOCHS - version
        client.wait_applied()
        np.testing.assert_array_equal(weights(job_name)[: SAMPLES * EPOCHS], 1)
    now = support.status(job_name)
    assert (now["work"]["state"], now["work"]["epochs_done"]) == ("done", EPOCHS)
    assert now["gradients_applied"] == now["samples"] == SAMPLES * EPOCHS
    # What is done stays done.
    take(job_name)
    die(job_name)
    again(cli, job_name)
    with Client(job_name) as client:
        assert answer(client) == 0


def write(cli: Cli, job: str, text: str, versions: range, slots: int = 0) -> None:
    """A job that is no more: its file and its checkpoints."""
    file = cli.directory / f"{job}.toml"
    file.write_text(text)
    cli.made(job)
    wanted = config.load(file)
    model = place([Tensor("w", (VALUES,))])
    for version in versions:
        one = Snapshot(
            job=job,
            config=wanted.model_dump(mode="json"),
            model=model,
            weights=np.full(model.elements, -version, np.float32),
            slots=(np.zeros(model.elements, np.float32),) * slots,
            version=version,
            steps=version,
            supersteps=0,
            work=dict.fromkeys(("batches", "epochs", "seed", "next", "epochs_done", "state"), 0),
            requeue=np.empty(0, np.uint64),
            counts=dict.fromkeys(("dropped", "refused", "requeued_total"), 0)
            | {"applied": version, "samples": version},
            clocks={},
        )
        checkpoint.write(wanted.checkpoint_directory(), one, len(versions))


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
    assert failed.code == 1
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
    assert "file/below: cannot be read" in refused(cli, job_name)


@pytest.mark.parametrize("before", ["sgd", "adam"])
def test_another_optimizer(before: str, cli: Cli, job_name: str) -> None:
    texts = {"sgd": ALONE + SGD + MODEL, "adam": ALONE + ADAM + MODEL}
    write(cli, job_name, texts[before], range(1, 2), 2 * (before == "adam"))
    file = cli.directory / f"{job_name}.toml"
    after = "adam" if before == "sgd" else "sgd"
    file.write_text(texts[after])
    said = refused(cli, job_name)
    assert f"the checkpoint is of optimizer {before}, the job of {after}: " in said
    assert "--fresh" in said
    # Only its numbers may change.
    file.write_text(texts[before].replace("lr = ", "weight_decay = 0.1\nlr = 1"))
    again(cli, job_name)
    assert support.status(job_name)["version"] == 1


def test_another_model(dead: str, cli: Cli) -> None:
    (cli.directory / f"{dead}.toml").write_text(COUNTED.replace("'w'", "'v'"))
    assert "'v'" in refused(cli, dead)


# -- restore ----------------------------------------------------------------------------------


def restored(cli: Cli, job: str, *arguments: object) -> int:
    """The version that a job comes back with; it is stopped again."""
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
    assert restored(cli, dead, oldest) == 1
    assert restored(cli, dead, dead) == 3
    assert restored(cli, dead, f"{dead}.toml", "--version", 1) == 1
    assert [path.name for path in there(dead, cli)] == [
        f"checkpoint-{version:012}" for version in (3, 2, 1)
    ]


def test_restore_goes_back(dead: str, cli: Cli) -> None:
    """The future that was given up is not taken for the newest after the next checkpoint."""
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
    said = cli("restore", dead, "--version", 9).error
    assert "no checkpoint of version 9; there are: 3, 2, 1" in said
    assert "no such directory" in cli("restore", "no-such-job").error
    assert "--version" in cli("restore", there(dead, cli)[0], "--version", 1).error
    truncate(there(dead, cli)[0])
    assert "weights.safetensors" in cli("restore", there(dead, cli)[0]).error
    assert not support.segments(dead)


# -- export -----------------------------------------------------------------------------------


def test_export(cli: Cli, job_name: str) -> None:
    """Plain weights, the same in every format, of a live job and of a checkpoint."""
    import torch

    text = ALONE + SGD + MODEL + "[[tensors]]\nname = 'm.b'\nshape = [2, 3]\nrole = 'buffer'\n"
    cli.serve(job_name, text)
    random = np.random.default_rng(1)
    with Client(job_name) as client:
        client.push({"w": random.standard_normal(VALUES), "m.b": np.arange(6).reshape(2, 3)})
        client.wait_applied()
        expected = {name: values.copy() for name, values in client.weights.items()}
        live = [cli("export", job_name, f"live{suffix}", "--json").json for suffix in SUFFIXES]
        path = Path(take(job_name)["path"])
        client.push({"w": random.standard_normal(VALUES)})
        client.wait_applied()
    assert [one["version"] for one in live] == [1, 1, 1]
    assert (live[0]["job"], live[0]["tensors"], live[0]["values"]) == (job_name, 2, VALUES + 6)
    stop(job_name)
    said = cli("export", path, "one.npz").out
    assert said.startswith("2 tensors of version 1 written: one.npz")
    (cli.directory / "one.npz").unlink()
    for suffix in SUFFIXES:
        saved.export(str(path), cli.directory / f"one{suffix}")
        saved.export(job_name, cli.directory / f"name{suffix}", 1)
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
    assert "not its weights, but those of its newest checkpoint" in shown.err


SUFFIXES = (".safetensors", ".npz", ".pt")


def test_without_a_model(cli: Cli, job_name: str) -> None:
    daemon = cli.serve(job_name, ALONE + "[checkpoint]\nevery_s = 0.1\n")
    for command in (("checkpoint", job_name), ("export", job_name, "out.npz")):
        assert "no model yet" in cli(*command).error
    cli("stop", job_name)
    assert daemon.wait().code == 0
    assert not there(job_name, cli)
    assert "no job" in cli("checkpoint", job_name).error


# -- a disk that does not want ----------------------------------------------------------------


def test_a_full_disk_does_not_stop_training(cli: Cli, job_name: str) -> None:
    daemon = cli.serve(job_name, COUNTED + "[checkpoint]\nevery_gradients = 5\n")
    with Client(job_name) as client:
        limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        # Checkpoint writers inherit it; it allows the manifest but not the weights.
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (3000, limit[1]))
        count(client, 6)
        support.eventually(lambda: support.status(job_name)["checkpoint_failures"] == 1)
        assert "training goes on" in daemon.err
        assert "File too large" in daemon.err
        said = cli("checkpoint", job_name).error
        assert str(cli.directory / "state" / job_name) in said
        assert "File too large" in said
        count(client, 6)
        np.testing.assert_array_equal(weights(job_name), -12)
        now = support.status(job_name)
        assert (now["checkpoints"], now["checkpoint_failures"]) == (0, 2)
        assert now["last_checkpoint"]["error"] in daemon.err
        assert "2 failed" in cli("status", job_name).out
        assert [path.name for path in (cli.directory / "state" / job_name).iterdir()] == [".lock"]
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limit)
        assert take(job_name)["version"] == 12


# -- under load -------------------------------------------------------------------------------

LOAD = 50_000  # values: some chunks for each shard


def push_for_ever(pipe: Connection, job: str) -> None:
    client = Client(job)
    client.wait_turn()
    pipe.send("granted")
    pipe.recv()
    ones = np.ones(client.model.elements, np.float32)
    while True:
        client.push(ones, samples=1)
        time.sleep(0.0005)  # the checkpoint's writer needs the cores


@pytest.mark.parametrize(("sync", "times"), [("asp", 12), ("ssp:1", 4), ("bsp", 4)])
def test_each_is_of_one_moment(sync: str, times: int, cli: Cli, job_name: str) -> None:
    """Whatever the shards were doing: no gradient is in some weights and missing in others."""
    text = f"sync = '{sync}'\n{COUNTED}[checkpoint]\nevery_s = 0\nkeep = {times}\non_stop = false\n"
    cli.serve(job_name, text.replace(f"[{VALUES}]", f"[{LOAD}]"))
    with support.fork(3, push_for_ever, job_name) as team:
        for child in team:
            assert child.receive() == "granted"
        for child in team:
            child.send()
        for _ in range(times):
            version = support.status(job_name)["version"] + 2
            support.eventually(lambda least=version: support.status(job_name)["version"] > least)
            take(job_name)
        assert len(support.status(job_name)["learners"]) == 3
    die(job_name)
    made = [checkpoint.read(path) for path in there(job_name, cli)]
    assert len(made) == times
    for one in made:
        values = one.model.views(one.weights)["w"]
        done = one.supersteps if sync == "bsp" else one.version
        np.testing.assert_array_equal(values, -done)
        assert one.steps == done > 0
        assert one.counts["applied"] == one.counts["samples"] == one.version
        assert len(one.clocks) == 3
        if sync == "bsp":
            assert one.version == 3 * one.supersteps, "a superstep is of all three"
    again(cli, job_name)
    before = support.status(job_name)
    assert before["version"] == made[0].version
    with support.fork(2, push_for_ever, job_name) as team:
        for child in team:
            assert child.receive() == "granted"
        for child in team:
            child.send()
        support.eventually(lambda: support.status(job_name)["version"] > before["version"] + 20)
    support.eventually(lambda: not support.status(job_name)["learners"])
    end = support.status(job_name)
    done = end["supersteps"] if sync == "bsp" else end["version"]
    np.testing.assert_array_equal(support.live_weights(job_name)[:LOAD], -done)
