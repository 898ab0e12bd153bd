"""The manual pages and the shells' completions are made of what --help shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Cli

from gadei_ps.cli import manual

SHARE = Path(__file__).parents[2] / "docs" / "share"
REMEDY = "run: python -m gadei_ps.cli.manual docs/share"


def test_the_files_in_the_sources_are_those_that_are_made() -> None:
    kept = {
        str(path.relative_to(SHARE)): path.read_text()
        for path in SHARE.rglob("*")
        if path.is_file()
    }
    made = manual.files()
    assert kept.keys() == made.keys(), REMEDY
    assert [name for name in made if kept[name] != made[name]] == [], REMEDY


def test_a_page_has_all_that_the_help_has(cli: Cli) -> None:
    page = manual.files()["man/man1/gadei-ps-gc.1"].replace("\\-", "-")
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


def test_bash_completes() -> None:
    script = manual.COMPLETIONS["bash"]
    code = f"""
        source {SHARE / script}
        COMP_WORDS=(gadei-ps uninst) COMP_CWORD=1
        _gadei_ps_completion gadei-ps
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", code],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "uninstall-unit\n"
