"""Compares the simulator with real runs of a server whose learners sleep.

    python -m gadei_ps.benchmarks.reproduce.validation JOB NUMBER

is one learner of such a run. It computes nothing: an iteration is a sleep, drawn from a fixed seed,
and a push. An iteration lasts from its grant to the end of its push. The simulator gets these times
as its trace.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.learners.client import Client
from gadei_ps.simulate import compare
from gadei_ps.simulate.outcome import Outcome
from gadei_ps.simulate.run_times import RecordedTimes
from gadei_ps.simulate.setting import Setting

MODELS = ("asp", "ssp:1", "bsp")
TEAMS = (2, 3, 4)
MEANS_S = (0.012, 0.018, 0.024, 0.036)
STD = 0.25
VALUES = 1000
SECONDS = 3.0
ROUNDS = 3  # the median counts, because other programs disturb a machine
QUICK_S = 0.5
BOUND = 0.10

Trace = list[list[float]]
"""Run times of iterations by learner (s)."""


def run(quick: bool = False) -> Part:
    """Compare every model with every team."""
    seconds = QUICK_S if quick else SECONDS
    rounds = 1 if quick else ROUNDS
    rows: list[Row] = []
    data: dict[str, Any] = {"seconds": seconds, "runs": []}
    worst = 0.0
    for learners in TEAMS:
        free: Trace = []
        for model in MODELS:
            found = [
                _compared(model, trace, waits, free or trace, seconds)
                for trace, waits in _real(model, learners, seconds, rounds)
            ]
            found.sort(key=lambda one: float(one["difference"]))
            one = found[len(found) // 2]
            free = free or one["run_times_s"]
            for other in found:
                if other is not one:
                    del other["run_times_s"]
            worst = max(worst, abs(one["difference"]))
            rows.append(_row(model, learners, one))
            data["runs"].append({"model": model, "learners": learners, "rounds": found})
    data["worst"] = worst
    return Part(
        "The simulator against real runs",
        f"A real job has 2 to 4 learner processes of unequal speed. An iteration is a sleep, with "
        f"a mean of {MEANS_S[0] * 1e3:.0f} to {MEANS_S[-1] * 1e3:.0f} ms, and a push. A run lasts "
        f"{seconds:g} s; the middle one of {rounds} runs counts. The simulator gets the measured "
        f"run times and must find the throughput. Waiting is the share of the learners' time, real "
        f"and simulated. The last figure is the simulator's prediction for a model from run times "
        f"that were measured under asp, as before the choice of a model. A real superstep takes "
        f"longer by its way through the server, which is not simulated here; `--server-time` would "
        f"add it.",
        rows,
        data=data,
    )


def _compared(
    model: str, trace: Trace, waits: float, free: Trace, seconds: float
) -> dict[str, Any]:
    """A real run, its simulation, and a simulation with the run times under asp."""
    real = sum(map(len, trace)) / seconds
    own, foretold = (_simulated(model, given, seconds) for given in (trace, free))
    return {
        "real_gradients_per_s": real,
        "simulated_gradients_per_s": own.throughput,
        "difference": own.throughput / real - 1,
        "foretold_difference": foretold.throughput / real - 1,
        "real_waiting_share": waits / len(trace) / seconds,
        "simulated_waiting_share": own.waiting_share,
        "simulated_staleness_mean": own.staleness.mean,
        "run_times_s": [[round(one, 6) for one in column] for column in trace],
    }


def _row(model: str, learners: int, one: dict[str, Any]) -> Row:
    real, simulated = one["real_gradients_per_s"], one["simulated_gradients_per_s"]
    waits = one["real_waiting_share"], one["simulated_waiting_share"]
    why = f"waiting {waits[0]:.1%} and {waits[1]:.1%}; "
    why += f"from the run times under asp {one['foretold_difference']:+.1%}"
    if model == "bsp":
        longer_s = learners / real - learners / simulated
        why += f"; a real superstep takes {longer_s * 1e3:.1f} ms longer"
    told = f"{real:.1f} real, {simulated:.1f} simulated gradients/s ({one['difference']:+.1%})"
    return Row(f"{model}, {learners} learners", f"within {BOUND:.0%}", told, why)


def _simulated(model: str, trace: Trace, seconds: float) -> Outcome:
    """Simulate a run. Learners with fewer iterations use their run times again."""
    most = max(map(len, trace))
    times = np.stack([np.resize(np.array(one), most) for one in trace], axis=1)
    setting = Setting(len(trace), RecordedTimes(times), seconds=seconds)
    return compare.run(compare.model(model, len(trace)), setting)


def _real(model: str, learners: int, seconds: float, rounds: int) -> Iterator[tuple[Trace, float]]:
    """Yield for each round the run times by learner, and the time that all learners waited (s)."""
    job = f"validation-{os.getpid()}"
    tensors = [{"name": "w", "shape": [VALUES]}]
    optimizer = {"kind": "sgd", "lr": 1e-3}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = {f"GADEI_PS_{name}_DIR": str(scratch / name) for name in ("STATE", "RUNTIME")}
        stack.enter_context(mock.patch.dict(os.environ, there))
        asked = {
            "name": job,
            "history": False,
            "sync": model,
            "tensors": tensors,
            "optimizer": optimizer,
        }
        stack.enter_context(Daemon(from_mapping(asked | {"standby": False}, job), silent=True))
        line = ["-m", "gadei_ps.benchmarks.reproduce.validation", job]
        gang = stack.enter_context(Gang([[*line, str(number)] for number in range(learners)]))
        for number in range(rounds):
            gang.ask({"attach": number})
            told = gang.ask({"at": time.monotonic() + 0.1, "seconds": seconds})
            yield [one["took"] for one in told], sum(one["waited"] for one in told)


def main() -> None:
    """Run a learner, which pushes from a given moment on for a given time."""
    job, number = sys.argv[1], int(sys.argv[2])
    gradient = np.ones(VALUES, np.float32)
    for order in orders():
        if "attach" in order:
            chance = np.random.default_rng([7, number, order["attach"]])
            client = Client(job)
            client.wait_turn()  # so that it is a member before any learner pushes
            answer({})
            continue
        begin = order["at"]
        end = begin + order["seconds"]
        took: list[float] = []
        waited = 0.0
        time.sleep(max(0.0, begin - time.monotonic()))
        before = begin
        while True:
            client.wait_turn()
            started = time.monotonic()
            waited += min(started, end) - min(before, end)
            mean = MEANS_S[number]
            time.sleep(max(mean / 4, chance.normal(mean, STD * mean)))
            client.push({"w": gradient})
            before = time.monotonic()
            if before > end:
                break
            took.append(before - started)
        client.detach()
        answer({"took": took, "waited": waited})


if __name__ == "__main__":
    main()
