"""The memory of a job: its processes, its shared segments, and their growth over time.

The first part trains the sentence classifier on mr with gadei-ps, with one and with two learners,
with Hogwild and with DistributedDataParallel. Each process is started on its own. For each process
it records the resident memory, in which shared pages count in full, and the proportional share, in
which they count in parts. The shares add up to the memory of the contender. One row is what a job
takes besides learners and segments: the watchdog, the servers, and what starts them. The second
part pushes dense gradients to a job. It compares the sizes of the segments with the model, and
looks whether the server's private memory grows.

ratio: memory of the contender over memory of gadei-ps, with the same number of learners. In the
second part, `of` and `to` name both sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil

from gadei_ps.benchmarks import nlc_texts
from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.nlc_member import OURS
from gadei_ps.benchmarks.nlc_team import Team, started
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.job.control import Status
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.memory import presence, shm

SAMPLES = 10
BESIDES = "watchdog and servers, without segments"
REACH = 120_000_000
"""Bytes of these, at most. Peers without a server have none."""
GROWTH = 1.05
"""The most growth of the server's private memory, from the first to the last tenth of gradients."""
MB = 1e6
SEGMENTS = str(shm.SHM / "gadei-ps.")


def measure(quick: bool) -> Report:
    """Measure the processes, then the server over time."""
    size = sizes("memory", quick)
    found, notes = nlc_texts.read(["mr"])
    report = Report(["contender", "learners", "of", "MB", "resident MB"], notes=notes)
    name, data = next(iter(found.items()))
    texts = nlc_texts.whole(name, data)
    shares = {}
    for kind, learners in size["contenders"]:
        # One after the other, so that contenders do not share pages of libraries.
        team = Team(kind, learners, texts, method="spawn")
        with started([team]):
            team.train(1, size["run_s"], 0.1)
            shares[kind, learners] = _processes(report, team)
    for (kind, learners), share in shares.items():
        if kind != OURS:
            for of, taken in share.items():
                ratio = taken / shares[OURS, learners][of]
                told = {"contender": kind, "learners": learners, "of": of}
                report.ratios.append(told | {"ratio": ratio, "best_ratio": ratio})
    _over_time(report, size["megabytes"] * 250_000, size["gradients"])
    return report


def _add(
    report: Report, contender: str, learners: int, of: str, taken: float, **more: int | None
) -> None:
    """Add a row and a line. taken: bytes."""
    told = {"contender": contender, "learners": learners, "of": of}
    report.rows.append(told | summary([taken], "bytes") | more)
    resident = more.get("resident_bytes")
    shown = "" if resident is None else f"{resident / MB:.1f}"
    report.lines.append([contender, str(learners), of, f"{taken / MB:.2f}", shown])


def _processes(report: Report, team: Team) -> dict[str, float]:
    """Add a row for each process and segment. Return the sum, and the mean of the learners."""
    processes = {f"learner {i + 1}": psutil.Process(pid) for i, pid in enumerate(team.pids)}
    own: dict[str, psutil.Process] = {}
    parts: dict[str, int] = {}
    for daemon in team.daemons:
        own |= _own(daemon)
        parts |= sizes_of(daemon.config.name)
    processes |= own
    shares = {}
    mapped, besides = 0.0, 0.0
    for of, process in processes.items():
        memory = process.memory_full_info()
        maps = process.memory_maps(grouped=False)
        segments = sum(one.pss for one in maps if one.path.startswith(SEGMENTS))
        mapped += segments
        if of in own:
            besides += memory.pss - segments
        shares[of] = float(memory.pss)
        more = {"resident_bytes": memory.rss, "private_bytes": memory.uss}
        _add(report, team.kind, team.count, of, memory.pss, **more)
    # A segment's memory counts in full, because it is reserved before it is touched.
    whole = sum(shares.values()) - mapped + sum(parts.values())
    _add(report, team.kind, team.count, "all together", whole)
    _add(report, team.kind, team.count, BESIDES, besides, reach_bytes=REACH)
    for part, size in parts.items():
        _add(report, team.kind, team.count, f"segment {part}", size)
    learner = sum(share for of, share in shares.items() if of.startswith("learner")) / team.count
    return {"all together": whole, "a learner": learner}


def _own(daemon: Daemon) -> dict[str, psutil.Process]:
    """Return the processes of a job that are not learners."""
    watchdog = psutil.Process(daemon.request(Status())["watchdog_pid"])
    control = Processes(daemon.config.name).control
    names = {int(pid): f"server {number}" for number, pid in enumerate(control["server"]["pid"], 1)}
    names[int(control["fork_server_pid"])] = "fork-server"
    others = ((names.get(one.pid, "history"), one) for one in watchdog.children(recursive=True))
    return {"watchdog": watchdog} | dict(sorted(others, key=lambda other: other[0]))


def sizes_of(job: str) -> dict[str, int]:
    """Return the bytes of each of a job's segments."""
    return {found.part: found.size for found in presence.find(job)}


def _over_time(report: Report, values: int, gradients: int) -> None:
    """Push dense gradients of this number of float32 values."""
    name = f"memory-{os.getpid()}"
    config = from_mapping(
        {"name": name, "history": False, "optimizer": {"kind": "adam"}, "slots": 2}, "memory"
    )
    tensors = {"w": np.zeros(values, np.float32)}
    gradient = {"w": np.full(values, 1e-3, np.float32)}
    private: dict[int, int] = {}
    with Daemon(config) as daemon, Client(name, tensors=tensors) as client:
        parts = sizes_of(name)
        for sample in range(1, SAMPLES + 1):
            for _ in range(gradients // SAMPLES):
                client.push(gradient)
            client.wait_applied()
            private[sample * (gradients // SAMPLES)] = daemon.request(Status())[
                "server_private_bytes"
            ]
    _tell_segments(report, parts, 4 * values)
    for pushed, taken in private.items():
        what = f"server, private, after {pushed} gradients"
        _add(report, "dense pushes", 1, what, taken, gradients=pushed)
    first, *_, last = private.values()
    told = {"contender": "dense pushes", "of": "private memory, last", "to": "first"}
    growth = last / first
    reach = {"reach": GROWTH, "reached": growth <= GROWTH}
    report.ratios.append(told | {"ratio": growth, "best_ratio": growth} | reach)


def _tell_segments(report: Report, parts: Mapping[str, int], model: int) -> None:
    """Compare the segments with the least possible: weights, two slots of Adam, a ring of 2."""
    least: dict[str, Any] = {"weights": model, "state": 2 * model, "ring.0": 2 * model}
    for part, size in parts.items():
        _add(report, "dense pushes", 1, f"segment {part}", size, limit_bytes=least.get(part))
    for part, limit in least.items():
        told = {"contender": "dense pushes", "of": f"segment {part}", "to": "least"}
        ratio = parts[part] / limit
        report.ratios.append(told | {"ratio": ratio, "best_ratio": ratio})
