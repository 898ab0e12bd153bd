"""The time of a prediction in the parameter server, on one core."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np

from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.machine import process
from gadei_ps.sync.order_statistics import NormalPredictor, SampledPredictor
from gadei_ps.sync.prediction import Predictor
from gadei_ps.sync.run_time_file import Sizes
from gadei_ps.sync.run_time_model import RunTimeModel

LEARNERS = (10, 158, 2175)
REACH_MS = {158: 5.0, 2175: 50.0}
DROPPED = 0.2
"""Share of learners that are censored in each superstep. Their run times are imputed."""
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}


def run(quick: bool = False) -> Part:
    """Measure in another process, whose linear algebra has one thread."""
    command = process.module_command(__spec__.name, *["--quick"] * quick)
    done = subprocess.run(
        command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    rows = []
    for name, costs in found.items():
        for learners, milliseconds in costs.items():
            reach = REACH_MS.get(int(learners)) if name == "learned" else None
            rows.append(
                Row(
                    f"{name}, {int(learners):,} learners",
                    f"at most {reach:g} ms" if reach else "",
                    f"{milliseconds:.2f} ms",
                )
            )
    return Part(
        title="Cutoff SGD: cost of a prediction",
        text=f"""\
Milliseconds that prediction takes in a superstep. The predictor takes in the observed run times,
imputes {DROPPED:.0%} of them, and predicts the next superstep. Median of {_rounds(quick)}, on one
thread. The learned model has untrained weights of the same sizes as a trained model, which cost the
same.
""",
        rows=rows,
        data={"milliseconds": found},
    )


def _rounds(quick: bool) -> int:
    return 10 if quick else 200


def _learned(learners: int) -> RunTimeModel:
    from gadei_ps.run_times.fitting import HIDDEN, LAG, LATENT, RECURRENT

    sizes = Sizes(learners, LAG, LATENT, RECURRENT, HIDDEN)
    generator = np.random.default_rng(0)
    weights = {
        name: generator.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in sizes.shapes().items()
    }
    return RunTimeModel(sizes, weights)


MAKE: dict[str, Callable[[int], Predictor]] = {
    "learned": _learned,
    "order": lambda learners: NormalPredictor(),
    "sampled": lambda learners: SampledPredictor(),
}


def _measure(predictor: Predictor, learners: int, rounds: int) -> float:
    """The median time in milliseconds."""
    generator = np.random.default_rng(1)
    slots = np.arange(learners)
    nobody = np.zeros(learners, np.bool_)
    for _ in range(20):
        predictor.observe(generator.normal(1.0, 0.1, learners), nobody)
    found = []
    for _ in range(rounds):
        row = generator.normal(1.0, 0.1, learners)
        bound = np.quantile(row, 1 - DROPPED)
        row, dropped = np.minimum(row, bound), row > bound
        begin = time.perf_counter()
        predictor.observe(row, dropped)
        predictor.expected(slots)
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints milliseconds as JSON.")
    parser.add_argument("--quick", action="store_true")
    rounds = _rounds(parser.parse_args().quick)
    print(
        json.dumps(
            {
                name: {n: _measure(make(n), n, rounds) for n in LEARNERS}
                for name, make in MAKE.items()
            }
        )
    )


if __name__ == "__main__":
    main()
