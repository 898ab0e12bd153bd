"""The client for Python and the client for C: one behaviour. Two threads, and detach beside a push.

Each case drives both against a real job, by the commands of tests/clients/driver.py and driver.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support
from clients.both import Makers, asleep, fill
from clients.drivers import ERROR, SMALL, WIDE, Job

BUSY = "another thread is in a call of this learner: a learner belongs to one thread at a time"
CLAIMED = (
    "another thread has claimed a slot of this learner and not published it: a learner belongs to "
    "one thread at a time"
)
LEFT = "this learner has detached from its job; attach again"
PUSHES: list[tuple[object, ...]] = [("push", 1, 1000), ("claim", 1000), ("give_up", 1000)]
SGD: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 1.0}}


def moved(job: Job, begin: np.ndarray) -> float:
    """Return by how many gradients of ones every value has been moved."""
    steps = np.unique(begin - job.weights())
    assert len(steps) == 1, steps
    return float(steps[0])


def test_a_second_thread_is_refused(client: Makers, small: Job) -> None:
    mine = client.plain()
    fill(small, mine)
    mine.do("beside", "push", 1, -1)
    asleep(small, mine)
    for command in (*PUSHES, ("claim_rows", 1000)):
        assert mine.ask(*command) == (ERROR, BUSY), command
    small.pause(False)
    assert mine.ask("joined") == (0, "")
    assert mine.ask("published") == (3, "")
    mine.do("push", 1, 10_000)
    mine.do("applied", 10_000)
    mine.do("detach")
    small.gone()


def test_a_claimed_slot_is_its_threads(client: Makers, job: Callable[..., Job]) -> None:
    running = job(**SMALL, **SGD)
    begin = running.weights()
    mine = client.plain()
    mine.do("attach", running.socket)
    mine.do("beside", "claim", 1000)
    assert mine.ask("joined") == (0, "")
    for command in (*PUSHES, ("publish", 0, 0, 1)):
        assert mine.ask(*command) == (ERROR, CLAIMED), command
    mine.do("beside", "publish", 0, 0, 1)
    assert mine.ask("joined") == (0, "")
    assert mine.ask("published") == (1, "")
    mine.do("push", 1, 10_000)
    mine.do("applied", 10_000)
    assert moved(running, begin) == 1
    mine.do("detach")


def test_a_thread_that_has_ended_holds_up_nobody(client: Makers, small: Job) -> None:
    mine = client.plain()
    mine.do("attach", small.socket)
    mine.do("beside", "claim", 1000)
    assert mine.ask("joined") == (0, "")
    mine.do("over")
    mine.do("push", 1, 10_000)
    mine.do("applied", 10_000)
    mine.do("detach")
    small.gone()


def test_a_second_batch_and_a_second_copy(both: dict[str, Makers], job: Callable[..., Job]) -> None:
    """Refuse them in Python only beside their like: a pipeline pushes in its own thread."""
    running = job(**SMALL)
    for name, make in both.items():
        mine = make.plain()
        mine.do("attach", running.socket)
        for command in (("take", -1), ("pull_consistent", 60_000)):
            with running.writing():
                mine.do("beside", *command)
                ring = running.ring(running.status()["learners"][0]["row"])
                word = "waits_work" if command[0] == "take" else "hold"
                support.eventually(lambda ring=ring, word=word: int(ring[word]))
                assert mine.ask(*command) == (ERROR, BUSY), (name, command)
            if command[0] == "take":
                with_work = make.plain()
                with_work.do("attach", running.socket)
                with_work.do("work", 2, 1, 0)
                with_work.do("detach")
            mine.begin("joined")
            assert not mine.line().startswith(str(ERROR))
        mine.do("push", 1, 10_000)
        mine.do("detach")
        support.eventually(lambda: not running.status()["learners"])


def test_what_returns_is_applied(client: Makers, job: Callable[..., Job]) -> None:
    """Two threads push as fast as they can: each push is applied once or refused."""
    running = job(**WIDE, **SGD)
    begin = running.weights()
    mine = client.plain()
    mine.do("attach", running.socket)
    mine.do("beside", "many", 100)
    done = mine.ask("many", 100)[0] + mine.ask("joined")[0]
    assert mine.ask("published") == (done, "")
    mine.do("applied", 10_000)
    mine.do("detach")
    running.gone()
    assert running.status()["gradients_applied"] == done > 0
    assert moved(running, begin) == done


def test_detach_ends_a_push_that_waits(client: Makers, job: Callable[..., Job]) -> None:
    running = job(**SMALL, **SGD)
    begin = running.weights()
    mine = client.plain()
    fill(running, mine)
    mine.do("beside", "push", 1, -1)
    asleep(running, mine)
    mine.do("detach")
    assert mine.ask("joined") == (ERROR, LEFT)
    running.pause(False)
    running.gone()
    assert running.status()["gradients_applied"] == 2
    assert moved(running, begin) == 2


@pytest.mark.parametrize("command", PUSHES)
def test_nothing_is_published_after_detach(
    both: dict[str, Makers], small: Job, command: tuple[object, ...]
) -> None:
    """Check the error in Python; in C the handle is gone by then."""
    mine = both["python"].plain()
    mine.do("attach", small.socket)
    mine.do("detach")
    assert mine.ask(*command) == (ERROR, LEFT)
    assert mine.ask("published") == (0, "")
    small.gone()


def test_detach_beside_pushes(both: dict[str, Makers], job: Callable[..., Job]) -> None:
    """Check that all shards apply what returned before, and that later pushes are refused."""
    running = job(**WIDE, **SGD)
    begin = running.weights()
    mine, done = both["python"].plain(), 0
    for _ in range(30):
        mine.do("attach", running.socket)
        mine.do("beside", "until_refused")
        support.eventually(lambda: mine.ask("published")[0] > 2)
        mine.do("detach")
        pushed, why = mine.ask("joined")
        assert why == "UsageError"
        assert mine.ask("published") == (pushed, "")
        done += pushed
        running.gone()
    assert running.status()["gradients_applied"] == done
    assert moved(running, begin) == done
