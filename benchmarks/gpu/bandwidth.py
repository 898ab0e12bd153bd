"""The bandwidth of a push and of a pull, beside cudaMemcpyAsync of pinned memory.

A real job has a model of one tensor; the gradient lies on the device. There are three figures for
each way:

- transfer: timed by events on the link's streams, right before and after the copy;
- end to end: gradients are pushed one after the other until the server has applied the last one,
  and weights are filled one after the other. The server's update also limits the first;
- limit: copies of as many bytes between pinned and device memory, on other streams, timed as the
  transfers are.

Both ways: a push and a pull begin together; timed from the first begin to the last end. The streams
of copies wait for a kernel that only waits, so that the host has queued everything when they begin.
A transfer that begins earlier is repeated.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gpu.target import HeadStart, Target, job, noted
from gadei_ps.benchmarks.scale import SHARE, free_bytes
from gadei_ps.learners import host
from gadei_ps.learners.client import Client

LEAST_WAIT_S, MOST_WAIT_S = 2e-3, 20e-3
WAIT = 3
"""Time of the waiting kernel, as a multiple of the host's time to queue the last transfer."""
TRIES = 20
"""Trials of a transfer, each with the host slower than the waiting kernel."""
SEGMENTS = 4
"""Shared memory of a job with one learner, in sizes of the model: weights, slots, the rest."""
LEAST_TIMES = 3
LARGER = 2
"""Time that a larger model may take, as a multiple of that of the one before."""
PUSH, PULL, BOTH = "push", "pull", "both ways"
WAYS = (PUSH, PULL, BOTH)
LIMIT = "cudaMemcpyAsync"
TO_HOST, TO_DEVICE = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"
CALL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 2)
TRANSFER, END_TO_END = "gadei-ps", "gadei-ps, end to end"
REACH = {PUSH: 0.95, PULL: 0.95, BOTH: 0.9}


class Mover(Protocol):
    """Moves a model's gradient and weights. The methods return seconds."""

    def transfer(self, way: str) -> float:
        """Make one transfer of the link, or one each way."""

    def limit(self, way: str) -> float:
        """Copy as many bytes between pinned and device memory, or as many each way."""

    def end_to_end(self, way: str, times: int) -> float:
        """Make `times` pushes, until they are applied, or `times` pulls."""


class _End:
    """Shared by host and GPU: the figure end to end."""

    def __init__(self, target: Target, client: Client, link: Any, gradient: Any) -> None:
        self._target, self._client, self._link = target, client, link
        self._gradients = {"w": gradient}
        self._buffer = link.buffer()
        link.fill(self._buffer)

    def close(self) -> None:
        self._link.close()

    def _push(self) -> None:
        self._link.push(self._gradients, self._link.version)

    def _applied(self) -> None:
        self._link.flush()
        self._client.wait_applied(timeout_s=60.0)

    def end_to_end(self, way: str, times: int) -> float:
        """See Mover."""
        begin = time.perf_counter()
        for _ in range(times):
            if way == PUSH:
                self._push()
            else:
                self._link.fill(self._buffer)
        self._target.wait()
        if way == PUSH:
            self._applied()
        return time.perf_counter() - begin


class OnHost(_End):
    """Copies on the host, timed by the clock, for a trial of the rest of this program."""

    def __init__(self, target: Target, client: Client) -> None:
        count = client.model.elements
        gradient = np.full(count, 1e-3, np.float32)
        super().__init__(target, client, host.Host().link(client), gradient)
        self._copies = [(np.zeros_like(gradient), gradient) for _ in range(2)]

    def transfer(self, way: str) -> float:
        """See Mover."""
        begin = time.perf_counter()
        if way != PULL:
            self._push()
            self._link.flush()
        if way != PUSH:
            self._link.fill(self._buffer)
        taken = time.perf_counter() - begin
        self._applied()
        return taken

    def limit(self, way: str) -> float:
        """See Mover."""
        begin = time.perf_counter()
        for to, source in self._copies[: 2 if way == BOTH else 1]:
            np.copyto(to, source)
        return time.perf_counter() - begin


class Timed:
    """CUDA's driver, with an event before and after each copy on some streams.

    It replaces the driver in the module of the link, whose code does not change.
    """

    def __init__(self, libcuda: Any, event: Callable[[], Any]) -> None:
        self._libcuda, self._event = libcuda, event
        self.streams: set[int] = set()
        """Handles of the streams to look at."""
        self.least = 1
        """Bytes of a copy that counts."""
        self.spans: list[tuple[Any, Any]] = []
        for name in (TO_HOST, TO_DEVICE):
            setattr(self, name, CALL(functools.partial(self.copy, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libcuda, name)

    def copy(self, name: str, to: int, source: int, size: int, stream: int) -> int:
        """Copy, as the driver's function of this name does; return its result."""
        copy = ctypes.cast(getattr(self._libcuda, name), CALL)
        if stream not in self.streams or size < self.least:
            return int(copy(to, source, size, stream))
        record = ctypes.cast(self._libcuda.cuEventRecord, RECORD)
        begin, end = self._event(), self._event()
        result = record(begin.ptr, stream) or copy(to, source, size, stream)
        self.spans.append((begin, end))
        return int(result or record(end.ptr, stream))


class OnGpu(_End):
    """Copies of the GPU's engines, timed by events."""

    def __init__(self, target: Target, client: Client, timed: Timed) -> None:
        import cupy
        import torch

        self._cupy, self._torch, self._timed = cupy, torch, timed
        self._head_start = HeadStart(target)
        self._waiting = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._wait_s = MOST_WAIT_S
        self._bytes = 4 * client.model.elements
        gradient = cupy.full(client.model.elements, 1e-3, cupy.float32)
        super().__init__(target, client, target.learner_device().link(client), gradient)
        timed.least = self._bytes
        timed.streams = set(self._link.streams)
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._pinned = [cupy.cuda.alloc_pinned_memory(self._bytes) for _ in range(2)]
        self._device = [cupy.zeros(client.model.elements, cupy.float32) for _ in range(2)]
        cupy.cuda.runtime.deviceSynchronize()

    def transfer(self, way: str) -> float:
        """See Mover."""

        def queue() -> None:
            if way != PULL:
                self._push()
            if way != PUSH:
                self._link.pull(self._buffer)

        def once() -> float | None:
            if way != PUSH:  # there must be newer weights than those pulled last
                self._push()
                self._applied()
            taken = self._timely(queue, way)
            if way != PUSH and not self._link.pulled():
                raise RuntimeError("the pull has not arrived")
            self._applied()
            return taken

        return _first(once)

    def limit(self, way: str) -> float:
        """See Mover."""

        def queue() -> None:
            if way != PULL:
                to, source = self._pinned[0].ptr, self._device[0].data.ptr
                self._timed.copy(TO_HOST, to, source, self._bytes, self._streams[0].ptr)
            if way != PUSH:
                to, source = self._device[1].data.ptr, self._pinned[1].ptr
                self._timed.copy(TO_DEVICE, to, source, self._bytes, self._streams[1].ptr)

        kept, self._timed.streams = self._timed.streams, {one.ptr for one in self._streams}
        try:
            return _first(lambda: self._timely(queue, way))
        finally:
            self._timed.streams = kept

    def _timely(self, queue: Callable[[], None], way: str) -> float | None:
        """Return the time (s) of the copies that `queue` queues; None if they begin earlier."""
        self._timed.spans.clear()
        with self._torch.cuda.stream(self._waiting):
            self._head_start.begin(self._wait_s, list(self._timed.streams))
        begin = time.perf_counter()
        queue()
        suffices = self._head_start.suffices()
        queued_s = time.perf_counter() - begin
        self._wait_s = min(MOST_WAIT_S, max(LEAST_WAIT_S, WAIT * queued_s))
        self._cupy.cuda.runtime.deviceSynchronize()
        return self._taken(2 if way == BOTH else 1) if suffices else None

    def _taken(self, copies: int) -> float:
        """Return the time (s) from the first start to the last end of the last copies."""
        spans = self._timed.spans
        if len(spans) != copies:
            raise RuntimeError(f"{len(spans)} copies instead of {copies}")
        elapsed = self._cupy.cuda.get_elapsed_time  # milliseconds
        return max(float(elapsed(begin, end)) for begin, _ in spans for _, end in spans) / 1e3


def _first(once: Callable[[], float | None]) -> float:
    """Return the first time that is not None. Raises RuntimeError after many trials."""
    for _ in range(TRIES):
        if (taken := once()) is not None:
            return taken
    raise RuntimeError("the host takes too long to queue a transfer")


@contextmanager
def mover(target: Target, client: Client) -> Iterator[Mover]:
    """The mover of a client, which nothing else may use."""
    if not target.on_gpu:
        on_host = OnHost(target, client)
        yield on_host
        on_host.close()
        return
    import cupy

    link: Any = importlib.import_module("gadei_ps.learners.cuda.link")
    libcuda = link.libcuda
    timed = Timed(libcuda(), cupy.cuda.Event)
    link.libcuda = lambda: timed
    try:
        on_gpu = OnGpu(target, client, timed)
        yield on_gpu
        on_gpu.close()
    finally:
        link.libcuda = libcuda


def measure(target: Target) -> Iterator[Report]:
    """Measure each size with its own job."""
    size = target.sizes("bandwidth")
    report = Report(["MB", "way", f"{LIMIT} GB/s", "transfer", "end to end", "/limit", "target"])
    taken, before = 0.0, 1  # seconds and bytes of the size before
    for count in size["bytes"]:
        if SEGMENTS * count > SHARE * free_bytes():
            report.notes.append(f"{count / 1e6:g} MB: not measured: too little shared memory")
            continue
        # A larger model has fewer transfers in a round, so its time grows slowly.
        if target.left() < taken * (LARGER if count > before else 1):
            report.notes.append(f"{count / 1e6:g} MB: not measured: no time")
            continue
        begin = time.monotonic()
        tensors = [{"name": "w", "shape": [count // 4]}]
        with (
            noted(report, f"{count / 1e6:g} MB"),
            job("bandwidth", tensors=tensors) as name,
            Client(name) as client,
            mover(target, client) as moves,
        ):
            _compare(report, target, moves, count, size)
        yield report
        taken, before = time.monotonic() - begin, count


def _compare(
    report: Report, target: Target, moves: Mover, count: int, size: dict[str, Any]
) -> None:
    """Measure one size of the model."""
    limit = LIMIT if target.on_gpu else "memcpy"
    contenders: dict[tuple[str, str], Callable[[], float]] = {}
    for way in WAYS:
        moved = count * (2 if way == BOTH else 1)
        for who, call in ((limit, moves.limit), (TRANSFER, moves.transfer)):
            contenders[who, way] = _rate(functools.partial(call, way), moved, size["call_s"])
        if way != BOTH:
            call_s = functools.partial(moves.end_to_end, way)
            contenders[END_TO_END, way] = _whole_rate(call_s, moved, size["call_s"])
    named = {f"{who}: {way}": call for (who, way), call in contenders.items()}
    figures = alternate(named, size["rounds"])
    for (who, way), values in zip(contenders, figures.values(), strict=True):
        facts = {"contender": who, "bytes": count, "way": way}
        report.rows.append(facts | summary(values, "B/s", larger=True))
    for way in WAYS:
        found = {who: figures[f"{who}: {way}"] for who, one in contenders if one == way}
        _tell(report, found, way, count, limit)


def _rate(once: Callable[[], float], moved: int, call_s: float) -> Callable[[], float]:
    """Return the rate (bytes/s): the median of transfers that take about call_s together."""
    times = max(LEAST_TIMES, min(25, round(call_s / once())))
    return lambda: moved / sorted(once() for _ in range(times))[times // 2]


def _whole_rate(seconds: Callable[[int], float], moved: int, call_s: float) -> Callable[[], float]:
    """Return the rate (bytes/s) over transfers in a row that together take about call_s."""
    seconds(1)
    times = max(LEAST_TIMES, round(call_s * LEAST_TIMES / seconds(LEAST_TIMES)))
    return lambda: moved * times / seconds(times)


def _tell(
    report: Report, figures: dict[str, list[float]], way: str, count: int, limit: str
) -> None:
    """Report the ratios to the limit, and the line for people."""
    facts: dict[str, Any] = {"contender": limit, "bytes": count, "way": way}
    for who, of in ((TRANSFER, "transfer"), (END_TO_END, "end to end")):
        if who in figures:
            found = ratios_of(figures[who], figures[limit], larger=True)
            reach = REACH[way] if who == TRANSFER else None
            reached = None if reach is None else found["ratio"] >= reach
            report.ratios.append(facts | {"of": of} | found | {"reach": reach, "reached": reached})
    cells = [
        f"{summary(figures[who])['median'] / 1e9:.1f}" if who in figures else "-"
        for who in (limit, TRANSFER, END_TO_END)
    ]
    ratio = ratios_of(figures[TRANSFER], figures[limit], larger=True)["ratio"]
    report.lines.append([f"{count / 1e6:g}", way, *cells, f"{ratio:.2f}", f"{REACH[way]}"])
