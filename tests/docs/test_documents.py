"""Targets of the documents exist: links, anchors, paths, modules and names in files."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import gadei_ps

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "native" / "examples" / "README.md"]
)
PAGES = [page for page in PAGES if "_build" not in page.parts]
FENCED = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
# What a path of the repository looks like, and a name of a source without its folder.
PATH = re.compile(r"[\w.*{},-]+(?:/[\w.*{},-]+)*/?")
SOURCE = re.compile(r"[\w*-]+\.(?:py|c|h|cu|pml)")
# "`_follow`, `_take_in` in `gadei_ps/server/manager.py`" says where functions are.
WHERE = re.compile(r"((?:`[\w.]+`(?:,\s+|\s+and\s+)?)+)\s+in\s+`([\w/.]+\.(?:py|c|h|pml))`")
# `client.push(...)`, `ps_publish`, `record.cursor`, `_look_up`: a name with a dot or an underscore.
NAME = re.compile(r"(?=[^(]*[._])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
MODULE = re.compile(r"\bgadei_ps(?:\.\w+)+")
# The package is put together from these folders (pyproject.toml).
INSTALLED = {
    "learners": "learners",
    "watchdog": "watchdog",
    "systemd": "systemd",
    "benchmarks": "benchmarks",
}
DOCUMENTS = {".md", ".svg", ".csv", ".json"}
UNREAD = (".png", ".min.js", ".min.css")  # pictures, and what others have written
FILES = DOCUMENTS | {".py", ".c", ".h", ".cu", ".pml", ".toml", ".safetensors"}
FOREIGN = {
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
    *("clamp_", "max_failures"),
}  # of torch and of Ray, and named in no source
MYST_DEPTH = 4  # myst_heading_anchors in docs/conf.py
# Made by commands and by readers; the last ones by a machine with a GPU.
MADE = {"docs/_build/html", "build/typing", "shared.py", "benchmarks/results/gpu-*.json"}
PLACEHOLDER = re.compile(r"(?<![A-Z])(?:NAME|PART|JOB|FILE)(?![A-Z])")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """The text without its blocks of code, line by line in the same places."""
    return FENCED.sub(lambda found: "\n" * found.group().count("\n"), text)


def slug(heading: str) -> str:
    """The anchor of a heading by GitHub's rule, which is MyST's too."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def anchors(text: str, depth: int = 6) -> set[str]:
    """All anchors of a page; a heading that comes twice gets a number."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.finditer(r"^(#{1,6})\s+(.+?)\s*#*$", prose(text), re.M):
        base = slug(heading[2])
        if len(heading[1]) <= depth:
            found.add(f"{base}-{seen[base]}" if seen[base] else base)
        seen[base] += 1
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Return links to files or anchors that do not exist. Web addresses are not looked at."""
    wrong = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(target)
        elif anchor:
            there = text if file == page else file.read_text()
            built = file.is_relative_to(ROOT / "docs")
            if anchor not in anchors(there, MYST_DEPTH if built else 6):
                wrong.append(target)
    return wrong


@cache
def tracked() -> frozenset[str]:
    """Return files of the repository and their folders; what is new and not ignored counts."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in result.stdout.splitlines() if (ROOT / name).exists()}
    folders = {str(folder) for name in files for folder in Path(name).parents}
    return frozenset(files | folders - {"."})


def alternatives(text: str) -> list[str]:
    """`a.{c,h}` as `a.c` and `a.h`."""
    found = re.fullmatch(r"(.*)\{([^}]*)\}(.*)", text)
    if not found:
        return [text]
    return [f"{found[1]}{one}{found[3]}" for one in found[2].split(",")]


def missing_paths(page: Path, text: str) -> list[str]:
    """Return paths in backticks that look like the repository's, and do not exist."""
    tops = {name.split("/")[0] for name in tracked() if "/" in name}
    names = {name.rsplit("/", 1)[-1] for name in tracked()}
    wrong = []
    for span in SPAN.findall(prose(text)):
        if not PATH.fullmatch(span):
            continue
        for path in alternatives(PLACEHOLDER.sub("*", span.rstrip("/"))):
            if path in MADE:
                continue
            if "/" not in path:
                lost = SOURCE.fullmatch(path) and not any(fnmatch(one, path) for one in names)
            else:
                here = os.path.normpath(page.parent.relative_to(ROOT) / path)
                lost = path.split("/")[0] in tops and not any(
                    fnmatch(one, where) for one in tracked() for where in (path, here)
                )
            if lost:
                wrong.append(span)
    return wrong


def file_of(module: str) -> Path | None:
    """The file of a module, by the folders that the package is made of."""
    parts = module.split(".")[1:]
    base = ROOT / "gadei_ps"
    if parts and parts[0] in INSTALLED:
        base, parts = ROOT / INSTALLED[parts[0]], parts[1:]
    path = base.joinpath(*parts)
    files = (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi"))
    return next((file for file in files if file.exists()), None)


def missing_modules(text: str) -> list[str]:
    """Dotted names that begin with gadei_ps and are neither a module nor a name in one."""
    wrong = []
    for dotted in MODULE.findall(text):
        module, names = dotted, []
        while (file := file_of(module)) is None:
            module, _, name = module.rpartition(".")
            names.append(name)
        words = set(re.findall(r"\w+", file.read_text()))
        later = module == "gadei_ps" and set(names) <= set(dir(gadei_ps))
        if (module == "gadei_ps" and not later) or not words.issuperset(names):
            wrong.append(dotted)
    return wrong


def identifiers(path: Path) -> set[str]:
    """The names that a source uses; of Python none from texts and comments."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def misplaced_names(page: Path, text: str) -> Iterator[str]:
    """Return functions that the page places in a file which does not have them."""
    for names, path in WHERE.findall(prose(text)):
        places = [name for name in tracked() if name == path or name.endswith(f"/{path}")]
        words = set().union(*(identifiers(ROOT / place) for place in places))
        for name in SPAN.findall(names):
            if name.split(".")[-1] not in words:
                yield f"{name} in {path}"


@cache
def words() -> frozenset[str]:
    """Every word of the repository, except those of documents and of the tests that read them."""
    found: set[str] = set()
    for name in tracked():
        path = ROOT / name
        is_read = not name.startswith("tests/docs/") and not name.endswith(UNREAD)
        if path.is_file() and is_read and path.suffix not in DOCUMENTS:
            found |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


def unknown_names(text: str) -> list[str]:
    """Return names of code in backticks that nothing in the repository has."""
    spans = {span for span in SPAN.findall(prose(text)) if NAME.fullmatch(span)}
    known = words() | FOREIGN
    return sorted(
        span
        for span in spans
        if Path(span).suffix not in FILES and not known.issuperset(re.findall(r"\w+", span))
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_are_those_of_the_code(page: Path) -> None:
    assert not unknown_names(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_paths_exist(page: Path) -> None:
    assert not missing_paths(page, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_are_where_a_page_says(page: Path) -> None:
    assert not list(misplaced_names(page, page.read_text()))


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("docs/reference/*.rst")], ids=named)
def test_modules_exist(page: Path) -> None:
    assert not missing_modules(page.read_text())


def test_every_page_is_looked_at() -> None:
    assert {named(page) for page in PAGES} >= {
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/decisions/index.md",
        "native/examples/README.md",
    }
    assert len(PAGES) > 40


def test_what_is_wrong_is_found() -> None:
    """Each check sees its own kind of mistake, and leaves what is right alone."""
    page = ROOT / "README.md"
    text = "# Two words\n## Two `words`\n[a](docs/none.md) [b](#two-words-1) [c](#two-words-2)\n"
    assert broken_links(page, text) == ["docs/none.md", "#two-words-2"]
    assert broken_links(page, "```\n[a](docs/none.md)\n```\n[b](https://example.org/#c)\n") == []
    deep = ROOT / "docs" / "index.md"
    assert broken_links(deep, "##### Too deep\n[a](#too-deep)") == ["#too-deep"]
    paths = (
        "`gadei_ps/server.py` `native/ps_ring.{c,h}` `none.py` `~/x/y.toml` `FILE.csv` `tests/cli/`"
    )
    assert missing_paths(page, paths) == ["gadei_ps/server.py", "none.py"]
    modules = (
        "gadei_ps.layout gadei_ps.sync.asp gadei_ps.learners.client.Client gadei_ps.server.none"
    )
    assert missing_modules(modules) == ["gadei_ps.layout", "gadei_ps.server.none"]
    names = "`client.push`, `look_up()`, `no_such_name`, `parse`, `test_rows.py`, `modes.set_mood`"
    assert unknown_names(names) == ["modes.set_mood", "no_such_name"]
    places = "`parse` and `nothing` in `gadei_ps/sync/__init__.py`, `ASP` in `gadei_ps/sync/asp.py`"
    assert list(misplaced_names(page, places)) == ["nothing in gadei_ps/sync/__init__.py"]
