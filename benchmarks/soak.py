"""`make soak`: finds out whether anything grows in a job under kills. Half an hour by default.

    python -m gadei_ps.benchmarks.soak [--for 30m] [--learners 3] [--every 3s]

The job has checkpoints and starts its own learners. In the first half, the storm, a process of any
role is killed every few seconds. This shows growth from one process to the next. In the second
half, the calm, only learners are killed, and never the oldest. This shows growth within a server, a
watchdog or a learner. A quantity has grown if its median over the last quarter of a half is above
the median over the first quarter by more than ALLOWED. In that case the exit code is 1. Writes
results/soak.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.common import Report
from gadei_ps.commands import quantities
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import GadeiError, JobFailed
from gadei_ps.job import config, faults
from gadei_ps.job.faults import Processes, Role, Target
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence
from gadei_ps.show.counts import counted
from gadei_ps.watchdog.restart import USEFUL_S, Policy

VALUES = 250_000  # of the model: 1 MB
BATCHES = 10_000  # of an epoch
PAUSE_S = 0.002  # of a learner after each gradient, because other processes need the cores
POLL_S = 0.02
SAMPLES = 60  # of a whole run, at least LEAST_S apart
LEAST_S = 1.0
SETTLED_S = 2.0  # age from which a process is measured; a younger one is still loading
MATURE_S = USEFUL_S + 1.0  # age from which a learner is hit; a job fails after early deaths
KEEP = 3  # checkpoints
WARM_UP_S = 300.0  # at most, until all processes and checkpoints exist; includes compiling
UNITS = {"rss": "bytes", "private": "bytes", "bytes": "bytes", "checkpoint bytes": "bytes"}
# Growth that is allowed: a share of the first value, plus an amount.
ALLOWED = {"bytes": (0.05, 4 << 20), "count": (0.0, 1)}
Key = tuple[str, str]
"""The process or job, and the quantity."""


def learn(job: str) -> None:
    """Run a learner, which answers batches until the job ends."""
    with Client(job) as client:
        gradient = np.full(client.model.elements, 1e-3, np.float32)
        for _ in client.batches(samples=BATCHES, batch_size=1, epochs=10**6):
            client.push(gradient, samples=1, loss=0.0)
            time.sleep(PAUSE_S)


# -- looking --------------------------------------------------------------------------------------


def look_at(pid: int) -> dict[str, int]:
    """The memory of a process in bytes, and its numbers of threads, descriptors and segments."""
    status = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        status[name] = value.split()
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "rss": int(status["VmRSS"][0]) * 1024,
        "private": int(status["RssAnon"][0]) * 1024,
        "threads": int(status["Threads"][0]),
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        # Counts also segments without a name: rings that should be unmapped by now.
        "segments mapped": maps.count("/dev/shm/gadei-ps."),
    }


@dataclass
class Half:
    """A half of the run, and its measurements in order."""

    name: str
    roles: tuple[Role, ...]
    series: defaultdict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(who, what, seen) for (who, what), seen in sorted(self.series.items())]

    def _row(self, who: str, what: str, seen: list[int]) -> dict[str, Any]:
        quarter = max(1, len(seen) // 4)
        first, last = statistics.median(seen[:quarter]), statistics.median(seen[-quarter:])
        unit = UNITS.get(what, "count")
        part, more = ALLOWED[unit]
        return {
            "contender": who,
            "quantity": what,
            "half": self.name,
            "first": first,
            "last": last,
            "max": max(seen),
            "unit": unit,
            "samples": len(seen),
            "grew": last > first * (1 + part) + more,
        }


# -- the job --------------------------------------------------------------------------------------


class Soak:
    """One job, its checkpoints in `directory`."""

    def __init__(self, daemon: Daemon, directory: Path, every_s: float, seed: int) -> None:
        self.daemon = daemon
        self.directory = directory
        self.every_s = every_s
        self.processes = Processes(daemon.config.name)
        self.chance = random.Random(seed)
        self.kills: Counter[str] = Counter()

    @property
    def version(self) -> int:
        return int(self.processes.control["version"])

    def warm_up(self) -> None:
        """Wait until all processes and checkpoints of the job exist."""
        until = time.monotonic() + WARM_UP_S
        assert self.daemon.config.learners is not None
        while time.monotonic() < until:
            self.daemon.check()
            found = self._found()
            complete = all(found.values())
            complete = complete and len(found[Role.LEARNER]) == self.daemon.config.learners.count
            if complete and len(self._checkpoints()) >= KEEP:
                return
            time.sleep(POLL_S)
        raise JobFailed("the job has not become complete; read its messages above")

    def _checkpoints(self) -> list[Path]:
        return list(self.directory.glob("checkpoint-*"))

    def go_through(self, half: Half, seconds: float, sample_s: float) -> None:
        begin = time.monotonic()
        due, look = begin + self.every_s, begin + sample_s
        while (now := time.monotonic()) < begin + seconds:
            self.daemon.check()  # starts the next watchdog
            if now >= due and self._strike(half.roles):
                due = now + self.every_s * (0.5 + self.chance.random())
            if now >= look:
                look = now + sample_s
                self._sample(half)
            time.sleep(POLL_S)

    def _found(self) -> dict[Role, list[Target]]:
        one = {
            Role.SERVER: self.processes.server(ready=True),
            Role.STANDBY: self.processes.standby(),
            Role.WATCHDOG: self.processes.watchdog(),
        }
        found = {role: [] if target is None else [target] for role, target in one.items()}
        return found | {Role.LEARNER: self.processes.learners()}

    def _strike(self, roles: tuple[Role, ...]) -> bool:
        """Kill a process of a random role. False if there is none to kill."""
        role = self.chance.choice(roles)
        found = self._found()[role]
        if role is Role.LEARNER:
            found = [one for one in found if older(one, MATURE_S)]
        if roles == (Role.LEARNER,):
            found = sorted(found, key=lambda one: one.start)[1:]
        if not found or faults.send(self.chance.choice(found), signal.SIGKILL) is None:
            return False
        self.kills[role] += 1
        return True

    def _sample(self, half: Half) -> None:
        for role, targets in self._found().items():
            seen = []
            for one in targets:
                if older(one, SETTLED_S):
                    try:
                        seen.append(look_at(one.pid))
                    except (OSError, KeyError):  # the process has just died
                        continue
            if seen:
                for what in seen[0]:
                    half.series[role, what].append(max(each[what] for each in seen))
        segments = presence.find(self.daemon.config.name)
        # A file that another process removes meanwhile does not count.
        sizes = [size for path in self.directory.rglob("*") if (size := size_of(path))]
        for what, number in {
            "processes": sum(self.daemon.config.name in line for line in command_lines()),
            "segments": len(segments),
            "bytes": sum(one.size for one in segments),
            "checkpoints": len(self._checkpoints()),
            "checkpoint bytes": sum(sizes),
        }.items():
            half.series["job", what].append(number)


def older(target: Target, seconds: float) -> bool:
    """Return whether a process is older than `seconds`."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - target.start / os.sysconf("SC_CLK_TCK") > seconds


def size_of(path: Path) -> int:
    """Return the size of a file (bytes). 0 if the path is not a file or has been removed."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def command_lines() -> list[list[str]]:
    """Command lines of all processes. Those of servers and learners contain the job's name."""
    return [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]


def job_config(name: str, directory: Path, learners: int, seconds: float) -> config.JobConfig:
    return config.from_mapping(
        {
            "name": name,
            "history": False,
            "optimizer": {"kind": "adam", "lr": 1e-3},
            "tensors": [{"name": "w", "shape": [VALUES]}],
            "checkpoint": {
                "every_s": max(2.0, min(20.0, seconds / 40)),
                "keep": KEEP,
                "directory": directory,
            },
            "learners": {
                "command": [sys.executable, "-P", str(Path(__file__).resolve()), "--learner", name],
                "count": learners,
            },
        },
        "soak",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="seconds", default="30m", metavar="TIME")
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--every", default="3s", metavar="TIME", help="mean time between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learner", metavar="JOB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        try:
            learn(options.learner)
        except GadeiError as error:
            sys.exit(f"soak, learner: {error}")
        return 0
    seconds = quantities.duration(options.seconds)
    sample_s = max(LEAST_S, seconds / SAMPLES)
    halves = [Half("storm", tuple(Role)), Half("calm", (Role.LEARNER,))]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        wanted = job_config(f"soak-{os.getpid()}", directory, options.learners, seconds)
        with Daemon(wanted) as daemon:
            daemon.policy = Policy(limit=sys.maxsize)  # it is restarted after any number of kills
            soak = Soak(daemon, directory, quantities.duration(options.every), options.seed)
            soak.warm_up()
            for half in halves:
                soak.go_through(half, seconds / len(halves), sample_s)
                kills = ", ".join(f"{soak.kills[role]} {role}" for role in Role)
                print(
                    f"{half.name}: killed {kills}; {counted(soak.version, 'gradient')}", flush=True
                )
            control = soak.processes.control
            counts = {
                "gradients": soak.version,
                "checkpoints written": int(control["checkpoints"]),
                "checkpoints failed": int(control["checkpoint_failures"]),
                **{f"{role}s killed": soak.kills[role] for role in Role},
            }
    left = presence.find(wanted.name)
    rows = [row for half in halves for row in half.rows()]
    report = Report(["what", "first", "last", "max", ""], rows=rows)
    report.lines = [
        [
            f"{row['half']}: {row['contender']}, {row['quantity']}",
            *(shown(row[name], row["unit"]) for name in ("first", "last", "max")),
            "GREW" if row["grew"] else "",
        ]
        for row in rows
    ]
    rows += [
        {"contender": "run", "quantity": what, "last": number, "unit": "count"}
        for what, number in counts.items()
    ]
    rows.append({"contender": "run", "quantity": "time", "last": seconds, "unit": "s"})
    rows.append(
        {"contender": "run", "quantity": "segments left", "last": len(left), "unit": "count"}
    )
    print(suite.shown(report))
    print(suite.write(suite.result_of("soak", report, suite.command("soak")), suite.RESULTS))
    return int(bool(left) or any(row.get("grew", False) for row in rows))


def shown(value: float, unit: str) -> str:
    return f"{value / 2**20:.1f} MiB" if unit == "bytes" else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
