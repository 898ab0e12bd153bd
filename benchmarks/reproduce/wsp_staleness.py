"""Updates in the weights of a mini-batch under WSP, read from the weights of real runs.

    python -m gadei_ps.benchmarks.reproduce.wsp_staleness JOB NUMBER

is one virtual worker of such a run. It adds 1 to a value of its own in every mini-batch, so the
weights say how many mini-batches of each worker they hold. Its pipeline begins and ends
mini-batches in a random order, and it computes nothing: a mini-batch is a sleep.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.peers import answer, orders
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import PushTimeout
from gadei_ps.job.config import from_mapping
from gadei_ps.learners.client import Client
from gadei_ps.learners.waves import Waves
from gadei_ps.sync.wsp import WSP

MODELS = tuple((D, s_local) for D in (0, 1, 4) for s_local in (0, 3))
MEANS_S = (0.0005, 0.001, 0.004)
SECONDS = 1.0
QUICK_S = 0.3
POLL_S = 0.05


def run(quick: bool = False) -> Part:
    """Run every model, and one model against the bound of another."""
    seconds = QUICK_S if quick else SECONDS
    rows: list[Row] = []
    data: dict[str, Any] = {"seconds": seconds, "runs": []}
    for D, s_local in MODELS:
        model = WSP(D, s_local)
        most, checked, broken = _missed(model, model, seconds)
        data["runs"].append({"model": str(model), "most": most, "checked": checked})
        why = f"{broken} of {checked:,} mini-batches miss more"
        rows.append(Row(f"{model}: misses at most", str(model.s_global), str(most), why))
    wrong, right = WSP(1, 3), WSP(0, 3)
    most, checked, broken = _missed(wrong, right, seconds)
    data["off_by_one"] = {"most": most, "checked": checked, "broken": broken}
    why = f"{broken} of {checked:,} mini-batches miss more"
    row = Row(f"{wrong}, held against {right}", f"above {right.s_global}", str(most), why)
    return Part(
        "WSP: the promise on the weights of a mini-batch",
        "Park et al. 2020: a mini-batch p > (D + 1)(s_local + 1) + s_local sees all updates of all "
        "other virtual workers up to p - (s_global + 1), where s_global = (D + 1)(s_local + 1) + "
        "s_local - 1. So it misses at most s_global of the p - 1 before it. Three processes run a "
        f"pipeline for {seconds:g} s, one of them eight times slower than the first. The model's "
        "weights count the mini-batches of each, and every mini-batch reads them. The last row "
        "shows that a grant which comes one wave too early is noticed.",
        [*rows, row],
        data=data,
    )


def _missed(model: WSP, bound: WSP, seconds: float) -> tuple[int, int, int]:
    """The most that a mini-batch has missed; how many were looked at; how many missed too much.

    Mini-batches count from the first for which `bound` promises anything.
    """
    job = f"wsp-{os.getpid()}"
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = {f"GADEI_PS_{name}_DIR": str(scratch / name) for name in ("STATE", "RUNTIME")}
        stack.enter_context(mock.patch.dict(os.environ, there))
        asked = {
            "name": job,
            "history": False,
            "sync": str(model),
            "optimizer": {"kind": "add"},
            "tensors": [{"name": "count", "shape": [len(MEANS_S)]}],
            "standby": False,
        }
        stack.enter_context(Daemon(from_mapping(asked, job), silent=True))
        line = ["-m", "gadei_ps.benchmarks.reproduce.wsp_staleness", job]
        gang = stack.enter_context(Gang([[*line, str(n)] for n in range(len(MEANS_S))]))
        gang.ask({"attach": True})
        told = gang.ask({"until": time.monotonic() + seconds})
    first = (bound.D + 1) * bound.wave + bound.s_local
    missed = np.concatenate([one["missed"][first:] for one in told])
    return int(missed.max()), len(missed), int((missed > bound.s_global).sum())


def main() -> None:
    """Run a virtual worker; answers with what each of its mini-batches has missed."""
    job, number = sys.argv[1], int(sys.argv[2])
    chance = np.random.default_rng([7, number])
    for order in orders():
        if "attach" in order:
            client = Client(job)
            waves = Waves(client)
            waves.begin()  # so that all are members before any of them pushes
            missed = [0]
            answer({})
            continue
        while time.monotonic() < order["until"]:
            full = waves.in_flight == client.wave
            if not full and (not waves.in_flight or chance.random() < 0.6):
                try:
                    waves.begin(timeout_s=0.0 if waves.in_flight else POLL_S)
                except PushTimeout:
                    full = waves.in_flight > 0
                else:
                    others = np.delete(waves.weights["count"], number)
                    missed.append(len(missed) - int(others.min()))
                    continue
            if full or waves.in_flight:
                time.sleep(chance.exponential(MEANS_S[number]))
                waves.weights["count"][number] += 1
                waves.end()
        answer({"missed": missed})


if __name__ == "__main__":
    main()
