"""Applying a gradient: our kernels against C with OpenMP, torch's fused optimizers, and memory.

All contenders work on the same arrays with the same number of threads, one for each core. In a
round each contender makes several passes over the weights, so that all take about the same time.
The figure is the time of one pass. Contenders use threads as follows:

- gadei-ps: one thread for each shard makes all passes over its shard. It does not wait for other
  shards, as in the server. The time includes the start of the threads.
- C: `apply_peer.c`, `cc -O3 -march=native -ffast-math`. Each pass is a `parallel for` with a
  barrier, as in a server that forks and joins for each gradient. OpenMP keeps its threads.
- torch: one call of the fused operation for each pass, without the Python code of `Optimizer.step`;
  there is none for RMSprop. It accepts float32 only, so a 16-bit gradient is first copied to
  float32, as a user would do.
- limit: the time to read and write the bytes that the optimizer needs, at the rate at which
  `a[i] += b[i]` in C moves the same amount of memory.

All run without the undo log; the benchmark `undo` measures it. `mean of 4` is a superstep: the
server reduces and applies four gradients in one pass. It is compared with four passes.

ratio: their time over ours. Above 1, gadei-ps is faster. The contender `float32` compares a 16-bit
gradient with a 32-bit one.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from gadei_ps.benchmarks.common import Report, alternate, cores, ratios_of, summary
from gadei_ps.benchmarks.sizes import MB, sizes
from gadei_ps.kernels import cpu, optimizers
from gadei_ps.kernels.optimizers import COEFFICIENTS, Kind, OptimizerSpec, WireType
from gadei_ps.server.payload import values_of
from gadei_ps.server.symbols import address, doubles, floats, halves

CHUNK = 1024
HEADLINE = 100 * MB
IN_CACHE = 2 * MB
Floats = NDArray[np.float32]
Run = Callable[[int], None]
SETTLE_S = 0.02
"""The OpenMP threads of the previous contender spin for some milliseconds, on cores that this one
needs. Then they sleep."""
LR = 1e-9
"""So small that the weights hardly change over all passes."""
FEW_ROUNDS = 8
"""Number of rounds for sizes at which a pass takes tens of milliseconds."""


@numba.njit(nogil=True)
def apply_shard(
    kernel: Callable[..., None],
    coef: NDArray[np.float64],
    w: Floats,
    s0: Floats,
    s1: Floats,
    g: cpu.Gradient,
    passes: int,
) -> None:
    """Pass over one shard chunk by chunk, as the server does. g: float32, or bfloat16's bits.

    kernel: of `cpu.KERNELS`; the loop is compiled for each. By addresses: for slices of arrays,
    Numba would count references, which takes as long.
    """
    c = cpu.scalars(doubles(address(coef), COEFFICIENTS))
    at, at0, at1, at_g = address(w), address(s0), address(s1), address(g)
    for _ in range(passes):
        for start in range(0, w.size, CHUNK):
            count, here = min(CHUNK, w.size - start), np.uint64(4 * start)
            gradient = values_of(g[0], at_g + np.uint64(start * g.itemsize), count)
            weights, slot0 = floats(at + here, count), floats(at0 + here, count)
            kernel(c, weights, slot0, floats(at1 + here, count), gradient)


@numba.njit(nogil=True)
def apply_float16(
    kernel: Callable[..., None],
    coef: NDArray[np.float64],
    w: Floats,
    s0: Floats,
    s1: Floats,
    g: NDArray[np.uint16],
    passes: int,
) -> None:
    """Do the same with a gradient of float16, converted block by block."""
    c = cpu.scalars(doubles(address(coef), COEFFICIENTS))
    at, at0, at1, at_g = address(w), address(s0), address(s1), address(g)
    decoded = np.empty(CHUNK, np.float32)
    for _ in range(passes):
        for start in range(0, w.size, CHUNK):
            count, here = min(CHUNK, w.size - start), np.uint64(4 * start)
            gradient = decoded[:count]
            cpu.decode_float16(halves(at_g + np.uint64(2 * start), count), gradient)
            weights, slot0 = floats(at + here, count), floats(at0 + here, count)
            kernel(c, weights, slot0, floats(at1 + here, count), gradient)


KINDS = tuple(kind for kind in Kind if kind is not Kind.ADD)  # those that torch.optim has
FUSED = tuple(kind for kind in KINDS if kind is not Kind.RMSPROP)  # by torch


class Work:
    """Weights, slots, scalars, and one gradient of each wire type. Arrays begin on cache lines."""

    def __init__(self, kind: Kind, size: int, lr: float = LR) -> None:
        """Make arrays of size values each."""
        self.kind = kind
        self.spec = OptimizerSpec(kind, lr=lr)
        self.coef = np.zeros(optimizers.COEFFICIENTS)
        cpu.coefficients(int(kind), self.spec.pack(), lr, 1000, 0, math.nan, self.coef)
        random = np.random.default_rng(0)
        count = optimizers.slots(kind)
        self.w, self.g = (_aligned(size), _aligned(size))
        self.slots = [_aligned(size) for _ in range(count)]
        self.w[:] = random.random(size, np.float32)
        self.g[:] = random.random(size, np.float32)
        for slot in self.slots:
            slot[:] = random.random(size, np.float32)
        self.halves = {
            WireType.BFLOAT16: (self.g.view(np.uint32) >> 16).astype(np.uint16),
            WireType.FLOAT16: self.g.astype(np.float16).view(np.uint16),
        }
        nothing = np.empty(0, np.float32)
        self.s0 = self.slots[0] if count > 0 else nothing
        self.s1 = self.slots[1] if count > 1 else nothing

    def payload(self, wire: WireType) -> NDArray[Any]:
        """Return the gradient in this wire type. 16-bit values are uint16."""
        return self.g if wire is WireType.FLOAT32 else self.halves[wire]

    def bytes_moved(self, wire: WireType) -> int:
        """Return the number of bytes that one pass must read and write."""
        gradient = 4 if wire is WireType.FLOAT32 else 2
        return self.w.size * (gradient + 8 * (1 + len(self.slots)))


def _aligned(size: int) -> Floats:
    """Return float32 zeros that begin on a cache line."""
    raw = np.zeros(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def ours(work: Work, wire: WireType, threads: int) -> Run:
    """Return a function that makes passes, each thread over its shard."""
    chunks = -(-work.w.size // CHUNK)
    edges = [min(work.w.size, chunks * i // threads * CHUNK) for i in range(threads + 1)]
    kernel = cpu.KERNELS[work.kind]

    def shard(i: int, passes: int) -> None:
        part = slice(edges[i], edges[i + 1])
        mine = work.coef, work.w[part], work.s0[part], work.s1[part]
        run = apply_float16 if wire is WireType.FLOAT16 else apply_shard
        run(kernel, *mine, work.payload(wire)[part], passes)

    def run(passes: int) -> None:
        started = [threading.Thread(target=shard, args=(i, passes)) for i in range(1, threads)]
        for thread in started:
            thread.start()
        shard(0, passes)
        for thread in started:
            thread.join()

    return run


def in_c(library: ctypes.CDLL, work: Work, wire: WireType, threads: int) -> Run:
    """Return a function that makes passes in C."""
    arrays: list[NDArray[Any]] = [work.coef, work.w, work.s0, work.s1, work.payload(wire)]
    pointers = [_pointer(array) for array in arrays]
    size = ctypes.c_size_t(work.w.size)

    def run(passes: int) -> None:
        library.apply(int(work.kind), *pointers, int(wire), size, passes, threads)

    return run


def memory(library: ctypes.CDLL, work: Work, threads: int) -> tuple[Run, int]:
    """Return a function that moves as much memory as the optimizer uses, and its bytes a pass."""
    half = work.w.size * (2 + len(work.slots)) // 2
    a, b = _aligned(half), _aligned(half)
    a[:], b[:] = 1.0, LR  # unwritten memory is one page of zeros, always cached
    arrays = _pointer(a), _pointer(b)

    def run(passes: int) -> None:
        library.stream(*arrays, ctypes.c_size_t(a.size), passes, threads)

    return run, 12 * half


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def build_peer(folder: Path) -> ctypes.CDLL:
    """Compile `apply_peer.c` for this processor and load it."""
    library, code = folder / "apply_peer.so", folder / "apply_peer.o"
    source = Path(__file__).with_name("apply_peer.c")
    flags = ["-O3", "-march=native", "-fopenmp", "-ffast-math", "-fPIC"]
    subprocess.run(["cc", *flags, "-c", str(source), "-o", str(code)], check=True)
    # A linker that gets -ffast-math adds code that sets denormal numbers to 0 in the whole process.
    link = ["cc", "-shared", "-fopenmp", str(code), "-o", str(library), "-lm"]
    subprocess.run(link, check=True)
    return ctypes.CDLL(str(library))


def in_torch(work: Work, wire: WireType) -> Run:
    """Return a function that calls torch's fused operation several times."""
    w, g = [torch.from_numpy(work.w)], [torch.from_numpy(work.g)]
    source = g[0]
    if wire is not WireType.FLOAT32:
        dtype = torch.bfloat16 if wire is WireType.BFLOAT16 else torch.float16
        source = torch.from_numpy(work.halves[wire].view(np.int16)).view(dtype)
        g = [torch.empty_like(w[0])]
    call = _fused(work, w, g)

    def run(passes: int) -> None:
        for _ in range(passes):
            if source is not g[0]:
                g[0].copy_(source)
            call()

    return run


def _fused(work: Work, w: list[torch.Tensor], g: list[torch.Tensor]) -> Callable[[], None]:
    slots = [[torch.from_numpy(slot)] for slot in work.slots]
    # The operation increases the step, then corrects the bias for it.
    steps = [torch.tensor(1000.0)]
    spec = work.spec
    assert spec.eps is not None
    common: dict[str, Any] = {"lr": spec.lr, "weight_decay": 0.0, "maximize": False}
    if work.kind in (Kind.SGD, Kind.MOMENTUM, Kind.NESTEROV):
        momentum = 0.0 if work.kind is Kind.SGD else spec.momentum
        common |= {"momentum": momentum, "dampening": 0.0, "is_first_step": False}
        common["nesterov"] = work.kind is Kind.NESTEROV
        return lambda: torch._fused_sgd_(w, g, slots[0] if slots else [], **common)
    common["eps"] = spec.eps
    if work.kind is Kind.ADAGRAD:
        return lambda: torch._fused_adagrad_(w, g, slots[0], steps, lr_decay=0.0, **common)
    operation = torch._fused_adam_ if work.kind is Kind.ADAM else torch._fused_adamw_
    common |= {"beta1": spec.beta1, "beta2": spec.beta2, "amsgrad": False}
    return lambda: operation(w, g, slots[0], slots[1], [], steps, **common)


def timed(run: Run, passes: int) -> Callable[[], float]:
    """Return a function that measures the seconds of one pass, after an unmeasured one."""

    def measure_once() -> float:
        time.sleep(SETTLE_S)
        run(1)
        start = time.perf_counter()
        run(passes)
        return (time.perf_counter() - start) / passes

    return measure_once


def passes_for(run: Run, call_s: float) -> int:
    """Return the number of passes that take about call_s seconds."""
    run(1)
    passes = 1
    while True:
        seconds = timed(run, passes)() * passes
        if seconds > call_s / 4:
            return max(1, round(passes * call_s / seconds))
        passes *= 4


def measure(quick: bool) -> Report:
    """Measure each optimizer and wire type at each size."""
    size = sizes("apply", quick)
    threads = cores()
    torch.set_num_threads(threads)
    header = ["optimizer", "wire", "weights", "gadei-ps us", "C us", "torch us", "limit us"]
    report = Report([*header, "C/ours", "torch/ours", "limit/ours", "float32/ours"])
    with tempfile.TemporaryDirectory() as folder:
        library = build_peer(Path(folder))
        for count in size["bytes"]:
            for kind in KINDS:
                _measure_kind(report, library, Work(kind, count // 4), count, threads, size)
    return report


def _measure_kind(
    report: Report,
    library: ctypes.CDLL,
    work: Work,
    count: int,
    threads: int,
    size: Mapping[str, Any],
) -> None:
    stream, moved = memory(library, work, threads)
    runs: dict[tuple[str, WireType], Run] = {}
    for wire in WireType:
        runs["gadei-ps", wire] = ours(work, wire, threads)
        runs["C", wire] = in_c(library, work, wire, threads)
        if work.kind in FUSED:
            runs["torch", wire] = in_torch(work, wire)
    peers = ("C", "torch") if work.kind in FUSED else ("C",)
    passes = passes_for(runs["gadei-ps", WireType.FLOAT32], size["call_s"])
    contenders = {f"{who}/{wire.name}": timed(run, passes) for (who, wire), run in runs.items()}
    contenders["memory"] = timed(stream, passes)
    rounds = min(size["rounds"], FEW_ROUNDS) if count > HEADLINE else size["rounds"]
    seconds = alternate(contenders, rounds)
    for wire in WireType:
        needed = work.bytes_moved(wire) / moved
        mine = {who: seconds[f"{who}/{wire.name}"] for who in ("gadei-ps", *peers)}
        mine["limit"] = [one * needed for one in seconds["memory"]]
        told: dict[str, Any] = {"optimizer": work.kind.name, "wire": wire.name.lower()}
        told |= {"bytes": count, "threads": threads}
        line = [work.kind.name, wire.name.lower(), f"{count / MB:g} MB"]
        cells = dict.fromkeys(("gadei-ps", "C", "torch", "limit"), "")
        for who, taken in mine.items():
            figures = summary(taken)
            report.rows.append({"contender": who, **told, "passes": passes, **figures})
            cells[who] = f"{figures['median'] * 1e6:.1f} ±{figures['spread']:.0%}"
        line += cells.values()
        times = dict.fromkeys(("C", "torch", "limit", "float32"), "")
        against = {who: mine[who] for who in (*peers, "limit")}
        if wire is not WireType.FLOAT32:
            against["float32"] = seconds["gadei-ps/FLOAT32"]
        for who, taken in against.items():
            found = ratios_of(mine["gadei-ps"], taken)
            reach = _reach(who, work.kind, wire, count)
            reached = None if reach is None else found["ratio"] >= reach
            report.ratios.append(
                {"contender": who, **told, **found, "reach": reach, "reached": reached}
            )
            times[who] = f"{found['ratio']:.2f}"
        report.lines.append([*line, *times.values()])


def _reach(who: str, kind: Kind, wire: WireType, count: int) -> float | None:
    """Return the ratio that the design asks for, None if it asks for none."""
    if who == "C":
        return 0.95
    if who == "torch":
        return 1.3 if kind is Kind.ADAM and count == IN_CACHE else 1.0
    if who == "float32" and wire is WireType.BFLOAT16 and count == HEADLINE:
        return 1.1
    return None
