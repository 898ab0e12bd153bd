"""The manual pages and the shells' completions are made of what --help shows."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Cli

DOCS = Path(__file__).parents[2] / "docs"
SHARE = DOCS / "share"
REMEDY = "run: python docs/manual.py docs/share"
MANUAL = runpy.run_path(str(DOCS / "manual.py"))


def test_the_files_in_the_sources_are_those_that_are_made() -> None:
    kept = {
        str(path.relative_to(SHARE)): path.read_text()
        for path in SHARE.rglob("*")
        if path.is_file()
    }
    made = MANUAL["files"]()
    assert kept.keys() == made.keys(), REMEDY
    assert [name for name in made if kept[name] != made[name]] == [], REMEDY


def test_a_page_has_all_that_the_help_has(cli: Cli) -> None:
    page = MANUAL["files"]()["man/man1/gadei-ps-gc.1"].replace("\\-", "-")
    for word in ("JOB", "--dry-run", "--json", "Remove segments, sockets and locks of dead jobs"):
        assert word in page
        assert word in cli("gc", "--help").out


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_roff_accepts_the_pages() -> None:
    pages = sorted(str(path) for path in SHARE.glob("man/man1/*.1"))
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", *pages], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("uninst", "uninstall-unit"),
        ("status runs", "runs-1 runs-2"),
        ("stop runs-1", "runs-1"),
        ("history runs", "runs-1 runs-2 runs-3 runs-4"),
        ("plot runs-4", "runs-4"),
    ],
)
def test_bash_completes(words: str, completed: str, tmp_path: Path) -> None:
    """Complete commands, and names of jobs: those that run, or have left a history."""
    for name in ("runs-1.sock", "runs-2.sock", "runs-3.history.jsonl", "other.history.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "runs-4").mkdir()
    (tmp_path / "runs-4" / "history.jsonl").touch()
    script = MANUAL["COMPLETIONS"]["bash"]
    code = f"""
        source {SHARE / script}
        COMP_WORDS=(gadei-ps {words}) COMP_CWORD={len(words.split())}
        _gadei_ps_completion gadei-ps
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", code],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "GADEI_PS_RUNTIME_DIR": str(tmp_path),
            "GADEI_PS_STATE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{completed}\n"
