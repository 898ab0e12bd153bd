"""Accuracy and speed of `gadei-ps train` with one learner, two, kills, and 16-bit gradients.

    python -m gadei_ps.benchmarks.accuracy [--data DIR] [--sets trec6 mr] [--seeds 5]
        [--kill-every 1] [--model ensemble] [--cases CASE ...] [--out DIR]

DIR contains trec6/{train,test}.csv and mr/all.csv. A tenth of mr becomes its test file. Writes
accuracy.json into the directory of --out (results/) after each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.classifier import SHARED, files
from gadei_ps.benchmarks.common import Report, table
from gadei_ps.benchmarks.tables import Table
from gadei_ps.errors import GadeiError
from gadei_ps.job.control import Status, ask
from gadei_ps.machine import process

Row = dict[str, Any]
KEPT = (
    *("test_accuracy", "validation_accuracy", "calibration_error", "epochs", "samples_per_s"),
    *("gradients_applied", "gradients_dropped", "training_seconds", "seconds", "learner_deaths"),
    "kills",
)
"""Fields of the summary of `gadei-ps train` that are written."""


class Killer:
    """Kills a random learner of a job at a fixed interval."""

    def __init__(self, job: str, every_s: float) -> None:
        self.kills = 0
        self._job, self._every_s = job, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        if self._every_s:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._every_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                learners = ask(self._job, Status())["learners"]
            except GadeiError:
                continue
            if learners:
                os.kill(random.choice(learners)["pid"], signal.SIGKILL)
                self.kills += 1


def train(
    train_file: Path,
    test_file: Path,
    learners: int,
    kill_every_s: float,
    seed: int,
    out: Path,
    more: Sequence[str],
    model: str,
) -> dict[str, Any]:
    """Run the command once. Returns its summary and the number of kills."""
    job = f"accuracy-{os.getpid()}"
    command = process.module_command("gadei_ps", "train", str(train_file), "--json")
    command += ["--test", str(test_file), "--learners", str(learners), "--seed", str(seed)]
    command += ["--out", str(out), "--overwrite", "--job", job, "--model", model, *more]
    with Killer(job, kill_every_s) as killer:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"kills": killer.kills}


def lines_of(rows: list[Row]) -> list[list[str]]:
    """Summarize the runs: a line for each set and case, with means and standard errors."""
    lines = []
    for name, case in dict.fromkeys((row["set"], row["contender"]) for row in rows):
        own = [row for row in rows if (row["set"], row["contender"]) == (name, case)]
        cells = [name, case]
        for figures in (
            [100 * row["test_accuracy"] for row in own],
            [row["samples_per_s"] for row in own],
        ):
            error = statistics.stdev(figures) / len(own) ** 0.5 if len(own) > 1 else math.nan
            digits = 2 if figures[0] <= 100 else 0
            cells.append(f"{statistics.mean(figures):,.{digits}f} ± {error:,.{digits}f}")
        lines.append([*cells, str(sum(row["kills"] for row in own)), str(len(own))])
    return lines


HEADER = ("set", "case", "accuracy, %", "samples/s", "kills", "seeds")


def _markdown(result: Row) -> list[str]:
    cells = [HEADER, ["---"] * len(HEADER), *lines_of(result["rows"])]
    return [f"| {' | '.join(line)} |" for line in cells]


TABLE = Table("accuracy", "performance.md", _markdown)


def cases(kill_every_s: float) -> dict[str, tuple[int, float, list[str]]]:
    """Return the learners, the seconds between kills and the options of each case."""
    feedback = ["--wire", "float16", "--error-feedback"]
    return {
        "1 learner": (1, 0.0, []),
        "2 learners": (2, 0.0, []),
        f"2 learners, one killed every {kill_every_s:g} s": (2, kill_every_s, []),
        "2 learners, bfloat16": (2, 0.0, ["--wire", "bfloat16"]),
        "2 learners, float16": (2, 0.0, ["--wire", "float16"]),
        "2 learners, float16, error feedback": (2, 0.0, feedback),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--sets", nargs="+", default=["trec6", "mr"])
    parser.add_argument("--kill-every", type=float, default=1.0, help="s; a training takes 3")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", help="run only these cases")
    parser.add_argument("--model", default="ensemble", choices=["cnn", "ensemble"])
    parser.add_argument("--out", type=Path, default=suite.RESULTS)
    options = parser.parse_args()
    suite.prepare(options.out)
    rows: list[Row] = []
    chosen = cases(options.kill_every)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        for name, seed, case in itertools.product(
            options.sets, range(options.seeds), options.cases or chosen
        ):
            pair = files(options.data, name, 1, Path(scratch))
            learners, kill_every_s, more = chosen[case]
            found = train(*pair, learners, kill_every_s, seed, model, more, options.model)
            kept = {key: found[key] for key in KEPT}
            rows.append({"contender": case, "set": name, "seed": seed} | kept)
            print(json.dumps(rows[-1]), flush=True)
            report = Report([], rows=rows, ratios=[])
            path = suite.write(
                suite.result_of("accuracy", report, suite.command("accuracy")), options.out
            )
    print(table(HEADER, lines_of(rows)))
    print(path)


if __name__ == "__main__":
    main()
