"""Scenes of the count of statements: in each, a process dies at one line."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from counted import VALUES
from lines import Tracer
from served import Job
from support import segments

from gadei_ps.errors import CheckpointError, CheckpointMistake, NotSaved
from gadei_ps.job import paths
from gadei_ps.job.control import Checkpoint
from gadei_ps.machine.launch import JOB_VARIABLE, NAME_VARIABLE
from gadei_ps.storage import checkpoint

Dying = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Scene:
    """name: for people. play: in a block with dying() a process may die. own_job: a round
    has one, made as how says, which is stopped at its end."""

    name: str
    play: Callable[[Job, Tracer, Dying], None]
    how: Mapping[str, Any] = field(default_factory=dict, hash=False)
    own_job: bool = False


# -- in the life of a job -------------------------------------------------------------------------


def all_go(job: Job) -> None:
    for one in job.learners:
        one.go()


def all_push(job: Job, gradients: int = 2) -> None:
    """Wait until each learner has pushed so many more."""
    wanted = {one: one.published + gradients for one in job.learners}
    job.until(lambda: all(one.published >= count for one, count in wanted.items()), "learners push")


def all_rest(job: Job) -> None:
    for one in job.learners:
        one.rest()


def attached(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A learner attaches, pushes and detaches."""
    with dying():
        one = job.hire()
        all_go(job)
        all_push(job)
        all_rest(job)
        job.remove(one, one.detach)
        job.until(lambda: job.retired(one), "its row is free")


def died(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A learner dies while it pushes."""
    one = job.hire()
    all_go(job)
    with dying():
        all_push(job)
        job.remove(one, one.kill)
        all_rest(job)
        job.until(lambda: job.retired(one), "its row is free")


def adopted(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The watchdog dies. A learner leaves and another dies before the next one adopts the job."""
    leaves, dies = job.hire(), job.hire()
    all_go(job)
    with job.without_watchdog():
        job.remove(leaves, leaves.detach)
        job.remove(dies, dies.kill)
    with dying():
        job.up()
        all_rest(job)
        job.until(lambda: job.retired(leaves) and job.retired(dies), "their rows are free")


def alone(job: Job, tracer: Tracer, dying: Dying) -> None:
    """Kill a learner and a server without a watchdog."""
    dies = job.hire()
    all_go(job)
    with job.without_watchdog(), dying():
        job.remove(dies, dies.kill)
        job.until(
            lambda: not int(job.roster[dies.row]["wanted"]) or not job.processes.server(),
            "it is detached",
        )
        job.kill(job.processes.server())
    job.up()
    all_rest(job)
    job.until(lambda: job.retired(dies), "its row is free")


def taken_over(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The active server dies; a learner leaves meanwhile."""
    one = job.hire()
    all_go(job)
    with dying():
        job.kill(job.processes.server())
        job.remove(one, one.detach)
        job.up()
        all_push(job)
        all_rest(job)
        job.until(lambda: job.retired(one), "its row is free")


def from_nothing(job: Job, tracer: Tracer, dying: Dying) -> None:
    """Both servers die, and new leases are made."""
    all_go(job)
    with dying():
        job.kill(job.processes.standby())
        job.kill(job.processes.server())
        job.up()
        all_push(job)
        all_rest(job)


def damaged(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A learner writes nonsense over its ring and is evicted."""
    one = job.hire()
    all_go(job)
    all_push(job)
    job.damaged += 1
    with dying():
        one.damage()
        job.until(lambda: job.retired(one), "its row is free")
        job.remove(one, one.kill)
        all_rest(job)


def saved(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A checkpoint is made while learners push."""
    all_go(job)
    with dying():
        while True:
            try:
                made = job.ask(Checkpoint())
            except CheckpointError:
                continue  # the checkpoint writer died, say
            break
        all_rest(job)
    snapshot, path, problems = checkpoint.newest(job.checkpoints)
    assert not problems
    assert snapshot is not None
    assert str(path) == made["path"]
    assert snapshot.version == made["version"]
    np.testing.assert_array_equal(snapshot.weights[:VALUES], -float(snapshot.steps))
    kept = {one.name for one in job.checkpoints.iterdir()} - {".lock"}
    assert len(kept) <= 2, kept


def _changed(model: str) -> Callable[[Job, Tracer, Dying], None]:
    def play(job: Job, tracer: Tracer, dying: Dying) -> None:
        one = job.hire()
        all_go(job)
        with dying():
            job.change(model)
            all_push(job)
            job.remove(one, one.kill)
            all_push(job)
            job.change("asp")
            all_rest(job)
            job.until(lambda: job.retired(one), "its row is free")

    return play


def _limited(model: str) -> Callable[[Job, Tracer, Dying], None]:
    def play(job: Job, tracer: Tracer, dying: Dying) -> None:
        all_go(job)
        job.change(model)
        other = 2e9 if job.status["settings"]["clip_norm"] == 1e9 else 1e9
        with dying():
            job.limit(other)
            all_push(job)
        job.change("asp")
        all_rest(job)
        assert job.status["settings"]["clip_norm"] == other

    return play


def refused(job: Job, tracer: Tracer, dying: Dying) -> None:
    """gadei-ps is replaced under the job: a server of the other build does not serve."""
    with dying():
        with tracer.other_build():
            job.kill(job.processes.standby())
            job.until(
                lambda: job.status["standby_missing"] or not job.processes.server(), "it is refused"
            )
        job.up()


def idle(job: Job, tracer: Tracer, dying: Dying) -> None:
    """Nothing happens but what the count itself asks."""
    with dying():
        all_go(job)
        all_push(job, 20)
        all_rest(job)
        job.settle()


IDLE = Scene("nothing happens", idle)
LIVING = [
    IDLE,
    Scene("attach", attached),
    Scene("death of a learner", died),
    Scene("adopt", adopted),
    Scene("without a watchdog", alone),
    Scene("failover", taken_over),
    Scene("new leases", from_nothing),
    Scene("ssp", _changed("ssp:s=1")),
    Scene("bsp", _changed("bsp")),
    Scene("cutoff", _changed("cutoff:c=1")),
    Scene("numbers", _limited("asp")),
    Scene("numbers of bsp", _limited("bsp")),
    Scene("checkpoint", saved),
    Scene("damaged ring", damaged),
    Scene("another build", refused),
]


# -- from a job's begin to its end ----------------------------------------------------------------


def _work(job: Job, **how: Any) -> None:
    """A learner attaches, pushes and leaves."""
    one = job.hire(**how)
    one.go()
    all_push(job)
    one.rest()
    job.remove(one, one.detach)


def started(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A job starts."""
    with dying():
        job.up()
    _work(job)


def offered(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The first learner brings the model and the work, and answers a batch."""
    job.until(job.serves, "a watchdog answers")
    with dying():
        one = job.hire(tensors=True)
        one.call("set_work", 3, 1, 1)
        one.call("take_batch")
        one.once()
        work = job.status["work"]
        assert (work["state"], work["batches"], work["next"] > 0) == ("working", 3, True), work
        job.remove(one, one.detach)
        job.up()


def stopped(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A job is stopped while learners push, of which one does not leave by itself; its last
    checkpoint has all gradients."""
    job.up()
    pair = [job.hire(), job.hire(stubborn=True)]
    all_go(job)
    all_push(job)
    with dying():
        job.stop()
    for one in pair:
        job.remove(one, one.kill)


def restored(job: Job, tracer: Tracer, dying: Dying) -> None:
    """All processes have died and the memory is lost: the job continues from its checkpoint."""
    job.up()
    _work(job)
    saved = job.ask(Checkpoint())
    assert saved["version"] == job.published
    job.lose_memory()
    with dying():
        job.up()
    _work(job)


def from_memory(job: Job, tracer: Tracer, dying: Dying) -> None:
    """All processes have died: the job continues from memory."""
    job.up()
    one = job.hire()
    one.go()
    all_push(job)
    job.kill_all()
    job.remove(one, one.kill)
    with dying():
        job.up()
    _work(job)


def afresh(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A dead job is dropped, and another begins in its place."""
    job.up()
    _work(job)
    job.kill_all()
    job.buried = 0
    job.forget()
    job.flags = ("--fresh",)
    with dying():
        job.up()
    job.flags = ()
    _work(job)


def restored_by_command(job: Job, tracer: Tracer, dying: Dying) -> None:
    """`restore` drops a dead job that is in memory, and continues from a checkpoint."""
    job.up()
    _work(job)
    saved = job.ask(Checkpoint())
    job.kill_all()
    job.base, job.buried = saved["version"], 0
    job.forget()
    job.restores = Path(saved["path"])
    with dying():
        job.up()
    job.restores = None
    _work(job)


def kept(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The last checkpoint cannot be written: the job ends and its memory stays for the next."""
    job.up()
    _work(job)
    aside = job.checkpoints.rename(job.checkpoints.with_suffix(".aside"))
    job.checkpoints.touch()  # no directory
    # A watchdog that dies when all else has ended leaves nothing to be adopted: the next start
    # looks at that directory first.
    job.refusal = CheckpointMistake.__name__
    with dying():
        job.until(job.ends, "it ends")
    assert job.ended in (NotSaved.exit_code, CheckpointMistake.exit_code), job
    job.refusal = ""
    job.checkpoints.unlink()
    aside.rename(job.checkpoints)
    job.start()
    job.up()
    _work(job)


SCRIPT = 'while [ ! -e "$GADEI_PS_JOB.finish.$GADEI_PS_LEARNER" ]; do sleep 0.1; done'


def _processes(job: Job, index: int) -> set[int]:
    """Return the pid of the job's own learner: there should be one."""
    job_is = f"{JOB_VARIABLE}={paths.socket_path(job.name)}".encode()
    name_is = f"{NAME_VARIABLE}=learner-{index}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {job_is, name_is} <= set((path / "environ").read_bytes().split(b"\0")):
                pid = int(path.name)
                if os.getpgid(pid) == pid:  # not a child of the learner
                    found.add(pid)
    return found


def with_learners(job: Job, tracer: Tracer, dying: Dying) -> None:
    """Kill one of the job's own learners, which is started again; another one ends and is not."""
    job.up()
    job.until(lambda: _processes(job, 0) and _processes(job, 1), "its learners run")
    first = _processes(job, 0)
    finish = Path(f"{paths.socket_path(job.name)}.finish.1")
    with dying():
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        job.until(lambda: _processes(job, 0) - first, "it runs again")
        finish.touch()
        job.until(lambda: not _processes(job, 1), "it has ended")
        job.kill_watchdog()
        job.up()
    _work(job)
    job.until(lambda: len(_processes(job, 0)) == 1 and not _processes(job, 1), "one runs, once")
    job.settle()
    job.stop()
    finish.unlink()
    assert not _processes(job, 0)


def collected(job: Job, tracer: Tracer, dying: Dying) -> None:
    """The dead job is removed by `gc`."""
    job.up()
    _work(job)
    job.kill_all()
    with dying():
        job.command("gc", job.name)
    job.nothing_left()
    job.gone()


def discarded(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A job without a watchdog is stopped."""
    job.up()
    _work(job)
    with job.without_watchdog(), dying():
        job.command("stop", job.name, "--discard")
    # If its server died too, the command says so, and the memory stays.
    job.command("gc", job.name)
    job.nothing_left()
    job.gone()


def finished(job: Job, tracer: Tracer, dying: Dying) -> None:
    """A job without a watchdog and without a job file is ended; its last checkpoint has all."""
    job.up()
    _work(job)
    with job.without_watchdog(), dying():
        job.until(lambda: _finishes(job), "it ends")
    job.ended = 0


def _finishes(job: Job) -> bool:
    job.command("serve", "--finish", "--name", job.name, "nowhere.toml")
    return not segments(job.name)


ONE = {"standby": False}  # its start is that of the other server
OWN = {"command": ["/bin/sh", "-c", SCRIPT], "count": 2}
BIRTHS = [
    Scene("start", started, own_job=True),
    Scene("offer", offered, ONE | {"tensors": []}, own_job=True),
    Scene("stop", stopped, ONE, own_job=True),
    Scene("restore", restored, ONE, own_job=True),
    Scene("from memory", from_memory, ONE, own_job=True),
    Scene("fresh", afresh, ONE, own_job=True),
    Scene("restore command", restored_by_command, ONE, own_job=True),
    Scene("no last checkpoint", kept, ONE, own_job=True),
    Scene("its own learners", with_learners, ONE | {"learners": OWN}, own_job=True),
    Scene("gc", collected, ONE, own_job=True),
    Scene("stop without a watchdog", discarded, ONE, own_job=True),
    Scene("finish", finished, ONE, own_job=True),
]
