"""The list of benchmarks, how to run one, and the file that it writes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.common import Report, machine, table
from gadei_ps.errors import UsageError

RESULTS = Path(__file__).resolve().parent / "results"
"""Directory of the results in a checkout."""

BENCHMARKS = {
    "apply": "the update kernels against C with OpenMP, torch and the memory's bandwidth",
    "undo": "what the undo log adds to the time of the update kernels",
    "groups": "what ten parameter groups add to the time of a gradient in the server",
    "ingest": "gradients through the rings against MPI, gloo and a Ray actor",
    "aggregate": "the mean of a group's models against gloo, Ray's object store and hivemind",
    "latency": "a 4 KB push until it is applied, against other ways between processes",
    "nlc": "samples per second of the sentence classifier against torch's ways to train it",
    "table8": "the smallest mini-batch at which two learners beat one",
    "time_to_accuracy": "how long training takes to reach a given accuracy",
    "table7": "bytes per second through the server",
    "scale": "the cost of a gradient by model size, learners and shards",
    "learners": "gradients a second by the number of learners, and beside silent ones",
    "memory": "resident and shared memory of a job and of each learner",
    "start": "how long it takes until the first gradient is applied, against Hogwild",
    "attach": "how long a large model takes to come in, against zeroing its memory",
    "kills": "the loss of one job over time, undisturbed and with processes killed, and the count",
    "failover": "what the death of servers costs, against DDP under torchrun and torchft",
    "worker_groups": "samples a second and accuracy of replicas in groups, beside one replica",
    "group_deaths": "what the deaths of replicas, of their parts and of Ray cost a group",
    "idle_agent": "what a replica beside a job costs while there is nothing to exchange",
    "watching": "what metrics, curves and an open page cost a learner with mini-batches of one",
    "asynchrony": "what training with momentum reaches with many learners, against Hogwild",
    "scripts": "two learners of each training script in examples/scripts against the plain script",
    "virtual": "a pipeline of stages beside torch's pipelines, its threads, and the planner",
}


def check(names: Iterable[str]) -> None:
    """Raise UsageError for an unknown name."""
    for name in names:
        if name not in BENCHMARKS:
            raise UsageError(f"no benchmark {name!r}; the benchmarks are {', '.join(BENCHMARKS)}")


def run(name: str, *, quick: bool) -> tuple[dict[str, Any], str]:
    """Run a benchmark. Returns its result, as `write` writes it, and its table.

    quick: small sizes and few rounds, for a trial; the figures mean little. Raises UsageError for
    an unknown name or a missing package.
    """
    check([name])
    try:
        module = importlib.import_module(f"gadei_ps.benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gadei_ps"):
            raise
        raise UsageError(
            f"bench {name} needs {error.name}: pip install 'gadei-ps[torch,bench]'"
        ) from None
    report: Report = module.measure(quick)
    command = f"gadei-ps bench {name}" + (" --quick" if quick else "")
    result = result_of(name, report, command) | {"quick": quick}
    return result, shown(report)


def result_of(name: str, report: Report, command: str) -> dict[str, Any]:
    """The contents of the result file."""
    return {
        "benchmark": name,
        "machine": machine(),
        "commit": commit(),
        "command": command,
        "rows": report.rows,
        "ratios": report.ratios,
        "notes": report.notes,
    }


def shown(report: Report) -> str:
    """The report as text for people."""
    return "\n".join([table(report.header, report.lines), *report.notes])


def command(name: str) -> str:
    """The command that started a benchmark with its own options."""
    return " ".join(["python -m", f"gadei_ps.benchmarks.{name}", *sys.argv[1:]])


def prepare(directory: Path) -> None:
    """Make the directory of results. Call it before a long measurement. Raises UsageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{directory}: you cannot write there")


def write(result: dict[str, Any], directory: Path) -> Path:
    """Write DIRECTORY/NAME.json and return its path. Raises UsageError if it cannot be."""
    path = directory / f"{result['benchmark']}.json"
    try:
        path.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return path


HERE = Path(__file__).resolve().parent
# What benchmarks write, so that the second part of a run is not of a dirty tree.
OWN_OUTPUT = (":(top,exclude)benchmarks/results", ":(top,exclude)docs")


def commit(where: Path = HERE) -> str | None:
    """The commit of this checkout, with `-dirty` after changes. None if it is not a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(where), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", ":/", *OWN_OUTPUT)
    except OSError:  # git is not installed
        return None
    return name + ("-dirty" if changed else "") if name else None
