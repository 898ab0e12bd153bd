"""Changing a running job's model, stragglers that are notified, and waves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from support import PATIENCE_S, daemon, eventually, fork, learner, live_weights, status
from support.steered import (
    MODELS,
    TENSORS,
    VALUES,
    all_granted,
    push_until_told,
    push_when_told,
    tell,
)

from gadei_ps.commands import change
from gadei_ps.errors import ControlError, UsageError
from gadei_ps.job import control
from gadei_ps.job.control import SetSync
from gadei_ps.learners.client import Client
from gadei_ps.sync.run_time_file import Sizes, contents


def test_every_change_under_load_loses_nothing(job_name: str) -> None:
    """Change from each model to each other one, while learners push as fast as they can."""
    pairs = list(itertools.permutations(MODELS, 2))
    order = [MODELS[0]]
    while pairs:  # a walk over all pairs
        after = next((b for a, b in pairs if a == order[-1]), pairs[0][0])
        if (order[-1], after) in pairs:
            pairs.remove((order[-1], after))
        order.append(after)
    with (
        daemon(job_name, sync=MODELS[0], tensors=TENSORS, shards=2) as job,
        fork(3, push_until_told, job_name) as team,
    ):
        all_granted(team)
        for model in order[1:]:
            result = change.set_sync(job_name, model, PATIENCE_S)
            assert result["sync"] == model == status(job_name)["sync"]
            heads = {row["pid"]: row["published"] for row in status(job_name)["learners"]}

            def moved(heads: dict[int, int] = heads) -> bool:
                rows = status(job_name)["learners"]
                return all(row["published"] > heads[row["pid"]] + 3 for row in rows)

            eventually(moved, what=lambda: status(job_name))
            job.check()
        pushed = sum(tell(child, "stop") for child in team)
        eventually(lambda: not status(job_name)["learners"])
        end = status(job_name)
        assert end["gradients_applied"] + end["gradients_dropped"] == pushed
        assert end["gradients_refused"] == 0
        assert end["version"] == end["gradients_applied"]


@pytest.mark.parametrize("times", ["once", "each"])
def test_kills_amid_changes(times: str, job_name: str) -> None:
    """A change is made whichever process dies; each gradient is applied or dropped once."""
    with (
        daemon(job_name, sync="bsp", tensors=TENSORS, shards=2, standby=True) as job,
        fork(3, push_until_told, job_name) as team,
    ):
        all_granted(team)
        for number, model in enumerate(("asp", "bsp", "ssp:s=1", "cutoff:c=2", "asp", "bsp")):
            control.ask(job_name, SetSync(sync=model))
            if times == "each" or number == 0:
                before = status(job_name)["server_pid"]
                os.kill(before, signal.SIGKILL)
                eventually(lambda before=before: status(job_name)["server_pid"] != before)
            eventually(
                lambda model=model: status(job_name)["sync"] == model,
                what=lambda: status(job_name),
            )
            eventually(lambda: status(job_name)["standby_pid"], what="a standby")
            job.check()
        pushed = sum(tell(child, "stop") for child in team)
        eventually(lambda: not status(job_name)["learners"])
        end = status(job_name)
        assert end["gradients_applied"] + end["gradients_dropped"] == pushed
        if end["gradients_dropped"] == 0:
            # Sums of ones, or means of them: a superstep of three moves the weights by one.
            assert live_weights(job_name)[0] < 0
        assert np.ptp(live_weights(job_name)[:VALUES]) == 0


def test_change_waits_for_the_iteration_in_hand(job_name: str) -> None:
    with (
        daemon(job_name, sync="ssp:9", tensors=TENSORS),
        fork(2, push_when_told, job_name) as (one, other),
    ):
        all_granted([one, other])
        one.send(1)
        assert one.receive() == "granted"
        changing = threading.Thread(target=change.set_sync, args=(job_name, "bsp", PATIENCE_S))
        changing.start()
        eventually(lambda: status(job_name)["sync_wanted"] == "bsp")
        with pytest.raises(ControlError, match="is just changing to bsp"):
            change.set_sync(job_name, "asp", PATIENCE_S)
        # Both finish their iterations in flight, and neither begins another iteration.
        one.send(2)
        with pytest.raises(ControlError, match="is just changing"):
            change.set_sync(job_name, "asp", PATIENCE_S)
        assert status(job_name)["sync"] == "ssp:s=9"
        other.send(3)
        changing.join()
        all_granted([one, other])
        assert status(job_name)["sync"] == "bsp"
        before = live_weights(job_name)[0]
        one.send(10)
        other.send(20)
        all_granted([one, other])
        assert live_weights(job_name)[0] == before - 15


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("ssp:-1", "sync: ssp: s must be a whole number from 0"),
        ("elastic-bsp:0", "sync: elastic-bsp: R must be a whole number from 1"),
        ("nosuch", "sync: unknown model 'nosuch'"),
        ("cutoff:c=3", "cutoff: c = 3 is above the number of learners, 2"),
        ("cutoff:file=/nonexistent/model.safetensors", "cutoff: .*/nonexistent/model"),
    ],
)
def test_bad_change_changes_nothing(spec: str, why: str, job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS),
        fork(2, push_when_told, job_name) as team,
    ):
        all_granted(team)
        with pytest.raises((UsageError, ControlError), match=why):
            change.set_sync(job_name, spec, PATIENCE_S)
        assert (status(job_name)["sync"], status(job_name)["sync_wanted"]) == ("asp", None)
        assert tell(team[0], 1) == "granted"


def test_straggler_gives_up_and_goes_on(job_name: str) -> None:
    with (
        daemon(job_name, sync="cutoff:c=2", tensors=TENSORS, shards=2),
        fork(3, push_when_told, job_name) as team,
    ):
        all_granted(team)
        one, other, slow = team
        assert tell(slow, "wanted") is True
        one.send(100)
        other.send(300)
        all_granted([one, other])
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -200)
        assert tell(slow, "wanted") is False
        assert tell(slow, "abandon") == "granted"
        assert tell(slow, "wanted") is True
        row = learner(job_name, slow.pid)
        assert row
        assert (row["dropped"], row["refused"], row["applied"]) == (1, 0, 0)
        # It counts in the superstep that runs.
        one.send(4)
        slow.send(8)
        all_granted([one, slow])
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -206)
        # A push that is not wanted any more is given up as well.
        assert tell(other, "wanted") is False
        assert tell(other, 1e9) == "granted"
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -206)


def _batches(pipe: Connection, job: str, slow: bool) -> None:
    """Answer batches; a slow one waits until its gradient is not wanted, and is abandoned then."""
    answered = []
    with Client(job) as client:
        pipe.send("attached")
        pipe.recv()
        for batch in client.batches(samples=100, batch_size=1, epochs=2, seed=1):
            if slow:
                while client.wanted and not pipe.poll():
                    pass
            if client.wanted:
                answered.append(batch.id)
                client.push({"w": np.ones(VALUES, np.float32)})
            else:
                client.abandon()
        pipe.send(answered)


def test_batch_of_a_straggler_is_handed_out_again(job_name: str) -> None:
    with (
        daemon(job_name, sync="cutoff:c=2", tensors=TENSORS, ahead=1) as job,
        fork(2, _batches, job_name, False) as fast,
        fork(1, _batches, job_name, True) as (slow,),
    ):
        team = [*fast, slow]
        for child in team:
            assert child.receive() == "attached"
        for child in fast:
            child.send("go")
        slow.send("go")
        eventually(lambda: status(job_name)["gradients_dropped"] > 0, what=lambda: status(job_name))
        slow.send("hurry")  # at the end nobody else is left to compute
        eventually(lambda: status(job_name)["work"]["state"] == "done")
        end = status(job_name)
        assert end["gradients_applied"] == 200
        assert end["batches_requeued"] == end["gradients_dropped"] > 0
        job.check()


def _flood(pipe: Connection, job: str) -> None:
    """Never asks for a turn, and pushes faster than the server applies."""
    client = Client(job)
    gradient = np.ones(client.model.elements, np.float32)
    pipe.send("attached")
    while not pipe.poll():
        client.push(gradient)
    client.wait_applied()
    pipe.send(client.published)


def test_change_from_asp_under_a_flood(job_name: str) -> None:
    big = [{"name": "w", "shape": [1_000_000]}]
    with (
        daemon(job_name, tensors=big, optimizer={"kind": "adam"}, slots=4) as job,
        fork(2, _flood, job_name) as team,
    ):
        for child in team:
            assert child.receive() == "attached"
        eventually(lambda: status(job_name)["version"] > 2)
        assert change.set_sync(job_name, "ssp:s=3", PATIENCE_S)["changed"]
        pushed = sum(tell(child, "stop") for child in team)
        job.check()
        assert status(job_name)["gradients_applied"] == pushed


def test_newcomer_amid_a_change(job_name: str) -> None:
    """A learner that attaches meanwhile does not join the old model, which would wait for ever."""
    with (
        daemon(job_name, sync="bsp", tensors=TENSORS),
        fork(2, push_when_told, job_name) as (one, other),
    ):
        all_granted([one, other])
        changing = threading.Thread(target=change.set_sync, args=(job_name, "asp", 50.0))
        changing.start()
        eventually(lambda: status(job_name)["sync_wanted"] == "asp")
        with fork(1, push_until_told, job_name) as (late,):
            eventually(lambda: len(status(job_name)["learners"]) == 3)
            one.send(1)
            other.send(1)
            changing.join()
            all_granted([one, other, late])
            assert status(job_name)["sync"] == "asp"
            tell(late, "stop")


def test_death_of_a_straggler_amid_a_change(job_name: str) -> None:
    with (
        daemon(job_name, sync="cutoff:c=2", tensors=TENSORS),
        fork(4, push_when_told, job_name) as team,
    ):
        all_granted(team)
        for child in team[:2]:
            child.send(1)
        all_granted(team[:2])  # the other two are stragglers
        changing = threading.Thread(target=change.set_sync, args=(job_name, "asp", 50.0))
        changing.start()
        eventually(lambda: status(job_name)["sync_wanted"] == "asp")
        team[2].send(5)  # late: dropped
        eventually(lambda: status(job_name)["gradients_dropped"] == 1)
        team[3].kill()
        for child in team[:2]:
            child.send(1)
        changing.join()
        assert status(job_name)["sync"] == "asp"
        all_granted(team[:3])


def test_model_file_that_vanishes_ends_no_job(job_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sizes = Sizes(learners=2, lag=2, latent=2, recurrent=2, hidden=2)
    weights = {name: np.zeros(shape, np.float32) for name, shape in sizes.shapes().items()}
    path.write_bytes(contents(sizes, weights, {}))
    with (
        daemon(job_name, sync=f"cutoff:file={path}", tensors=TENSORS, standby=True) as job,
        fork(2, push_until_told, job_name) as team,
    ):
        all_granted(team)
        path.unlink()
        for _ in range(3):
            eventually(lambda: status(job_name)["standby_pid"], what="a standby")
            version = status(job_name)["version"]
            os.kill(status(job_name)["server_pid"], signal.SIGKILL)
            eventually(lambda version=version: status(job_name)["version"] > version + 20)
        job.check()


def test_row_of_a_straggler_is_clean_for_the_next(job_name: str) -> None:
    with daemon(job_name, sync="cutoff:c=1", tensors=TENSORS):
        with fork(2, push_when_told, job_name) as (slow, fast):
            all_granted([slow, fast])
            for _ in range(3):
                assert tell(fast, 1) == "granted"
            assert tell(slow, "wanted") is False
        eventually(lambda: not status(job_name)["learners"])
        with fork(2, push_when_told, job_name) as team:
            for child in team:
                assert child.receive() == "granted"
                assert tell(child, "wanted") is True


def test_set_before_there_is_a_model(job_name: str) -> None:
    with daemon(job_name):
        assert change.set_sync(job_name, "bsp", PATIENCE_S)["changed"]
        assert status(job_name)["sync"] == "bsp"


def test_stopped_learner_holds_a_change_up_until_it_goes_on(job_name: str) -> None:
    with (
        daemon(job_name, sync="ssp:9", tensors=TENSORS),
        fork(2, push_when_told, job_name) as team,
    ):
        all_granted(team)  # so each has an iteration in flight
        team[0].signal(signal.SIGSTOP)
        with pytest.raises(ControlError, match=r"has not reached a barrier within 0\.5 s"):
            change.set_sync(job_name, "bsp", 0.5)
        for child in team:
            child.send(1)
        eventually(lambda: status(job_name)["gradients_applied"] == 1)  # the other one's
        assert status(job_name)["sync"] == "ssp:s=9"
        team[0].signal(signal.SIGCONT)
        eventually(lambda: status(job_name)["sync"] == "bsp")
