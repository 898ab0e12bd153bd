"""The cost of the undo log: the server's loop compared with the same loop without the log.

One thread applies one dense float32 gradient again and again to the same memory, which is shared,
as in a job. `with` is the server's own `apply_dense`. `without` computes the same, chunk by chunk,
but saves no old values and does not move the cursor. For each size the benchmark checks that both
give the same values but for rounding: where a product is added, the compiler may round once or
twice, and does so differently in the two on some processors.

Times of one gradient are medians with half the distance between the quartiles. The table shows the
time with over the time without the log, so 1.05 means that the log costs 5 %. The first number is
the median over the rounds, the second compares the fastest rounds.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.kernels import cpu, optimizers
from gadei_ps.kernels.optimizers import COEFFICIENTS, Kind, OptimizerSpec
from gadei_ps.memory import layout
from gadei_ps.server.apply import apply_dense
from gadei_ps.server.chunks import COEFFICIENTS_AT, Walk, prepare
from gadei_ps.server.context import Shard, shard_of
from gadei_ps.server.kinds import DENSE
from gadei_ps.server.record import lock, unlock
from gadei_ps.server.structs import BOARD, PART
from gadei_ps.server.symbols import address, doubles, floats
from gadei_ps.server.units import loops

# Chunks of the loop without the log: the fastest length.
CHUNK = 1024
FLOAT32 = int(layout.WireType.FLOAT32)
Floats = NDArray[np.float32]
Part = NDArray[np.void]
Run = Callable[..., None]

# So small that the weights hardly change over all gradients.
LR = 1e-9
ROUNDING = 1e-6
"""Relative; of values that are all positive."""


@numba.njit(nogil=True)
def with_log(part: Part, payload: int, times: int) -> None:
    """Apply the gradient at the address `payload` `times` times, as the server does."""
    s = shard_of(address(part))
    s.current[0].payload = payload
    s.current[0].dtype = FLOAT32
    s.current[0].kind = DENSE
    s.current[0].scale = 1.0
    for _ in range(times):
        prepare(s)
        lock(s)
        apply_dense(s, Walk(1, 0, s.low))
        unlock(s)


@numba.njit(nogil=True, forceinline=True, error_model="numpy")
def _chunk(
    kernel: Run, kept: int, s: Shard, coef: cpu.Scalars, payload: int, start: int, count: int
) -> None:
    """Apply a part of the gradient."""
    here = np.uint64(start * 4)
    s0 = floats(s.at.slot0 + here, count if kept > 0 else 0)
    s1 = floats(s.at.slot1 + here, count if kept > 1 else 0)
    w, g = floats(s.at.weights + here, count), floats(np.uint64(payload) + here, count)
    kernel(coef, w, s0, s1, g)


def without_log(kind: Kind) -> Run:
    """Return the same without the log. Each optimizer has its own loop here too."""
    kernel, kept = cpu.KERNELS[kind], optimizers.slots(kind)

    @numba.njit(nogil=True, error_model="numpy")
    def run(part: Part, payload: int, times: int) -> None:
        s = shard_of(address(part))
        rest = s.high % CHUNK
        for _ in range(times):
            prepare(s)
            coef = cpu.scalars(doubles(s.here + COEFFICIENTS_AT, COEFFICIENTS))
            for start in range(0, s.high - rest, CHUNK):
                _chunk(kernel, kept, s, coef, payload, start, CHUNK)
            if rest > 0:
                _chunk(kernel, kept, s, coef, payload, s.high - rest, rest)

    compiled: Run = run
    return compiled


class Work:
    """The memory of a job with one shard, and one gradient."""

    def __init__(self, kind: Kind, size: int, groups: int = 1) -> None:
        """Make weights, slots and a gradient of size float32 values each.

        groups: of about equal size, each with settings of its own.
        """
        self.size = size
        stream = layout.rounded(size * 4, layout.PAGE)
        undo = layout.rounded(layout.UNDO_BYTES, layout.PAGE)
        state = layout.rounded(layout.STATE.itemsize, layout.PAGE)
        control = layout.rounded(layout.CONTROL.itemsize, layout.PAGE)
        sizes = [control, state, undo, *[stream] * 4]
        memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)  # shared, as a segment is
        ends = np.cumsum(sizes)
        parts = [memory[end - some : end] for end, some in zip(ends, sizes, strict=True)]
        at = [part.ctypes.data for part in parts]
        specs = [
            OptimizerSpec(kind, lr=LR * (1 + number), weight_decay=number * LR)
            for number in range(groups)
        ]
        control_view = parts[0][: layout.CONTROL.itemsize].view(layout.CONTROL)[0]
        control_view["optimizer"] = int(kind)
        control_view["hyper"][:groups] = [spec.pack() for spec in specs]
        record = parts[1][: layout.STATE.itemsize].view(layout.STATE)[0]["record"][0]
        record["momentum"] = np.nan  # each group's own
        record["rate"][:groups], record["step"] = [spec.lr for spec in specs], 1000
        self.streams = [part[: size * 4].view(np.float32) for part in parts[3:]]
        self.fill()
        kept = optimizers.slots(kind)
        self.part = np.zeros(1, PART)
        part = self.part[0]
        part["high"] = part["elements"] = part["parameters"] = size
        part["control"], part["state"], part["undo"], part["weights"] = at[:4]
        part["slot0"] = at[4] if kept > 0 else 0
        part["slot1"] = at[5] if kept > 1 else 0
        # Not read; but the shard's view needs its address.
        self.board = np.zeros(1, BOARD)
        part["board"] = self.board.ctypes.data
        part["move"] = loops(int(kind))
        self.gradient = at[6]
        self.cut(groups)

    def cut(self, groups: int) -> None:
        """Let the values be in the first so many groups."""
        part = self.part[0]
        part["groups"] = groups
        cuts = [
            layout.rounded(self.size * number // groups, layout.CHUNK) for number in range(groups)
        ]
        part["group_end"][:groups] = [*cuts[1:], self.size]

    def fill(self) -> None:
        """Write the initial values."""
        random = np.random.default_rng(0)
        for values in self.streams:
            values[:] = random.random(self.size, np.float32)

    def after(self, run: Run) -> Floats:
        """Return the weights and slots after three gradients."""
        self.fill()
        run(self.part, self.gradient, 3)
        return np.concatenate(self.streams)


def timed(run: Run, work: Work, times: int) -> Callable[[], float]:
    """Return a function that measures the seconds of one gradient, after an unmeasured one."""

    def measure() -> float:
        run(work.part, work.gradient, 1)
        start = time.perf_counter()
        run(work.part, work.gradient, times)
        return (time.perf_counter() - start) / times

    return measure


def measure(quick: bool) -> Report:
    """Measure each optimizer at each size. ratio: time without over time with the log."""
    size = sizes("undo", quick)
    without = {kind: without_log(kind) for kind in Kind}
    report = Report(["optimizer", "weights", "without us", "with us", "with/without"])
    for weights in size["bytes"]:
        for kind in Kind:
            contenders: dict[str, Run] = {"without": without[kind], "gadei-ps": with_log}
            work = Work(kind, weights // 4)
            one, other = map(work.after, contenders.values())
            if not np.allclose(one, other, rtol=ROUNDING, atol=0):
                raise AssertionError(f"{kind.name}: the loops do not compute the same")
            times = max(1, round(size["call_s"] / timed(without[kind], work, 2)()))
            seconds = alternate(
                {who: timed(run, work, times) for who, run in contenders.items()}, size["rounds"]
            )
            told = {"optimizer": kind.name, "bytes": weights, "threads": 1}
            line = [kind.name, f"{weights / 1e6:g} MB"]
            for who, taken in seconds.items():
                figures = summary(taken)
                report.rows.append({"contender": who, **told, "passes": times, **figures})
                line.append(f"{figures['median'] * 1e6:.1f} ±{figures['spread']:.0%}")
            found = ratios_of(seconds["gadei-ps"], seconds["without"])
            report.ratios.append({"contender": "without", **told, **found})
            report.lines.append([*line, f"{1 / found['ratio']:.3f} {1 / found['best_ratio']:.3f}"])
    return report
