"""Time that a learner takes to bring a large model, beside zeroing the same memory.

Attach: Client(..., tensors=...) in a process that has imported it and filled its arrays, at a job
without a model: the learner copies its values into an anonymous file, the watchdog makes weights,
optimizer state and the ring. Zeroing: as many bytes of /dev/shm are taken by the same code, in as
many threads, and nothing else is done. Meanwhile a third process asks the watchdog for its status
without end, every 5 ms, and keeps the slowest answer.

ratio: zeroing over attach, of each round; 1 is the limit.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job import control
from gadei_ps.job.config import from_mapping
from gadei_ps.job.control import Status
from gadei_ps.learners.client import Client
from gadei_ps.machine import process
from gadei_ps.memory import presence, reserve, shm

OURS, LIMIT = "gadei-ps", "zeroing"
PAUSE_S = 0.005
ANSWER_S = 0.1
"""The reach of the slowest answer."""
SPAWN = multiprocessing.get_context("spawn")


def measure(quick: bool) -> Report:
    """Measure each model in turns with zeroing."""
    size = sizes("attach", quick)
    report = Report(["contender", "optimizer", "MB", "s", "processor s", "slowest answer ms"])
    for number in size["bytes"]:
        for optimizer in size["optimizers"]:
            _measure(report, number, optimizer, size["rounds"])
    return report


def _measure(report: Report, size: int, optimizer: str, rounds: int) -> None:
    """size: of the weights, in bytes."""
    values = {"w": np.full(size // 4, 1e-3, np.float32)}
    told: list[dict[str, float]] = []
    told.append(_attach(optimizer, values))
    whole = int(told[0]["bytes"])

    def attach() -> float:
        told.append(_attach(optimizer, values))
        return told[-1]["seconds"]

    figures = alternate({OURS: attach, LIMIT: lambda: _zero(whole)}, rounds)
    facts = {"optimizer": optimizer, "weights_bytes": size, "bytes": whole}
    answer = max(one["answer_s"] for one in told[1:])
    used = sorted(one["processor_s"] for one in told[1:])[len(told[1:]) // 2]
    for name, seconds in figures.items():
        row: dict[str, Any] = {"contender": name, **facts, **summary(seconds)}
        line = [name, optimizer, f"{size / 1e6:.0f}", f"{row['median']:.3f}", "", ""]
        if name == OURS:
            row |= {"processor_s": used, "slowest_answer_s": answer, "answer_reach_s": ANSWER_S}
            line[4:] = [f"{used:.2f}", f"{answer * 1e3:.0f}"]
        report.rows.append(row)
        report.lines.append(line)
    ratio = ratios_of(figures[OURS], figures[LIMIT])
    report.ratios.append({"contender": LIMIT, **facts, **ratio})


def _attach(optimizer: str, values: dict[str, np.ndarray]) -> dict[str, float]:
    """One attach, in a job of its own."""
    name = f"attach-{os.getpid()}"
    config = from_mapping(
        {"name": name, "history": False, "optimizer": {"kind": optimizer}, "standby": False}, name
    )
    with Daemon(config) as daemon:
        watchdog = daemon.request(Status())["watchdog_pid"]
        ours, theirs = SPAWN.Pipe()
        asker = SPAWN.Process(target=_ask, args=(theirs, str(daemon.socket)), daemon=True)
        asker.start()
        ours.recv()
        used = process.cpu_s(watchdog) + time.process_time()
        begin = time.perf_counter()
        client = Client(name, tensors=values)
        seconds = time.perf_counter() - begin
        used = process.cpu_s(watchdog) + time.process_time() - used
        ours.send(None)
        slowest = ours.recv()
        asker.join()
        parts = [one for one in presence.find(name) if one.part != "control"]
        assert client.flat[0] == values["w"][0]
        client.detach()
    return {
        "seconds": seconds,
        "processor_s": used,
        "answer_s": slowest,
        "bytes": sum(one.size for one in parts),
    }


def _ask(pipe: Connection, socket: str) -> None:
    """Request the status until the pipe closes; send the time of the slowest reply (s)."""
    slowest = 0.0
    with control.Connection(socket) as connection:
        connection.request(Status())
        pipe.send(None)
        while not pipe.poll():
            begin = time.perf_counter()
            connection.request(Status())
            slowest = max(slowest, time.perf_counter() - begin)
            time.sleep(PAUSE_S)
    pipe.send(slowest)


def _zero(size: int) -> float:
    """Take so many bytes of shared memory as segments do; s."""
    path = shm.SHM / f"attach-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        begin = time.perf_counter()
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            reserve.take(fd, _native.address(memory), size)
            return time.perf_counter() - begin
    finally:
        os.close(fd)
        path.unlink()
