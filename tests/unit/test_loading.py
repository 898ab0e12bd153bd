"""Who writes the optimizer's state that all learners load when they begin."""

from __future__ import annotations

from support import Rig

from gadei_ps.job.control import Load
from gadei_ps.memory.weights import Tensor
from gadei_ps.watchdog.loading import Loading

W = [Tensor("w", (10,))]


def asks(rig: Rig, generation: int, digest: int = 7, *, done: bool = False) -> str:
    """Of a new watchdog each time: all that counts is in memory."""
    return Loading(rig.memory).ask(Load(generation=generation, digest=digest, done=done))


def test_one_writes_and_the_others_wait(job_name: str) -> None:
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1) == "write"
        assert asks(rig, 2) == asks(rig, 3) == "wait"
        assert asks(rig, 1) == "write", "its connection broke, and it asks again"
        rig.state["record"]["steps"] = 50  # that it has written
        assert asks(rig, 2) == "wait"
        assert asks(rig, 1, done=True) == "same"
        assert asks(rig, 2) == asks(rig, 3) == "same"
        assert asks(rig, 2, digest=8) == "other"


def test_the_one_that_writes_dies(job_name: str) -> None:
    """The next one writes all of it again."""
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1) == "write"
        rig.state["record"]["steps"] = 50
        rig.roster[0]["wanted"] = 0
        assert asks(rig, 2) == "write"
        assert asks(rig, 3) == "wait"
        asks(rig, 1, done=True)  # said late
        assert asks(rig, 3) == "wait"
        asks(rig, 2, done=True)
        assert asks(rig, 3) == "same"


def test_a_job_that_has_trained_keeps_its_own(job_name: str) -> None:
    with Rig(job_name, W, learners=2) as rig:
        rig.state["record"]["steps"] = 1
        assert asks(rig, 1) == asks(rig, 2) == "other"
