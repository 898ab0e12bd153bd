"""Choice of the settings of `bench worker_groups`, by accuracy on held-out training rows.

    python -m gadei_ps.benchmarks.worker_groups_choice TASK [--seeds 0,1] [--samples N] SETTINGS...

SETTINGS are one:LR for one machine, or GROUPSxMACHINES,EVERY,LR,RULE, such as 2x2,20,2e-3,mix:0.5.

One process trains all machines in turn, without processes, waits and a network: a round takes no
time, and models of other groups are one round old. torch's Adam steps, and SparseAdam for rows, as
the job's does. So each run takes the time of its arithmetic. Printed are the accuracies of machine
0 at the shares of the training at which the benchmark takes them, and the mean of the late ones.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

from gadei_ps.benchmarks import worker_groups_tasks as tasks
from gadei_ps.benchmarks.worker_groups import EARLY, LATE
from gadei_ps.benchmarks.worker_groups_tasks import Examples
from gadei_ps.groups import reading
from gadei_ps.groups.parts import Floats
from gadei_ps.groups.rules import Rule


class Machine:
    """A model, its optimizers, and its order of mini-batches."""

    def __init__(self, name: str, found: Examples, lr: float, seed: int, number: int) -> None:
        self._model = tasks.model(name, found, seed, plain=True).train()
        self._found = found
        self._random = np.random.default_rng([seed, number])
        named = dict(self._model.named_parameters())
        rows = [named.pop("embedding")] if "embedding" in named else []
        kind = torch.optim.Adam if tasks.TASKS[name].optimizer == "adam" else torch.optim.Adagrad
        of_rows = torch.optim.SparseAdam if kind is torch.optim.Adam else kind
        self._optimizers: list[torch.optim.Optimizer] = [kind(named.values(), lr=lr)]
        if rows:
            self._optimizers.append(of_rows(rows, lr=lr))

    def step(self) -> None:
        """One mini-batch."""
        for one in self._optimizers:
            one.zero_grad()
        self._found.loss(self._model, self._random).backward()  # type: ignore[no-untyped-call]
        for one in self._optimizers:
            one.step()

    def weights(self) -> Floats:
        """A copy."""
        flat = nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy()
        return np.array(flat, np.float32)

    def take(self, weights: Floats) -> None:
        """Continue with these weights."""
        nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), self._model.parameters())

    def accuracy(self) -> float:
        """Return the accuracy (%)."""
        return 100 - self._found.held_out(self._model)


def trained(
    name: str, found: Examples, settings: str, seed: int, samples: int, shares: tuple[float, ...]
) -> list[float]:
    """The accuracies at these shares of the training, in percent; of groups, after a round."""
    torch.manual_seed(seed)  # of dropout
    if settings.startswith("one:"):
        groups, each, every, lr, text = 1, 1, 0, settings.partition(":")[2], ""
    else:
        counts, every_, lr, text = settings.split(",", 3)
        groups, each = map(int, counts.split("x"))
        every = int(every_)
    machines = [Machine(name, found, float(lr), seed, number) for number in range(groups * each)]
    judge = Machine(name, found, 1.0, seed, 0)  # takes no steps
    rules = [reading.parse(text) for _ in range(groups if every else 0)]
    for rule in rules:
        rule.begin(machines[0].weights())
    steps = samples // tasks.TASKS[name].batch // len(machines)
    sent: list[Floats] = []
    common = machines[0].weights()
    accuracies: list[float] = []
    for step in range(1, steps + 1):
        for one in machines:
            one.step()
        if every and step % every == 0:
            sent = exchanged(machines, rules, sent)
            common = machines[0].weights()
        while len(accuracies) < len(shares) and step >= shares[len(accuracies)] * steps:
            judge.take(common if every else machines[0].weights())
            accuracies.append(judge.accuracy())
    return accuracies


def exchanged(machines: list[Machine], rules: list[Rule], sent: list[Floats]) -> list[Floats]:
    """End a round of all groups; return what each of them sends. sent: in the round before."""
    each, now = len(machines) // len(rules), list[Floats]()
    for number, rule in enumerate(rules):
        mine = machines[number * each : (number + 1) * each]
        whole = mine[0].weights()
        for one in mine[1:]:
            whole += one.weights()
        whole /= np.float32(each)
        own = whole.copy()
        rule.end_round(whole, [model for other, model in enumerate(sent) if other != number])
        now.append(whole.copy() if rule.sends_result else own)
        for one in mine:
            one.take(whole)
    return now


def main() -> None:
    """Print a line for each of the settings and seeds, then the mean of the seeds."""
    parser = argparse.ArgumentParser(description="Accuracy by settings of worker groups.")
    parser.add_argument("task", choices=tasks.TASKS)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int)
    parser.add_argument("settings", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = Examples(options.task, choosing=True)
    samples = options.samples or tasks.TASKS[options.task].samples
    for settings in options.settings:
        means, begin = [], time.monotonic()
        for seed in map(int, options.seeds.split(",")):
            shares = trained(options.task, found, settings, seed, samples, EARLY + LATE)
            means.append(statistics.mean(shares[len(EARLY) :]))
            shown = " ".join(f"{one:.1f}" for one in shares)
            print(f"{settings}  seed {seed}: {shown}; late {means[-1]:.2f}%", flush=True)
        taken = time.monotonic() - begin
        print(f"{settings}: {statistics.mean(means):.2f}%, {taken:.0f} s", flush=True)


if __name__ == "__main__":
    main()
