"""Segments are made piece by piece here, as a test allows; the watchdog answers meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import (
    FORK,
    PATIENCE_S,
    Child,
    config,
    daemon,
    eventually,
    fork,
    gone,
    live_weights,
    segments,
    status,
)

from gadei_ps import _native
from gadei_ps.errors import CheckpointError, GadeiError, JobStopped, ModelMismatch
from gadei_ps.job.control import Attach, Checkpoint, Connection, StopJob, ask
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment
from gadei_ps.memory.layout import SegmentKind
from gadei_ps.memory.shm import segment_name
from gadei_ps.watchdog.admission import Admission, Waiting

VALUES = 4 << 20
SLOW = 1 << 20  # bytes: a piece of this size waits for its permission
PIECES = 4 * VALUES // SLOW
MODEL = {"w": np.arange(VALUES, dtype=np.float32)}


class Brake:
    """Brake on the making of large segments, in all forks of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = FORK.Semaphore(0)
        self._free = FORK.Event()
        self._waiting = FORK.Semaphore(0)
        populate = _native.populate
        own = os.getpid()

        def slowly(address: int, size: int) -> int:
            if size >= SLOW and os.getpid() != own and not self._free.is_set():
                self._waiting.release()
                while not self._free.is_set() and not self._allowed.acquire(timeout=0.01):
                    pass
            return populate(address, size)

        monkeypatch.setattr(_native, "populate", slowly)
        monkeypatch.setattr("gadei_ps.memory.reserve.PIECE", SLOW, raising=False)

    def reached(self) -> None:
        """Wait until a piece is about to be made."""
        assert self._waiting.acquire(timeout=PATIENCE_S)

    def waits(self) -> bool:
        """Return whether one more piece is about to be made."""
        return self._waiting.acquire(block=False)

    def allow(self, pieces: int) -> None:
        for _ in range(pieces):
            self._allowed.release()

    def hold(self) -> None:
        """Make pieces wait from now on."""
        self._free.clear()

    def release(self) -> None:
        """Everything is made at once from now on."""
        self._free.set()


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    made = Brake(monkeypatch)
    yield made
    made.release()


def _learn(pipe: Pipe, job: str, tensors: dict[str, Any] | None) -> None:
    """A learner that attaches, reports it, and leaves on request."""
    try:
        client = Client(job, tensors=tensors)
    except GadeiError as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((client.row, float(client.flat[7])))
    pipe.recv()
    client.push({})
    client.wait_applied()
    client.detach()
    pipe.send("left")


def leaves(child: Child) -> None:
    child.send()
    assert child.receive() == "left"
    assert child.join() == 0


def making(job: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = status(job)["making"]
    return found


def test_the_watchdog_answers_while_a_model_is_made(job_name: str, brake: Brake) -> None:
    other = {"w": np.zeros(3)}
    with daemon(job_name), fork(1, _learn, job_name, MODEL) as (first,):
        brake.reached()
        now = making(job_name)
        assert now is not None
        assert (now["what"], now["done"]) == ("the model", 0)
        assert now["total"] > 4 * VALUES
        with pytest.raises(ModelMismatch, match=r"tensor 'w' has shape \[3\]"):
            Client(job_name, tensors=other)
        with pytest.raises(CheckpointError, match=r"the model is being made: 0 of \d\d MiB"):
            ask(job_name, Checkpoint())
        with (
            fork(1, _learn, job_name, MODEL) as (same,),
            fork(1, _learn, job_name, None) as (none,),
        ):
            brake.allow(PIECES // 2)
            eventually(lambda: (making(job_name) or {"done": 0})["done"] >= SLOW)
            assert not any(one.has_sent for one in (first, same, none))
            brake.release()
            got = sorted(one.receive() for one in (first, same, none))
            assert got == [(0, 7.0), (1, 7.0), (2, 7.0)]
            assert making(job_name) is None
            np.testing.assert_array_equal(live_weights(job_name)[:VALUES], MODEL["w"])
            for one in (first, same, none):
                leaves(one)


def test_a_learner_dies_while_its_model_is_made(job_name: str, brake: Brake) -> None:
    """The model is the job's: others need it, too."""
    with daemon(job_name), fork(1, _learn, job_name, MODEL) as (first,):
        brake.reached()
        with fork(1, _learn, job_name, None) as (second,):
            eventually(lambda: status(job_name)["making"])
            first.kill()
            brake.release()
            assert second.receive() == (0, 7.0)
            leaves(second)


def test_a_learner_dies_while_its_ring_is_made(job_name: str, brake: Brake) -> None:
    brake.release()
    with daemon(job_name, tensors=[{"name": "w", "shape": [VALUES]}]):
        before = segments(job_name)
        brake.hold()
        with fork(1, _learn, job_name, None) as (first,):
            brake.reached()
            now = making(job_name)
            assert now is not None and now["what"] == "the ring of learner 0"
            assert len(segments(job_name)) == len(before) + 1
            first.kill()
            eventually(lambda: brake.allow(1) or making(job_name) is None)
        assert segments(job_name) == before
        brake.release()
        with fork(1, _learn, job_name, MODEL) as (second,):
            assert second.receive() == (0, 0.0)
            leaves(second)
        assert status(job_name)["learner_deaths"] == 0, "it never was one"


def is_a_file(link: str) -> bool:
    """Return whether this descriptor in /proc is of a learner's file. Raise OSError."""
    return str(Path(link).readlink()).startswith("/memfd:gadei-ps")


def files(pid: int) -> int:
    """Return how many learners' files a process has open."""
    count = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += is_a_file(str(one))
    return count


def test_the_watchdogs_thread_frees_no_file(
    job_name: str, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last close of gigabytes takes longer than an answer may."""
    watchdog, its_thread, others = (FORK.Value("q", 0) for _ in range(3))
    close = os.close

    def counts(fd: int) -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == watchdog.value and is_a_file(f"/proc/self/fd/{fd}"):
                mine = threading.get_native_id() == os.getpid()
                counter = its_thread if mine else others
                with counter.get_lock():
                    counter.value += 1
        close(fd)

    monkeypatch.setattr(os, "close", counts)
    with daemon(job_name), fork(1, _learn, job_name, MODEL) as (first,):
        watchdog.value = pid = status(job_name)["watchdog_pid"]
        brake.reached()
        with fork(1, _learn, job_name, MODEL) as (second,):
            with fork(1, _learn, job_name, MODEL) as (third,):
                eventually(lambda: files(pid) == 3)
                for one in (first, third):
                    one.kill()
            brake.release()
            assert second.receive() == (0, 7.0)
            eventually(lambda: files(pid) == 0)
            leaves(second)
    assert (its_thread.value, others.value) == (0, 3)


def test_a_ring_made_in_vain_has_no_name_when_it_is_dropped(job_name: str) -> None:
    """Else the watchdog's thread would free it, by taking the name away last."""
    ring = segment.create(job_name, "ring.0", SegmentKind.RING, SLOW, job_id=bytes(16))
    named: list[bool] = []
    maker, stopping = mock.Mock(), mock.Mock(begun=True, refusal=lambda: JobStopped("stopping"))
    maker.drop = lambda held: named.append(segment.is_named(held))
    memory = mock.Mock(config=config(job_name))
    admission = Admission(
        mock.Mock(), memory, mock.Mock(), stopping, maker, mock.Mock(), mock.Mock()
    )
    client = mock.Mock()
    admission._asked[client] = mock.Mock()
    try:
        admission._ring_made(Waiting(client, mock.Mock()), Attach(), mock.Mock(row=0), ring, None)
    finally:
        segment.unlink(ring.name)
    assert named == [False]


def test_a_stop_while_a_model_is_made(job_name: str, brake: Brake) -> None:
    message = f"job {job_name!r} is stopping"
    notes: list[dict[str, Any]] = []
    messages: list[str] = []

    def attach() -> None:
        with Connection(job_name) as one:
            try:
                one.request(Attach(), on_note=notes.append)
            except JobStopped as error:
                messages.append(str(error))

    with daemon(job_name) as job, fork(1, _learn, job_name, MODEL) as (first,):
        brake.reached()
        asking = [
            threading.Thread(target=attach),
            threading.Thread(target=ask, args=(job_name, StopJob())),
        ]
        asking[0].start()
        eventually(lambda: notes)
        assert notes[0]["note"] == "making"
        control = Processes(job_name).control
        asking[1].start()
        eventually(lambda: int(control["stop"]))
        brake.allow(1)
        allowed = 1
        while not (first.has_sent and messages):
            time.sleep(0.05)  # the pieces in flight are to be the last ones
            if brake.waits():
                brake.allow(1)
                allowed += 1
                assert allowed < PIECES
        assert (first.receive(), messages) == (f"JobStopped: {message}", [message])
        for one in asking:
            one.join()
        with pytest.raises(JobStopped):
            eventually(lambda: job.check())
    assert not segments(job_name)


def test_the_watchdog_is_killed_while_a_model_is_made(job_name: str, brake: Brake) -> None:
    """The next one starts again, and the learner offers its model again."""
    with daemon(job_name) as job, fork(1, _learn, job_name, MODEL) as (first,):
        brake.reached()
        before = status(job_name)
        os.kill(before["watchdog_pid"], signal.SIGKILL)
        assert segment_name(job_name, "weights") in segments(job_name)
        brake.release()
        eventually(lambda: gone(before["watchdog_pid"]))
        job.check()
        assert first.receive() == (0, 7.0)
        assert status(job_name)["job_id"] != before["job_id"]
        leaves(first)
