"""README: install lines work as printed, results have a commit, pictures exist in both themes.

Exit codes: documentation and manual pages have those of the program.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.tutorials import blocks, fits, masked

from gadei_ps.cli.exits import EXIT_CODES
from gadei_ps.show import plot_style

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = re.compile(r'(?:src|srcset)="([^"]+)"')
TABLE = re.compile(r"^\| exit code \| meaning \| commands \|\n\| --- .*\n((?:\|.*\n)+)", re.M)
MOST_LINES = 126
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def installs(text: str) -> list[list[str]]:
    """The words of `pip install` lines that install from the checkout."""
    lines = re.findall(r"pip install ((?:-\S+ )*'?\.(?:\[[\w,]+\])?'?)", text)
    return [shlex.split(line) for line in lines]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_the_clone_of_the_quick_start_can_be_installed(tmp_path: Path) -> None:
    """The address is the reader's; here it is the checkout."""
    line = re.search(r"^\$ (git clone .*)$", README, re.M)
    assert line
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = line[1].replace("REPOSITORY", shlex.quote(str(ROOT))) + " && ls pyproject.toml"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "pyproject.toml\n", done.stderr


@pytest.mark.parametrize("extras", sorted({one[-1] for one in installs(README)}))
def test_install_lines_are_accepted_by_pip(extras: str) -> None:
    """Each is resolved, but nothing is fetched or installed."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("pip is not installed")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "-q", extras]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not provide" not in done.stderr


def test_pages_install_from_the_checkout() -> None:
    """No package index has gadei-ps, so a line that names it there would fail."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "learn").glob("*.md"))):
        for words in re.findall(r"pip install ([^\n`#]+)", page.read_text()):
            assert "gadei-ps" not in words, page.name
    assert installs("pip install -e '.[torch,dev]'  # x\npip install .") == [
        ["-e", ".[torch,dev]"],
        ["."],
    ]


def unknown_extras(text: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"pip install [^\n`]*\[([\w,]+)\]", text)
    return {extra for one in named for extra in one.split(",")} - {
        *project["optional-dependencies"]
    }


def test_extras_of_install_lines_exist() -> None:
    assert not {page.name: found for page in PAGES if (found := unknown_extras(page.read_text()))}
    assert unknown_extras("pip install '.[torch,torhc]'\npip install 'gadei-ps[plot]'") == {"torhc"}


def outputs(text: str) -> dict[str, str]:
    return {command: out for block in blocks(text) for command, out in block.commands}


def test_the_quick_start_prints_what_the_tutorials_print() -> None:
    """Their commands are run by test_learn.py. The script is another one, with its own lines."""
    learn = ROOT / "docs" / "learn"
    shown, killed = outputs(README), outputs((learn / "kill.md").read_text())
    chaos = "gadei-ps chaos --for 60s"
    assert fits(killed[chaos], shown[chaos])
    run = "gadei-ps run demo --learners 2 -- python "
    first = outputs((learn / "first-job.md").read_text())
    trained = next(out for command, out in first.items() if command.startswith("gadei-ps run"))
    ours = [line for line in masked(trained) if line.startswith("gadei-ps: ")]
    ours[-1] = ours[-1].removesuffix("; weights in weights.npz")
    lines = masked(shown[f"{run}examples/my_train.py"])
    assert [line for line in lines if line.startswith("gadei-ps: ")] == ours
    epoch = masked("[0] epoch 1: accuracy 0.5")
    assert {line for line in lines if not line.startswith("gadei-ps: ")} <= {*epoch, "..."}


def test_results_of_the_front_page_have_a_commit_and_a_row() -> None:
    """The commit is in the table of docs/performance.md, and the tree was clean."""
    names = set(re.findall(r"`(\w+)\.json`", README))
    assert names
    table = (ROOT / "docs" / "performance.md").read_text()
    for name in names:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        commit = result["commit"]
        assert commit and not commit.endswith("-dirty"), name
        assert not result.get("quick"), name
        assert f"| `{name}.json` |" in table and f"| {commit} |" in table, name


def test_pictures_are_there_for_both_themes() -> None:
    paths = PICTURE.findall(README)
    assert len(paths) >= 4
    for path in paths:
        assert (ROOT / path).exists(), path
        if path.endswith("-dark.svg"):
            light = (ROOT / path.replace("-dark", "")).read_text()
            assert (ROOT / path).read_text() == plot_style.dark(light), path
    assert {one.replace("-dark", "") for one in paths if "-dark" in one} == {
        one for one in paths if "-dark" not in one
    }


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*/*.svg")), ids=lambda one: one.name)
def test_pictures_adapt_to_dark_pages(path: Path) -> None:
    dark = "(prefers-color-scheme: dark)"
    assert (dark in path.read_text()) != path.stem.endswith("-dark")


def test_exit_codes_are_those_of_the_program() -> None:
    tables = [found for page in PAGES for found in TABLE.findall(page.read_text())]
    assert len(tables) == 1, "exactly one page has the table"
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in tables[0].splitlines()
    ]
    assert shown == [
        (one.code, one.meaning, ", ".join(f"`{name}`" for name in one.commands) or "all")
        for one in EXIT_CODES
    ]


def test_manual_pages_have_the_exit_codes_of_their_command() -> None:
    for page in (ROOT / "docs" / "share" / "man" / "man1").glob("gadei-ps-*.1"):
        name = page.stem.removeprefix("gadei-ps-")
        section = page.read_text().partition(".SH EXIT STATUS")[2].partition(".SH ")[0]
        shown = re.findall(r"^\.B (.+)$", section, re.M)
        wanted = [
            one.code
            for one in EXIT_CODES
            if not one.commands or name in {each.replace(" ", "-") for each in one.commands}
        ]
        assert shown == wanted, page.name
