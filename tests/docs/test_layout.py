"""Pages are rendered as written: tables are whole, no line is a list item by accident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts),
]
BLOCKS = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.M | re.S)
ITEM = re.compile(r" *[-*] ")
SEPARATOR = re.compile(r"\|(?: *:?-+:? *\|)+")


def paragraphs(text: str) -> list[list[str]]:
    """Return the lines between blank lines, without blocks of code."""
    found = re.split(r"\n\s*\n", BLOCKS.sub("", text))
    return [[line for line in one.split("\n") if line] for one in found]


def rows_without_head(text: str) -> list[str]:
    """Return the first rows of tables that have no header and no separator."""
    return [
        line
        for lines in paragraphs(text)
        for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        if line.startswith("|") and not before.startswith("|") and not SEPARATOR.fullmatch(after)
    ]


def accidental_items(text: str) -> list[str]:
    """Return lines that begin like an item within a sentence. No list here has plus signs."""
    found = []
    for lines in paragraphs(text):
        first = next((place for place, line in enumerate(lines) if ITEM.match(line)), 0)
        if first and not lines[first - 1].endswith((".", ":", "-->")):
            found.append(lines[first])
        found += [line for line in lines if re.match(r" *\+ ", line)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert not rows_without_head(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_a_paragraph_is_a_list_item(page: Path) -> None:
    assert not accidental_items(page.read_text())


def test_faults_are_found() -> None:
    table = "| a |\n| --- |\n| b |\n"
    assert rows_without_head(f"Text.\n\n{table}\n| c |\n\n{table}") == ["| c |"]
    items = "- w is p\n  + 1, or q\n- 2\n"
    assert accidental_items(f"{items}\nis q\n- 1\n\nOf these:\n- r\n- s\n") == [
        "  + 1, or q",
        "- 1",
    ]
