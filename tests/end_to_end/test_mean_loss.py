"""The sum of the losses is that of the learners, whichever of the job's processes are killed."""

from __future__ import annotations

import math
import os
import random
import signal
from itertools import pairwise

import numpy as np
import pytest
from shell import Cli
from support import Pusher, daemon, eventually, gone, spin, status

from gadei_ps.commands import history
from gadei_ps.dashboard import data
from gadei_ps.dashboard.live import OneJob
from gadei_ps.learners.client import Client
from gadei_ps.monitoring import series

VALUES, FAILOVERS, LEARNERS, GRADIENTS = 256, 20, 3, 20
TENSORS = [{"name": "w", "shape": [VALUES]}]
GRADIENT = {"w": np.ones(VALUES, np.float32)}
FILE = """\
[optimizer]
lr = 1.0
[checkpoint]
every_s = 0
[[tensors]]
name = "w"
shape = [256]
"""


def loss_of(number: int) -> float:
    """Loss of a learner's gradient with this number; every seventh one is not known."""
    return math.nan if number % 7 == 6 else math.sin(number) / 3 + 1.7


def losses(count: int) -> list[float]:
    """The losses of the first `count` gradients of a learner that are known."""
    return [loss_of(number) for number in range(count) if not math.isnan(loss_of(number))]


def push(client: Client) -> None:
    client.push(GRADIENT, loss=loss_of(client.published), samples=1)


def test_the_mean_loss_is_that_of_the_learners(
    job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill servers and learners at any instant. The dashboard's page has the same mean."""
    monkeypatch.setattr(data, "RATE_S", 1e-6)
    chance = random.Random(7)
    with daemon(job_name, tensors=TENSORS, standby=True, shards=2, history=True) as job:
        learners = [Pusher(job_name, push) for _ in range(LEARNERS)]
        ended: list[Pusher] = []
        page = OneJob(job_name, lambda *_, **__: "")
        try:
            for death in range(FAILOVERS):
                eventually(lambda: status(job_name)["standby_pid"], what="a standby")
                before = sum(one.published for one in learners)
                eventually(lambda before=before: sum(one.published for one in learners) > before)
                if death % 4 == 3:
                    target = learners.pop(0)
                    target.kill()
                    ended.append(target)
                    learners.append(Pusher(job_name, push))
                spin(chance, 0.002)
                server = status(job_name)["server_pid"]
                os.kill(server, signal.SIGKILL)
                eventually(lambda server=server: status(job_name)["server_pid"] != server)
                page.look()
        finally:
            for one in learners:
                one.kill()
        eventually(lambda: not status(job_name)["learners"], what="all that died are evicted")
        page.look()
        with Client(job_name) as client:
            for _ in range(GRADIENTS):
                push(client)
            client.wait_applied()
            (point,) = (page.look() or {})["points"]
        last = losses(GRADIENTS)
        # Nine digits, as below.
        assert math.isclose(point["values"]["loss"], math.fsum(last) / len(last), rel_tol=1e-8)
        job.check()
        end = status(job_name)
        assert end["failovers"] >= FAILOVERS
    reported = [one for learner in (*ended, *learners) for one in losses(learner.published)] + last
    assert end["loss_count"] == len(reported) < end["gradients_applied"]
    assert math.isclose(end["loss_sum"], math.fsum(reported), rel_tol=1e-9)
    points = [one for one in history.read(job_name)["lines"] if "loss_sum" in one]
    assert points[-1]["loss_count"] == len(reported)
    for one, after in pairwise(points):
        counted = after["loss_count"] - one["loss_count"]
        mean = (after["loss_sum"] - one["loss_sum"]) / counted if counted else None
        assert after["loss"] == mean, "the mean of the gradients between the two points"
    shown = series.columns(points)["series"]["loss"]
    for one, point in zip(shown, points, strict=True):
        # Nine digits: nearer than the rounding of a float32, which may still go the other way.
        assert one == point["loss"] or math.isclose(one, point["loss"], rel_tol=1e-8)


def test_a_checkpoint_keeps_the_sum(cli: Cli, job_name: str) -> None:
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        for _ in range(20):
            push(client)
        client.wait_applied()
        server, watchdog = (status(job_name)[f"{one}_pid"] for one in ("server", "watchdog"))
        cli("checkpoint", job_name)
    cli("stop", job_name)
    assert service.wait().code == 0
    assert gone(server) and gone(watchdog)
    service = cli.serve(job_name, FILE)
    with Client(job_name) as client:
        for _ in range(10):
            push(client)
        client.wait_applied()
        found = status(job_name)
    wanted = losses(20) + losses(10)
    assert found["loss_count"] == len(wanted)
    assert math.isclose(found["loss_sum"], math.fsum(wanted), rel_tol=1e-12)
    cli("stop", job_name)
    service.wait()
