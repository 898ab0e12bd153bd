"""Servers and learners die under every synchronization model, also while the model changes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from support import eventually, status
from team import Team, send

from gadei_ps.job import control
from gadei_ps.job.control import SetSync
from gadei_ps.job.faults import Role


def _kill_one_learner(team: Team, chance: random.Random) -> None:
    one = chance.choice(team.learners)
    one.kill()
    team.buried += one.published
    team.learners.remove(one)
    team.hire()


def _kill_servers_and_learners(team: Team, chance: random.Random) -> None:
    for number in range(team.rounds(4)):
        send(team.find(Role.SERVER))
        if number % 2:
            _kill_one_learner(team, chance)
        team.goes_on(30)


@pytest.mark.parametrize("model", ["ssp:s=2", "elastic-bsp:R=5", "wsp:D=1,s_local=0"])
def test_on_arrival(model: str, job_name: str, tmp_path: Path) -> None:
    chance = random.Random(model)
    with Team(job_name, tmp_path, learners=3, sync=model) as team:
        _kill_servers_and_learners(team, chance)
        team.settle()


@pytest.mark.parametrize("model", ["cutoff:c=2", "cutoff:by=sampled"])
def test_cutoff(model: str, job_name: str, tmp_path: Path) -> None:
    """The mean of ones is one, so the weights count supersteps exactly."""
    chance = random.Random(model)
    with Team(job_name, tmp_path, learners=3, sync=model) as team:
        _kill_servers_and_learners(team, chance)
        _settle(team)


def test_changes(job_name: str, tmp_path: Path) -> None:
    """Check deaths during changes: each gradient is applied or dropped exactly once."""
    chance = random.Random(7)
    models = ["asp", "bsp", "ssp:s=1", "cutoff:c=1", "elastic-bsp:R=3"]
    with Team(job_name, tmp_path, learners=3, sync=models[0]) as team:
        for number in range(team.rounds(8)):
            model = models[(number + 1) % len(models)]
            target = team.find(Role.SERVER)
            control.ask(job_name, SetSync(sync=model))
            if chance.random() < 0.5:
                team.goes_on(chance.randrange(4))
            send(target)
            eventually(lambda model=model: status(job_name)["sync"] == model)
            if number % 3 == 2:
                _kill_one_learner(team, chance)
            team.goes_on(30)
        _settle(team, means=False)


def _settle(team: Team, *, means: bool = True) -> None:
    """Wait until all published gradients are consumed. means: weights count supersteps."""
    team.watch()
    team.fire()
    roster = team.control["roster"]
    eventually(lambda: (roster["retired"] == roster["generation"]).all(), what="all are detached")
    now = status(team.name)
    assert now["gradients_applied"] + now["gradients_dropped"] == team.buried
    assert now["gradients_refused"] == 0
    assert now["version"] == now["gradients_applied"] == now["samples"]
    assert np.ptp(team.weights) == 0
    if means:
        supersteps = -float(team.weights[0])
        # Supersteps that only drop count too, but do not move the weights.
        dropping = now["supersteps"] - supersteps
        assert 0 <= dropping <= now["gradients_dropped"]
        assert now["gradients_applied"] >= supersteps > 0
        assert supersteps == round(supersteps)
