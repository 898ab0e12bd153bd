"""Cost of watching a job, to a learner with mini-batches of one sample (watching_learner.py).

One job is measured alone and watched, in turn. Watched: `gadei-ps metrics` is scraped every second,
`--tensorboard` writes curves, and a client has the job's page of `gadei-ps dashboard` open and
takes its updates. While the job is measured alone, these processes are stopped (SIGSTOP).

ratio: gradients a second while watched over those alone; its spread is half the distance between
the quartiles of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.machines import place, until
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.errors import GadeiError
from gadei_ps.job.faults import Processes
from gadei_ps.machine import process
from gadei_ps.memory.totals import total

ALONE, WATCHED = "alone", "watched"
CURVES = "gadei_ps.monitoring.curves"
SCRAPE_S = 1.0
END_S = 30.0
REACH = 0.98


def _start(stack: ExitStack, said: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of gadei-ps, which ends with the stack. said: file of its output."""
    stream = stack.enter_context(said.open("wb"))
    child = process.spawn(
        process.module_command("gadei_ps", *words), stdout=stream, stderr=stream, how=signal.SIGTERM
    )

    def end() -> None:
        child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    stack.callback(end)
    return child


def _link(said: Path) -> str:
    """Wait for the link that a command prints."""
    found: list[str] = []

    def printed() -> bool:
        found[:] = re.findall(r"http://\S+", said.read_text())
        return bool(found)

    until(printed, f"the link in {said.name}", said.read_text)
    return found[0]


class Watchers:
    """The processes that watch, and a thread that is their client. Stopped, unless let run."""

    def __init__(self, stack: ExitStack, directory: Path, job: str) -> None:
        """Return once each of them has shown the job. Raises Failed."""
        said = {name: directory / f"{name}.said" for name in ("metrics", "dashboard")}
        children = [
            _start(stack, said["metrics"], "metrics", "--listen", "127.0.0.1:0"),
            _start(stack, said["dashboard"], "dashboard", "--no-token", "--listen", "127.0.0.1:0"),
        ]
        self._metrics, page = _link(said["metrics"]), _link(said["dashboard"])
        self._stream = f"{page}job/{job}/stream"
        self.scrapes, self.updates = 0, 0
        self._running, self._over = threading.Event(), threading.Event()
        stack.callback(self._end)
        for client in (self._scrape, self._take):
            threading.Thread(target=client, daemon=True).start()
        self._running.set()
        until(lambda: self.scrapes and self.updates, "a scrape and an update of the page")
        until(lambda: self._writers(), "the process that writes the curves")
        self._processes = [psutil.Process(one.pid) for one in children] + self._writers()
        self._signal(signal.SIGSTOP)

    def rate(self, measured: Callable[[], float]) -> float:
        """Return what is measured while the watchers run."""
        self._signal(signal.SIGCONT)
        try:
            return measured()
        finally:
            self._signal(signal.SIGSTOP)

    def _writers(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += [one] if CURVES in one.cmdline() else []
        return found

    def _signal(self, number: signal.Signals) -> None:
        (self._running.set if number == signal.SIGCONT else self._running.clear)()
        for one in self._processes:
            one.send_signal(number)

    def _scrape(self) -> None:
        while not self._over.is_set():
            self._running.wait()
            with contextlib.suppress(OSError), urllib.request.urlopen(self._metrics) as answer:
                self.scrapes += bool(answer.read())
            time.sleep(SCRAPE_S)

    def _take(self) -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(self._stream) as answer:
            for line in answer:
                self.updates += line.startswith(b"data:")

    def _end(self) -> None:
        self._over.set()
        self._running.set()
        for one in self._processes:
            with contextlib.suppress(psutil.Error):
                one.send_signal(signal.SIGCONT)


class Job:
    """A run of one learner that writes curves for TensorBoard."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        """Return once gradients are applied. Raises Failed."""
        self.name = f"watching-{os.getpid()}"
        said = directory / "run.said"
        words = [sys.executable, "-P", "-m", "gadei_ps.benchmarks.watching_learner"]
        options = ["--lr", "0.001", "--tensorboard", str(directory / "curves")]
        _start(stack, said, "run", *options, self.name, "--", *words)
        self._control: Any = None
        until(self._trains, "the first gradients", said.read_text)

    def _trains(self) -> bool:
        with contextlib.suppress(GadeiError, OSError):
            self._control = Processes(self.name).control
        return self._control is not None and total(self._control, "applied") > 0

    def rate(self, seconds: float) -> float:
        """Return the gradients a second."""
        first, begin = total(self._control, "applied"), time.monotonic()
        time.sleep(seconds)
        return (total(self._control, "applied") - first) / (time.monotonic() - begin)


def measure(quick: bool) -> Report:
    """Measure a job alone and watched, in turn."""
    size = sizes("watching", quick)
    report = Report(["learner, mini-batch 1", "gradients/s", "ratio"])
    with place() as directory, ExitStack() as stack:
        job = Job(stack, directory)
        watchers = Watchers(stack, directory, job.name)
        rates = alternate(
            {
                ALONE: lambda: job.rate(size["call_s"]),
                WATCHED: lambda: watchers.rate(lambda: job.rate(size["call_s"])),
            },
            size["rounds"],
        )
        seen = watchers.scrapes, watchers.updates
    ratio = ratios_of(rates[WATCHED], rates[ALONE], larger=True)
    of_rounds = [b / a for a, b in zip(rates[ALONE], rates[WATCHED], strict=True)]
    ratio["spread"] = summary(of_rounds)["spread"]
    for what in (ALONE, WATCHED):
        row = {"contender": "gadei-ps", "what": what}
        row |= summary(rates[what], "1/s", larger=True)
        report.rows.append(row)
        shown = f"{ratio['ratio']:.3f} ±{ratio['spread']:.1%}" if what == WATCHED else ""
        report.lines.append([what, f"{row['median']:.0f} ±{row['spread']:.0%}", shown])
    report.ratios.append(
        {"contender": ALONE, **ratio, "reach": REACH, "reached": ratio["ratio"] >= REACH}
    )
    report.notes.append(f"{seen[0]} scrapes, {seen[1]} updates of the page")
    return report
