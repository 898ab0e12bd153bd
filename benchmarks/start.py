"""Times until a daemon is ready, until a learner is attached, and until a push is applied.

Ready: from the start of `gadei-ps serve` to the first answer of its socket, with warm caches.
Attach: Client(...) in a process that has imported it. Round trip: a 4 KB push until it is applied,
seen from the learner, with the job's default for spinning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import running
from gadei_ps.learners.client import Client
from gadei_ps.machine import process


def start(job_file: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Starts a daemon as a child. Returns it and the seconds until it answered."""
    begin = time.perf_counter()
    child = subprocess.Popen(
        process.module_command("gadei_ps", "serve", str(job_file)), stderr=subprocess.DEVNULL
    )
    while not running(job_file.stem):
        if child.poll() is not None:
            raise SystemExit("the daemon has ended; run gadei-ps serve yourself to see why")
        time.sleep(0.001)
    return child, time.perf_counter() - begin


def measure(quick: bool) -> Report:
    """Measure rounds. Each round starts its own daemon."""
    rounds = sizes("start", quick)["rounds"]
    seconds: dict[str, list[float]] = {"daemon ready": [], "attach": [], "4 KB push applied": []}
    with tempfile.TemporaryDirectory() as scratch:
        job_file = Path(scratch) / f"start-{os.getpid()}.toml"
        job_file.write_text('[[tensors]]\nname = "w"\nshape = [1000]\n')
        for number in range(rounds + 1):
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
            if number:  # the first round warms the caches
                seconds["daemon ready"].append(ready_s)
                seconds["attach"].append(attach_s)
                seconds["4 KB push applied"].append(sorted(pushes)[len(pushes) // 2])
    reach = {"daemon ready": 2.0, "attach": 0.05, "4 KB push applied": None}
    report = Report(["what", "median ms", "best ms"])
    for name, taken in seconds.items():
        figures = summary(taken)
        report.rows.append({"contender": name, **figures, "reach_s": reach[name]})
        report.lines.append(
            [name, f"{figures['median'] * 1e3:.3f}", f"{figures['best'] * 1e3:.3f}"]
        )
    return report
