"""`bench` runs and reports results. Tests do not judge the figures."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from shell import Cli
from support import PATIENCE_S

from gadei_ps.benchmarks import suite, virtual_tables
from gadei_ps.memory import presence

# One benchmark of each kind, to save time. The others use the same processes and loops.
RUN = [
    "apply",
    "undo",
    "groups",
    "latency",
    "nlc",
    "start",
    "attach",
    "failover",
    "idle_agent",
    "kills",
    "scripts",
    "virtual",
]
RATIO = {"contender", "ratio"}
ROW = {"contender", "unit"}


def test_they_are_listed(cli: Cli) -> None:
    shown = cli("bench")
    assert shown.code == 0
    assert [line.split()[0] for line in shown.out.splitlines()] == list(suite.BENCHMARKS)
    assert cli("bench", "--json").json["benchmarks"] == suite.BENCHMARKS


def test_a_name_that_there_is_not(cli: Cli) -> None:
    shown = cli("bench", "nonsense", "--quick")
    assert shown.code == 2
    assert "no benchmark 'nonsense'; the benchmarks are apply, undo" in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("name", RUN)
def test_each_runs(name: str, cli: Cli, compiled: None) -> None:
    out = cli.directory / "results"
    cli.interpreters = True  # threads of OpenMP and PyTorch would be missing in forks
    cli.patience_s = 4 * PATIENCE_S
    bench = cli.start("bench", name, "--quick", "--json", "--out", out)
    ended = bench.wait()
    assert ended.code == 0, ended.err
    result = ended.json
    assert json.loads((out / f"{name}.json").read_text()) == result
    assert (result["benchmark"], result["quick"]) == (name, True)
    assert result["machine"]["cores"] >= 1
    assert re.fullmatch(r"gadei-ps bench \w+ --quick", result["command"])
    assert result["rows"]
    assert all(row.keys() >= ROW for row in result["rows"])
    assert all(ratio.keys() >= RATIO for ratio in result["ratios"])
    assert any("gadei-ps" in row["contender"] for row in result["rows"])
    if name == "virtual":
        page = virtual_tables.PAGE.read_text()
        assert virtual_tables.MISSING not in virtual_tables.filled(page, out / f"{name}.json")
    # Its jobs have the process's pid in their names.
    assert not [one.name for one in presence.find() if f"-{bench.pid}" in one.name]


def test_a_directory_that_cannot_be(cli: Cli) -> None:
    """The error comes before any measurement."""
    shown = cli("bench", "nlc", "--out", "/proc/nothing/results")
    assert shown.code == 2
    assert shown.error == "/proc/nothing/results: No such file or directory"


def test_only_what_is_measured_makes_a_tree_dirty(tmp_path: Path) -> None:
    """A part of `make reproduce` has written its result and its plot when the next one begins."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    assert suite.commit(tmp_path) is None
    files = [tmp_path / name for name in ("benchmarks/results/a.json", "docs/plots/a.svg", "a.py")]
    git("init")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    name = suite.commit(tmp_path / "benchmarks")
    assert name and not name.endswith("-dirty")
    for file in files[:2]:
        file.write_text("2")
    assert suite.commit(tmp_path / "benchmarks") == name
    files[2].write_text("2")
    assert suite.commit(tmp_path / "benchmarks") == f"{name}-dirty"
