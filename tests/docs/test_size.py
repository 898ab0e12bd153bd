"""Pages and tables are short enough to be read: words of a page, words of a cell, words in all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(path for path in DOCS.glob("**/*.md") if not {"_build", "decisions"} & set(path.parts)),
]
PAGE, CELL, ALL = 2500, 25, 60_000  # words
BLOCKS = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.M | re.S)
MADE = re.compile(
    r"<!-- [^\n]*: table -->.*?<!-- end of table -->"
    r"|<!-- figures: [^\n]* -->\n(?:\|[^\n]*\n)+",
    re.S,
)
LINK = re.compile(r"\]\([^)]*\)")
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


def words(text: str) -> int:
    """Return the number of words; a bar of a table is not a word."""
    return len(re.findall(r"\S*\w\S*", LINK.sub("]", text)))


def written(page: Path) -> str:
    """Return a page without blocks of code and without tables that a program makes."""
    text = without_made(page.read_text())
    return TABLE.sub("", text) if page.stem.startswith("reproduction") else text


def without_made(text: str) -> str:
    return MADE.sub("", BLOCKS.sub("", text))


def cells(text: str) -> list[str]:
    """Return the cells of all tables that are written by hand."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [cell for line in lines for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page: Path) -> None:
    assert words(written(page)) <= PAGE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_are_short(page: Path) -> None:
    assert not [cell for cell in cells(written(page)) if words(cell) > CELL]


def test_the_documents_are_not_longer_than_they_may_be() -> None:
    pages = [page for page in PAGES if page.is_relative_to(DOCS)]
    assert sum(words(written(page)) for page in pages) <= ALL


def test_words_are_counted() -> None:
    assert words("| a | [b c](d.md) | - |") == 3
    text = "x\n```\na b\n```\n<!-- y: table -->\n| c |\n<!-- end of table -->\n| d `e\\|f` | g |\n"
    assert without_made(text).split() == ["x", "|", "d", "`e\\|f`", "|", "g", "|"]
    assert [one.strip() for one in cells(without_made(text))] == ["d `e\\|f`", "g"]
