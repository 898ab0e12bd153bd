"""WSP's invariants under random schedules of pipelined virtual workers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.sync.wsp import WSP

SCHEDULES = 100_000
STEPS = 60


@dataclass
class _Worker:
    """A virtual worker. Mini-batches are counted from 1."""

    started: int = 0
    finished: int = 0


def violations(seed: int, steps: int) -> tuple[int, int]:
    """Runs one schedule. Returns the numbers of mini-batches checked and of broken promises."""
    chance = random.Random(seed)
    model = WSP(chance.randrange(5), chance.randrange(5))
    wave, distance = model.wave, model.D
    count = chance.randint(2, 5)
    workers = [_Worker() for _ in range(count)]
    pushed = [0] * count  # by worker: waves in the global weights
    for learner in range(count):
        model.join(learner, 0.0)
    speeds = [chance.choice((1, 1, 5, 20)) for _ in range(count)]
    checked = broken = 0
    for now in range(steps):
        (learner,) = chance.choices(range(count), speeds)
        worker = workers[learner]
        full = worker.started - worker.finished > model.s_local
        may_start = worker.started < model.mini_batches(learner) and not full
        if may_start and (worker.started == worker.finished or chance.random() < 0.6):
            worker.started = p = worker.started + 1
            checked += 1
            if p > (distance + 1) * wave + model.s_local:
                least = min(pushed[other] * wave for other in range(count) if other != learner)
                broken += least < p - (model.s_global + 1)
        elif worker.finished < worker.started:
            worker.finished += 1
            if worker.finished % wave == 0:
                model.push(learner, float(now))
                pushed[learner] += 1
        broken += max(pushed) - min(pushed) > distance + 1
    return checked, broken


def run(quick: bool = False) -> Part:
    """Runs 100,000 schedules. tests/unit/test_wsp.py searches a counterexample with hypothesis."""
    schedules = 1000 if quick else SCHEDULES
    checked = broken = 0
    for seed in range(schedules):
        found = violations(seed, STEPS)
        checked += found[0]
        broken += found[1]
    return Part(
        "WSP: the promise on the weights of a mini-batch",
        "Park et al. 2020: a mini-batch p > (D + 1)(s_local + 1) + s_local sees all updates of all "
        "other virtual workers up to p - (s_global + 1), where s_global = (D + 1)(s_local + 1) + "
        "s_local - 1. Local clocks are at most D + 1 apart. Each schedule has 2 to 5 virtual "
        "workers of very different speeds, with D and s_local from 0 to 4. Their pipelines start "
        f"and finish mini-batches in a random order of {STEPS} steps.",
        [
            Row("s_global for D = 0, s_local = 3", "6", str(WSP(0, 3).s_global)),
            Row(
                "violations",
                "0",
                str(broken),
                f"{schedules:,} schedules, {checked:,} mini-batches",
            ),
        ],
        data={"schedules": schedules, "checked": checked, "violations": broken},
    )
