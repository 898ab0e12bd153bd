"""Words of the watchdog for learners and shards, and its counts, in a job's real memory."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import support
from rich.console import Console
from support.memory import create_model, create_ring
from support.words import Changing, at_each_line, words

from gadei_ps import _native, sync
from gadei_ps.errors import ControlError
from gadei_ps.job.control import LENGTH, memory_file, pack
from gadei_ps.job.faults import Processes, Target
from gadei_ps.job.replies import JobStatus
from gadei_ps.kernels.optimizers import PACKED, Kind, OptimizerSpec, Schedule
from gadei_ps.learners import attach
from gadei_ps.learners.attach import Place
from gadei_ps.machine import log, process
from gadei_ps.memory import totals
from gadei_ps.memory.layout import (
    CONTROL,
    REPLICA,
    RING,
    STATE,
    Gone,
    Phase,
    Reason,
    ServerState,
    Stop,
)
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.show import status
from gadei_ps.watchdog import checkpoints, cleanup, requests, stopping, supervisor
from gadei_ps.watchdog.checkpoint_writer import CheckpointWriter, Task, attached
from gadei_ps.watchdog.checkpoints import Checkpoints
from gadei_ps.watchdog.history import History
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.refused_gradients import most_frequent_reason
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.stopping import Stopping
from gadei_ps.watchdog.supervisor import Supervisor

MODEL = place([Tensor("w", (10,))])


@pytest.fixture
def memory(job_name: str) -> Iterator[JobMemory]:
    """A job that serves, with a learner in row 0, which is this process."""
    made = JobMemory(support.config(job_name))
    made.create_control(sync.parse("asp"))
    try:
        create_model(made, MODEL, np.zeros(MODEL.elements, np.float32))
        ring = create_ring(made, 0, 1)
        control = made.control.view(CONTROL)
        control["model_ready"] = 1
        control["phase"] = Phase.SERVING
        control["ring_inode"][0] = ring.inode
        entry = control["roster"][0]
        entry["generation"] = entry["wanted"] = 1
        entry["pid"], entry["pid_start"] = os.getpid(), process.start_ticks(os.getpid())
        yield made
    finally:
        made.remove()


@pytest.fixture
def ended() -> tuple[int, int]:
    """Pid and start time of a process that is no more."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        start = process.start_ticks(child.pid)
        child.kill()
    return child.pid, start


class Seen(list[tuple[Phase, Stop]]):
    """The phase and the stop word at each line of some code."""

    def __init__(self, memory: JobMemory) -> None:
        self.control = memory.control.view(CONTROL)

    def look(self) -> None:
        self.append((Phase(int(self.control["phase"])), Stop(int(self.control["stop"]))))

    def check(self, *last: object) -> None:
        """A learner that sees the stop sees the reason, too."""
        assert self[-1] == last
        assert {one[0] for one in self if one[1] == Stop.CLOSED} == {last[0]}


# -- the end --------------------------------------------------------------------------------------


def test_a_stop(memory: JobMemory) -> None:
    selector = selectors.DefaultSelector()
    roster = Roster(memory, selector, log.get(), 0.0, lambda ring: None)
    made = Checkpoints(memory, selector, log.get())
    stop = Stopping(memory, roster, made, Notify(), log.get())
    roster.adopt(0.0)
    control, seen = memory.control.view(CONTROL), Seen(memory)
    stop.begin(drain=True, timeout_s=1000.0)
    seen.look()
    stop.begin(drain=False, timeout_s=1000.0)
    seen.look()
    stop.begin(drain=True, timeout_s=1000.0)
    seen.look()
    stops = [Stop.DRAIN, Stop.NOW, Stop.NOW]
    assert seen == [(Phase.DRAINING, one) for one in stops]
    with at_each_line(seen.look, stopping):
        assert not stop.over(now=float("inf"))
    seen.check(Phase.DRAINING, Stop.CLOSED)
    assert control["roster"][0]["gone"] == Gone.STOPPED
    selector.close()


def test_what_a_dead_watchdogs_job_tells_its_learners(
    memory: JobMemory, ended: tuple[int, int]
) -> None:
    control, seen = memory.control.view(CONTROL), Seen(memory)
    memory.release()
    control["watchdog_pid"], control["watchdog_start"] = ended
    with at_each_line(seen.look, cleanup):
        cleanup.end_servers(memory.config.name)
    seen.check(Phase.FAILED, Stop.CLOSED)
    control["phase"] = Phase.KEPT
    cleanup.end_servers(memory.config.name)
    assert control["phase"] == Phase.KEPT, "they are notified already"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_life_of_a_job(
    job_name: str, monkeypatch: pytest.MonkeyPatch, resume: bool, fails: bool
) -> None:
    """Replace its server by words alone."""

    def tick(servers: Servers, now: float) -> None:
        control = servers.memory.control.view(CONTROL)
        control["lease_state"] = 1
        control["server"][0]["state"] = ServerState.READY

    monkeypatch.setattr(Servers, "tick", tick)
    monkeypatch.setattr(Servers, "serving", property(lambda _: True))
    tensors = [{"name": "w", "shape": [10]}]
    made = Supervisor(support.config(job_name, tensors=tensors), Options(resume=resume))
    try:
        made.startup()
        seen = Seen(made.memory)
        fields = words(made.memory.words)
        if fails:
            made._fail("the test wants it")
        with at_each_line(seen.look, supervisor):
            made.shutdown()
    except BaseException:
        made.shutdown()
        raise
    assert fields["phase"] == Phase.SERVING
    assert fields.get("temporary") == (None if resume else 1)
    seen.check(Phase.FAILED if fails else Phase.STOPPED, Stop.CLOSED)


# -- learners -------------------------------------------------------------------------------------


def test_a_learner_leaves_that_no_watchdog_hears(memory: JobMemory) -> None:
    assert memory.weights
    ring = memory.rings[0]
    here = Place(memory.config.name, 0, 1, memory.control, memory.weights, ring)
    gone = mock.Mock()
    gone.request.side_effect = ControlError("nobody listens")
    attach.detach(gone, 0, 1, os.getpid(), here)
    assert words(ring.view(RING))["detached"] == 1


def test_who_is_told_to_be_leaving(memory: JobMemory) -> None:
    entry = memory.control.view(CONTROL)["roster"][0]
    assert [one["leaving"] for one in requests.job_status(memory)["learners"]] == [False]
    entry["wanted"] = 0
    assert [one["leaving"] for one in requests.job_status(memory)["learners"]] == [True]


def test_a_replica_is_no_learner_of_the_status(memory: JobMemory) -> None:
    entry = memory.control.view(CONTROL)["roster"][0]
    entry["name"] = REPLICA
    report = requests.job_status(memory)
    assert (report["learners"], report["learners_attached"]) == ([], 0)
    assert [one["row"] for one in report["replicas"]] == [0]


def test_a_loss_that_changes_while_the_status_is_made(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes NaN once the row has been copied."""
    entry = memory.control.view(CONTROL)["roster"][0]
    entry["applied"], entry["loss"], entry["norm"] = 1, 1.5, 2.5

    def copy_first(*place: Any) -> np.void:
        found = copy(*place)
        entry["loss"] = entry["norm"] = math.nan
        return found

    copy = totals.row
    monkeypatch.setattr(totals, "row", copy_first)
    found = requests.job_status(memory)["learners"][0]
    assert (found["loss"], found["gradient_norm"]) == (1.5, 2.5)


def test_gradients_that_are_applied_while_the_status_is_made(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is in the text only after an assignment, which makes it higher."""
    control = memory.control.view(CONTROL)

    def apply(_: str) -> None:
        control["roster"][0]["applied"] += 1
        control["version"] += 1

    with monkeypatch.context() as patch:
        patch.setattr(memory.control, "view", lambda _: Changing(control, apply))
        report = requests.job_status(memory)
    assert 0 < report["version"] <= report["gradients_applied"]
    assert "version" not in shown(report)
    control["version"] += 1
    report = requests.job_status(memory)
    assert f"; version {control['version']}" in shown(report)


def shown(report: dict[str, Any]) -> str:
    """Return the text of a status."""
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as text:
        console.print(status.job_status(report))
    return text.get()


def test_an_epoch_that_begins_while_the_status_is_made(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = memory.control.view(CONTROL)
    values = iter([10, 1 << 32])

    def change(name: str) -> None:
        if name == "next":
            control["next"] = next(values)

    monkeypatch.setattr(memory.control, "view", lambda _: Changing(control, change))
    work = requests.job_status(memory)["work"]
    assert (work["epoch"], work["next"]) == (0, 10)


EXTREMES: dict[str, list[float]] = {
    "i": [-1, 2**31 - 1],
    "f": [math.nan, math.inf, -math.inf, 1e308],
}


def test_no_word_makes_the_status_unreadable(memory: JobMemory) -> None:
    """Each word of the control segment, of a learner's row and of its ring, with extreme values."""

    def read() -> dict[str, Any]:
        raw = pack({"v": 1, "ok": True} | requests.job_status(memory))[LENGTH.size :]
        return JobStatus.model_validate_json(raw).model_dump(exclude_unset=True, by_alias=True)

    assert memory.state
    control, ring = memory.control.view(CONTROL), memory.rings[0].view(RING)
    entry, record = control["roster"][0], memory.state.view(STATE)["record"][0]
    entry["applied"] = 1
    report = read()
    for struct in (control, entry, ring, record):
        for name in struct.dtype.names or ():
            kind = struct.dtype[name].base
            values = [np.iinfo(kind).max] if kind.kind == "u" else EXTREMES.get(kind.kind, [])
            before = struct[name].copy()
            for value in values:
                struct[name] = value
                found = read()
                rest = report.keys() - {"learners", "learners_attached", "replicas"}
                assert len([key for key in rest if found[key] != report[key]]) <= 2, name
                assert found["learners"][0]["pid"] == os.getpid() or name == "pid", name
            struct[name] = before
    assert read() == report


def test_no_word_ends_the_history(memory: JobMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word of the optimizer's settings with extreme values, and a row that is half changed."""
    monkeypatch.setattr(History, "_flush", lambda *_: None)
    assert memory.state
    control, record = memory.control.view(CONTROL), memory.state.view(STATE)["record"][0]
    packed = OptimizerSpec(
        Kind.ADAM, schedule=Schedule.STEP, step_size=3, warmup_steps=2, step_gamma=1e38
    ).pack()
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, log.get())
        history.tick(0.0)

        def rate() -> object:
            control["version"] += 1
            history._waiting.clear()
            history._point(0.0)
            return json.loads(history._waiting[-1])["learning_rate"]

        control["groups"], control["hyper"][0] = 1, packed
        assert rate() == 0.005
        for index, value in itertools.product(range(PACKED), [*EXTREMES["f"], 0.5, 0.0]):
            control["hyper"][0] = packed
            control["hyper"][0][index] = value
            rate()
        control["hyper"][0] = packed
        for struct, name in ((control, "groups"), (record, "steps")):
            before = struct[name].copy()
            limits = np.iinfo(struct.dtype[name].base)
            for number in (limits.min, limits.max):
                struct[name] = number
                rate()
            struct[name] = before
        assert rate() == 0.005


def test_the_queue_in_a_history(memory: JobMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring holds no more than its slots, whatever its learner writes into its words."""
    monkeypatch.setattr(History, "_flush", lambda *_: None)
    control, ring = memory.control.view(CONTROL), memory.rings[0].view(RING)
    found = []
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, log.get())
        for head in (0, 1, 2, 2**64 - 1):
            ring["head"] = head
            control["version"] += 1
            history._point(0.0)
            found.append(json.loads(history._waiting[-1])["queue"])
    assert found == [0, 1, 2, int(control["slots"])]


def test_learners_that_a_signal_can_hit(memory: JobMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a replica gets meanwhile is not a learner's."""
    roster = memory.control.view(CONTROL)["roster"]
    roster[1] = roster[0]

    def alive(target: Target) -> bool:
        if target.row == 0:
            roster[1]["name"] = REPLICA
            roster[1]["generation"] = roster[1]["wanted"] = 2
        return True

    monkeypatch.setattr(Target, "alive", property(alive))
    assert [one.row for one in Processes(memory.config.name).learners()] == [0]


def test_the_reason_of_a_refusal_that_is_just_being_counted(memory: JobMemory) -> None:
    roster = memory.control.view(CONTROL)["roster"]
    roster[0]["refused"] = 1  # its reason comes next
    assert most_frequent_reason(memory.control.view(CONTROL)) == Reason.OK
    roster[1]["refused"], roster[1]["reason"] = 1, Reason.NOT_FINITE
    roster[0]["refused"] = 2
    assert most_frequent_reason(memory.control.view(CONTROL)) == Reason.NOT_FINITE


def test_the_staleness_of_a_learner_that_has_left(memory: JobMemory) -> None:
    """Clear its gradients: its staleness stays until another learner has the row."""
    control = memory.control.view(CONTROL)
    create_ring(memory, 1, 1)
    control["roster"][1]["generation"] = 1
    rows = control["roster"][:2]
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, log.get())
        rows["staleness_sum"], rows["applied"] = 40, 9
        history._measure(0.0)
        rows[0]["staleness_sum"], rows[0]["applied"] = 60, 19
        rows[1]["applied"] = 0
        assert history._measure(1.0) == (0, 2.0)


@pytest.mark.parametrize(
    ("generation", "gone", "deaths", "event"),
    [(1, Gone.HUNG, 0, "eviction"), (2, 0, 1, "death"), (2, 0, 0, "detach")],
)
def test_why_a_learner_has_left(
    memory: JobMemory, generation: int, gone: int, deaths: int, event: str
) -> None:
    """Another learner may have its row already."""
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, log.get())
        history._learners = history._there()
        entry, memory.words["learner_deaths"] = memory.words["roster"][0], deaths
        entry["generation"], entry["gone"] = generation, gone
        if generation == 1:
            memory.remove_ring(0)
        history._note_events()
        left = json.loads(history._waiting[0])
    assert (left["event"], left["learner"], left["pid"]) == (event, 0, os.getpid())


def test_a_value_that_no_line_can_have(memory: JobMemory) -> None:
    with selectors.DefaultSelector() as selector:
        history = History(memory, selector, log.get())
        history._add({"loss": math.inf, "reported": {"accuracy": math.nan, "rate": 2.0}}, 7)
        (raw,) = history._waiting
    assert json.loads(raw) | {"time": 0} == {
        "time": 0,
        "version": 7,
        "loss": None,
        "reported": {"accuracy": None, "rate": 2.0},
    }


# -- checkpoints ----------------------------------------------------------------------------------


class Parking(CheckpointWriter):
    """Shards that pause at the word at once."""

    def _wait_parked(self, deadline: int) -> bool:
        self.paused = _native.load(self._segment.word(CONTROL, "pause"))
        self._control["shard"]["parked"] = self.paused
        assert self._all_parked(deadline)
        return super()._wait_parked(deadline)


def test_shards_pause_for_a_copy(memory: JobMemory) -> None:
    control = memory.control.view(CONTROL)
    task = Task(memory.config.name, memory.job_id.hex(), memory.files, "", 1, {})
    one = Parking(task, attached(task))
    snapshot, _ = one._take()
    assert one.paused
    assert control["pause"] == 0
    assert snapshot.version == 0


def test_a_copy_for_a_client_takes_no_process(
    memory: JobMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CheckpointWriter", Parking)
    assert memory.model is not None
    selector = selectors.DefaultSelector()
    made = Checkpoints(memory, selector, log.get())
    heard: list[dict[str, Any]] = []
    size = memory.model.elements * 4
    files = [memory_file(size, [(0, memoryview(b"\xff" * size))]) for _ in range(2)]
    for file in files:  # the second one waits for the first
        made.ask(heard.append, os.dup(file), slots=False)
    assert made._checkpoint_writer is None
    while len(heard) < 2:
        for key, _ in selector.select(10):
            key.data(0)
    assert [one["ok"] for one in heard] == [True, True]
    for file in files:
        assert os.pread(file, size + 1, 0) == bytes(size)
        os.close(file)
    made.close()
    selector.close()


@pytest.mark.parametrize("killed", [False, True])
def test_what_becomes_of_a_checkpoint(memory: JobMemory, killed: bool) -> None:
    """A checkpoint writer that was killed in its pause holds no shard."""
    control = memory.control.view(CONTROL)
    control["pause"] = 1 << 62
    before = words(control)
    made = Checkpoints(memory, selectors.DefaultSelector(), log.get())
    if not killed:
        outcome = {"ok": True, "version": 7, "path": "", "problem": "", "aside": None}
        made._line_received(json.dumps(outcome | {"pause_ms": 0.0}).encode())
    heard: list[dict[str, Any]] = []
    made._waiting.append(heard.append)
    made._ended(-signal.SIGKILL if killed else 0)
    assert [one["ok"] for one in heard] == [not killed]
    after = words(control)
    if killed:
        assert before.pop("pause")
        for bell in ("manager_bell", "shard_bell"):
            assert after.pop(bell) > before.pop(bell, 0)
        assert after == before | {"checkpoint_failures": 1}
    else:
        assert after.pop("checkpoint_time") > 0
        assert after == before | {"checkpoints": 1, "checkpoint_version": 7}
