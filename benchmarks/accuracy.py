"""Accuracy of `gadei-ps train` on real data: one learner, two, and two with kills.

    python -m gadei_ps.benchmarks.accuracy [--data DIR] [--sets trec6 mr] [--kill-every 10]
        [--model ensemble] [--out DIR]

DIR contains trec6/{train,test}.csv and mr/all.csv. A tenth of mr becomes its test file. Writes
accuracy.json into the directory of --out (results/), which has figures of the CNN. Takes minutes to
hours, because it uses the defaults of the model.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.common import Report, table
from gadei_ps.classifier import dataset, hold_out
from gadei_ps.errors import GadeiError
from gadei_ps.job.control import Status, ask
from gadei_ps.machine import process

SHARED = Path(__file__).parents[2] / "shared" / "data"
KIM = {"trec6": 0.912, "mr": 0.761}  # Kim (2014), CNN-rand
REACH = {"trec6": 0.88, "mr": 0.74}


def files(data: Path, name: str, scratch: Path) -> tuple[Path, Path]:
    """The training and the test file of a data set. Without a test file, a tenth is held out."""
    if (data / name / "test.csv").exists():
        return data / name / "train.csv", data / name / "test.csv"
    whole = dataset.read_training(data / name / "all.csv")
    parts = hold_out.split(whole, 0.1, seed=1)
    paths = (scratch / f"{name}-train.csv", scratch / f"{name}-test.csv")
    for path, part in zip(paths, parts, strict=True):
        with path.open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerow(["text", "label"])
            for text, label in zip(part.texts, part.labels, strict=True):
                writer.writerow([text, part.label_names[label]])
    return paths


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
    model: str = "cnn",
) -> dict[str, Any]:
    """Run the command once with the defaults. Returns its summary and the number of kills."""
    job = f"accuracy-{os.getpid()}"
    command = process.module_command("gadei_ps", "train", str(train_file), "--json")
    command += ["--test", str(test_file), "--learners", str(learners), "--seed", str(seed)]
    command += ["--out", str(out), "--overwrite", "--job", job, "--model", model, *more]
    with Killer(job, kill_every_s) as killer:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"kills": killer.kills}


def keep(rows: list[dict[str, Any]], ratios: list[dict[str, Any]], out: Path) -> Path:
    """Write the rows and ratios so far into the directory `out`."""
    report = Report([], rows=rows, ratios=ratios)
    return suite.write(suite.result_of("accuracy", report, suite.command("accuracy")), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--sets", nargs="+", default=["trec6", "mr"])
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=[], help="run only these cases")
    parser.add_argument("--model", default="cnn", choices=["cnn", "ensemble"])
    parser.add_argument("--out", type=Path, default=suite.RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the existing file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    suite.prepare(options.out)
    if options.resume and (options.out / "accuracy.json").exists():
        rows = json.loads((options.out / "accuracy.json").read_text())["rows"]
    ratios: list[dict[str, Any]] = []
    killed = f"2 learners, one killed every {options.kill_every:g} s"
    feedback = ["--wire", "float16", "--error-feedback"]
    cases: list[tuple[str, int, float, list[str]]] = [
        ("1 learner", 1, 0.0, []),
        ("2 learners", 2, 0.0, []),
        (killed, 2, options.kill_every, []),
        ("2 learners, bfloat16", 2, 0.0, ["--wire", "bfloat16"]),
        ("2 learners, float16", 2, 0.0, ["--wire", "float16"]),
        ("2 learners, float16, error feedback", 2, 0.0, feedback),
    ]
    cases = [case for case in cases if not options.cases or case[0] in options.cases]
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.sets:
            train_file, test_file = files(options.data, name, Path(scratch))
            for seed in range(options.seeds):
                for case, learners, kill_every_s, more in cases:
                    told = {"contender": case, "set": name, "seed": seed}
                    if any(told.items() <= row.items() for row in rows):
                        continue
                    found = train(
                        train_file,
                        test_file,
                        learners,
                        kill_every_s,
                        seed,
                        Path(scratch) / "model",
                        more,
                        options.model,
                    )
                    found.pop("model_dir")
                    rows.append(told | found)
                    print(json.dumps(rows[-1]), flush=True)
                    keep(rows, ratios, options.out)
            mine = [row for row in rows if row["set"] == name]
            one = next(row for row in mine if row["learners"] == 1)
            ratios += [
                {
                    "set": name,
                    "contender": row["contender"],
                    "test_accuracy": row["test_accuracy"],
                    "less_than_one_learner": one["test_accuracy"] - row["test_accuracy"],
                    "reach": REACH.get(name),
                    "kim_2014": KIM.get(name),
                }
                for row in mine
            ]
    header = ["set", "case", "test", "validation", "epochs", "samples/s", "kills"]
    lines = [
        [
            row["set"],
            row["contender"],
            f"{row['test_accuracy']:.4f}",
            f"{row['validation_accuracy']:.4f}",
            str(row["epochs"]),
            f"{row['samples_per_s']:.0f}",
            str(row["kills"]),
        ]
        for row in rows
    ]
    print(table(header, lines))
    print(keep(rows, ratios, options.out))


if __name__ == "__main__":
    main()
