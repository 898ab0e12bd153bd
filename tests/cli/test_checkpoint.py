"""Checkpoints: when they are made, and how a job continues from one after all processes died."""

from __future__ import annotations

import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import support
from saved_jobs import (
    ADAM,
    ALONE,
    COUNTED,
    MODEL,
    VALUES,
    again,
    count,
    die,
    stop,
    take,
    there,
    weights,
)
from shell import Cli

from gadei_ps.job import config
from gadei_ps.learners.client import Client
from gadei_ps.storage import checkpoint

pytestmark = pytest.mark.usefixtures("compiled")


# -- when they are made -----------------------------------------------------------------------


def test_by_hand(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, COUNTED)
    with Client(job_name) as client:
        count(client, 3)
        begin = time.monotonic()
        made = cli("checkpoint", job_name, "--json").json
        most_ms = 1e3 * (time.monotonic() - begin)
        count(client, 2)
    assert (made["version"], Path(made["path"]).parent) == (3, config.state_directory() / job_name)
    assert made["bytes"] > 4 * VALUES
    assert 0 < made["pause_ms"] < most_ms
    assert made["problem"] is None
    shown = cli("checkpoint", job_name).out
    assert shown.startswith("checkpoint of version 5: ")
    assert " KiB; training paused " in shown
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
    kept = {path.name for path in path.parent.iterdir()}
    assert kept - {"history.jsonl"} == {path.name, ".lock"}


def test_on_stop(cli: Cli, job_name: str) -> None:
    """The checkpoint includes gradients pushed just before. The next start continues from it."""
    text = COUNTED + "[checkpoint]\nevery_s = 0\ndirectory = 'here'\n"
    daemon = cli.serve(job_name, text)
    with Client(job_name) as client:
        count(client, 7)
    assert stop(job_name)["gradients_applied"] == 7
    assert daemon.wait().code == 0
    here = cli.directory / "here"
    assert [one.version for one in checkpoint.found(here)] == [7]
    daemon = again(cli, job_name)
    assert "resuming from a checkpoint" in daemon.err
    now = support.status(job_name)
    assert (now["version"], now["gradients_applied"], now["samples"]) == (7, 7, 7)
    np.testing.assert_array_equal(weights(job_name), -7)
    with Client(job_name) as client:
        count(client, 2)
    daemon.process.terminate()
    assert daemon.wait().code == 0, "SIGTERM is a stop too"
    assert [one.version for one in checkpoint.found(here)] == [9, 7]


# -- continuing after everything has died -----------------------------------------------------


def test_as_if_nothing_had_happened(cli: Cli, job_name: str) -> None:
    """Adam's moments and step count come back, bit for bit as in an undisturbed job."""
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
    """Answer batches, each of which adds 1 to its own weight. Return their number."""
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
    """The ledger continues in the middle of an epoch, with batches handed out and requeued."""
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
    # Finished work stays finished.
    take(job_name)
    die(job_name)
    again(cli, job_name)
    with Client(job_name) as client:
        assert answer(client) == 0


# -- a full disk ------------------------------------------------------------------------------


def test_a_full_disk_does_not_stop_training(cli: Cli, job_name: str) -> None:
    daemon = cli.serve(job_name, COUNTED + "[checkpoint]\nevery_gradients = 5\n")
    with Client(job_name) as client:
        limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        # Checkpoint writers inherit this limit, which allows the manifest but not the weights.
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (3000, limit[1]))
        count(client, 6)
        support.eventually(lambda: support.status(job_name)["checkpoint_failures"] == 1)
        assert "training continues" in daemon.err
        assert "File too large" in daemon.err
        message = cli("checkpoint", job_name).error
        assert str(cli.directory / "state" / job_name) in message
        assert "File too large" in message
        count(client, 6)
        np.testing.assert_array_equal(weights(job_name), -12)
        now = support.status(job_name)
        assert (now["checkpoints"], now["checkpoint_failures"]) == (0, 2)
        assert now["last_checkpoint"]["error"] in daemon.err
        assert "2 failed" in cli("status", job_name).out
        kept = {path.name for path in (cli.directory / "state" / job_name).iterdir()}
        assert kept - {"history.jsonl"} == {".lock"}
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
    """No checkpoint has a gradient in some weights that it lacks in others."""
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
