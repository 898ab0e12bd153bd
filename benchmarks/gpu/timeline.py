"""Whether push and pull overlap with the computation (paper, Figure 4): a learner's trace.

Torch's profiler records some steps of one learner. Its events make three lanes: what the computing
stream does, copies from the device (push), and copies to it on another stream (pull). The figure is
the share of the transfers' time in which the GPU also computes, without those that begin after the
last step; docs/plots shows the lanes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.gpu import networks
from gadei_ps.benchmarks.gpu.step_profile import trace
from gadei_ps.benchmarks.gpu.target import Target, job, noted
from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

WARM_UP = 5
NARROW = 8
COMPUTE, PUSH, PULL = "compute", "push", "pull"
LANES = (COMPUTE, PUSH, PULL)
SMALL_BYTES = 65536
"""A smaller copy has no gradient or weights: it is a loss, or what travels beside a gradient."""

GAP_US = 5.0
"""A shorter pause between two kernels is not drawn."""

Span = tuple[float, float]
"""Begin and end, microseconds."""


def lanes(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Return the spans of each lane, sorted by begin. events: of a trace file ("traceEvents").

    The stream with the most kernels is the one that computes; copies on it (a mini-batch, weights
    that are copied on the device) belong to the computation.
    """
    done = [one for one in events if one.get("ph") == "X"]
    kernels = [one for one in done if one.get("cat") == "kernel"]
    streams = Counter(one["args"]["stream"] for one in kernels)
    compute = streams.most_common(1)[0][0] if streams else None
    found: dict[str, list[Span]] = {name: [] for name in LANES}
    for one in done:
        if one.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = float(one["ts"]), float(one["ts"]) + float(one["dur"])
        if one["args"]["stream"] == compute:
            found[COMPUTE].append(span)
        elif one["cat"] == "gpu_memcpy" and one["args"].get("bytes", SMALL_BYTES) >= SMALL_BYTES:
            if "DtoH" in one["name"]:
                found[PUSH].append(span)
            elif "HtoD" in one["name"]:
                found[PULL].append(span)
    return {name: sorted(spans) for name, spans in found.items()}


def union(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The same time in as few spans as possible, sorted by begin. gap: shorter ones are closed."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def overlap(transfers: Sequence[Span], compute: Sequence[Span]) -> float | None:
    """The share, 0 to 1, of the transfers' time with computation; None without transfers."""
    busy = union(compute)
    whole = sum(end - begin for begin, end in transfers)
    if not whole:
        return None
    shared = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in transfers
        for other_begin, other_end in busy
    )
    return shared / whole


def measure(target: Target) -> Iterator[Report]:
    """Measure each network with a job of its own."""
    size = target.sizes("timeline")
    report = Report(["network", "mini-batch", "of", "transfers", "overlap"])
    taken = 0.0  # by the network before
    for name, mini_batch in size["models"]:
        if target.left() < taken:
            report.notes.append(f"{name}: not measured: no time")
            continue
        begin = time.monotonic()
        with noted(report, name):
            network, inputs, labels = _network(target, name, mini_batch, size)
            with job("timeline") as running:
                found = lanes(_trace(target, running, network, inputs, labels, size["steps"]))
            _tell(report, name, mini_batch, found)
        yield report
        taken = time.monotonic() - begin
    if not any(row["transfers"] for row in report.rows):
        report.notes.append("no transfers: the host needs none")
    yield report


def _network(
    target: Target, name: str, mini_batch: int, size: dict[str, Any]
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network and one mini-batch, on the device."""
    torch.manual_seed(0)
    if name == "vgg":
        small = target.quick or not target.on_gpu
        network = networks.vgg(narrow=NARROW if small else 1)
        inputs, classes = torch.randn(mini_batch, 3, 32, 32), 10
    else:
        network = networks.mlp(size["mlp"])
        inputs, classes = torch.randn(mini_batch, size["mlp"][0]), size["mlp"][-1]
    labels = torch.randint(classes, (mini_batch,))
    device = target.torch_device
    return network.to(device), inputs.to(device), labels.to(device)


def _trace(
    target: Target,
    running: str,
    network: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    steps: int,
) -> list[dict[str, Any]]:
    """Take so many steps of a learner; return the profiler's events."""
    optimizer = Optimizer(network, running)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = networks.loss_of(network, inputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.report(loss=loss, samples=len(labels))
            optimizer.step()
        optimizer.client.wait_applied(timeout_s=60.0)
        target.wait()

    activity = ProfilerActivity.CUDA if target.on_gpu else ProfilerActivity.CPU
    train(WARM_UP)
    with profile(activities=[activity]):  # the first one takes a while to begin
        train(1)
    with profile(activities=[activity]) as profiler:
        train(steps)
    optimizer.close()
    events = trace(profiler)
    if target.on_gpu and not any(one.get("cat") == "kernel" for one in events):
        raise UsageError("torch's profiler has recorded no kernel: CUPTI may be missing")
    return events


def _tell(report: Report, name: str, mini_batch: int, found: dict[str, list[Span]]) -> None:
    """Report a row for each lane, with what a plot needs."""
    known = {"contender": "gadei-ps", "network": name, "mini_batch": mini_batch}
    begin = min((span[0] for spans in found.values() for span in spans), default=0.0)
    compute = union(found[COMPUTE])
    end = compute[-1][1] if compute else begin
    drawn = {
        lane: [[round(a - begin, 1), round(b - begin, 1)] for a, b in union(spans, GAP_US)]
        for lane, spans in found.items()
    }
    busy = sum(b - a for a, b in compute) / (end - compute[0][0]) if compute else None
    report.rows.append(
        {**known, "of": COMPUTE, "transfers": 0, "overlap": None, "busy": busy}
        | summary([(b - a) / 1e6 for a, b in compute] or [0.0])
        | {"lanes_us": drawn}
    )
    for way, spans in ((PUSH, found[PUSH]), (PULL, found[PULL])):
        share = overlap([one for one in spans if one[0] < end], compute)
        row = {**known, "of": way, "transfers": len(spans), "overlap": share}
        report.rows.append(row | summary([(b - a) / 1e6 for a, b in spans] or [0.0]))
        shown = "-" if share is None else f"{share:.0%}"
        report.lines.append([name, str(mini_batch), way, str(len(spans)), shown])
