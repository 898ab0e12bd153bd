"""`gadei-ps train` beside TF-IDF with a linear SVM and beside the paper's network.

    python -m gadei_ps.benchmarks.classifier [--data DIR] [--sets SET ...] [--seeds 5]
        [--contenders ensemble cnn svm] [--out DIR] [--resume]

DIR has {trec6,trec50,banking77,sst2}/{train,test}.csv and mr/all.csv. A tenth of mr, and of the
example `intents`, becomes its test file. Any other SET has SET/{train,test}.csv in DIR. The SVM
needs scikit-learn. CPU seconds are those of all processes of a contender, imports included.
Sentences of another set are the ones out of scope. Writes classifier.json into the directory of
--out (results/) after each run. Accuracy does not depend on the load of the machine; seconds do.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.common import Report, table
from gadei_ps.benchmarks.tables import Table
from gadei_ps.classifier import dataset, hold_out
from gadei_ps.classifier.calibration import BINS
from gadei_ps.machine import process

ROOT: Final = Path(__file__).parents[1]
SHARED: Final = ROOT.parent / "shared" / "data"
SETS: Final = ("trec6", "trec50", "mr", "sst2", "banking77", "intents")
OUTSIDE: Final = {"banking77": "trec6"}
"""Sets whose sentences are out of scope; of the others, banking77."""
CONTENDERS: Final = ("ensemble", "cnn", "svm")

# What people do instead, in a process of its own.
SVM: Final = """
import csv, sys
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline, make_union
from sklearn.svm import LinearSVC
(x, y), (u, v) = ([*zip(*list(csv.reader(open(path)))[1:])] for path in sys.argv[1:])
words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\\b\\w+\\b|\\S")
characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), min_df=2, sublinear_tf=True)
model = make_pipeline(make_union(words, characters), LinearSVC())
print(model.fit(x, y).score(u, v))
"""


def files(data: Path, name: str, seed: int, scratch: Path) -> tuple[Path, Path]:
    """Return the training and the test file of a set; a tenth by `seed` if it has no test file."""
    if (data / name / "test.csv").exists():
        return data / name / "train.csv", data / name / "test.csv"
    whole_file = ROOT / "examples" / "intents.csv" if name == "intents" else data / name / "all.csv"
    parts = hold_out.split(dataset.read_training(whole_file), 0.1, seed)
    paths = (scratch / f"{name}-train-{seed}.csv", scratch / f"{name}-test-{seed}.csv")
    for path, part in zip(paths, parts, strict=True):
        with path.open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerow(["text", "label"])
            for text, label in zip(part.texts, part.labels, strict=True):
                writer.writerow([text, part.label_names[label]])
    return paths


def timed(command: list[str]) -> tuple[str, float, float]:
    """Run a command. Returns its output, its CPU time with all its processes, and its time (s)."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout.decode(), cpu, time.monotonic() - begin


def predicted(model: Path, file: Path) -> list[dict[str, Any]]:
    """Return what `gadei-ps predict` finds for a file."""
    command = process.module_command("gadei_ps", "predict", str(model), "--csv", str(file))
    found: list[dict[str, Any]] = json.loads(timed([*command, "--json"])[0])["predictions"]
    return found


def calibration_error(surest: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error of probabilities and of what they are of."""
    bins = np.minimum((surest * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, right - surest)).sum() / len(right))


def chance(surest: NDArray[np.float64]) -> float:
    """Compute the mean calibration error of right probabilities: of so few rows, it is above 0."""
    rng = np.random.default_rng(0)
    draws = [calibration_error(surest, rng.random(len(surest)) < surest) for _ in range(200)]
    return statistics.mean(draws)


def auroc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """Compute the share of pairs in which the sentence in scope has the higher probability."""
    every = np.sort(outside)
    below = np.searchsorted(every, inside, "left") + np.searchsorted(every, inside, "right")
    return float(below.mean() / 2 / len(outside))


def run(
    contender: str, train_file: Path, test_file: Path, outside: Path, seed: int, out: Path
) -> dict[str, Any]:
    """Train once, and measure on the test file."""
    load = os.getloadavg()[0]
    if contender == "svm":
        command = [sys.executable, "-P", "-c", SVM, str(train_file), str(test_file)]
        score, cpu, seconds = timed(command)
        return {"test_accuracy": float(score), "cpu_s": cpu, "seconds": seconds, "load": load}
    command = process.module_command("gadei_ps", "train", str(train_file), "--json")
    command += ["--test", str(test_file), "--seed", str(seed), "--model", contender]
    command += ["--out", str(out), "--overwrite", "--job", f"classifier-{os.getpid()}"]
    text, cpu, seconds = timed(command)
    summary = json.loads(text)
    inside = predicted(out, test_file)
    with test_file.open(newline="", encoding="utf-8") as file:
        truth = [row["label"] for row in csv.DictReader(file)]
    surest = np.array([one["probability"] for one in inside])
    right = np.array([one["label"] == label for one, label in zip(inside, truth, strict=True)])
    others = np.array([one["probability"] for one in predicted(out, outside)])
    least = float(np.quantile(surest, 0.05))
    kept = ("test_accuracy", "validation_accuracy", "epochs", "training_seconds", "rows")
    return {name: summary[name] for name in kept} | {
        "cpu_s": cpu,
        "seconds": seconds,
        "load": load,
        "calibration_error": calibration_error(surest, right),
        "calibration_error_by_chance": chance(surest),
        "below_threshold": float(np.mean([one["below"] for one in inside])),
        "auroc": auroc(surest, others),
        "outside_refused": float((others < least).mean()),
    }


HEADER = (
    *("set", "contender", "accuracy, %", "standard error, %", "CPU, s", "of the CNN's, %"),
    *("calibration error, %", "below threshold, %", "AUROC, %", "out of scope refused, %", "seeds"),
)


def lines_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Summarize the runs: a line for each set and contender."""

    def mean_cpu(name: str, contender: str) -> float:
        found = [
            row["cpu_s"] for row in rows if (row["set"], row["contender"]) == (name, contender)
        ]
        return statistics.mean(found) if found else math.nan

    lines = []
    for name in dict.fromkeys((*SETS, *(row["set"] for row in rows))):
        for contender in CONTENDERS:
            own = [row for row in rows if (row["set"], row["contender"]) == (name, contender)]
            if not own:
                continue
            accuracies = [100 * row["test_accuracy"] for row in own]
            cells = [name, contender, f"{statistics.mean(accuracies):.2f}"]
            error = statistics.stdev(accuracies) / len(own) ** 0.5 if len(own) > 1 else math.nan
            cells.append("-" if math.isnan(error) else f"{error:.2f}")
            cpu, of_cnn = mean_cpu(name, contender), mean_cpu(name, "cnn")
            cells += [f"{cpu:.1f}", "-" if math.isnan(of_cnn) else f"{100 * cpu / of_cnn:.0f}"]
            for key in ("calibration_error", "below_threshold", "auroc", "outside_refused"):
                values = [100 * row[key] for row in own if key in row]
                cells.append(f"{statistics.mean(values):.1f}" if values else "-")
            lines.append([*cells, str(len(own))])
    return lines


def _markdown(result: dict[str, Any]) -> list[str]:
    cells = [HEADER, ["---"] * len(HEADER), *lines_of(result["rows"])]
    return [f"| {' | '.join(line)} |" for line in cells]


TABLE = Table("classifier", "performance.md", _markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="SET")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--out", type=Path, default=suite.RESULTS)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the existing file")
    options = parser.parse_args()
    for name in set(options.sets) - {*SETS}:
        if not all((options.data / name / file).is_file() for file in ("train.csv", "test.csv")):
            parser.error(f"--sets {name}: {options.data / name} lacks train.csv or test.csv")
    contenders = options.contenders
    if "svm" in contenders and importlib.util.find_spec("sklearn") is None:
        print("without the SVM: pip install scikit-learn", file=sys.stderr)
        contenders = [one for one in contenders if one != "svm"]
    suite.prepare(options.out)
    path = options.out / "classifier.json"
    rows: list[dict[str, Any]] = []
    if options.resume and path.exists():
        rows = json.loads(path.read_text())["rows"]
    done = {(row["set"], row["contender"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            for name in options.sets:
                train_file, test_file = files(options.data, name, seed, Path(scratch))
                outside = options.data / OUTSIDE.get(name, "banking77") / "test.csv"
                for contender in contenders:
                    if (name, contender, seed) in done:
                        continue
                    found = run(
                        contender, train_file, test_file, outside, seed, Path(scratch) / "model"
                    )
                    row = {"contender": contender, "set": name, "seed": seed, **found}
                    rows.append(row | {"commit": suite.commit()})  # --resume may mix several
                    report = Report(HEADER, rows=rows)
                    result = suite.result_of("classifier", report, suite.command("classifier"))
                    suite.write(result, options.out)
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(HEADER, lines_of(rows)))


if __name__ == "__main__":
    main()
