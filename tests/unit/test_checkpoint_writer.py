"""A copy of a job that is made while the watchdog stores what a learner has asked it for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.jobs import config
from support.memory import create_model

from gadei_ps import _native, sync
from gadei_ps.job.control import SetWork
from gadei_ps.memory.layout import CONTROL, Work
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.watchdog import batches
from gadei_ps.watchdog.batches import Batches
from gadei_ps.watchdog.checkpoint_writer import CheckpointWriter, Task, attached
from gadei_ps.watchdog.job_memory import JobMemory

WANTED = {"batches": 10, "epochs": 3, "seed": 7, "next": 0, "epochs_done": 0}
STORES = 1 + len(WANTED) + 1  # `ahead`, which no copy has, is the first, `work` itself the last


class Words:
    """The control segment's words; `before` is called before each access of a kind."""

    def __init__(
        self,
        control: np.void,
        *,
        before_read: Callable[[], object] = lambda: None,
        before_store: Callable[[], object] = lambda: None,
    ) -> None:
        self._control, self._read, self._store = control, before_read, before_store

    def __getitem__(self, name: str) -> Any:
        self._read()
        return self._control[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._store()
        self._control[name] = value


class FirstWork:
    """The watchdog's own code stores the first work of a job, as many words at a time as asked."""

    def __init__(self, memory: JobMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        control = memory.control.view(CONTROL)
        control["work"] = Work.NONE
        for word in WANTED:
            control[word] = 0
        self._at_store, self._may_store = threading.Semaphore(0), threading.Semaphore(0)
        self._left = STORES
        words = Words(control, before_store=self._stop)
        monkeypatch.setattr(JobMemory, "words", words)

        def store32(address: int, value: int) -> None:
            self._stop()
            _native.store32(address, value)

        monkeypatch.setattr(batches, "_native", SimpleNamespace(store32=store32))
        self._thread = threading.Thread(target=self._run, args=(memory,))
        self._thread.start()
        self._at_store.acquire()

    def _run(self, memory: JobMemory) -> None:
        Batches(memory, 0).set_work(SetWork(batches=10, epochs=3, seed=7))
        self._at_store.release()

    def _stop(self) -> None:
        self._at_store.release()
        self._may_store.acquire()

    def store(self, count: int) -> None:
        for _ in range(min(count, self._left)):
            self._left -= 1
            self._may_store.release()
            self._at_store.acquire()

    def end(self) -> None:
        self.store(STORES)
        self._thread.join()


def test_work_that_is_being_set_is_in_a_copy_whole_or_not_at_all(
    job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do the first stores at each of the copy's reads, and the others at the next read."""
    memory = JobMemory(config(job_name))
    memory.create_control(sync.parse("asp"))
    try:
        model = place([Tensor("w", (4,))])
        create_model(memory, model, np.zeros(model.elements, np.float32))
        task = Task(job_name, memory.job_id.hex(), memory.files, "", 1, {})
        checkpoint_writer = CheckpointWriter(task, attached(task))
        reads = 0
        seen: list[Callable[[int], None]] = []

        def read() -> None:
            nonlocal reads
            reads += 1
            for one in seen:
                one(reads)

        checkpoint_writer._control = Words(memory.control.view(CONTROL), before_read=read)  # type: ignore[assignment]
        checkpoint_writer._copy()
        states = set()
        for at in range(1, reads + 1):
            for stored in range(STORES + 1):
                work = FirstWork(memory, monkeypatch)

                def at_read(number: int, at=at, stored=stored, work=work) -> None:  # type: ignore[no-untyped-def]
                    if number >= at:
                        work.store(stored if number == at else STORES)

                reads, seen[:] = 0, [at_read]
                copied = checkpoint_writer._copy().work
                work.end()
                states.add(copied["state"])
                whole = WANTED | {"state": int(Work.WORKING)}
                nothing = dict.fromkeys(WANTED, 0) | {"state": int(Work.NONE)}
                assert copied in (whole, nothing), (at, stored)
        assert states == {Work.NONE, Work.WORKING}
    finally:
        memory.remove()
