"""Every command line in the documents works: those of gadei-ps are run, the others are looked up.

A line is run as it is written, with names, durations and sizes replaced by small ones. The first
line of each command is run by a new interpreter, as users run it. A line that no stage below takes
fails the test.
"""

from __future__ import annotations

import configparser
import importlib.util
import itertools
import operator
import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from shell import Cli, Result, is_running, learning

from gadei_ps.cli.app import command_tree
from gadei_ps.commands import unit_files
from gadei_ps.commands.service_manager import Scope
from gadei_ps.run_times import traces
from gadei_ps.storage import checkpoint

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    # The tutorials are run by test_learn.py.
    *sorted(
        one
        for one in ROOT.glob("docs/**/*.md")
        if not {"_build", "learn"} & {*one.relative_to(ROOT).parts}
    ),
    ROOT / "native" / "examples" / "README.md",
]
FENCED = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^ *\2$", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
DRAWN = re.compile("[│├└┌╭]")  # a block with such characters is a drawing
PREFIX = re.compile(r"^(?:\$ )?(?:sudo (?:-u \S+ )?)?(?:env )?(?:[A-Z_]+=\S+ )*")
COMMAND = re.compile(r"(gadei-ps|make|pip|systemctl) +\S")
PATIENCE_S = 4 * support.PATIENCE_S  # for a training, on a busy machine
LONG = 80  # iterations that a trace must have for `runtime-model train`
TREE = command_tree()


@dataclass(frozen=True)
class Line:
    """A command line of a document. block: it stands in a block of code, not in a sentence."""

    page: str
    text: str
    block: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def found_in(page: str, text: str) -> list[Line]:
    """All command lines of a page, without `sudo`, variables and comments."""
    lines: list[tuple[str, bool]] = []
    for block in FENCED.finditer(text):
        if block[3] not in ("", "sh", "bash", "console") or DRAWN.search(block[4]):
            continue
        whole = re.sub(r"\\\n\s*", " ", block[4]).splitlines()
        lines += [(re.sub(r"(^|\s+)#.*", "", one).strip(), True) for one in whole]
    spans = SPAN.finditer(FENCED.sub("", text))
    lines += [(" ".join(span[1].split()), False) for span in spans]
    bare = [Line(page, PREFIX.sub("", one), block) for one, block in lines]
    return [one for one in bare if COMMAND.match(one.text)]


@cache
def documented() -> tuple[Line, ...]:
    return tuple(
        dict.fromkeys(
            one for page in PAGES for one in found_in(str(page.relative_to(ROOT)), page.read_text())
        )
    )


def of_gadei_ps() -> list[Line]:
    return [one for one in documented() if one.text.startswith("gadei-ps ")]


def look_up(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words after it. Raises AssertionError."""
    command: Any = TREE
    rest = words
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"there is no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_options(words: list[str]) -> None:
    """Raise AssertionError for a command or an option that does not exist."""
    command, rest = look_up(words)
    known = {"--help", "-h"} | {name for one in command.params for name in one.opts}
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{words[0]} has no option {word}"


def is_mention(line: Line) -> bool:
    """Return whether a sentence only names a command, without what it needs to run."""
    command, rest = look_up(line.words[1:])
    needed = any(one.required for one in command.params)
    given = any(not word.startswith("-") for word in rest)
    return not line.block and (not rest or (needed and not given))


# -- how each line is run -------------------------------------------------------------------------

LEARNER = """
    import sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    with Client(tensors={"w": np.zeros(8)}) as client:
        pushed = 0
        while pushed < 20 or "for-ever" in sys.argv:
            client.push({"w": -np.ones(8)}, samples=1, loss=1.0)
            pushed += 1
            time.sleep(0.002)
"""
MODEL = ROOT / "examples" / "my_model.py"
ROWS = "text,label\n" + "".join(
    f"a {w} sentence number {i},{w}\n" for i in range(40) for w in ("red", "blue")
)
# What stands in the documents, and what is put there for the test.
SMALL = (
    (r"PROGRAM \.\.\.", "python my_train.py"),
    (r"--for \S+", "--for 1s"),
    (r"--learners \S+", "--learners 2"),
    (r"--iterations \S+", "--iterations 4"),
    (r" --address \S+", ""),
    (r"--rounds \S+", "--rounds 4"),
    (r"\bRULE\.\.\.", "replace"),
    (r"\b(FILE|TEST)\.csv\b", "rows.csv"),
    (r"\bruns/intents\b", "model-1"),  # that the line with `train` makes
    (r"\bexamples/my_train\.py\b", "my_train.py"),
    (r"\bnative/examples/least_squares\.toml\b", "c/{job}.toml"),
    (r"\[JOB\]", "JOB"),
    (r"/etc/gadei-ps/", ""),
    (r"sync=MODEL\b", "sync=ssp:2"),
    (
        r"\bpartition MODULE:NAME --sample MODULE:NAME",
        "partition my_model:layers --sample my_model:sample",
    ),
    (r"--devices LIST\b", "--devices host:1,host:1"),
    (r"\bOUT\b", "weights.npz"),
    (r"\bbench (NAME|kills)\b", "bench latency --quick"),
    (r"\b(demo|least_squares|JOB|NAME|X)\b", "{job}"),
)
# More words, so that a command ends soon or changes nothing of this machine.
MORE = {
    "train": ["--epochs", "1"],
    "simulate": ["--iterations", "4"],
    "group simulate": ["--rounds", "4"],
    "partition": ["--repeats", "1"],
    "runtime-model": ["--epochs", "1"],
    "install-unit": ["--dry-run"],
    "uninstall-unit": ["--dry-run"],
}


def substituted(text: str, job: str) -> tuple[str, ...]:
    """The words after `gadei-ps` of a line as the test runs it."""
    for pattern, small in SMALL:
        text = re.sub(pattern, small.format(job=job), text)
    words = shlex.split(text)[1:]
    more = MORE.get(words[0]) or MORE.get(" ".join(words[:2]), [])
    if more and more[0] not in words:
        words += more
    return tuple(words)


# In this order; each is a condition on the words. A line belongs to the first stage that takes it.
STAGES: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "grouped": lambda words: words[:2] == ("group", "run"),
    # tests/end_to_end/test_group_run.py runs these two.
    "carried": lambda words: words[0] == "train" and "--groups" in words,
    "changed": lambda words: words[0] == "group" and words[1] in ("join", "leave"),
    # test_top.py in tests/cli/, test_dashboard.py and test_metrics_export.py in tests/end_to_end/.
    "shown": lambda words: words[0] in ("top", "dashboard", "metrics"),
    "ungrouped": lambda words: words[0] == "group" and words[1] in ("status", "stop"),
    "alone": lambda words: (
        words[0]
        in ("doctor", "docs", "group", "ls", "install-unit", "uninstall-unit", "bench", "chaos")
    ),
    "trained": lambda words: words[0] == "train",
    "predicted": lambda words: words[0] == "predict",
    "planned": lambda words: words[0] == "partition",
    "run": lambda words: words[0] == "run",
    "ended": lambda words: words[0] == "serve" and "--finish" in words,
    "served": lambda words: words[0] == "serve",
    "watched": lambda words: words[0] in ("status", "attach", "checkpoint", "export", "reload"),
    "traced": lambda words: words[0] == "trace",
    "learned": lambda words: words[0] in ("runtime-model", "simulate"),
    "set": lambda words: words[0] in ("set", "history", "plot"),
    "killed": lambda words: words[0] == "kill",
    "stopped": lambda words: words[0] == "stop",
    "restored": lambda words: words[0] == "restore",
    "collected": lambda words: words[0] == "gc",
}


def stage_of(words: tuple[str, ...]) -> str | None:
    return next((name for name, takes in STAGES.items() if takes(words)), None)


def lines_of(stage: str, job: str) -> list[tuple[str, ...]]:
    """The documents' lines of a stage, each once, ready to be run."""
    lines = [substituted(one.text, job) for one in of_gadei_ps() if not is_mention(one)]
    found = [one for one in dict.fromkeys(lines) if stage_of(one) == stage]
    assert found, f"no document has a line for the stage {stage!r}: leave it out"
    return found


class Bench:
    """A directory with what the lines need, and one job."""

    def __init__(self, cli: Cli, job: str) -> None:
        self.cli, self.job = cli, job
        self._seen: set[str] = set()
        self.env = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(cli.directory / "config"),
            "OMP_NUM_THREADS": "1",
        }
        (cli.directory / "my_train.py").write_text(textwrap.dedent(LEARNER))
        (cli.directory / "my_model.py").write_bytes(MODEL.read_bytes())
        (cli.directory / "rows.csv").write_text(ROWS)
        text = (ROOT / "native" / "examples" / "least_squares.toml").read_text()
        (cli.directory / "c").mkdir()
        (cli.directory / "c" / f"{job}.toml").write_text(text.replace("least_squares", job))
        (cli.directory / f"{job}.toml").write_text("")
        groups = f'name = "{job}"\nevery = 5\n[[groups]]\nmachines = 1\n'
        (cli.directory / "GROUPS.toml").write_text(groups)
        cli.made(job)

    def _see(self, command: str) -> None:
        """Prepare for a line of this command."""
        # A fork of a process that has loaded Ray cannot use another cluster.
        self.cli.interpreters = command == "group" or command not in self._seen
        self._seen.add(command)

    def run(self, *words: str) -> Result:
        self._see(words[0])
        done = self.cli(*words, patience_s=PATIENCE_S, **self.env)
        assert done.code == 0, f"gadei-ps {shlex.join(words)}: {done.err or done.out}"
        return done

    def all(self, stage: str) -> None:
        for words in lines_of(stage, self.job):
            self.run(*words)

    def trace(self) -> None:
        """Record traces, longer ones until they have enough iterations of both learners."""
        for words in lines_of("traced", self.job):
            out = words[words.index("--out") + 1] if "--out" in words else f"{self.job}-trace.csv"
            seconds = itertools.accumulate(itertools.repeat(2), operator.mul, initial=1)

            def whole(
                words: tuple[str, ...] = words, out: str = out, seconds: Iterator[int] = seconds
            ) -> bool:
                longer = f"{next(seconds)}s"
                self.run(*(longer if word == "1s" else word for word in words))
                known = ~np.isnan(traces.read(self.cli.directory / out).times)
                enough = len(known) >= LONG and known.shape[1] == 2
                return enough and bool(known.any(axis=0).all())

            support.eventually(whole)

    def serve(self, *words: str) -> Any:
        """Serve or restore the job until a test stops it."""
        self._see(words[0])
        daemon = self.cli.start(*words, **self.env)
        support.eventually(
            lambda: is_running(self.job) or daemon.process.poll() is not None,
            what=lambda: daemon.err,
        )
        assert daemon.process.poll() is None, f"{shlex.join(words)}: {daemon.err}"
        return daemon


@pytest.fixture
def bench(cli: Cli, job_name: str) -> Bench:
    return Bench(cli, job_name)


@pytest.mark.timeout(600)
def test_lines_with_a_job(bench: Bench, compiled: None) -> None:
    """Run a job from start to end, through one checkpoint and one death of each process."""
    job, cli = bench.job, bench.cli
    bench.all("run")
    *others, last = sorted(lines_of("served", job), key=lambda words: words[1] == f"{job}.toml")
    for words in others:
        daemon = bench.serve(*words)
        bench.run("stop", job)
        assert daemon.wait().code == 0
    watchdog = bench.serve(*last)
    team = cli.start(
        *("run", job, "--learners", "2", "--", "python", "my_train.py", "for-ever"), **bench.env
    )
    support.eventually(learning(job, team, 2))
    bench.all("watched")
    bench.trace()
    bench.all("learned")
    bench.all("set")
    version = bench.run("checkpoint", job, "--json").json["version"]
    for words in sorted(lines_of("killed", job), key=lambda words: words[-1] == "--watchdog"):
        support.eventually(lambda: support.status(job)["standby_pid"])
        bench.run(*words)
    assert watchdog.wait().code < 0, "the watchdog is the last that is killed"
    watchdog = bench.serve(*last)
    for number, words in enumerate(lines_of("stopped", job)):
        if number:
            watchdog = bench.serve(*last)
        discards = "--discard" in words  # what a watchdog looks after is not thrown away
        if discards:
            bench.run("kill", job, "--watchdog")
        bench.run(*words)
        assert (watchdog.wait().code < 0) == discards
    team.wait()
    watchdog = bench.serve(*last)
    bench.run("kill", job, "--watchdog")
    assert watchdog.wait().code < 0
    bench.all("ended")
    for words in lines_of("restored", job):
        # The newest one: what is restored is written again and sets newer ones aside.
        path, version = checkpoint.found(cli.directory / "state" / job)[0]
        words = tuple(
            str(path)
            if one in ("CHECKPOINT", "PATH")
            else str(version)
            if one in ("1200", "N")
            else one
            for one in words
        )
        daemon = bench.serve(*words)
        bench.run("stop", job)
        assert daemon.wait().code == 0
    bench.all("collected")


@pytest.mark.timeout(600)
def test_lines_without_a_job(bench: Bench, compiled: None) -> None:
    for stage in ("alone", "trained", "predicted", "planned"):
        bench.all(stage)


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_lines_of_groups(bench: Bench, compiled: None) -> None:
    for words in lines_of("grouped", bench.job):
        bench.cli.interpreters = True
        command = bench.cli.start(*words, "for-ever", **bench.env)
        support.eventually(
            lambda command=command: ": training" in command.err,
            2 * support.PATIENCE_S,  # Ray starts first
            lambda command=command: command.err,
        )
        for others in sorted(lines_of("ungrouped", bench.job)):
            bench.run(*others)
        assert command.wait().code == 4, command.err


# -- what is only looked up -----------------------------------------------------------------------


def test_every_line_is_run() -> None:
    """A line that is not run names at least a command and options that exist."""
    assert len(of_gadei_ps()) > 40
    wrong = []
    for line in of_gadei_ps():
        try:
            check_options(line.words[1:])
            if not is_mention(line):
                assert stage_of(substituted(line.text, "job")), "no stage runs this line"
        except AssertionError as error:
            wrong.append(f"{line.page}: `{line.text}`: {error}")
    assert not wrong


def test_commands_without_the_program_have_their_options() -> None:
    """`serve --fresh` in a sentence."""
    spans = {
        " ".join(span[1].split())
        for page in PAGES
        for span in SPAN.finditer(FENCED.sub("", page.read_text()))
    }
    names = "|".join(TREE.commands)
    checked = [one for one in spans if re.match(rf"({names}) (?:.* )?--\w", one)]
    assert "serve --fresh" in checked
    for one in checked:
        check_options(one.replace("'", "").split())


def test_an_invented_option_is_found() -> None:
    page = "```\ngadei-ps status demo --fast  # quick\n```\nand `sudo gadei-ps gc\n--all X`."
    status, gc = found_in("page", page)
    assert (status.text, gc.text) == ("gadei-ps status demo --fast", "gadei-ps gc --all X")
    for line in (status, gc):
        with pytest.raises(AssertionError, match="has no option"):
            check_options(line.words[1:])
    with pytest.raises(AssertionError, match="no command"):
        check_options(["statistics", "demo"])


def test_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [one for one in documented() if one.text.startswith("make ")]
    assert len(lines) > 10
    for line in lines:
        for word in line.words[1:]:
            name, is_variable, _ = word.partition("=")
            pattern = rf"\b{name}\b" if is_variable else rf"^{re.escape(name)}:"
            assert re.search(pattern, makefile, re.M), f"{line.page}: {line.text}"


def test_extras_of_pip() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [one for one in documented() if one.text.startswith("pip install")]
    assert len(lines) > 2
    for line in lines:
        for word in line.words[2:]:
            name, _, extras = word.rstrip("]").partition("[")
            assert name in (".", project["name"]), f"{line.page}: {line.text}"
            for extra in filter(None, extras.split(",")):
                assert extra in project["optional-dependencies"], f"{line.page}: {line.text}"


VERBS = {
    "daemon-reexec",
    "daemon-reload",
    "disable",
    "edit",
    "is-failed",
    "restart",
    "reset-failed",
    "start",
    "status",
    "stop",
}


@pytest.mark.parametrize("scope", Scope)
def test_units_of_systemctl(scope: Scope) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    unit.read_string(unit_files.texts(scope, "/usr/local/bin/gadei-ps")[unit_files.NAME])
    verbs = VERBS | ({"enable"} if unit.has_section("Install") else set())
    verbs |= {"reload"} if unit.has_option("Service", "ExecReload") else set()
    lines = [one for one in documented() if one.text.startswith("systemctl ")]
    assert len(lines) > 5
    for line in lines:
        verb, *names = [one for one in line.words[1:] if not one.startswith("-")] or [""]
        assert verb in verbs | {""}, f"{line.page}: {line.text}"
        for name in names:
            template = re.sub(r"@[\w*-]*(\.service)?$", "@.service", name)
            foreign = name == "systemd-logind"
            ours = template in (unit_files.NAME, unit_files.END_NAME, unit_files.LEARNER_NAME)
            assert foreign or ours, f"{line.page}: {line.text}"
