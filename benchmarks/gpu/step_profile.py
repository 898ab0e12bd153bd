"""Profile of a learner's steps: the host's time by parts of step(), the GPU's by kernels.

The parts on the host are methods that are replaced while a with-block lasts. The time of each is
without that of the parts inside it, so that the parts add up to the whole step. Each costs about
half a microsecond more.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.learners.torch import Optimizer

ON_HOST, ON_GPU, CALLS = "host, profiled", "GPU, profiled", "CUDA calls, profiled"
REST = "everything else"
MOST = 12
"""Kernels and calls that are reported, those that take most."""
NAME = 70
"""Characters of a kernel's name."""
KINDS = {
    "kernel": ON_GPU,
    "gpu_memcpy": ON_GPU,
    "gpu_memset": ON_GPU,
    "cuda_runtime": CALLS,
    "cuda_driver": CALLS,
}
"""Categories of a trace."""

Row = dict[str, Any]


class StepParts:
    """Measures the parts of the steps that are taken in its with-block."""

    def __init__(self, optimizer: torch.optim.Optimizer, network: torch.nn.Module) -> None:
        self._optimizer, self._network = optimizer, network
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._inside = [0.0]  # seconds in parts of the current one, and of those around it
        self._undo = ExitStack()
        self._begin = self._whole = 0.0

    def __enter__(self) -> Self:
        """Replace the methods."""
        for owner, name, part in self._places():
            self._replace(owner, name, part)
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        """Put the methods back."""
        self._whole = time.perf_counter() - self._begin
        self._undo.close()

    def _places(self) -> list[tuple[Any, str, str]]:
        """Return objects, their methods, and what to call these."""
        optimizer = self._optimizer
        found = [
            (self._network, "forward", "forward"),
            (torch.Tensor, "backward", "backward"),
            (optimizer, "zero_grad", "zero_grad()"),
            (optimizer, "step", "step(), the rest"),
        ]
        if not isinstance(optimizer, Optimizer):
            return found
        backend, client = optimizer.backend, optimizer.client
        link = getattr(backend, "_link", None)
        found += [
            (optimizer, "report", "report()"),
            (getattr(optimizer, "_job", None), "follow", "settings of the groups"),
            (backend, "written", "look for written parameters"),
            (backend, "_addresses", "addresses of the gradients"),
            (backend, "push", "push, the rest"),
            (backend, "refresh", "pull, the rest"),
            (client, "check_facts", "check of the facts"),
            (client, "publish_landed", "copies of the push, publish"),
            (link, "push_from", "push of the link, the rest"),
            (link, "_stage", "launch of stage, with the copy"),
            (link, "flush", "wait for the push before"),
            (link, "gather", "launch of gather"),
            (link, "pulled", "look for pulled weights"),
            (link, "refresh", "refresh of the link, the rest"),
            (link, "pull", "begin of a pull"),
        ]
        return [one for one in found if hasattr(one[0], one[1])]

    def _replace(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                taken = time.perf_counter() - begin
                self._seconds[part] += taken - self._inside.pop()
                self._calls[part] += 1
                self._inside[-1] += taken

        if isinstance(owner, type):
            self._undo.callback(setattr, owner, name, function)
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, timed)

    def rows(self, steps: int) -> list[Row]:
        """Return seconds and calls of each part in a step, in the order of their time."""
        seconds = {**self._seconds, REST: self._whole - self._inside[0]}
        return [
            {"of": ON_HOST, "part": part, "mean": value / steps, "unit": "s"}
            | {"calls": self._calls.get(part, steps) / steps}
            for part, value in sorted(seconds.items(), key=lambda one: -one[1])
        ]


def train(
    optimizer: torch.optim.Optimizer, loss_of: Callable[[int], torch.Tensor], steps: int
) -> None:
    """Take steps of gadei-ps or of torch. loss_of: the loss of a mini-batch, by its number."""
    for number in range(steps):
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(optimizer, Optimizer):
            optimizer.report(loss=loss, samples=1)
        optimizer.step()


def on_host(
    target: Target,
    optimizer: torch.optim.Optimizer,
    network: torch.nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
) -> list[Row]:
    """Measure the host's parts of some steps."""
    train(optimizer, loss_of, max(2, steps // 10))
    target.wait()
    with StepParts(optimizer, network) as parts:
        train(optimizer, loss_of, steps)
    return parts.rows(steps)


def on_gpu(
    target: Target,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
) -> list[Row]:
    """Measure kernels, copies and CUDA's calls of some steps.

    The profiler may slow later launches of the process down: measure other things before.
    """
    for count in (max(2, steps // 10), steps):  # the first one takes a while to begin
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            train(optimizer, loss_of, count)
            target.wait()
    return of_trace(trace(profiler), steps)


def trace(profiler: profile) -> list[dict[str, Any]]:
    """Return the events of a profile, in the form that browsers show."""
    with tempfile.TemporaryDirectory(prefix="gadei-ps-trace-") as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def of_trace(events: Iterable[Mapping[str, Any]], steps: int) -> list[Row]:
    """Return seconds and calls of a step, of the kernels, copies and calls that take most."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in events:
        if one.get("ph") == "X" and (kind := KINDS.get(one.get("cat", ""))):
            found[kind, one["name"][:NAME]].append(float(one["dur"]) / 1e6)
    rows: list[Row] = []
    for kind in (ON_GPU, CALLS):
        names = {name: values for (of, name), values in found.items() if of == kind}
        most = sorted(names, key=lambda name: -sum(names[name]))
        rows += [
            {"of": kind, "part": name, "mean": sum(names[name]) / steps, "unit": "s"}
            | {"calls": len(names[name]) / steps}
            for name in most[:MOST]
        ]
        if rest := [value for name in most[MOST:] for value in names[name]]:
            rows.append(
                {"of": kind, "part": REST, "mean": sum(rest) / steps, "unit": "s"}
                | {"calls": len(rest) / steps}
            )
    return rows


def show(title: str, rows: Iterable[Row]) -> None:
    """Print rows, one line for each kind."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        kinds[row["of"]].append(f"{row['part']} {1e6 * row['mean']:.1f} ({row['calls']:g})")
    for kind, parts in kinds.items():
        print(f"{title}, {kind}, us of a step (calls): {'; '.join(parts)}", flush=True)
