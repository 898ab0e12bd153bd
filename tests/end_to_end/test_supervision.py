"""What the watchdog does: the hung and the dead are replaced, and nobody waits for them.

Learners here do one call at a time, as they are told; what they have pushed is counted in weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from shell import Cli, Running, is_running
from support import (
    FORK,
    Child,
    Pusher,
    Stopped,
    config,
    daemon,
    eventually,
    fork,
    gone,
    learner,
    live_weights,
    segments,
    status,
)
from support.quick import fork_quickly

from gadei_ps.commands import jobs
from gadei_ps.errors import GadeiError, JobFailed
from gadei_ps.job.control import StopJob, ask
from gadei_ps.job.processes import Processes
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment
from gadei_ps.watchdog import servers, supervisor

VALUES = 3000
TIMEOUT_S = 1.2
TENSORS = [{"name": "w", "shape": [VALUES]}]
TOML = f"[optimizer]\nkind = 'sgd'\nlr = 1.0\n[[tensors]]\nname = 'w'\nshape = [{VALUES}]\n"


def _obey(pipe: Connection, job: str) -> None:
    """Calls the client's methods whose names and arguments it is sent."""
    client = Client(job)
    pipe.send("attached")
    while True:
        name, *args = pipe.recv()
        try:
            pipe.send(getattr(client, name)(*args))
        except GadeiError as error:
            pipe.send(f"{type(error).__name__}: {error}")


def tell(child: Child, name: str, *args: Any) -> None:
    """The child begins a call; child.receive() gives its result."""
    child.send((name, *args))


def call(child: Child, name: str, *args: Any) -> Any:
    tell(child, name, *args)
    return child.receive()


@contextlib.contextmanager
def team(job: str, count: int, *calls: str) -> Iterator[list[Child]]:
    """Learners that obey and have done these calls."""
    with fork(count, _obey, job) as made:
        for child in made:
            assert child.receive() == "attached"
            for name in calls:
                call(child, name)
        yield made


def one_at(value: int) -> np.ndarray:
    gradient = np.zeros(VALUES, np.float32)
    gradient[value] = 1.0
    return gradient


@contextlib.contextmanager
def pushing(job: str, value: int | None = None) -> Iterator[Pusher]:
    """A learner that has had its first turn, and goes on; with ones, or a one at a single value."""
    gradient = one_at(value) if value is not None else np.ones(VALUES, np.float32)

    def push(client: Client) -> None:
        client.wait_turn()
        client.push({"w": gradient})
        time.sleep(0.0005)  # what is started meanwhile needs the cores

    one = Pusher(job, push)
    try:
        eventually(lambda: one.published)
        yield one
    finally:
        one.kill()


def goes_on(job: str, gradients: int = 20) -> None:
    version = status(job)["version"]
    eventually(lambda: status(job)["version"] >= version + gradients)


def standby(job: str) -> int:
    return int(eventually(lambda: status(job)["standby_pid"], what="nobody stands by"))


def settled(job: str) -> None:
    """Once the learners are gone: every published gradient is in the weights."""
    eventually(lambda: not status(job)["learners"])
    now = status(job)
    np.testing.assert_array_equal(live_weights(job)[:VALUES], -now["version"])
    assert now["gradients_applied"] == now["version"]


# -- a watchdog that is looked at ---------------------------------------------------------------

TICK_S = 0.02


def _supervise(pipe: Connection, job: str, looks: Any, values: dict[str, Any]) -> None:
    """A watchdog that looks at everything more often than others do, and counts it."""
    supervisor.TICK_S = supervisor.SLOW_TICK_S = TICK_S
    servers.STANDBY_LIMIT_S = TIMEOUT_S
    look = supervisor.Supervisor._look_around

    def counted(self: supervisor.Supervisor, now: float) -> None:
        look(self, now)
        looks.value += 1

    supervisor.Supervisor._look_around = counted  # type: ignore[method-assign]
    wanted = config(job, tensors=TENSORS, **({"standby": False} | values))
    with fork_quickly():
        supervisor.serve(wanted, supervisor.Options(fresh=True, quiet=True))


class Watched:
    """A job with such a watchdog."""

    def __init__(self, job: str, **values: Any) -> None:
        self.job = job
        self._looks = FORK.Value(ctypes.c_uint64)
        self.watchdog = Child(_supervise, job, self._looks, values)

    def __enter__(self) -> Self:
        eventually(lambda: is_running(self.job))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and self.watchdog.alive:
            ask(self.job, StopJob(drain=False))
            assert self.watchdog.join() == 0
        self.watchdog.kill()

    def look(self, seconds: float) -> None:
        """Until the watchdog has looked for so long, by its own clock."""
        enough = self._looks.value + seconds / TICK_S
        eventually(lambda: self._looks.value >= enough)


def test_a_hung_standby_is_replaced(job_name: str) -> None:
    with Watched(job_name, standby=True, hang_s=TIMEOUT_S):
        hung = standby(job_name)
        active = status(job_name)["server_pid"]
        with pushing(job_name):
            os.kill(hung, signal.SIGSTOP)
            eventually(lambda: status(job_name)["standby_pid"] not in (0, hung))
            assert gone(hung)
            assert status(job_name)["server_pid"] == active
            goes_on(job_name)


# -- learners that hang -----------------------------------------------------------------------

SAMPLES, EPOCHS = 60, 2


def _answer(pipe: Connection, job: str, holds: bool) -> None:
    """Answers batches: each has a value of its own, which becomes 1 less."""
    with Client(job) as client:
        for batch in client.batches(samples=SAMPLES, batch_size=1, epochs=EPOCHS):
            if holds:
                pipe.send("holds")
                pipe.recv()
            client.push({"w": one_at(batch.epoch * SAMPLES + batch.index)}, samples=1)
    pipe.send("done")


def test_batches_of_the_hung_go_to_others(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, learner_timeout_s=TIMEOUT_S),
        fork(1, _answer, job_name, True) as (hung,),
        Stopped(hung.pid) if hung.receive() == "holds" else contextlib.nullcontext(),
        fork(1, _answer, job_name, False) as (good,),
    ):
        assert good.receive() == "done"
        eventually(lambda: gone(hung.pid))
        assert good.join() == 0
        end = status(job_name)
        assert end["work"]["state"] == "done"
        assert (end["gradients_applied"], end["learner_deaths"]) == (SAMPLES * EPOCHS, 1)
        assert end["batches_requeued"] > 0
        answered = live_weights(job_name)[:VALUES]
        np.testing.assert_array_equal(answered[: SAMPLES * EPOCHS], -1)
        assert not answered[SAMPLES * EPOCHS :].any()


def test_barriers_do_not_wait_for_the_hung(job_name: str) -> None:
    with (
        daemon(job_name, tensors=TENSORS, learner_timeout_s=TIMEOUT_S, sync="bsp"),
        team(job_name, 1, "wait_turn") as (hung,),
        pushing(job_name) as good,
    ):
        hung.signal(signal.SIGSTOP)
        eventually(lambda: gone(hung.pid))
        goes_on(job_name)
        good.kill()
        settled(job_name)


def test_the_slow_and_the_waiting_are_left_alone(job_name: str) -> None:
    wanted = {"learner_timeout_s": TIMEOUT_S, "sync": "bsp", "slots": 1}
    with (
        Watched(job_name, **wanted) as job,
        team(job_name, 2, "wait_turn") as (slow, quick),
    ):
        gradient = np.ones(VALUES, np.float32)
        # It takes its time, but less than the limit; the other waits for its turn.
        for _ in range(3):
            call(quick, "push", gradient_of(gradient))
            tell(quick, "wait_turn")
            job.look(0.4 * TIMEOUT_S)  # it computes
            call(slow, "push", gradient_of(gradient))
            call(slow, "wait_turn")
            quick.receive()
        # Both have pushed, and wait far longer than the limit, but for the server.
        with Stopped(status(job_name)["server_pid"]):
            for child in (slow, quick):
                call(child, "push", gradient_of(gradient))
                tell(child, "wait_turn")
            job.look(1.5 * TIMEOUT_S)
        for child in (slow, quick):
            child.receive()
            assert call(child, "wait_applied") is None
        end = status(job_name)
        assert (end["learner_deaths"], end["supersteps"], len(end["learners"])) == (0, 4, 2)


def gradient_of(values: np.ndarray) -> dict[str, np.ndarray]:
    return {"w": values}


def test_who_holds_nobody_up_may_rest(job_name: str) -> None:
    """Under ASP, while there are other batches to hand out, or nothing to do at all."""
    with Watched(job_name, learner_timeout_s=0.3) as job, team(job_name, 2) as (one, other):
        call(one, "set_work", 100, 1, 1)
        assert isinstance(call(one, "take_batch"), int)
        call(other, "push", gradient_of(one_at(0)))
        job.look(1.0)
        now = status(job_name)
        assert (now["learner_deaths"], len(now["learners"])) == (0, 2)


# -- the last learner -------------------------------------------------------------------------


def test_a_job_that_stops_when_idle(job_name: str) -> None:
    """Not before the first learner has come, nor as long as one is there."""
    with Watched(job_name, when_idle="stop") as job, team(job_name, 2) as (one, other):
        call(one, "push", gradient_of(one_at(0)))
        assert call(one, "detach") is None
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        job.look(0.1)
        assert is_running(job_name)
        other.kill()
        assert job.watchdog.join() == 0
        assert not segments(job_name)


# -- learners that the watchdog starts --------------------------------------------------------

SCRIPT = """
    import os, pathlib, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    here, index = pathlib.Path(__file__).parent, os.environ["GADEI_PS_LEARNER"]
    (here / f"started.{index}.{os.getpid()}").touch()
    while (here / "hold").exists():
        time.sleep(0.002)
    with Client() as client:
        while not (here / f"finish.{index}").exists():
            client.push({"w": np.ones(3000, np.float32)})
            time.sleep(0.002)
"""


def with_learners(cli: Cli, count: int, text: str = "", command: list[str] | None = None) -> str:
    """A job file that names its learners."""
    script = cli.directory / "learner.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = command or [sys.executable, str(script)]
    table = f"[learners]\ncommand = {json.dumps(command)}\ncount = {count}\n"
    return f"standby = false\n{text}{TOML}{table}"


def named(job: str) -> dict[str, int]:
    """Pids of the learners by the names that they have."""
    return {row["name"]: row["pid"] for row in status(job)["learners"] if not row["leaving"]}


def starts(cli: Cli, index: int) -> int:
    return len(list(cli.directory.glob(f"started.{index}.*")))


def all_there(job: str, count: int) -> dict[str, int]:
    wanted = {f"learner-{index}" for index in range(count)}
    eventually(lambda: named(job).keys() == wanted, what=lambda: named(job))
    return named(job)


def test_learners_of_the_job_file(cli: Cli, job_name: str) -> None:
    """Started, started again when killed, but not when they have finished; then the job ends."""
    watchdog = cli.serve(job_name, with_learners(cli, 2, "when_idle = 'stop'\n"))
    first = all_there(job_name, 2)
    os.kill(first["learner-0"], signal.SIGKILL)
    eventually(lambda: named(job_name).get("learner-0", first["learner-0"]) != first["learner-0"])
    goes_on(job_name)
    (cli.directory / "finish.1").touch()
    eventually(lambda: gone(first["learner-1"]))
    eventually(lambda: set(named(job_name)) == {"learner-0"})
    goes_on(job_name)
    (cli.directory / "finish.0").touch()
    assert watchdog.wait().code == 0
    assert "last learner has left" in watchdog.err
    assert (starts(cli, 0), starts(cli, 1)) == (2, 1)
    assert not segments(job_name)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-c", "import sys; sys.exit(3)"], "fails again and again"),
        (["/no/such/program"], "cannot start a learner"),
    ],
)
def test_learners_that_fail(command: list[str], said: str, cli: Cli, job_name: str) -> None:
    """They are given up, said so; the job waits for others."""
    text = with_learners(cli, 1, command=command)
    watchdog = cli.serve(job_name, text)
    eventually(lambda: said in watchdog.err, what=lambda: watchdog.err)
    if len(command) > 1:
        assert watchdog.err.count("a learner ended") == 5
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    assert jobs.stop(job_name, drain=False, timeout_s=5)["gradients_applied"] == 1


def test_learners_are_adopted(cli: Cli, job_name: str) -> None:
    (cli.directory / "hold").touch()
    watchdog = cli.serve(job_name, with_learners(cli, 2))
    server = status(job_name)["server_pid"]
    # Before they have attached: they may need seconds for their imports.
    eventually(lambda: starts(cli, 0) == starts(cli, 1) == 1)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    (cli.directory / "hold").unlink()
    first = all_there(job_name, 2)
    goes_on(job_name)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    assert all_there(job_name, 2) == first
    goes_on(job_name)
    assert status(job_name)["server_pid"] == server
    # And looked after: nobody else tells the new watchdog of their deaths.
    os.kill(first["learner-1"], signal.SIGKILL)
    eventually(lambda: named(job_name).get("learner-1", first["learner-1"]) != first["learner-1"])
    assert (starts(cli, 0), starts(cli, 1)) == (1, 2)
    pids = all_there(job_name, 2)
    assert pids["learner-0"] == first["learner-0"]
    # What has finished is not started again, by the next one neither.
    (cli.directory / "finish.1").touch()
    eventually(lambda: set(named(job_name)) == {"learner-0"})
    eventually(lambda: int(Processes(job_name).control["finished"][0]) == 1 << 1)
    watchdog.signal(signal.SIGKILL)
    watchdog = again(cli, job_name)
    os.kill(pids["learner-0"], signal.SIGKILL)
    eventually(lambda: starts(cli, 0) == 2)
    pids = all_there(job_name, 1)
    assert starts(cli, 1) == 2
    jobs.stop(job_name, drain=False, timeout_s=5)
    assert watchdog.wait().code == 0
    for pid in pids.values():
        assert gone(pid), "they end with the job"


# -- adoption ---------------------------------------------------------------------------------


def again(cli: Cli, job: str, *options: str) -> Running:
    """Serves the job file once more."""
    made = cli.start("serve", f"{job}.toml", *options)
    eventually(lambda: is_running(job) or made.process.poll() is not None, what=lambda: made.err)
    assert made.process.poll() is None, made.err
    return made


def test_a_job_is_adopted(cli: Cli, job_name: str) -> None:
    """With its history; who has left meanwhile is gone, and who is there is heard."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    with team(job_name, 4) as (stays, leaves, dies, dead):
        for child in (stays, leaves, dies, dead):
            call(child, "push", gradient_of(np.ones(VALUES, np.float32)))
            call(child, "wait_applied")
        dead.kill()
        eventually(lambda: status(job_name)["learner_deaths"] == 1)
        assert call(stays, "set_work", 10, 1, 1) is None
        before = status(job_name)
        watchdog.signal(signal.SIGKILL)
        call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        call(stays, "wait_applied")
        call(leaves, "detach")
        dies.kill()

        watchdog = again(cli, job_name)
        assert "adopted" in watchdog.err
        eventually(lambda: [row["pid"] for row in status(job_name)["learners"]] == [stays.pid])
        now = status(job_name)
        for name in ("job_id", "server_pid", "server_generation", "started", "model"):
            assert now[name] == before[name], name
        assert now["version"] == now["gradients_applied"] == 5
        assert now["watchdog_starts"] == 2
        assert now["watchdog_pid"] == watchdog.pid
        assert now["server_deaths"] == 0
        # The learner speaks with the new one.
        assert call(stays, "set_work", 10, 1, 1) is None
        assert call(stays, "set_work", 11, 1, 1).startswith("ControlError")
        assert isinstance(call(stays, "take_batch"), int)
        call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        call(stays, "detach")
        eventually(lambda: learner(job_name, stays.pid) is None)
        settled(job_name)
    # And so do others.
    with Client(job_name) as client:
        client.push(gradient_of(np.ones(VALUES, np.float32)))
        client.wait_applied()
        assert client.current_version == 7


def test_another_configuration_is_refused(cli: Cli, job_name: str) -> None:
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        server = status(job_name)["server_pid"]
        watchdog.signal(signal.SIGKILL)
        file = cli.directory / f"{job_name}.toml"
        file.write_text("standby = false\n" + TOML.replace("1.0", "0.5"))
        said = cli("serve", file).error
        assert "with another optimizer:" in said
        assert "--fresh" in said
        call(child, "push", gradient_of(one_at(0)))
        assert call(child, "wait_applied") is None, "the job goes on as it is"
        # What does not change what is computed may change.
        file.write_text("standby = false\nwhen_idle = 'stop'\n[checkpoint]\nevery_s = 0\n" + TOML)
        watchdog = again(cli, job_name)
        assert status(job_name)["server_pid"] == server
        watchdog.signal(signal.SIGKILL)

        file.write_text("standby = false\n" + TOML.replace("1.0", "0.5"))
        again(cli, job_name, "--fresh")
        assert gone(server)
        assert status(job_name)["version"] == 0


def test_a_stop_is_finished_by_the_next(cli: Cli, job_name: str) -> None:
    """With the last checkpoint, which the watchdog that began it did not live to make."""
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        stop = cli.start("stop", job_name)
        eventually(lambda: status(job_name)["phase"] == "draining")
        watchdog.signal(signal.SIGKILL)
        stop.wait()
        watchdog = cli.start("serve", f"{job_name}.toml")
        assert watchdog.wait().code == 0
        assert "finishing the stop" in watchdog.err
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobStopped")
    assert not segments(job_name)
    assert "version=1" in watchdog.err


def test_what_no_checkpoint_took_stays(cli: Cli, job_name: str) -> None:
    """A stop whose last checkpoint fails leaves the memory, and serve goes on from it."""
    watchdog = cli.serve(job_name, "standby = false\n[checkpoint]\n" + TOML)
    with team(job_name, 1) as (child,):
        call(child, "push", gradient_of(one_at(0)))
        call(child, "wait_applied")
        limit = resource.prlimit(watchdog.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(watchdog.pid, resource.RLIMIT_FSIZE, (3000, limit[1]))
        said = cli("stop", job_name).error
        assert call(child, "push", gradient_of(one_at(0))).startswith("JobStopped")
    assert "File too large" in said
    assert f"gadei-ps gc {job_name}" in said
    assert watchdog.wait().code == 1
    assert not segment.server_pids(job_name)
    watchdog = again(cli, job_name)
    assert status(job_name)["version"] == 1
    with Client(job_name) as client:
        client.push(gradient_of(one_at(0)))
        client.wait_applied()
    np.testing.assert_array_equal(live_weights(job_name)[:2], [-2, 0])
    assert cli("stop", job_name).code == 0
    assert not segments(job_name)


# -- clocks across a fail-over ----------------------------------------------------------------


def fail_over(job: str) -> None:
    """The active server is killed and the other one has taken over."""
    next_ = standby(job)
    os.kill(status(job)["server_pid"], signal.SIGKILL)
    eventually(lambda: status(job)["server_pid"] == next_)


def test_ssp_keeps_its_bound(job_name: str) -> None:
    bound = 2
    wanted = {"standby": True, "sync": f"ssp:{bound}", "shards": 2}
    fast_at, slow_at = 10, VALUES - 10  # of different shards
    with (
        daemon(job_name, tensors=TENSORS, **wanted),
        team(job_name, 1, "wait_turn") as (slow,),
        pushing(job_name, fast_at),
    ):
        weights = live_weights(job_name)

        def lead() -> int:
            """Applied gradients; the slow one's are looked at last, so that none is missed."""
            ahead = -weights[fast_at]
            ahead += weights[slow_at]
            assert ahead <= bound + 1
            return int(ahead)

        def lag_behind() -> None:
            eventually(lambda: lead() == bound + 1, what=lambda: weights[[fast_at, slow_at]])

        lag_behind()
        for pushed in range(1, 5):
            if pushed % 2:
                fail_over(job_name)
            call(slow, "push", gradient_of(one_at(slow_at)))
            call(slow, "wait_applied")
            assert -weights[slow_at] == pushed
            lag_behind()
        # A third one that comes after fail-overs begins where the slowest is.
        with team(job_name, 1, "wait_turn") as (late,):
            assert call(late, "push", gradient_of(one_at(slow_at))) == 0
            assert call(late, "wait_applied") is None
            assert call(late, "wait_turn", 30.0) is None
            assert int(-weights[fast_at]) == 4 + bound + 1
            call(late, "detach")


def test_bsp_keeps_its_supersteps(job_name: str) -> None:
    """A server dies with the first half of a superstep's gradients in the rings."""
    with (
        daemon(job_name, tensors=TENSORS, standby=True, sync="bsp", shards=2),
        team(job_name, 2, "wait_turn") as (one, other),
    ):
        weights = live_weights(job_name)[:VALUES]
        for number in range(1, 4):
            call(one, "push", gradient_of(np.full(VALUES, 3, np.float32)))
            if number != 2:
                fail_over(job_name)
            np.testing.assert_array_equal(weights, -2 * (number - 1))
            assert status(job_name)["supersteps"] == number - 1
            call(other, "push", gradient_of(np.full(VALUES, 1, np.float32)))
            for child in (one, other):
                assert call(child, "wait_turn", 30.0) is None
            np.testing.assert_array_equal(weights, -2 * number)
        end = status(job_name)
        assert (end["supersteps"], end["version"]) == (3, 6)


def test_what_the_dead_have_pushed_stays_in_its_superstep(job_name: str) -> None:
    """Also if the server dies after them, and the next one finds the others' gradients as well."""
    with (
        daemon(job_name, tensors=TENSORS, standby=True, sync="bsp", shards=2),
        team(job_name, 2, "wait_turn") as (stays, dies),
    ):
        call(dies, "push", gradient_of(np.full(VALUES, 3, np.float32)))
        dies.kill()
        roster = Processes(job_name).control["roster"]
        eventually(lambda: roster["member"].sum() == 1)
        next_ = standby(job_name)
        with Stopped(next_):
            os.kill(status(job_name)["server_pid"], signal.SIGKILL)
            call(stays, "push", gradient_of(np.ones(VALUES, np.float32)))
        assert call(stays, "wait_turn", 30.0) is None
        np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -2)
        assert status(job_name)["supersteps"] == 1


def test_learners_come_and_go_while_the_standby_sleeps(job_name: str) -> None:
    """It wakes up with the ring of a learner after whom others have had the same row."""
    with daemon(job_name, tensors=TENSORS, standby=True) as job:
        next_ = standby(job_name)
        maps = Path(f"/proc/{next_}/maps")
        with Client(job_name) as first:
            eventually(lambda: "ring.0" in maps.read_text())
            with Stopped(next_):
                first.detach()
                eventually(lambda: not status(job_name)["learners"])
                with Client(job_name) as second:
                    second.push({})
                eventually(lambda: not status(job_name)["learners"])
                third = Client(job_name)
        with third:
            assert third.row == 0
            third.push({})
            fail_over(job_name)
            third.push({})
            third.wait_applied()
        job.check()


# -- names that somebody has removed ----------------------------------------------------------


def test_segments_without_names(cli: Cli, job_name: str) -> None:
    """As logind's RemoveIPC does it. What runs goes on, also over the active server's death."""
    watchdog = cli.serve(job_name, "standby = true\n" + TOML)
    with pushing(job_name) as one:
        weights = live_weights(job_name)[:VALUES]
        control = Processes(job_name).control
        next_ = standby(job_name)
        for name in segments(job_name):
            segment.unlink(name)
        eventually(lambda: status(job_name)["names_lost"])
        assert "RemoveIPC" in watchdog.err
        goes_on(job_name)
        assert cli("checkpoint", job_name, "--json").json["version"] > 0
        with pytest.raises(JobFailed, match=r"is gone.*RemoveIPC"):
            Client(job_name)
        eventually(lambda: len(status(job_name)["learners"]) == 1)

        os.kill(status(job_name)["server_pid"], signal.SIGKILL)
        eventually(lambda: status(job_name)["server_pid"] == next_)
        goes_on(job_name)
        assert [row["pid"] for row in status(job_name)["learners"]] == [one.child.pid]
        eventually(lambda: status(job_name)["server_deaths"] == 1)
        status(job_name)  # it has looked for servers that are missing before it answers again
        assert int(control["server_starts"]) == 2, "none is started in vain"
        one.kill()
        eventually(lambda: not status(job_name)["learners"])
        version = status(job_name)["version"]
        np.testing.assert_array_equal(weights, -version)
    assert cli("stop", job_name, "--json").json["gradients_applied"] == version
    assert watchdog.wait().code == 0
    assert not segments(job_name)


def test_the_last_server_without_names(cli: Cli, job_name: str) -> None:
    """Nobody can follow it: the job fails, and says why."""
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    for name in segments(job_name):
        segment.unlink(name)
    os.kill(status(job_name)["server_pid"], signal.SIGKILL)
    result = watchdog.wait()
    assert result.code == 1
    assert "RemoveIPC" in result.err
    assert not Path(cli.directory / f"{job_name}.sock").exists()
