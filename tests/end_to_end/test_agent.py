"""Agents beside real jobs: machines that train together, and go on together when an agent dies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Child, daemon, eventually, live_weights, status
from support.agents import certificates
from support.beside import TOKEN, Agent, alike, ports
from support.supervised import TIMEOUT_S, Watched, goes_on, pushing

from gadei_ps.agents import agent
from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client

VALUES = 5_000
MASK = np.triu(np.full((20, 20), -np.inf, np.float32), 1)
FLOOR = np.triu(np.full((20, 20), np.finfo(np.float32).min), 1)


def _spoil(job: str) -> None:
    """One gradient makes all weights infinite."""
    with Client(job) as client:
        client.push({"w": np.full(VALUES, 3e38, np.float32)}, rate_scale=1e9)


def _learn(pipe: Connection, job: str, target: float, variance: float = 1) -> None:
    """Draws the weights towards its target, until it is killed."""
    weights = {"w": np.zeros(VALUES, np.float32)}
    buffers = {"mask": MASK, "floor": FLOOR, "variance": np.full(3, variance, np.float32)}
    with Client(job, tensors=weights, buffers=buffers) as client:
        pipe.send(None)
        while True:
            client.push({"w": client.weights["w"] - np.float32(target)}, samples=4)
            client.wait_applied()


@pytest.fixture
def two_jobs(job_name: str) -> Iterator[list[str]]:
    with _two_jobs(job_name) as names:
        yield names


@contextlib.contextmanager
def _two_jobs(job_name: str, last_variance: float = 1) -> Iterator[list[str]]:
    """Jobs whose learners draw the weights towards -10 and towards 30."""
    names = [f"{job_name}-{one}" for one in ("a", "b")]
    optimizer = {"kind": "sgd", "lr": 0.0005}
    with contextlib.ExitStack() as stack:
        for name, how in zip(names, ((-10,), (30, last_variance)), strict=True):
            job = stack.enter_context(daemon(name, optimizer=optimizer))
            learner = Child(_learn, name, *how)
            stack.callback(job.check)
            stack.callback(learner.kill)
            learner.receive()
        yield names
        for name in names:  # masks are no part of any exchange
            np.testing.assert_array_equal(_weights(name)["mask"], MASK)
            np.testing.assert_array_equal(_weights(name)["floor"], FLOOR)


def _weights(job: str) -> dict[str, np.ndarray[Any, Any]]:
    with Client(job) as client:
        return {name: np.array(values) for name, values in client.weights.items()}


def test_two_jobs_train_together_and_an_agent_is_killed(two_jobs: list[str]) -> None:
    a, b = two_jobs
    agents = dict(zip((0, 1), (f"127.0.0.1:{port}" for port in ports(2)), strict=True))
    one, other = Agent(a, 0, agents), Agent(b, 1, agents)
    for machine in (one, other):
        machine.go_on(5)
    # Alone, each job would end at its own target.
    weights = [live_weights(job) for job in two_jobs]
    eventually(lambda: one.next() and other.next() and all(0 < w[0] < 20 for w in weights))
    assert other.end(signal.SIGKILL) == -signal.SIGKILL
    one.go_on(5)
    # Its job has trained on alone; the new agent brings it back.
    eventually(lambda: weights[1][0] > 25)
    again = Agent(b, 1, {0: agents[0]}, joins=True)
    again.go_on(3)
    one.go_on(1)
    eventually(lambda: one.next() and again.next() and all(0 < w[0] < 20 for w in weights))
    alike(one, other)
    _spoil(b)
    again.hears("the weights of this machine ('w') hold a NaN or an infinity")
    eventually(lambda: one.next() and again.next() and all(0 < w[0] < 20 for w in weights))
    assert again.end(signal.SIGTERM) == 0
    assert one.end(signal.SIGTERM) == 0
    alike(one, again)
    for job in two_jobs:
        eventually(lambda job=job: len(status(job)["learners"]) == 1)


def _pair(first: str, second: str, overlap: bool) -> tuple[Agent, Agent, dict[int, str]]:
    """Agents of two jobs that have made three rounds, and where they listen."""
    agents = dict(zip((0, 1), (f"127.0.0.1:{port}" for port in ports(2)), strict=True))
    one = Agent(first, 0, agents, overlap=overlap)
    other = Agent(second, 1, agents, overlap=overlap)
    for machine in (one, other):
        machine.go_on(3)
    return one, other, agents


@pytest.mark.parametrize("overlap", [True, False])
def test_each_job_keeps_its_buffers(overlap: bool, job_name: str) -> None:
    """Whatever they hold, and through the death of an agent: only parameters are exchanged."""
    with _two_jobs(job_name, last_variance=np.inf) as jobs:
        a, b = jobs
        one, other, agents = _pair(b, a, overlap)
        assert other.end(signal.SIGKILL) == -signal.SIGKILL
        one.go_on(1)
        again = Agent(a, 1, {0: agents[0]}, overlap=overlap, joins=True)
        again.go_on(2)
        assert (_weights(a)["variance"] == 1).all() and np.isinf(_weights(b)["variance"]).all()
        for machine in (one, other, again):
            assert not machine.notes
        assert one.end(signal.SIGTERM) == again.end(signal.SIGTERM) == 0
        alike(one, again)


def test_jobs_that_stand_still_have_the_same_bits(two_jobs: list[str]) -> None:
    """Checksums are of the jobs' own weights here. No death leaves a job standing."""
    a, b = two_jobs
    agents = dict(zip((0, 1), (f"127.0.0.1:{port}" for port in ports(2)), strict=True))
    one, other = Agent(a, 0, agents, overlap=False), Agent(b, 1, agents, overlap=False)
    for machine in (one, other):
        machine.go_on(2)
    before = status(a)["server_pid"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: status(a)["server_pid"] != before)
    for machine in (one, other):
        machine.go_on(4)
    _spoil(b)
    other.hears("hold a NaN or an infinity")
    for machine in (one, other):
        machine.go_on(2)
    assert np.isfinite(live_weights(b)[:VALUES]).all()
    alike(one, other)
    assert other.end(signal.SIGKILL) == -signal.SIGKILL
    alike(one, other)
    goes_on(b)
    again = Agent(b, 1, {0: agents[0]}, overlap=False, joins=True)
    again.go_on(3)
    assert again.end(signal.SIGTERM) == 0
    assert one.end(signal.SIGTERM) == 0
    alike(one, again)
    for job in two_jobs:
        goes_on(job)
        told = status(job)
        assert told["supersteps"] > 3 and told["gradients_dropped"] == 0
        assert not any(one["others_stand_still"] for one in told["learners"])


def test_an_agent_that_waits_while_learners_stand_still_shows_life(job_name: str) -> None:
    """However long others may be silent, and however soon its job takes a learner for hung."""
    one, other = (f"127.0.0.1:{port}" for port in ports(2))
    with Watched(job_name, learner_timeout_s=TIMEOUT_S) as watched, pushing(job_name):
        waits = Agent(job_name, 0, {0: one, 1: other}, overlap=False, silence_s=20.0)

        def stands() -> bool:
            return any(one["others_stand_still"] for one in status(job_name)["learners"])

        eventually(stands)
        watched.look(2 * TIMEOUT_S)
        assert stands() and not status(job_name)["learner_deaths"]
        assert waits.end(signal.SIGKILL) == -signal.SIGKILL
        goes_on(job_name)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_two_groups_of_one_job_each_draw_one_another(two_jobs: list[str], tmp_path: Path) -> None:
    """Over TLS. They hear later where the others are: one is told, and the other one is called."""
    certificates(tmp_path, ["agent"])
    files = {"certificate": "agent.pem", "key": "agent.key", "authority": "authority.pem"}
    *agents, nowhere = (f"127.0.0.1:{port}" for port in ports(3))
    groups = [
        Agent(
            *(job, number, {number: agents[number]}),
            group_number=number,
            sources={1 - number: {1 - number: nowhere}},
            rule="mix:0.5",
            wire="bfloat16",
            tls={name: str(tmp_path / file) for name, file in files.items()},
        )
        for number, job in enumerate(two_jobs)
    ]
    weights = [live_weights(job) for job in two_jobs]
    one, other = groups
    one.order({"group": 7})  # no order, which changes nothing
    one.order({"group": 1, "agents": {1: agents[1]}})
    eventually(lambda: one.next() and other.next() and all(0 < w[0] < 20 for w in weights))
    assert [machine.end(signal.SIGTERM) for machine in groups] == [0, 0]


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"every": 0}, "agent: every: Input should be greater than 0"),
        ({"every": True}, "agent: every: give a number, not true"),
        ({"agents": {0: "here"}}, "agent: agents: 'here' is no HOST:PORT"),
        ({"agents": {1: "h:1"}}, "agent: agents: number 0 is not among those that begin"),
        ({"sources": {1: {}}}, "agent: sources: name an agent of group 1"),
        ({"sources": {0: {2: "h:1"}}}, "agent: sources: group 0 is this one's own"),
        ({"wire": "int4"}, "agent: wire: Input should be 'float32', 'bfloat16' or 'int8'"),
        ({"joins": True}, "agent: agents: name one that is in the group, to join it"),
        ({"listen": "0.0.0.0:1"}, "agent: address: others cannot call 0.0.0.0:1"),
        ({"rule": "best"}, "agent: rule: unknown rule 'best'"),
        (
            {"agents": dict.fromkeys(range(65), "h:1")},
            "agent: agents: 65 begin a group: at most 64 can",
        ),
        ({"token": "short"}, "a token of 5 bytes can be guessed"),
    ],
)
def test_mistakes_are_one_line(others: dict[str, Any], line: str) -> None:
    settings = {"job": "nobody", "group": "g", "number": 0, "token": TOKEN, "every": 1}
    settings |= {"agents": {0: "h:1"}, "listen": "127.0.0.1:0", "patience_s": 0} | others
    with pytest.raises(UsageError) as error:
        agent.run(agent.read(json.dumps(settings)))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_a_machine_joins_though_many_were_in_its_group() -> None:
    """Settings name each agent of its group that there has ever been."""
    settings = {"job": "nobody", "group": "g", "number": 99, "token": TOKEN, "every": 1}
    settings |= {"agents": dict.fromkeys(range(100), "h:1"), "listen": "h:0", "joins": True}
    assert len(agent.read(json.dumps(settings)).contacts()) == 99
