"""Writer of the optimizer's state that all learners load when they begin."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support import Rig

from gadei_ps.job.control import Load
from gadei_ps.memory.weights import Tensor
from gadei_ps.watchdog.initial_load import Loading

W = [Tensor("w", (10,))]


def asks(rig: Rig, generation: int, digest: int = 7, *, done: bool = False, **more: Any) -> str:
    """Ask a new watchdog each time: all that counts is in memory."""
    asked = Load(generation=generation, digest=digest, done=done, **more)
    return Loading(rig.memory, None).ask(asked)


def test_one_writes_and_the_others_wait(job_name: str) -> None:
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1) == "write"
        assert asks(rig, 2) == asks(rig, 3) == "wait"
        assert asks(rig, 1) == "write", "its connection broke, and it asks again"
        rig.state["record"]["steps"] = 50  # that it has written
        assert asks(rig, 2, gives=50) == "wait"
        assert asks(rig, 1, done=True) == "same"
        assert asks(rig, 2) == asks(rig, 3) == "same"
        assert asks(rig, 2, digest=8) == "other"


def test_the_one_that_writes_dies(job_name: str) -> None:
    """The next one writes all of it again."""
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1, gives=50) == "write"
        rig.state["record"]["steps"] = 50
        rig.roster[0]["wanted"] = 0
        assert asks(rig, 2, gives=50) == "write"
        assert asks(rig, 3, gives=50) == "wait"
        asks(rig, 1, gives=50, done=True)  # said late
        assert asks(rig, 3, gives=50) == "wait"
        asks(rig, 2, gives=50, done=True)
        assert asks(rig, 3, gives=50) == "same"


@pytest.mark.parametrize("what", ["state", "weights"])
def test_the_job_trains_after_the_one_that_writes_has_died(what: str, job_name: str) -> None:
    """Check that its training stays, whether the dead one had written or not."""
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1, what=what, gives=50) == "write"
        rig.roster[0]["wanted"] = 0
        for steps in (1, 49, 51, 1000):
            rig.state["record"]["steps"] = steps
            assert asks(rig, 2, what=what, gives=50) == "other"
        rig.state["record"]["steps"] = 50
        expected = "write" if what == "state" else "other"  # weights bring no steps
        assert asks(rig, 2, what=what, gives=50) == expected


def test_a_job_that_has_trained_keeps_its_own(job_name: str) -> None:
    with Rig(job_name, W, learners=2) as rig:
        rig.state["record"]["steps"] = 1
        assert asks(rig, 1) == asks(rig, 2) == "other"


def test_weights_and_state_are_loaded_one_after_the_other(job_name: str) -> None:
    """Load in either order. The weights' turn is not over because the state has brought steps."""
    with Rig(job_name, W, learners=2) as rig:
        assert asks(rig, 1) == "write"
        rig.state["record"]["steps"] = 50
        asks(rig, 1, done=True)
        assert asks(rig, 2, what="weights") == "other", "the job has steps that it does not know"
        assert asks(rig, 1, what="weights", steps=50) == "write"
        assert asks(rig, 2, what="weights", steps=50) == "wait"
        asks(rig, 1, what="weights", steps=50, done=True)
        assert asks(rig, 2, what="weights", steps=50) == "same"
        assert asks(rig, 2) == "same"
    with Rig(f"{job_name}-other", W, learners=2) as rig:
        assert asks(rig, 1, what="weights") == "write"
        asks(rig, 1, what="weights", done=True)
        assert asks(rig, 1) == "write"


def test_another_load_before_the_first_step(job_name: str) -> None:
    """It takes the place of the one before; who is late with that one does not bring it back."""
    with Rig(job_name, W, learners=2) as rig:
        assert asks(rig, 1, 7) == "write"
        asks(rig, 1, 7, done=True)
        assert asks(rig, 1, 8, after=7) == "write"
        assert asks(rig, 2, 8, after=7) == "wait"
        asks(rig, 1, 8, after=7, done=True)
        assert asks(rig, 2, 7) == "other"
        assert asks(rig, 2, 8, after=7) == "same"
        rig.state["record"]["steps"] = 1
        assert asks(rig, 1, 9, after=8) == "other", "the job has trained since"


def test_a_load_that_was_not_finished_takes_the_place_of_the_one_before(job_name: str) -> None:
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1, 7) == "write"
        asks(rig, 1, 7, done=True)
        assert asks(rig, 1, 8, after=7) == "write"
        rig.roster[0]["wanted"] = 0
        assert asks(rig, 2, 8, after=7) == "write"
        assert asks(rig, 3, 7) == "wait", "nothing of that load is whole any more"


def test_the_one_that_writes_gives_up(job_name: str) -> None:
    """Abandon it as if it had died, even while it lives; it may be the next one that writes."""
    with Rig(job_name, W, learners=3) as rig:
        log = mock.Mock()
        loading = Loading(rig.memory, log)
        assert asks(rig, 1, gives=50) == "write"
        assert asks(rig, 2, gives=50) == "wait"
        asks(rig, 2, gives=50, gives_up=True)  # it never had the turn
        assert asks(rig, 2, gives=50) == "wait"
        asks(rig, 1, gives=50, gives_up=True)
        rig.state["record"]["steps"] = 50  # its last part is made after that
        loading.tick()
        loading.tick()
        assert log.warning.call_count == 1
        assert asks(rig, 2, gives=50) == "write"
        assert asks(rig, 1, gives=50) == "wait"
        asks(rig, 2, gives=50, done=True)
        loading.tick()
        assert asks(rig, 1, gives=50) == "same"
        assert log.warning.call_count == 1


def test_the_one_that_writes_trains(job_name: str) -> None:
    """Then it writes no more, and who begins does not wait for it."""
    with Rig(job_name, W, learners=2) as rig:
        assert asks(rig, 1, what="weights") == "write"
        assert asks(rig, 2, what="weights") == "wait"
        rig.state["record"]["steps"] = 1
        assert asks(rig, 2, what="weights") == "other"
        assert asks(rig, 1, what="weights") == "write", "its connection broke, and it asks again"
        assert asks(rig, 1, gives=50, steps=1) == "write"
        rig.state["record"]["steps"] = 50
        assert asks(rig, 2, gives=50, steps=1) == "wait", "it may have written the steps"
        rig.state["record"]["steps"] = 51
        assert asks(rig, 2, gives=50, steps=1) == "other"


def test_in_the_middle_of_training(job_name: str) -> None:
    """It is written in any case, one after the other; what was loaded at the start stays known."""
    with Rig(job_name, W, learners=3) as rig:
        assert asks(rig, 1, 7) == "write"
        asks(rig, 1, 7, done=True)
        rig.state["record"]["steps"] = 50
        assert asks(rig, 1, again=True) == "write"
        assert asks(rig, 2, again=True) == "wait"
        assert asks(rig, 3, 7) == "same"
        asks(rig, 1, again=True, done=True)
        assert asks(rig, 2, again=True) == "write"
        asks(rig, 2, again=True, done=True)
        assert asks(rig, 3, 7) == "same"
        assert asks(rig, 3, 8) == "other"


def test_one_dies_in_the_middle_of_training(job_name: str) -> None:
    """The next one that loads after a step of its own writes all of it; the log has it."""
    with Rig(job_name, W, learners=3) as rig:
        log = mock.Mock()
        loading = Loading(rig.memory, log)
        assert asks(rig, 1, 7) == "write"
        asks(rig, 1, 7, done=True)
        assert asks(rig, 1, again=True) == "write"
        loading.tick()
        assert not log.warning.called
        rig.roster[0]["wanted"] = 0
        rig.state["record"]["steps"] = 50
        loading.tick()
        loading.tick()
        (warning,) = log.warning.call_args_list
        assert "a learner has died while it loaded the optimizer's state" in warning.args[0]
        assert asks(rig, 2, 7) == "other", "it begins, and the job has trained"
        assert asks(rig, 2, again=True) == "write"
        assert asks(rig, 3, again=True) == "wait"
        asks(rig, 2, again=True, done=True)
        assert asks(rig, 3, again=True) == "write"
