"""Virtual workers: the pipeline without flush beside torch's pipelines, and what its threads cost.

- *stretched*: stages that wait besides computing, so that a few cores are enough for many stages.
  Once the pipeline is full, at most 1 / slowest stage mini-batches end a second. Beside it,
  torch.distributed.pipelining, one process for each stage: a mini-batch of m micro-batches leaves
  the pipeline empty after each update, so of k equal stages each is idle for (k - 1) / (m + k
  - 1) of the time. A micro-batch has as many samples as a mini-batch here. Its gradients are of the
  current weights; here they are of those s_local mini-batches before.
- *stages*: stages of real layers (gadei_ps.benchmarks.virtual_stages).
- *bytes*: what a learner pushes for each mini-batch, by the headers of its frames.
- *planned*: predicted times and memory of stages (gadei_ps.benchmarks.virtual_plan).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks import virtual_plan, virtual_stages
from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.benchmarks.virtual_jobs import Jobs
from gadei_ps.benchmarks.virtual_shape import Shape
from gadei_ps.job.control import Status

PACKAGE = "gadei_ps.benchmarks"
OURS, LIMIT = "gadei-ps", "1 / slowest stage"
SCHEDULES = "GPipe", "1F1B"
REACH = 0.95
"""Target as a share of the limit."""
START_S = 120.0  # several processes load torch at once
MEMBER = ["-m", f"{PACKAGE}.virtual_member"]


def measure(quick: bool) -> Report:
    """Measure all parts."""
    size = sizes("virtual", quick)
    report = Report(["measured", "contender", "figure", "beside"])
    report.notes.append("stretched: stages wait besides computing, so that they need no cores")
    if not size["micro_batches"]:
        report.notes.append("torch.distributed.pipelining is left out: it takes long to start")
    with Gang([MEMBER] * 2, start_s=START_S) as members, Jobs() as jobs:
        for waits in size["waits"]:
            _stretched(report, members, jobs, waits, size)
        virtual_stages.measure(report, members, size, jobs)
        _bytes(report, members, jobs, size["s_local"])
        virtual_plan.measure(report, members, size, jobs)
    return report


def _stretched(
    report: Report,
    members: Gang,
    jobs: Jobs,
    waits: Sequence[Sequence[float]],
    size: Mapping[str, Any],
) -> None:
    """One pipeline, with some numbers of mini-batches in flight."""
    stages = len(waits)
    shape = Shape(stages, waits=waits)
    total = [sum(one) for one in waits]
    limit = 1 / max(total)
    count = size["mini_batches"]
    facts = {"series": "stretched", "stages_s": total, "limit": limit}
    what = f"{stages} stages of {_milliseconds(total)}"
    contenders: dict[str, Callable[[], float]] = {}
    told: dict[str, dict[str, Any]] = {}

    def ours(job: str) -> Callable[[], float]:
        order = {"shape": shape.told(), "pipeline": job, "mini_batches": count}
        return lambda: _rate(members.ask(order, first=1)[0])

    def theirs(ranks: Gang, schedule: str, micro_batches: int) -> Callable[[], float]:
        times = max(1, -(-count // micro_batches))
        order = {"shape": shape.told(), "schedule": schedule, "micro_batches": micro_batches}
        return lambda: times * micro_batches / ranks.seconds({**order, "times": times})

    peers: Gang | None = None
    with ExitStack() as stack:
        for in_flight in (stages * times for times in size["in_flight"]):
            name = f"{OURS}, {in_flight} in flight"
            contenders[name] = ours(jobs.job(in_flight - 1, shape))
            told[name] = {"contender": OURS, "in_flight": in_flight}
        for times in size["micro_batches"]:
            peers = peers or stack.enter_context(_ranks(stages))
            for schedule in SCHEDULES:
                name = f"{schedule}, {(micro_batches := times * stages)} micro-batches"
                contenders[name] = theirs(peers, schedule, micro_batches)
                bubble = 1 - micro_batches / (micro_batches - 1 + sum(total) * limit)
                more = {"micro_batches": micro_batches, "bubble_in_theory": bubble}
                told[name] = {"contender": f"torch {schedule}", **more}
        figures = alternate(contenders, size["rounds"])
    for name, rates in figures.items():
        row = {**told[name], **facts, **summary(rates, "1/s", larger=True)}
        row["bubble"] = bubble = 1 - row["median"] / limit
        report.rows.append(row)
        beside = f"{1 - bubble:.3f} of the limit"
        if "bubble_in_theory" in row:
            beside += f"; bubble {bubble:.1%}, {row['bubble_in_theory']:.1%} in theory"
        report.lines.append([what, name, f"{row['median']:.2f}/s ±{row['spread']:.0%}", beside])
    best = f"{OURS}, {stages * max(size['in_flight'])} in flight"
    share = ratios_of(figures[best], [limit] * len(figures[best]), larger=True)
    reached = {"reach": REACH, "reached": share["ratio"] >= REACH}
    report.ratios.append({"contender": LIMIT, **facts, **share, **reached})
    for name in figures:
        if "micro_batches" in told[name]:
            ratio = ratios_of(figures[best], figures[name], larger=True)
            report.ratios.append({**told[name], **facts, **ratio})


@contextmanager
def _ranks(stages: int) -> Iterator[Gang]:
    """The processes of torch's pipeline."""
    with tempfile.TemporaryDirectory(prefix="gadei-ps-") as scratch:
        meet = [str(stages), str(Path(scratch) / "meet")]
        ranks = [["-m", f"{PACKAGE}.peers_pipelining", str(rank), *meet] for rank in range(stages)]
        with Gang(ranks, env={"GLOO_SOCKET_IFNAME": "lo"}, start_s=START_S) as gang:
            yield gang


def _milliseconds(seconds: Sequence[float]) -> str:
    each = [f"{1e3 * one:g}" for one in seconds]
    return f"{each[0] if len(set(each)) == 1 else ', '.join(each)} ms"


def _rate(told: Mapping[str, Any]) -> float:
    rate: float = told["mini_batches"] / told["seconds"]
    return rate


def _bytes(report: Report, members: Gang, jobs: Jobs, s_locals: Sequence[int]) -> None:
    """Measure the bytes of a plain learner, and of virtual workers."""
    shape = Shape(2)
    alone = 0.0
    for s_local in (None, *s_locals):
        job = jobs.job(s_local, shape)
        way = {"plain": job, "threads": 1} if s_local is None else {"pipeline": job}
        order = {"shape": shape.told(), "mini_batches": 64, **way}
        told = members.ask(order, first=1)[0]
        status = jobs.daemon(s_local, shape).request(Status())
        each = told["bytes"] / told["mini_batches"]
        alone = alone or each
        wanted = 1 if s_local is None else 1 / (s_local + 1)
        row: dict[str, Any] = {
            "contender": "plain learner" if s_local is None else OURS,
            "series": "bytes",
            "s_local": s_local,
            "median": each,
            "unit": "bytes",
            "of_the_plain_learner": each / alone,
            "model_bytes": status["model"]["bytes"],
            **{name: told[name] for name in ("mini_batches", "frames", "bytes")},
        }
        report.rows.append(row)
        if s_local is not None:
            ratio = {"ratio": alone / each, "reach": s_local + 1}
            reached = each / alone == wanted
            fact = {"series": "bytes", "s_local": s_local, "reached": reached}
            report.ratios.append({"contender": "plain learner", **fact, **ratio})
        name = row["contender"] if s_local is None else f"{OURS}, s_local={s_local}"
        beside = f"{each / alone:g} of the plain learner's"
        report.lines.append(["bytes a mini-batch", name, f"{each:,.0f}", beside])
