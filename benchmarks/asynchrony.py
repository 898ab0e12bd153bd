"""Result of training with the same number of gradients, by the number of learners.

One process makes all steps of a run; n learners make one n-th each, each with its own draw of
mini-batches. Contenders, with the same optimizer and rate:

    one process       torch alone
    asp               gadei-ps
    asp, plain        the same without spike compensation
    bsp               gadei-ps: an n-th of the steps, with the mean of n gradients each
    Hogwild           torch's examples/mnist_hogwild: shared weights, an optimizer in each process

`ratio`: the figure of the contender over that of one process that makes all steps; above 1 it is
worse. Figures are means of several seeds; the spread is the largest less the smallest.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import multiprocessing

from gadei_ps.benchmarks.asynchrony_tasks import TASKS, Task, data
from gadei_ps.benchmarks.common import Report
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.learners.torch import Optimizer

ALONE, ASP, PLAIN, BSP, HOGWILD = "one process", "asp", "asp, plain", "bsp", "Hogwild"
ANSWER_S = 900.0
PRELOAD = ["gadei_ps.benchmarks.asynchrony", "torch._dynamo"]


@dataclass(frozen=True)
class Part:
    """Part of one process in a run. job: of gadei-ps; else `shared` may be the model."""

    task: str
    lr: float
    seed: int
    rank: int
    steps: int
    job: str = ""
    shared: torch.nn.Module | None = None


def member(part: Part, pipe: Connection) -> None:
    """The process: joins, waits for a word, trains, and answers with what it has reached, if asked.

    Its last answer is the held-out figure.
    """
    torch.set_num_threads(1)
    task, found = TASKS[part.task], data(part.task)
    model = part.shared or found.model(part.seed)
    torch.manual_seed(1000 * part.seed + part.rank)  # of dropout; the models are the same
    said = task.optimizer | {"lr": part.lr}
    ours = Optimizer(model, part.job, **said) if part.job else None
    optimizer = ours or torch_optimizer(model, said)
    random = np.random.default_rng([part.seed, part.rank])
    _agree(pipe, ours, "ready")
    model.train()
    for _ in range(part.steps):
        optimizer.zero_grad()
        found.loss(model, random).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if ours:
        ours.client.wait_applied()
    _agree(pipe, ours, "done")
    if ours:
        ours.close()
    pipe.send(found.held_out(model))


def _agree(pipe: Connection, ours: Optimizer | None, word: str) -> None:
    """Say a word, and wait until all have said it; meanwhile nobody waits for this learner."""
    with ours.client.pause() if ours else contextlib.nullcontext():
        pipe.send(word)
        pipe.recv()


def torch_optimizer(model: torch.nn.Module, said: dict[str, Any]) -> torch.optim.Optimizer:
    """Torch's own optimizer with these settings of `Optimizer`."""
    rest = {name: value for name, value in said.items() if name != "kind"}
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "momentum": torch.optim.SGD,
    }
    return kinds[said["kind"]](model.parameters(), **rest)


def trained(kind: str, task: Task, lr: float, learners: int, steps: int, seed: int) -> float:
    """Run a contender; return the task's figure."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    job, shared, daemon = "", None, None
    if kind in (ASP, PLAIN, BSP):
        name = f"asynchrony-{os.getpid()}-{seed}"
        values: dict[str, Any] = {"name": name, "sync": "bsp" if kind == BSP else "asp"}
        values |= {"optimizer": {"spike_compensation": kind != PLAIN}, "start_with": learners}
        daemon = Daemon(from_mapping(values, "asynchrony"))
        daemon.__enter__()
        job = str(daemon.socket)
    if kind == HOGWILD:
        shared = data(task.name).model(seed)
        shared.share_memory()
    pipes, members = [], []
    try:
        for rank in range(learners):
            ours, theirs = context.Pipe()
            part = Part(task.name, lr, seed, rank, steps // learners, job, shared)
            one = context.Process(target=member, args=(part, theirs), daemon=True)
            one.start()
            pipes.append(ours)
            members.append(one)
            _answer(ours, "ready")
        for word in ("done", None):
            for pipe in pipes:
                pipe.send("continue")
            answers = [_answer(pipe, word) for pipe in pipes]
        figure: float = answers[0]
        for one in members:
            one.join()
        return figure
    finally:
        for one in members:
            one.kill()
        if daemon is not None:
            daemon.__exit__(None, None, None)


def _answer(pipe: Connection, wanted: str | None) -> Any:
    if not pipe.poll(ANSWER_S):
        raise RuntimeError("a learner does not answer; read its messages above")
    answer = pipe.recv()
    assert wanted is None or answer == wanted
    return answer


def measure(quick: bool) -> Report:
    """Train every task with every contender, number of learners, rate and seed."""
    size = sizes("asynchrony", quick)
    report = Report(["task", "rate", "contender", "learners", "steps", "figure", "spread", "ratio"])
    for name in size["tasks"]:
        task, steps = TASKS[name], size["steps"][name]
        for factor in size["rates"]:
            lr = task.optimizer["lr"] * factor
            whole = 0.0
            for learners in size["learners"]:
                kinds = [ALONE] if learners == 1 else []
                for kind in [*kinds, ASP, PLAIN, BSP, HOGWILD]:
                    if learners == 1 and kind in (PLAIN, BSP, HOGWILD):
                        continue
                    figures = [
                        trained(kind, task, lr, learners, steps, seed) for seed in size["seeds"]
                    ]
                    mean = statistics.mean(figures)
                    whole = mean if kind == ALONE else whole
                    told = {"task": name, "lr": lr, "contender": kind, "learners": learners}
                    told |= {"steps": steps, "figure": mean, "figures": figures}
                    report.rows.append(told | {"ratio": mean / whole})
                    spread = max(figures) - min(figures)
                    line = [name, f"{lr:g}", kind, str(learners), str(steps), f"{mean:.3f}"]
                    report.lines.append([*line, f"{spread:.3f}", f"{mean / whole:.3f}"])
                    print(" ".join(report.lines[-1]), flush=True)
    return report
