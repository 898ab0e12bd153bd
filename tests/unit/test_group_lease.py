"""Which `group run` looks after a run, and what another command tells it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support import eventually

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

from gadei_ps.cluster import lease
from gadei_ps.cluster.lease import Holder, Process
from gadei_ps.errors import ClusterError

Child = subprocess.Popen[bytes]


@pytest.fixture
def command() -> Iterator[Child]:
    with sleeping() as made:
        yield made


@pytest.fixture
def driver() -> Iterator[Child]:
    with sleeping() as made:
        yield made


@contextlib.contextmanager
def sleeping() -> Iterator[Child]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as made:
        yield made
        made.kill()


def holder(command: Child, driver: Child) -> Holder:
    return Holder("h, process 1", Process.of(command.pid), Process.of(driver.pid))


def test_the_driver_of_a_command_that_was_killed_is_not_waited_for(
    command: Child, driver: Child
) -> None:
    """It is stopped here, as one that waits for a machine that does not answer."""
    made = holder(command, driver)
    driver.send_signal(signal.SIGSTOP)
    made.note(True, ())
    made.let_go()
    assert made.state() == ("h, process 1", True) and driver.poll() is None
    command.kill()
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)  # dead, though nobody has reaped it
    assert made.state() == ("h, process 1", False)
    made.let_go()
    eventually(lambda: driver.poll() == -signal.SIGKILL)
    made.let_go()


def test_a_driver_that_may_have_something_to_take_back_is_left_alone(
    command: Child, driver: Child
) -> None:
    made = holder(command, driver)
    command.kill()
    command.wait()
    made.let_go()
    assert made.state() == ("h, process 1", False) and driver.poll() is None


def test_processes_of_another_namespace_may_live(command: Child, driver: Child) -> None:
    """A pid says nothing of them; and none of them is killed."""
    seen = [Process.of(one.pid) for one in (command, driver)]
    other = [one._replace(namespace=one.namespace + 1) for one in seen]
    command.kill()
    command.wait()
    for one, lives in ((Holder("h", other[0], seen[1]), True), (Holder("h", *other), True)):
        one.note(True, ())
        one.let_go()
        assert one.state() == ("h", lives)
    made = Holder("h", seen[0], other[1])
    made.note(True, ())
    made.let_go()
    assert driver.poll() is None


class Cluster:
    """Of Ray, in which the name of a run's actor is taken; time passes there as it is asked."""

    def __init__(self, states: list[tuple[str, bool] | None]) -> None:
        self.states, self.now = states, 0.0
        self.asked: list[str] = []

    def remote(self, *_: Any) -> Any:
        if self.states:
            raise ValueError("the name is taken")
        return "ours"

    def answer(self, run: str, what: str, *_: Any) -> Any:
        self.asked.append(what)
        if what != "state":
            return None
        self.now += 1.0
        return self.states.pop(0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster([])
    context = SimpleNamespace(get_node_id=lambda: "a" * 56)
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made.remote))
    ray = SimpleNamespace(
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_node_ip_address=lambda: "h"),
        remote=lambda _: options,
    )
    monkeypatch.setattr(lease, "ray", ray)
    monkeypatch.setattr(lease, "_asked_of", made.answer)
    monkeypatch.setattr(
        lease, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=lambda _: None)
    )
    return made


LIVES, KILLED = ("h, process 7", True), ("h, process 7", False)
WAITS = "waiting for the group run at h, process 7, which was killed, to end what it has begun"


@pytest.mark.parametrize(
    ("states", "said"),
    [([], []), ([KILLED, None], []), ([KILLED, None, None, None, None, KILLED], [WAITS])],
)
def test_a_command_that_was_killed_is_followed_by_the_next_one(
    cluster: Cluster, states: list[Any], said: list[str]
) -> None:
    lines: list[str] = []
    cluster.states = list(states)
    lease.take("a", lines.append)
    assert lines == said
    assert ("let_go" in cluster.asked) == (KILLED in states)


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ([LIVES], "^run a has its group run already, at h, process 7: end that command first"),
        ([KILLED, LIVES], "already, at h, process 7"),  # it has begun meanwhile
        ([None] * 4, "already, at a place that does not answer"),
        ([KILLED] * 101, "at h, process 7 was killed, and has not ended what it had begun in 100"),
    ],
)
def test_a_command_that_lives_is_left_alone(cluster: Cluster, states: list[Any], why: str) -> None:
    cluster.states = states
    with pytest.raises(ClusterError, match=why):
        lease.take("a", lambda _: None)
    assert not cluster.states


def test_what_another_command_has_done_is_told_once(command: Child, driver: Child) -> None:
    made = holder(command, driver)
    made.tell({1: {"asked": "leave"}})
    made.tell({2: {"asked": "dead"}})
    assert made.told() == {1: {"asked": "leave"}, 2: {"asked": "dead"}} and made.told() == {}


def test_an_actor_that_ray_begins_again_knows_what_it_must(command: Child, driver: Child) -> None:
    """Ray makes it as it was made first."""
    made = holder(command, driver)
    note = SimpleNamespace(remote=lambda *told: made.note(*told))
    ours = lease.Lease(SimpleNamespace(note=note))
    ours.begun()
    ours.miss({3})
    for _ in range(2):
        assert made._has_begun and made.missed() == (3,)
        made = holder(command, driver)
        ours.miss({3})
