"""Virtual workers, their stages, servers and watchdogs die: each update is applied once.

The weights of each layer count how often the job has trained on each sample: with SGD of rate 1,
the learner's own or the server's, each mini-batch takes 1 from the values of its samples, whatever
the weights are.
"""

from __future__ import annotations

import mmap
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import team
import torch
from support import Child, daemon, eventually, gone, live_weights, ring_of, segments, spin, status
from support.supervised import TIMEOUT_S
from support.torch_models import one_thread as one_thread
from team import Team, send
from torch import nn

from gadei_ps import _native
from gadei_ps.job.faults import Role
from gadei_ps.learners.virtual import VirtualWorker
from gadei_ps.memory import layout
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor, place

ROUNDS = team.ROUNDS or 8
WORKERS = 3
SAMPLES = 30
WAVE = 4  # mini-batches of one sample; the last wave of an epoch has two
BATCHES = 8  # of the server's, an epoch: each is a wave
WINDOW = 12  # waves of a round
EPOCHS = ROUNDS * (WINDOW + 8) // BATCHES + 2  # so many that there is work in the last round, too
GO_ON, HANG = 0, 9
STAGES = 2
VALUES = 600  # of each sample
MODEL = place([Tensor(f"{stage}.counts", (SAMPLES, VALUES)) for stage in range(STAGES)])
HOW = {
    "tensors": [{"name": one.name, "shape": list(one.shape)} for one in MODEL.tensors],
    "sync": f"wsp:D=1,s_local={WAVE - 1}",
}


class Told(Exception):
    """Error of a layer that was configured to fail."""


class Counts(nn.Module):
    """A layer of which each sample moves one row, by one.

    Takes and returns (n, SAMPLES + VALUES): each sample as a one at its place, and the sum of what
    the layers make of it.
    """

    def __init__(self, stage: int, order: np.ndarray) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, VALUES))
        self._stage = stage
        self._order = order

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._obey(backward=False)
        marks, found = inputs[:, :SAMPLES], inputs[:, SAMPLES:]
        outputs = torch.cat([marks, found + marks @ self.counts], 1)
        outputs.register_hook(lambda _: self._obey(backward=True))
        return outputs

    def _obey(self, *, backward: bool) -> None:
        if self._order[0] == failing(self._stage, backward):
            raise Told
        if self._order[0] == HANG and self._stage == 1:
            threading.Event().wait()


def loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
    return outputs[:, SAMPLES:].sum()


def failing(stage: int, backward: bool) -> int:
    """The order by which this stage fails in its next forward or backward pass."""
    return 1 + 2 * stage + backward


def _work(
    pipe: Connection, job: str, kind: str, order: np.ndarray, most: np.ndarray, epochs: int
) -> None:
    """Train on the server's batches while the job's version is below most[0].

    kind: of the job's optimizer. If a stage fails, another worker takes its place in this process.
    """
    torch.set_num_threads(1)
    inputs = torch.eye(SAMPLES, SAMPLES + VALUES)
    while True:
        worker = VirtualWorker(
            [Counts(stage, order) for stage in range(STAGES)],
            ["host:1"] * STAGES,
            (lambda parameters: torch.optim.SGD(parameters, 1.0)) if kind == "add" else None,
            job,
        )
        pipe.send(worker.client.row)
        pipe.recv()
        try:
            with worker:
                for _ in worker.train_on(inputs, inputs, loss, batch_size=1, epochs=epochs):
                    while worker.client.current_version >= most[0] and order[0] == GO_ON:
                        time.sleep(0.001)
        except Told:
            order[0] = GO_ON
            pipe.send([one.name for one in threading.enumerate() if "stage" in one.name])
        else:
            return


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Load here, once for all forks, what takes the first optimizer of a process a second."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)


class Worker:
    """A process with virtual workers, one after the other, and the rings that they have had."""

    def __init__(self, job: str, kind: str, most: np.ndarray, epochs: int = EPOCHS) -> None:
        self._job = job
        self.order = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        self.child = Child(_work, job, kind, self.order, most, epochs)
        self.rings: list[Segment] = []
        self.let_in()

    def let_in(self) -> None:
        self.rings.append(ring_of(self._job, self.child.receive()))
        self.child.send()

    @property
    def published(self) -> int:
        """Return its updates; also after its death."""
        return sum(_native.load(one.word(layout.RING, "head")) for one in self.rings)


class Crew(Team):
    """A job of virtual workers. kind: of its optimizer."""

    def __init__(self, name: str, directory: Path, kind: str) -> None:
        self._kind = kind
        self.most = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        self.workers: list[Worker] = []
        self.all: list[Worker] = []
        how = {"optimizer": {"kind": kind, "lr": 1.0}} | HOW
        super().__init__(name, directory, learners=0, **how)

    def hire(self) -> None:
        while len(self.workers) < WORKERS:
            self.workers.append(Worker(self.name, self._kind, self.most))
            self.all.append(self.workers[-1])

    def fire(self) -> None:
        for one in self.workers:
            one.child.kill()
        self.workers.clear()

    def kill(self, one: Worker) -> None:
        one.child.kill()
        self.workers.remove(one)

    @property
    def published(self) -> int:
        return sum(one.published for one in self.all)


def check(weights: np.ndarray, epochs: int) -> None:
    """Each stage has the update of each sample once an epoch."""
    for values in MODEL.views(weights).values():
        np.testing.assert_array_equal(values, -epochs)


VICTIMS: list[tuple[str | Role, ...]] = [
    ("worker",),
    (Role.SERVER,),
    ("forward", "worker"),
    ("worker", Role.SERVER),
    (Role.STANDBY,),
    (Role.SERVER, "worker"),
    ("backward",),
    (Role.WATCHDOG, "worker"),
]


def _round(crew: Crew, victims: tuple[str | Role, ...], chance: random.Random) -> None:
    """Some of them die while the others work, and are replaced; then all continue."""
    targets = {one: crew.find(one) for one in victims if isinstance(one, Role)}
    before = crew.version
    crew.most[0] = before + WINDOW
    reached = before + chance.randrange(WINDOW // 2)
    eventually(lambda: crew.version >= reached)
    for victim in victims:
        spin(chance, 0.003)
        one = chance.choice(crew.workers)
        if victim in targets:
            send(targets[victim])
        elif victim == "worker":
            crew.kill(one)
        else:
            one.order[0] = failing(chance.randrange(STAGES), victim == "backward")
            # It may wait for its turn behind workers that rest, as the round's waves are done.
            crew.most[0] += 2 * WORKERS
            assert one.child.receive() == [], "all stages have ended"
            one.let_in()
    crew.watch()
    crew.hire()
    eventually(lambda: crew.version >= before + WINDOW, what=lambda: f"stands at {crew.version}")


@pytest.mark.timeout(600 + 5 * ROUNDS)
@pytest.mark.parametrize("kind", ["add", "sgd"])
def test_killed_at_random_instants(kind: str, job_name: str, tmp_path: Path) -> None:
    chance = random.Random(3)
    counts = dict.fromkeys(("worker", "forward", "backward", *Role), 0)
    with Crew(job_name, tmp_path, kind) as crew:
        for number in range(ROUNDS):
            victims = VICTIMS[number % len(VICTIMS)]
            _round(crew, victims, chance)
            for one in victims:
                counts[one] += 1
        assert crew.version < BATCHES * EPOCHS, "work was left for all of them"
        crew.most[0] = 2**62
        for one in crew.workers:
            assert one.child.join() == 0
        crew.workers.clear()
        roster = crew.control["roster"]
        eventually(lambda: (roster["retired"] == roster["generation"]).all())
        # Each batch is answered once an epoch, each update that was published is in the weights.
        check(crew.weights, EPOCHS)
        now = status(job_name)
        assert now["version"] == now["gradients_applied"] == crew.published == BATCHES * EPOCHS
        assert now["samples"] == SAMPLES * EPOCHS
        assert now["gradients_dropped"] == now["gradients_refused"] == 0
        assert now["work"]["state"] == "done"
        assert now["batches_requeued"] > 0
        unseen = counts["worker"] - now["learner_deaths"]  # beside the death of a watchdog
        assert 0 <= unseen <= counts[Role.WATCHDOG]
    assert not segments(job_name)
    team.TOLD.append(
        f"virtual workers ({kind}): {counts['worker']} killed, stages failed in "
        f"{counts['forward']} forward and {counts['backward']} backward passes, "
        f"{counts[Role.SERVER]} servers, "
        f"{counts[Role.STANDBY]} standbys and {counts[Role.WATCHDOG]} watchdogs killed: "
        f"{crew.published} updates once each, {now['batches_requeued']} batches handed out again"
    )


def test_a_stage_that_hangs(job_name: str) -> None:
    """Let its worker do nothing that others could see: it is killed, and others get its batches."""
    most = np.array([2**62])
    how = {"optimizer": {"kind": "add"}, "learner_timeout_s": TIMEOUT_S / 2} | HOW
    with daemon(job_name, **how):
        hung = Worker(job_name, "add", most, 3)
        eventually(lambda: hung.published)
        hung.order[0] = HANG
        good = Worker(job_name, "add", most, 3)
        try:
            assert good.child.join() == 0
            assert gone(hung.child.pid)
        finally:
            hung.child.kill()
            good.child.kill()
        now = status(job_name)
        check(live_weights(job_name), 3)
        assert now["gradients_applied"] == hung.published + good.published == 3 * BATCHES
        assert (now["work"]["state"], now["learner_deaths"]) == ("done", 1)
