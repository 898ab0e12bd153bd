"""The client for Python and the client for C: one behaviour. Waits, batches and the end.

Each case drives both against a real job, by the commands of tests/clients/driver.py and driver.c.
Results are those of gadei.h, for Python the same numbers for the errors it raises.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
import support
from clients.both import Makers, asleep, fill, row_of, with_seconds
from clients.drivers import ERROR, EVICTED, FAILED, FINISHED, SMALL, STOPPED, TIMEOUT, Job

from gadei_ps.job import control
from gadei_ps.job.control import StopJob, pack

# -- waits -----------------------------------------------------------------------------------------


def test_waits_time_out_and_go_on(client: Makers, small: Job) -> None:
    mine = client.plain()
    fill(small, mine)
    slow = "no slot came free: does the server apply gradients? within 0.02 s"
    for command in (("claim", 20), ("claim_rows", 20), ("push", 1, 20), ("give_up", 20)):
        assert with_seconds(mine.ask(*command)) == (TIMEOUT, slow)
    assert mine.ask("claim", 0)[0] == TIMEOUT
    late = "the gradient was not applied within 0.001 s"
    assert with_seconds(mine.ask("applied", 1)) == (TIMEOUT, late)
    none = "no batch was handed out within 0.001 s"
    assert with_seconds(mine.ask("take", 1)) == (TIMEOUT, none)
    assert mine.ask("published") == (2, "")
    mine.begin("claim", -1)
    asleep(small, mine)
    small.pause(False)
    assert mine.end() == (0, "")
    mine.do("detach")
    small.gone()


def test_a_limit_is_one_for_the_turn_and_the_slot(client: Makers, job: Callable[..., Job]) -> None:
    """The turn comes when two thirds of the limit are over; then no slot comes free."""
    running = job(**SMALL, sync="bsp", slots=1)
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
        one.do("turn", 10_000)
    limit_s = 6.0
    mine.do("push", 1, 10_000)
    begin = time.monotonic()
    mine.begin("claim", int(1000 * limit_s))
    support.eventually(lambda: time.monotonic() - begin > 2 / 3 * limit_s)
    running.grant(row_of(running, mine)["row"])
    slow = f"no slot came free: does the server apply gradients? within {limit_s:g} s"
    assert with_seconds(mine.end()) == (TIMEOUT, slow)
    assert time.monotonic() - begin < (1 + 2 / 3) * limit_s


def test_a_barrier_waits_for_the_other(client: Makers, job: Callable[..., Job]) -> None:
    running = job(**SMALL, sync="bsp")
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
        one.do("turn", 10_000)
    mine.do("push", 1, 10_000)
    late = (TIMEOUT, "no grant to continue within 0.02 s")
    assert with_seconds(mine.ask("turn", 20)) == late
    assert with_seconds(mine.ask("claim", 20)) == late
    mine.begin("turn", -1)
    other.do("push", 3, 10_000)
    assert mine.end() == (0, "")
    np.testing.assert_array_equal(running.weights(), -2.0)
    assert mine.ask("version") == (2, "")


def test_a_straggler_gives_up(client: Makers, job: Callable[..., Job]) -> None:
    running = job(**SMALL, sync="cutoff:c=1")
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
    mine.do("work", 5, 1, 0)
    assert mine.ask("take", 10_000) == (0, "0 0")
    for one in (mine, other):
        one.do("turn", 10_000)
    assert mine.ask("wanted") == (1, "")
    other.do("push", 1.0, 10_000)
    other.do("turn", 10_000)  # granted once the superstep is applied
    assert mine.ask("wanted") == (0, "")
    mine.do("give_up", 10_000)
    mine.do("turn", 10_000)
    assert mine.ask("wanted") == (1, "")
    status = running.status()
    assert (status["gradients_applied"], status["gradients_dropped"]) == (1, 1)
    assert status["batches_requeued"] == 1


def test_others_go_on_without_one_that_pauses(client: Makers, job: Callable[..., Job]) -> None:
    running = job(**SMALL, sync="ssp:s=0")
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
        one.do("turn", 10_000)
    mine.do("pause")
    for _ in range(3):
        other.do("push", 1.0, 10_000)
        other.do("turn", 10_000)
    assert [one["paused"] for one in running.status()["learners"]] == [True, False]
    mine.do("resume")
    mine.do("turn", 10_000)
    mine.do("push", 1.0, 10_000)
    mine.do("applied", 10_000)
    status = running.status()
    assert status["gradients_applied"] == 4
    assert not any(one["paused"] for one in status["learners"])


@pytest.mark.parametrize(("sync", "wave"), [("asp", 1), ("wsp:D=1,s_local=3", 4)])
def test_wave(client: Makers, job: Callable[..., Job], sync: str, wave: int) -> None:
    mine = client.plain()
    mine.do("attach", job(**SMALL, sync=sync).socket)
    assert mine.ask("wave") == (wave, "")


def test_all_but_one_of_the_next_wave_begin_before_its_grant(
    client: Makers, job: Callable[..., Job]
) -> None:
    running = job(**SMALL, sync="wsp:D=0,s_local=3")
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
        for number in range(7):
            one.do("mini_batch", number, 10_000)
    mine.do("push", 1, 10_000)
    for number in range(3):
        mine.do("mini_batch", number, 20)
    late = (TIMEOUT, "no grant to continue within 0.02 s")
    for number in range(3, 7):
        assert with_seconds(mine.ask("mini_batch", number, 20)) == late
    mine.begin("mini_batch", 3, -1)
    other.do("push", 3, 10_000)
    assert mine.end() == (0, "")
    np.testing.assert_array_equal(running.weights(), -4.0)
    mine.do("mini_batch", 6, 20)
    assert mine.ask("version") == (2, "")


# -- batches ---------------------------------------------------------------------------------------


def test_every_batch_is_handed_out_once(client: Makers, job: Callable[..., Job]) -> None:
    running, mine, other = job(**SMALL, ahead=1), client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", running.socket)
        one.do("work", 10, 2, 7)
    seen, going = [], [mine, other]
    while going:
        for one in list(going):
            code, batch = one.ask("take", -1 if len(going) == 1 else 50)
            if code == FINISHED:
                going.remove(one)
            elif code != TIMEOUT:
                assert code == 0
                seen.append(tuple(map(int, batch.split())))
                one.do("push", 0, 10_000)
    assert sorted(seen) == [(epoch, index) for epoch in range(2) for index in range(10)]
    status = running.status()
    assert status["work"]["epochs_done"] == 2
    assert all(row["unasked"] == 0 for row in status["learners"])


def test_batches_that_are_refused(both: dict[str, Makers], job: Callable[..., Job]) -> None:
    running = job(**SMALL, ahead=2)
    answers = []
    for make in both.values():
        mine = make.plain()
        mine.do("attach", running.socket)
        mine.do("work", 10, 2, 7)
        answers.append([mine.ask("work", 11, 2, 7)])
        assert mine.ask("work", 0, 1, 0)[0] == mine.ask("work", 1, 0, 0)[0] == ERROR
        for _ in range(2):
            assert mine.ask("take", 10_000)[0] == 0
        answers[-1].append(mine.ask("take", 10_000))  # as many as are handed out ahead
        for _ in range(2):
            mine.do("push", 0, 10_000)
        mine.do("applied", 10_000)
        mine.do("detach")
        running.gone()
    assert answers[0] == answers[1]
    assert {code for code, _ in answers[0]} == {ERROR}
    assert answers[0][-1][1] == "batches that wait for their gradients: 2; push once for each batch"


# -- the end ---------------------------------------------------------------------------------------


def test_a_job_that_is_stopped(client: Makers, job: Callable[..., Job]) -> None:
    running, mine, late = job(**SMALL), client.plain(), client.plain()
    fill(running, mine)
    assert mine.ask("stopping") == (0, "")
    mine.begin("claim", -1)
    asleep(running, mine)
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(str(running.socket))
    asking.sendall(pack(StopJob().model_dump()))
    assert mine.end() == (STOPPED, f"job '{running.name}' has been stopped")
    assert mine.ask("stopping") == (1, "")
    for command in (("push", 1, 1000), ("claim_rows", -1), ("give_up", -1)):
        assert mine.ask(*command) == (STOPPED, f"job '{running.name}' has been stopped")
    assert mine.ask("take", -1)[0] == FINISHED
    code, text = late.ask("attach", running.socket)
    assert code in (STOPPED, ERROR) and "\n" not in text
    running.pause(False)  # or what the ring holds could not be applied, and the job not end
    mine.do("detach")
    asking.close()


def test_a_gradient_that_is_written_when_the_rings_are_closed(
    client: Makers, job: Callable[..., Job]
) -> None:
    running, mine = job(**SMALL), client.plain()
    mine.do("attach", running.socket)
    mine.do("push", 1, 1000)
    mine.do("claim", -1)
    report = control.ask(str(running.socket), StopJob())
    assert mine.ask("publish", 0, 0, 1) == (STOPPED, f"job '{running.name}' has been stopped")
    assert mine.ask("published") == (1, "")
    assert report["version"] == 1


def test_a_job_that_is_dead(client: Makers, job: Callable[..., Job]) -> None:
    """Once neither a server nor a watchdog, which would start one, has been there for a while."""
    running, mine = job(**SMALL), client.hurried()
    fill(running, mine)
    mine.begin("applied", -1)
    asleep(running, mine)
    support.kill_all(running.name, running.socket)
    gone = f"the server and the watchdog of job '{running.name}' are gone"
    assert mine.end() == (FAILED, gone)
    mine.do("detach")


def test_a_server_that_is_dead(client: Makers, job: Callable[..., Job]) -> None:
    """The watchdog starts the next one; nothing is reported."""
    running, mine = job(**SMALL, standby=True), client.plain()
    mine.do("attach", running.socket)
    mine.do("push", 1, 10_000)
    os.kill(running.status()["server_pid"], signal.SIGKILL)
    for _ in range(5):
        mine.do("push", 1, 60_000)
    mine.do("applied", 60_000)
    np.testing.assert_array_equal(running.weights(), -6.0)


def test_evicted(client: Makers, small: Job) -> None:
    mine = client.plain()
    mine.do("attach", small.socket)
    mine.do("claim", -1)
    small.control["roster"][row_of(small, mine)["row"]]["wanted"] = 0
    evicted = (EVICTED, f"job '{small.name}' has evicted this learner")
    for command in (("publish", 0, 0, 1), ("claim", 1000), ("push", 1, 1000)):
        assert mine.ask(*command) == evicted
    assert mine.ask("published") == (0, "")
    mine.kill()
    small.gone()


def test_a_child_may_not_use_its_parents(both: dict[str, Makers], small: Job) -> None:
    answers = []
    for make in both.values():
        mine = make.plain()
        mine.do("attach", small.socket)
        commands = ("turn 10", "claim 10", "push 1 10", "give_up 10", "take 10", "work 1 1 0")
        answers.append([mine.ask(f"forked {command}") for command in (*commands, "applied 10")])
        mine.do("forked detach")  # of the child alone
        mine.do("push", 1, 10_000)
        mine.do("applied", 10_000)
        mine.do("detach")
    assert answers[0] == answers[1]
    theirs = "this learner belongs to the parent process; attach after the fork"
    assert set(answers[0]) == {(ERROR, theirs)}
    small.gone()
