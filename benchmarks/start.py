"""Times until a job trains: its start, until a learner is attached, until a push is applied.

First gradient: from the start of `gadei-ps run` with one learner until its first gradient is in the
weights. The peer is the same program with Hogwild, which has no server. Empty cache: the same, on
an installation that has never started, which compiles the kernels; Python's own cached code is
there. Ready: from the start of `gadei-ps serve` to the first answer of its socket. Attach:
Client(...) in a process that has imported it. Round trip: a 4 KB push until it is applied, seen
from the learner, with the job's default for spinning.

ratio: Hogwild's time over that of gadei-ps, with the same framework.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import running
from gadei_ps.learners.client import Client
from gadei_ps.machine import process

NUMPY, TORCH, HOGWILD = "gadei-ps run, NumPy", "gadei-ps run, PyTorch", "Hogwild"
EMPTY = "gadei-ps run, empty cache"
REACH = {NUMPY: 0.8, EMPTY: 8.0, "daemon ready": 2.0, "attach": 0.05}


def first_gradient(command: Sequence[str], **env: str) -> float:
    """Return the time (s) from the start of a program of start_learner until its first gradient."""
    told = {name: one for name, one in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch) / "note"
        begin = time.monotonic()
        done = subprocess.run([*command, str(note)], env=told | env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        return float(note.read_text()) - begin


def of_run(kind: str, **env: str) -> float:
    learner = process.module_command("gadei_ps.benchmarks.start_learner", kind)
    job = f"start-{os.getpid()}"
    run = process.module_command("gadei_ps", "run", job, "--learners", "1", "--", *learner)
    return first_gradient(run, **env)


def of_hogwild() -> float:
    return first_gradient(process.module_command("gadei_ps.benchmarks.start_learner", "hogwild"))


def of_empty() -> float:
    with tempfile.TemporaryDirectory() as cache:
        return of_run("numpy", NUMBA_CACHE_DIR=cache)


def start(job_file: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start a watchdog as a child. Returns it and the seconds until it answered."""
    begin = time.perf_counter()
    child = subprocess.Popen(
        process.module_command("gadei_ps", "serve", str(job_file)), stderr=subprocess.DEVNULL
    )
    while not running(job_file.stem):
        if child.poll() is not None:
            raise SystemExit("the watchdog has ended; run gadei-ps serve yourself to see why")
        time.sleep(0.001)
    return child, time.perf_counter() - begin


def of_a_daemon(rounds: int) -> dict[str, list[float]]:
    """Return the times (s) until a watchdog is ready, a learner attached, a push applied."""
    seconds: dict[str, list[float]] = {"daemon ready": [], "attach": [], "4 KB push applied": []}
    with tempfile.TemporaryDirectory() as scratch:
        job_file = Path(scratch) / f"start-{os.getpid()}.toml"
        job_file.write_text('[[tensors]]\nname = "w"\nshape = [1000]\n')
        for number in range(0 if rounds > 1 else 1, rounds + 1):
            child, ready_s = start(job_file)
            try:
                begin = time.perf_counter()
                client = Client(job_file.stem)
                attach_s = time.perf_counter() - begin
                gradient = {"w": np.ones(1000, np.float32)}
                pushes = []
                for _ in range(200):
                    begin = time.perf_counter()
                    client.push(gradient)
                    client.wait_applied()
                    pushes.append(time.perf_counter() - begin)
                client.detach()
            finally:
                child.send_signal(signal.SIGTERM)
                child.wait()
            if number:  # one before the first warms the caches, unless there is but one
                seconds["daemon ready"].append(ready_s)
                seconds["attach"].append(attach_s)
                seconds["4 KB push applied"].append(sorted(pushes)[len(pushes) // 2])
    return seconds


def measure(quick: bool) -> Report:
    """Measure first gradients in turns, then those with an empty cache, then watchdogs."""
    size = sizes("start", quick)
    report = Report(["what", "median ms", "best ms"])
    contenders: dict[str, Callable[[], float]] = {NUMPY: lambda: of_run("numpy")}
    if importlib.util.find_spec("torch") is None:
        report.notes.append("PyTorch is not installed: its learner and Hogwild are left out")
    else:
        contenders |= {TORCH: lambda: of_run("torch"), HOGWILD: of_hogwild}
    seconds = alternate(contenders, size["rounds"])
    if HOGWILD in seconds:
        ratio = ratios_of(seconds[TORCH], seconds[HOGWILD])
        report.ratios.append({"contender": HOGWILD} | ratio)
    if size["empty"]:
        seconds[EMPTY] = [of_empty() for _ in range(size["empty"])]
    seconds |= of_a_daemon(size["rounds"])
    for name, taken in seconds.items():
        figures = summary(taken)
        report.rows.append({"contender": name, **figures, "reach_s": REACH.get(name)})
        report.lines.append(
            [name, f"{figures['median'] * 1e3:.3f}", f"{figures['best'] * 1e3:.3f}"]
        )
    return report
