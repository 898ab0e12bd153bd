"""The training scripts of examples/scripts/: two learners compared with the plain script.

The plain script is one process, in which torch takes all cores, or one thread. Two learners, under
ASP and under BSP, train half of the steps each, so that all contenders make as many of them. Each
run is a process of its own, as users start it. A figure is the samples of all learners over the
seconds of the slowest, by what the script prints: loading, making data and evaluating at the end
are left out. Beside it stands the loss or the score that the script ends with, of the last learner.

ratio: of samples per second to the plain script's. Above 1, two learners are faster.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.commands.daemon import running
from gadei_ps.errors import UsageError
from gadei_ps.machine import process

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "scripts"
"""Directory of the scripts in a checkout."""
TIMED = re.compile(r"^(\d+) samples in ([\d.]+) s$", re.M)
PLAIN, ONE_THREAD = "plain", "plain, one thread"
OURS = "gadei-ps"
LEARNERS = 2


@dataclass(frozen=True)
class Script:
    """words: the option that says how long it trains. whole: so much of it in all.

    batch: samples of a step, where each step has as many. second: the option that names a second
    job, for a script with two models.
    """

    words: str
    whole: int
    batch: int = 0
    second: str = ""


ALL = {
    "actor_critic": Script("--episodes", 100),
    "bfloat16": Script("--steps", 2000, 32),
    "clip": Script("--epochs", 8, 32),
    "compiled": Script("--steps", 400, 32),
    "distillation": Script("--epochs", 8, 64),
    "dqn": Script("--steps", 3000, 1),
    "fine_tuning": Script("--epochs", 8, 32),
    "gan": Script("--niter", 300, 64, "--generator"),
    "gcn": Script("--epochs", 400, 750),
    "gpt": Script("--steps", 300, 16),
    "matrix_factorization": Script("--epochs", 6, 128),
    "mixed_precision": Script("--steps", 2000, 64),
    "mixture_of_experts": Script("--steps", 2000, 16),
    "mnist_cnn": Script("--epochs", 4, 64),
    "mnist_hogwild": Script("--epochs", 8, 64),
    "neural_ode": Script("--niters", 400, 20),
    "normalizing_flow": Script("--steps", 1500, 128),
    "pinn": Script("--steps", 1000, 256),
    "ppo": Script("--iterations", 30, 32),
    "quickstart_mlp": Script("--epochs", 6, 64),
    "resnet": Script("--epochs", 6, 64),
    "super_resolution": Script("--nEpochs", 6, 16),
    "tabular": Script("--epochs", 10, 64),
    "text_classifier": Script("--epochs", 6, 64),
    "time_series": Script("--epochs", 10, 16),
    "translation": Script("--steps", 300, 64),
    "triplet": Script("--epochs", 8, 32),
    "vae": Script("--epochs", 4, 128),
    "word_language_model": Script("--epochs", 4, 400),
}
"""All but those that a job never takes."""


class Refused(Exception):
    """A script ended with an error; its last line."""


@dataclass(frozen=True)
class Ended:
    """Result of one run. rate: samples per second."""

    rate: float
    reached: float
    named: str


def _ended(outputs: Sequence[str]) -> Ended:
    """Parse the output of each process; the last one ended last."""
    timed = [TIMED.search(text) for text in outputs]
    if not all(timed):
        raise Refused("it printed no time")
    samples = sum(int(one[1]) for one in timed if one)
    seconds = max(float(one[2]) for one in timed if one)
    named, _, reached = outputs[-1].strip().rpartition("\n")[2].rpartition(" ")
    return Ended(samples / seconds, float(reached), named)


def _start(command: Sequence[str]) -> None:
    """Run a command to its end. Raises Refused if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [one for one in done.stderr.splitlines() if "Error" in one] or [f"{done.returncode}"]
        raise Refused(said[-1].strip())


def _plain(name: str, script: Script, **env: str) -> Ended:
    path = str(SCRIPTS / f"{name}.py")
    words = [sys.executable, path, "--plain", script.words, str(script.whole)]
    told = os.environ | env
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=told)
    if done.returncode:
        raise Refused(f"the plain script: {done.stderr.strip().rpartition(chr(10))[2]}")
    return _ended([done.stdout])


def _learners(name: str, script: Script, sync: str, scratch: Path) -> Ended:
    job = f"scripts-{os.getpid()}"
    share = [script.words, str(script.whole // LEARNERS)]
    words = [sys.executable, str(SCRIPTS / f"{name}.py"), *share]
    with contextlib.ExitStack() as kept, tempfile.TemporaryDirectory(dir=scratch) as logs:
        if script.second:
            words += [script.second, kept.enter_context(_served(f"{job}-second", sync, scratch))]
        how = ["--learners", str(LEARNERS), "--sync", sync, "--log-dir", logs]
        _start(process.module_command("gadei_ps", "run", job, *how, "--", *words))
        files = sorted(Path(logs).glob("learner-*.log"), key=lambda path: path.stat().st_mtime_ns)
        return _ended([path.read_text() for path in files])


@contextlib.contextmanager
def _served(job: str, sync: str, scratch: Path) -> Iterator[str]:
    """A job of its own; yields its name."""
    file = scratch / f"{job}.toml"
    file.write_text(f'sync = "{sync}"\nstart_with = {LEARNERS if sync == "bsp" else 0}\n')
    serve = process.module_command("gadei_ps", "serve", str(file), "--fresh")
    child = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        while not running(job):
            if child.poll() is not None:
                raise Refused(f"gadei-ps serve {job} has ended")
            time.sleep(0.01)
        yield job
    finally:
        child.terminate()
        child.wait()


def measure(quick: bool) -> Report:
    """Measure each script. A script that ends with an error is named in the notes."""
    if not SCRIPTS.is_dir():
        raise UsageError("bench scripts needs examples/scripts: run it in a checkout")
    size = sizes("scripts", quick)
    names = [f"{OURS} {sync}" for sync in size["sync"]]
    header = [
        "script",
        "step ms",
        "figure",
        PLAIN,
        ONE_THREAD,
        *names,
        *(f"/{PLAIN}" for _ in names),
    ]
    report = Report(header)
    chosen = {
        name: replace(ALL[name], whole=max(LEARNERS, round(ALL[name].whole * size["share"])))
        for name in size["scripts"] or ALL
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, script in chosen.items():
            try:
                _measure_script(report, name, script, size, Path(scratch))
            except Refused as error:
                report.notes.append(f"{name}: {error}")
    return report


def _measure_script(
    report: Report, name: str, script: Script, size: Mapping[str, Any], scratch: Path
) -> None:
    runs: dict[str, Callable[[], Ended]] = {
        PLAIN: lambda: _plain(name, script),
        ONE_THREAD: lambda: _plain(name, script, OMP_NUM_THREADS="1"),
    }
    for sync in size["sync"]:
        runs[f"{OURS} {sync}"] = partial(_learners, name, script, sync, scratch)
    ended: dict[str, list[Ended]] = {one: [] for one in runs}

    def timed(contender: str) -> Callable[[], float]:
        def once() -> float:
            ended[contender].append(runs[contender]())
            return ended[contender][-1].rate

        return once

    rates = alternate({one: timed(one) for one in runs}, size["rounds"])
    step_s = script.batch / statistics.median(rates[PLAIN]) if script.batch else None
    line = [name, f"{step_s * 1e3:.2f}" if step_s else "-", ended[PLAIN][0].named]
    for contender, figures in rates.items():
        reached = statistics.median(one.reached for one in ended[contender])
        row = {"contender": contender, "script": name, "step_s": step_s}
        row |= {"learners": LEARNERS if contender.startswith(OURS) else 1}
        row |= {"figure": ended[contender][0].named, "reached": reached}
        found = summary(figures, "samples/s", larger=True)
        report.rows.append(row | found)
        line.append(f"{found['median']:,.0f} ±{found['spread']:.0%} ({reached:.4g})")
    for contender in list(runs)[2:]:
        ratio = ratios_of(rates[contender], rates[PLAIN], larger=True)
        report.ratios.append({"contender": PLAIN, "script": name, "ours": contender, **ratio})
        line.append(f"{ratio['ratio']:.2f}")
    report.lines.append(line)
