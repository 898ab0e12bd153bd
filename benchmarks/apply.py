"""Applying a gradient: our kernels against C with OpenMP and against torch's fused optimizers.

    python benchmarks/apply.py [--sizes 2e6 100e6] [--rounds 60] [--optimizers SGD ADAM]

All contenders work on the same arrays with the same number of threads, one a core. A round lets
each make so many passes over the weights that it runs for about `--call-s` seconds; its figure is
the time of one pass. How each one's threads live:

- gadei-ps: a thread per shard makes all passes over its shard without meeting the others, as in
  the server, where no gradient waits for another shard. Starting the threads is paid in the time.
- C: `apply_peer.c`, `cc -O3 -march=native -ffast-math`; a `parallel for` and its barrier each
  pass, as a server that forks and joins for each gradient. OpenMP keeps its threads.
- C alone: the same without the barriers, so that only the loops differ from ours.
- torch: the fused operation itself, without `Optimizer.step`'s own work in Python; a call a pass.

Times are medians with half the distance between the quartiles. Ratios are theirs over ours, above 1
where gadei-ps is faster: the median over the rounds, then the fastest round over the fastest.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from common import alternate, cores, ratios_of, summary, table, write_results
from numpy.typing import NDArray

from gadei_ps.kernels import cpu, optimizers
from gadei_ps.kernels.borrow import borrow
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec

CHUNK = 1024
Floats = NDArray[np.float32]

# The OpenMP threads of the contender before go on spinning for some milliseconds, on a core that
# this one needs; then they sleep.
SETTLE_S = 0.02

# So small that weights stay in the range where they began, however many passes are made.
LR = 1e-9


@numba.njit(nogil=True)
def apply_shard(
    kind: int,
    coef: NDArray[np.float64],
    w: Floats,
    s0: Floats,
    s1: Floats,
    g: Floats,
    passes: int,
) -> None:
    """Pass over one shard chunk by chunk, as the server does."""
    coef, w, s0, s1, g = borrow(coef), borrow(w), borrow(s0), borrow(s1), borrow(g)
    for _ in range(passes):
        for start in range(0, w.size, CHUNK):
            end = min(start + CHUNK, w.size)
            cpu.update(kind, coef, w[start:end], s0[start:end], s1[start:end], g[start:end])


class Work:
    """Weights, slots and one gradient, 64-byte aligned, and the scalars of one optimizer."""

    def __init__(self, kind: Kind, size: int, weight_decay: float) -> None:
        """Make arrays of size float32 values each."""
        self.kind = kind
        self.spec = OptimizerSpec(kind, lr=LR, weight_decay=weight_decay)
        self.coef = np.zeros(optimizers.COEFFICIENTS)
        cpu.coefficients(int(kind), self.spec.pack(), LR, 1000, self.coef)
        random = np.random.default_rng(0)
        count = optimizers.slots(kind)
        self.w, self.g = (_aligned(size), _aligned(size))
        self.slots = [_aligned(size) for _ in range(count)]
        self.w[:] = random.standard_normal(size, np.float32)
        self.g[:] = random.standard_normal(size, np.float32)
        for slot in self.slots:
            slot[:] = random.random(size, np.float32)
        nothing = np.empty(0, np.float32)
        self.s0 = self.slots[0] if count > 0 else nothing
        self.s1 = self.slots[1] if count > 1 else nothing


def _aligned(size: int) -> Floats:
    """Return float32 zeros that begin on a cache line."""
    raw = np.zeros(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def ours(work: Work, threads: int) -> Callable[[int], None]:
    """Return a function that makes that many passes, each thread over its shard."""
    chunks = -(-work.w.size // CHUNK)
    edges = [min(work.w.size, chunks * i // threads * CHUNK) for i in range(threads + 1)]
    kind = int(work.kind)

    def shard(i: int, passes: int) -> None:
        part = slice(edges[i], edges[i + 1])
        apply_shard(
            kind, work.coef, work.w[part], work.s0[part], work.s1[part], work.g[part], passes
        )

    def run(passes: int) -> None:
        started = [threading.Thread(target=shard, args=(i, passes)) for i in range(1, threads)]
        for thread in started:
            thread.start()
        shard(0, passes)
        for thread in started:
            thread.join()

    return run


def in_c(work: Work, threads: int, function: Callable[..., None]) -> Callable[[int], None]:
    """Return a function that makes that many passes by one of the functions of the C library."""
    arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in (work.coef, work.w, work.s0, work.s1)]
    gradient = work.g.ctypes.data_as(ctypes.c_void_p)
    size = ctypes.c_size_t(work.w.size)

    def run(passes: int) -> None:
        function(int(work.kind), *arrays, gradient, size, passes, threads)

    return run


def build_peer(folder: Path) -> ctypes.CDLL:
    """Compile `apply_peer.c` for this processor and load it."""
    library = folder / "apply_peer.so"
    source = Path(__file__).with_name("apply_peer.c")
    flags = ["-O3", "-march=native", "-fopenmp", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


def in_torch(work: Work) -> Callable[[int], None]:
    """Return a function that makes that many calls of torch's fused operation."""
    w, g = [torch.from_numpy(work.w)], [torch.from_numpy(work.g)]
    slots = [[torch.from_numpy(slot)] for slot in work.slots]
    # Raised by the operation itself to the step that it then corrects the bias for.
    steps = [torch.tensor(1000.0)]
    spec = work.spec
    decay = spec.weight_decay
    eps = spec.eps
    assert eps is not None
    if work.kind in (Kind.SGD, Kind.MOMENTUM, Kind.NESTEROV):
        momentum = 0.0 if work.kind is Kind.SGD else spec.momentum

        def call() -> None:
            torch._fused_sgd_(
                w,
                g,
                slots[0] if slots else [],
                weight_decay=decay,
                momentum=momentum,
                lr=LR,
                dampening=0.0,
                nesterov=work.kind is Kind.NESTEROV,
                maximize=False,
                is_first_step=False,
            )
    elif work.kind is Kind.ADAGRAD:

        def call() -> None:
            torch._fused_adagrad_(
                w,
                g,
                slots[0],
                steps,
                lr=LR,
                lr_decay=0.0,
                weight_decay=decay,
                eps=eps,
                maximize=False,
            )
    else:
        operation = torch._fused_adam_ if work.kind is Kind.ADAM else torch._fused_adamw_

        def call() -> None:
            operation(
                w,
                g,
                slots[0],
                slots[1],
                [],
                steps,
                lr=LR,
                beta1=spec.beta1,
                beta2=spec.beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )

    def run(passes: int) -> None:
        for _ in range(passes):
            call()

    return run


def timed(run: Callable[[int], None], passes: int) -> Callable[[], float]:
    """Return a function that measures the seconds of one pass, after an unmeasured one."""

    def measure() -> float:
        time.sleep(SETTLE_S)
        run(1)
        start = time.perf_counter()
        run(passes)
        return (time.perf_counter() - start) / passes

    return measure


def passes_for(run: Callable[[int], None], call_s: float) -> int:
    """Return how many passes take about call_s seconds."""
    run(2)
    passes = 4
    while True:
        seconds = timed(run, passes)() * passes
        if seconds > call_s / 4:
            return max(2, round(passes * call_s / seconds))
        passes *= 4


def main() -> None:
    """Measure, print the table and write `results/apply.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=float, default=[2e6, 100e6], help="bytes")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--call-s", type=float, default=0.03)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--weight-decay", type=float, default=0.0)
    kinds = [kind.name for kind in Kind]
    parser.add_argument("--optimizers", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--name", default="apply", help="of the file in results/")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        library = build_peer(Path(folder))
        for size in options.sizes:
            for name in options.optimizers:
                work = Work(Kind[name], int(size) // 4, options.weight_decay)
                contenders = {
                    "gadei-ps": ours(work, options.threads),
                    "C": in_c(work, options.threads, library.apply_joined),
                    "C alone": in_c(work, options.threads, library.apply_alone),
                    "torch": in_torch(work),
                }
                passes = passes_for(contenders["gadei-ps"], options.call_s)
                seconds = alternate(
                    {who: timed(run, passes) for who, run in contenders.items()}, options.rounds
                )
                line = [name, f"{size / 1e6:g} MB"]
                told = {"optimizer": name, "bytes": int(size), "threads": options.threads}
                for who, taken in seconds.items():
                    figures = summary(taken)
                    rows.append({"contender": who, **told, "passes": passes, **figures})
                    line.append(f"{figures['median_s'] * 1e6:.1f} ±{figures['spread']:.0%}")
                for who in list(seconds)[1:]:
                    found = ratios_of(seconds["gadei-ps"], seconds[who])
                    ratios.append({"of": who, "to": "gadei-ps", **told, **found})
                    line.append(f"{found['ratio']:.2f} {found['best_ratio']:.2f}")
                lines.append(line)
    header = ["optimizer", "weights", "gadei-ps us", "C us", "C alone us", "torch us"]
    header += ["C/ours", "C alone/ours", "torch/ours"]
    print(table(header, lines))
    print(write_results(options.name, rows, ratios))


if __name__ == "__main__":
    main()
