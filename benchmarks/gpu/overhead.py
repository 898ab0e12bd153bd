"""Time that gadei-ps adds to a learner's forward and backward pass.

On the stream that computes, a step has two parts: from zero_grad() to backward(), and from there to
the end of optimizer.step(). The second part is the figure, measured in two ways:

- busy: before each step there is a kernel that only waits, so that the host has queued the whole
  step when it begins. This is the GPU's time in step(), unless step() itself waits for the GPU, as
  torch's SGD does for gradients of rows. Other steps that the host had not queued in time are left
  out; host_ahead is the share of those that count;
- as it trains: without that kernel. If the GPU waits for the host, this contains the host's time.

A third figure is the host's time in step(). The peer is step() of torch's SGD, on a copy of the
model; the target is 30 µs of the GPU's time.

Rows with a part have the time of a part of the step with one sample, on the host or the GPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gadei_ps.benchmarks import nlc_member
from gadei_ps.benchmarks.common import Report, summary
from gadei_ps.benchmarks.gpu import networks, step_profile, texts
from gadei_ps.benchmarks.gpu.target import HeadStart, Target, job, noted
from gadei_ps.benchmarks.nlc_texts import Texts
from gadei_ps.learners.torch import Optimizer
from gadei_ps.learners.torch.gpu_backend import GpuBackend

OURS, TORCH = "gadei-ps", "torch SGD"
REACH_S = 30e-6
SPINS = 3  # of the host's time of a step, that the waiting kernel takes
LEAST_SPIN_S = 2e-3
PROFILE_S = 4.0  # of one network
INPUTS = 16  # mini-batches, which lie on the device
BUSY, TRAINING, HOST = "stream, busy", "stream, as it trains", "host"


class Taken(NamedTuple):
    """A step.

    compute, step: times of the stream before step() and in it; host: of the host in step() (s).
    pulled: whether newer weights arrived in it, which it then copies to the network's. ahead:
    whether the host had queued all of it before the stream began it.
    """

    compute: float
    step: float
    host: float
    pulled: bool
    ahead: bool


Inputs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Mini-batches with their labels."""

Step = Callable[[int], torch.Tensor]
"""The loss of a mini-batch, given by its number."""


class Network(NamedTuple):
    """A network to measure."""

    name: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int], Inputs]
    """Makes the inputs for this size of mini-batch."""


def measure(target: Target) -> Iterator[Report]:
    """Measure each network with a job of its own."""
    size = target.sizes("overhead")
    report = Report(["network", "MB", "of", "gadei-ps us", "torch SGD us", "target met"])
    sentences = texts.first(target)
    report.notes.append(f"sentences of {sentences.name}")
    taken = 0.0  # by the network before
    measured = []
    for network in _networks(target, size, sentences):
        if target.left() < taken:
            report.notes.append(f"{network.name}: not measured: no time")
            continue
        begin = time.monotonic()
        with noted(report, network.name):
            yield from _of(report, target, network)
            measured.append(network)
        taken = time.monotonic() - begin
    for network in measured if target.on_gpu else []:
        if target.left() > PROFILE_S:
            with noted(report, f"{network.name}, profile"):  # CUPTI may be missing
                _kernels(report, target, network)
            yield report


def _of(report: Report, target: Target, of: Network) -> Iterator[Report]:
    """Measure one network."""
    size = target.sizes("overhead")
    network = of.make().to(target.torch_device)
    facts = {"network": of.name, "bytes": _bytes(network)}
    step, single = (_on(of.inputs(batch)) for batch in (size["mini_batch"], 1))
    twin = copy.deepcopy(network)
    for layer in twin.modules():
        if isinstance(layer, torch.nn.RNNBase):
            layer.flatten_parameters()  # a copy has pieces, which cuDNN joins in every call
    plain = torch.optim.SGD(twin.parameters(), 1e-6)
    found = {TORCH: _parts(target, twin, plain, step, size)}
    with job("overhead") as running:
        optimizer = Optimizer(network, running)
        found[OURS] = _parts(target, network, optimizer, step, size)
        _tell(report, facts, found)
        yield report
        for who, one, trained in ((OURS, optimizer, network), (TORCH, plain, twin)):
            rows = step_profile.on_host(target, one, trained, single(trained), size["profiled"])
            _profiled(report, {"contender": who, **facts}, rows)
        optimizer.close()
    yield report


def _kernels(report: Report, target: Target, of: Network) -> None:
    """Report the GPU's parts of a step."""
    steps, single = target.sizes("overhead")["profiled"], _on(of.inputs(1))
    network, twin = (of.make().to(target.torch_device) for _ in range(2))
    facts = {"network": of.name, "bytes": _bytes(network)}
    with job("overhead") as running:
        optimizer = Optimizer(network, running)
        rows = step_profile.on_gpu(target, optimizer, single(network), steps)
        _profiled(report, {"contender": OURS, **facts}, rows)
        optimizer.close()
    plain = torch.optim.SGD(twin.parameters(), 1e-6)
    rows = step_profile.on_gpu(target, plain, single(twin), steps)
    _profiled(report, {"contender": TORCH, **facts}, rows)


def _bytes(network: torch.nn.Module) -> int:
    return 4 * sum(one.numel() for one in network.parameters())


def _profiled(report: Report, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Report the parts of a step with one sample."""
    report.rows += [{**facts, "mini_batch": 1, **row} for row in rows]
    step_profile.show(f"{facts['contender']}, {facts['network']}, mini-batch 1", rows)


def _networks(target: Target, size: dict[str, Any], sentences: Texts) -> list[Network]:
    device = torch.device(target.torch_device)
    sizes = size["mlp"]
    hidden = target.sizes("learners")["hidden"]
    kind = nlc_member.OURS

    def numbers(batch: int) -> Inputs:
        return [
            (
                torch.from_numpy(sentences.encoded.batch(rows)).to(device),
                torch.from_numpy(sentences.labels[rows]).to(device),
            )
            for rows in (sentences.rows(number, batch) for number in range(INPUTS))
        ]

    def vectors(batch: int) -> Inputs:
        labels = [torch.randint(sizes[-1], (batch,)).to(device) for _ in range(INPUTS)]
        return [(torch.randn(batch, sizes[0], device=device), one) for one in labels]

    return [
        Network("sentence classifier", lambda: nlc_member.fresh(kind, sentences), numbers),
        Network("perceptron", lambda: networks.mlp(sizes), vectors),
        Network("LSTM", lambda: networks.lstm(kind, sentences, hidden), numbers),
    ]


def _on(inputs: Inputs) -> Callable[[torch.nn.Module], Step]:
    return lambda network: lambda number: networks.loss_of(network, *inputs[number % len(inputs)])


def _parts(
    target: Target,
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[torch.nn.Module], Step],
    size: dict[str, Any],
) -> dict[str, list[Taken]]:
    """Take steps for each way of measuring."""
    loss_of, count = step(network), size["steps"]
    _run(target, loss_of, optimizer, max(2, count // 10), 0.0)
    begin = time.perf_counter()
    training = _run(target, loss_of, optimizer, count, 0.0)
    spin = max(LEAST_SPIN_S, SPINS * (time.perf_counter() - begin) / count)
    return {BUSY: _run(target, loss_of, optimizer, count, spin), TRAINING: training, HOST: training}


def _run(
    target: Target, loss_of: Step, optimizer: torch.optim.Optimizer, count: int, spin_s: float
) -> list[Taken]:
    """Take `count` steps."""
    marks: list[tuple[Any, Any, Any]] = []
    others: list[tuple[float, bool, bool]] = []
    backend = optimizer.backend if isinstance(optimizer, Optimizer) else None
    shared = backend if isinstance(backend, GpuBackend) else None
    head_start = HeadStart(target)
    for number in range(count):
        if spin_s:
            head_start.begin(spin_s)
        first = target.mark()
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()  # type: ignore[no-untyped-call]
        middle = target.mark()
        version = -1 if shared is None else shared.version
        begin = time.perf_counter()
        if isinstance(optimizer, Optimizer):
            optimizer.report(loss=loss, samples=1)
        optimizer.step()
        host = time.perf_counter() - begin
        marks.append((first, middle, target.mark()))
        ahead = bool(spin_s) and head_start.suffices()
        others.append((host, shared is not None and shared.version != version, ahead))
    target.wait()
    return [
        Taken(target.seconds(first, middle), target.seconds(middle, last), *more)
        for (first, middle, last), more in zip(marks, others, strict=True)
    ]


def _tell(
    report: Report, network: dict[str, Any], found: dict[str, dict[str, list[Taken]]]
) -> None:
    """Report one network. network: its name and bytes."""
    for of in (BUSY, TRAINING, HOST):
        facts = {**network, "of": of}
        medians, least = {}, {}
        for who, ways in found.items():
            steps, more = ways[of], {}
            if of == BUSY:
                ahead = [one for one in steps if one.ahead]
                more["host_ahead"] = len(ahead) / len(steps)
                if who == OURS and not ahead:
                    report.notes.append(f"{network['network']}: the host was never ahead")
                steps = ahead or steps
            times = [one.host if of == HOST else one.step for one in steps]
            row = {"contender": who, **facts, **summary(times, "s"), **more}
            if of != HOST:
                row["forward_backward_s"] = statistics.median(one.compute for one in steps)
                if pulls := [one.step for one in steps if one.pulled]:
                    row["pulls"] = len(pulls)
                    row["median_with_pull"] = statistics.median(pulls)
            report.rows.append(row)
            # The goal is for steps with a pull: they take longer.
            medians[who], least[who] = row.get("median_with_pull", row["median"]), min(times)
        # Steps of the two are not pairs: one contender's all come before the other's.
        peer = {"contender": TORCH, **facts, "ratio": medians[TORCH] / medians[OURS]}
        best = least[TORCH] / least[OURS]
        report.ratios.append(peer | {"best_ratio": best, "reach": None, "reached": None})
        reached = medians[OURS] < REACH_S if of == BUSY else None
        if of == BUSY:
            limit = {"contender": "30 µs", **facts, "ratio": REACH_S / medians[OURS]}
            best = REACH_S / least[OURS]
            report.ratios.append(limit | {"best_ratio": best, "reach": 1.0, "reached": reached})
        cells = [f"{medians[who] * 1e6:.1f}" for who in (OURS, TORCH)]
        shown = "" if reached is None else "yes" if reached else "no"
        size = f"{network['bytes'] / 1e6:.1f}"
        report.lines.append([network["network"], size, of, *cells, shown])
