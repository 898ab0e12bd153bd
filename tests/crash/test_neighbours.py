"""Learners that fork, run another program, or lose their main thread: nobody else is harmed."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import Pusher, eventually, gone, status
from team import Team, push_ones, send

from gadei_ps.errors import GadeiError, UsageError
from gadei_ps.job.faults import Role
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout

SLEEP = "/bin/sleep"

# -- forks ----------------------------------------------------------------------------------------


def _uses(client: Client) -> None:
    """Each call that waits or publishes belongs to the parent."""
    ones = np.ones(client.model.elements, np.float32)
    calls: list[Callable[[], object]] = [
        lambda: client.push(ones),
        client.claim,
        client.abandon,
        client.wait_turn,
        client.wait_applied,
        client.take_batch,
        lambda: client.pull(consistent=True),
    ]
    for call in calls:
        try:
            call()
        except UsageError:
            continue
        os._exit(1)


def _leaves(client: Client) -> None:
    client.detach()


def _ends(client: Client) -> None:
    """End as an interpreter does."""
    del client
    gc.collect()
    atexit._run_exitfuncs()


def _dies(client: Client) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _attaches(client: Client) -> None:
    """It may become a learner of its own, which is gone with it."""
    own = Client(client.job)
    own.push({})


LIBC = ctypes.CDLL(None)
CHILDREN = {
    "uses it": (_uses, 0),
    "is of libc and uses it": (_uses, 0),
    "detaches": (_leaves, 0),
    "ends": (_ends, 0),
    "dies": (_dies, signal.SIGKILL),
    "attaches": (_attaches, 0),
}


def _forking(
    fork: Callable[[], int], child: Callable[[Client], None], ends: int
) -> Callable[[Client], None]:
    """Push, each time beside a fork; end if a fork does not end as it should."""

    def push(client: Client) -> None:
        pid = int(fork())
        if not pid:
            try:
                child(client)
            except BaseException:
                os._exit(2)
            os._exit(0)
        push_ones(client)
        if os.waitpid(pid, 0)[1] != ends:
            os._exit(3)

    return push


@pytest.mark.parametrize("what", CHILDREN)
def test_a_learner_forks(what: str, job_name: str, tmp_path: Path) -> None:
    with Team(job_name, tmp_path, learners=1) as team:
        fork = LIBC.fork if "libc" in what else os.fork
        forks = Pusher(job_name, _forking(fork, *CHILDREN[what]))
        team.learners.append(forks)
        eventually(lambda: forks.published >= 5 or not forks.child.alive)
        team.goes_on()
        assert forks.child.alive
        team.fire()
        eventually(lambda: not status(job_name)["learners"])
        eventually(lambda: int(team.control["version"]) >= team.buried)
        np.testing.assert_array_equal(team.weights, -team.buried)
        assert status(job_name)["gradients_refused"] == 0


def test_a_fork_outlives_its_learner(job_name: str, tmp_path: Path) -> None:
    """The learner is gone when its process is; what a fork still writes, nobody reads."""
    file = tmp_path / "pid"

    def push(client: Client) -> None:
        push_ones(client)
        if client.published == 3 and not os.fork():
            file.with_suffix(".new").write_text(str(os.getpid()))
            file.with_suffix(".new").rename(file)
            ring = client.place.ring
            while True:
                ring.array(np.uint8, ring.size, 0)[:] = 255
                time.sleep(0.001)

    with Team(job_name, tmp_path, learners=1) as team:
        forks = Pusher(job_name, push)
        row, roster = forks.row, team.control["roster"]
        eventually(file.exists)
        os.kill(forks.child.pid, signal.SIGKILL)
        eventually(lambda: int(roster["retired"][row]) == forks.generation)
        again = Pusher(job_name, push_ones)
        try:
            team.learners.append(again)
            assert again.row == row
            eventually(lambda: again.published > 20)
            team.goes_on()
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)
        forks.child.kill()
        assert status(job_name)["server_deaths"] == 0
        team.fire()
        eventually(lambda: (roster["retired"] == roster["generation"]).all())


# -- other programs -------------------------------------------------------------------------------


def _in_turn(client: Client) -> None:
    client.wait_turn()
    push_ones(client)


def _becomes_another(client: Client) -> None:
    _in_turn(client)
    if client.published == 5:
        os.execv(SLEEP, ["sleep", "1000"])


def _becomes_another_unseen(client: Client) -> None:
    """A fork keeps the connection to the watchdog open."""
    _in_turn(client)
    if client.published == 5:
        if not os.fork():
            signal.pause()
        os.execv(SLEEP, ["sleep", "1000"])


@pytest.mark.parametrize("model", ["asp", "bsp"])
@pytest.mark.parametrize("push", [_becomes_another, _becomes_another_unseen])
def test_a_learner_becomes_another_program(
    push: Callable[[Client], None], model: str, job_name: str, tmp_path: Path
) -> None:
    """The learner is gone, though its process lives on, and is left alone."""
    unseen = push is _becomes_another_unseen
    how = {"sync": model, "learner_timeout_s": 1.0 if unseen else 60.0}
    with Team(job_name, tmp_path, learners=0, **how) as team:
        other = Pusher(job_name, push)
        stays = Pusher(job_name, _in_turn)
        team.learners += [other, stays]
        comm = Path(f"/proc/{other.child.pid}/comm")
        eventually(lambda: comm.read_text() == "sleep\n")
        if model == "bsp" or not unseen:  # else nobody waits for it, and nobody looks
            roster = team.control["roster"]
            eventually(lambda: int(roster["retired"][other.row]) == other.generation)
            assert status(job_name)["learner_deaths"] == 1
        team.goes_on()
        assert not gone(other.child.pid)
        assert other.published == 5
        for orphan in psutil.Process(other.child.pid).children():
            orphan.kill()
        if model == "asp":
            team.settle()


# -- threads --------------------------------------------------------------------------------------


def _goes_on_in_a_thread(client: Client) -> None:
    def work() -> None:
        try:
            while True:
                push_ones(client)
        except GadeiError:
            os._exit(1)

    threading.Thread(target=work).start()
    ctypes.CDLL(None).pthread_exit(None)


def test_a_learner_without_its_main_thread(job_name: str, tmp_path: Path) -> None:
    """It lives for the watchdog, for the next watchdog, and for a server without one."""
    with Team(job_name, tmp_path, learners=1) as team:
        headless = Pusher(job_name, _goes_on_in_a_thread)
        team.learners.append(headless)
        stat = Path(f"/proc/{headless.child.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(") ")[2].startswith("Z"))

        def trains() -> None:
            wanted = headless.published + 20
            eventually(lambda: headless.published > wanted)

        trains()
        send(team.find(Role.WATCHDOG))
        trains()
        team.watch()
        trains()
        assert {row["pid"] for row in status(job_name)["learners"]} == {
            one.child.pid for one in team.learners
        }
        team.settle()
        assert status(job_name)["learner_deaths"] == 2
        assert int(team.control["roster"]["gone"][headless.row]) == layout.Gone.DIED
