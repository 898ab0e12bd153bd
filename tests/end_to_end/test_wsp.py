"""WSP in real processes: which mini-batches the weights hold that a mini-batch is computed from.

A model whose values count: each learner adds 1 to a value of its own in every mini-batch. So the
weights themselves say how many mini-batches of each learner are in them.
"""

from __future__ import annotations

import mmap
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import pytest
from support import daemon, fork, quick
from support.staleness import MANY, MODELS, grants, most_missed, notes

from gadei_ps.errors import JobStopped, PushTimeout, UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.waves import Waves
from gadei_ps.sync.wsp import WSP

ADDS = {"optimizer": {"kind": "add"}}


def _obey(pipe: Connection, job: str, me: int) -> None:
    """Begin and end mini-batches on request; answer with what the weights hold."""
    with Client(job) as client:
        waves = Waves(client)
        pipe.send("here")
        while (order := pipe.recv()) != "leave":
            if order == "end":
                waves.weights["count"][me] += 1
                waves.end()
                pipe.send("ended")
                continue
            try:
                waves.begin(timeout_s=0.02 if order == "try" else None)
            except PushTimeout as error:
                pipe.send(str(error))
            else:
                pipe.send(waves.weights["count"].tolist())


def test_figure_13(job_name: str) -> None:
    """Reproduce Park et al. 2020, D = 0, s_local = 3: two workers, four mini-batches in flight."""
    counts = {"tensors": [{"name": "count", "shape": [2]}]}
    with (
        daemon(job_name, sync="wsp:D=0,s_local=3", **ADDS, **counts),
        fork(1, _obey, job_name, 0) as (one,),
        fork(1, _obey, job_name, 1) as (two,),
    ):

        def tell(worker: object, order: str) -> object:
            worker.send(order)  # type: ignore[attr-defined]
            return worker.receive()  # type: ignore[attr-defined]

        late = "no grant to continue within 0.02 s"
        assert one.receive() == two.receive() == "here"
        assert tell(one, "begin") == tell(two, "begin") == [0, 0]
        for _ in (2, 3, 4):
            assert tell(one, "begin") == [0, 0]
        for ended in (1, 2, 3):  # 5, 6 and 7 begin in clock 0, with local updates only
            tell(one, "end")
            assert tell(one, "begin") == [ended, 0]
        tell(one, "end")  # of 4: wave 0 is pushed
        assert tell(one, "try") == late  # 8 waits for the other's wave 0
        for _ in (2, 3, 4):
            assert tell(two, "begin")[1] == 0  # type: ignore[index]
        for _ in (1, 2, 3, 4):
            tell(two, "end")
        assert tell(one, "begin") == [4, 4]  # 8
        for ended in (5, 6):
            tell(one, "end")
            assert tell(one, "begin") == [ended, 4]  # 9 and 10
        for _ in (5, 6, 7, 8):
            tell(two, "begin")
        for _ in (5, 6, 7):
            tell(two, "end")
        tell(one, "end")
        # Mini-batch 11 sees the global updates from 1 to 4 and the local ones from 5 to 7.
        assert tell(one, "begin") == [7, 4]
        tell(one, "end")  # of 8: wave 1 is pushed
        assert tell(one, "try") == late  # 12 waits for all of 1 to 8
        tell(two, "end")
        assert tell(one, "begin") == [8, 8]
        for worker in (one, two):
            worker.send("leave")
            assert worker.join() == 0


def _go_on(pipe: Connection, job: str, me: int, noted: mmap.mmap) -> None:
    """Mini-batch after mini-batch; notes how many of the others each begins with, and which."""
    mine = notes(noted)[me]
    with Client(job) as client:
        waves = Waves(client)
        try:
            waves.begin()
            pipe.send("joined")
            pipe.recv()  # all have joined at the same clock
            for number in range(1, MANY):
                others = np.delete(waves.weights["0.count"], me)
                mine[number] = int(others.min())
                mine[0] = number
                waves.weights["0.count"][me] += 1
                waves.end()
                waves.begin()
        except JobStopped:
            pass


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_what_a_mini_batch_sees_at_least(model: WSP, job_name: str) -> None:
    """The others come to the bound, and no mini-batch of any of them passes it."""
    assert most_missed(job_name, model, model.D + 1, _go_on) == model.s_global


WRONG = [("model", 1, one) for one in MODELS]
WRONG += [("model", -1, one) for one in MODELS if one.D]  # else no learner would ever begin
WRONG += [("published", 1, WSP(0, 3)), ("published", -1, WSP(1, 0))]


@pytest.mark.parametrize(("where", "waves", "model"), WRONG, ids=str)
def test_a_server_that_grants_a_wave_too_many_or_too_few_is_noticed(
    where: str, waves: int, model: WSP, job_name: str
) -> None:
    """Notice it by the test above: the most that a mini-batch misses is another number then."""
    with mock.patch.object(quick, "STARTING", [grants(waves, where)]):
        missed = most_missed(job_name, model, model.D + 1 + waves, _go_on)
    assert missed == model.s_global + waves * model.wave


def test_waves_are_the_sums_of_what_a_learner_changes(job_name: str) -> None:
    """Alone, against the same arithmetic without a job; ends with an unfinished wave."""
    random = np.random.default_rng(1)
    start, changes = random.standard_normal(100), random.standard_normal((10, 100))
    start, changes = start.astype(np.float32), changes.astype(np.float32)
    expected, base = start.copy(), start.copy()
    with (
        daemon(job_name, sync="wsp:D=1,s_local=2", **ADDS),
        Client(job_name, tensors={"w": start}) as client,
    ):
        waves = Waves(client)
        server = start.copy()
        for number, change in enumerate(changes):
            pulled = waves.begin()
            assert pulled == (number == 0 or number % 3 == 2)
            if pulled:
                own = expected - base
                base = server.copy()
                expected = base + own
            waves.weights["w"] += change
            expected += change
            pushed = waves.end(loss=float(number), samples=2)
            assert pushed == (number % 3 == 2)
            if pushed:
                server += expected - base
                base = expected.copy()
            np.testing.assert_array_equal(waves.weights["w"], expected)
        assert waves.flush()
        client.wait_applied()
        server += expected - base
        np.testing.assert_array_equal(client.weights["w"], server)
        assert client.published == 4
        with pytest.raises(UsageError, match="no mini-batch is in flight"):
            waves.end()
        for _ in range(3):
            waves.begin()
        with pytest.raises(UsageError, match="3 of 3; end\\(\\) the oldest first"):
            waves.begin()


def test_updates_need_a_job_that_adds_them(job_name: str) -> None:
    with (
        daemon(job_name),
        Client(job_name, tensors={"w": np.zeros(3)}) as client,
        pytest.raises(UsageError, match="is sgd, which takes gradients"),
    ):
        Waves(client)
