"""Pages of the documentation, as the wheel or a checkout has them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gadei_ps.errors import UsageError

PLACES = (
    Path(__file__).resolve().parents[2] / "docs",  # of a checkout
    Path(sys.prefix) / "share" / "doc" / "gadei-ps",  # pyproject.toml
)

FOLDERS = ("", "learn/", "scripts/")


class Page(NamedTuple):
    """A page of the documentation. name: its path without the suffix."""

    name: str
    text: str

    @property
    def title(self) -> str:
        """The first heading, without its markup."""
        heading = re.match(r"# (.+)", self.text)
        return heading[1].replace("`", "") if heading else self.name


def every() -> list[Page]:
    """Return all pages by their names. Raises UsageError."""
    for place in PLACES:
        if (place / "glossary.md").is_file():
            found = [one for folder in FOLDERS for one in place.glob(f"{folder}*.md")]
            pages = [
                Page(str(path.relative_to(place).with_suffix("")), path.read_text("utf-8"))
                for path in sorted(found)
            ]
            return [page for page in pages if page.text.startswith("# ")]
    raise UsageError(f"no documentation in {' or '.join(map(str, PLACES))}; reinstall gadei-ps")


def search(pages: Sequence[Page], words: Sequence[str]) -> list[Page]:
    """Return the page of this name, or the pages with all words.

    First are those with most of the words in the title, then with all in one heading, then in one
    line, such as a row of a table; among equals, those in which the words are more frequent.
    """
    named = [page for page in pages if [page.name] == list(words)]
    if named:
        return named
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}", re.I) for word in words]

    def has_all(text: str) -> bool:
        return all(one.search(text) for one in patterns)

    def rank(page: Page) -> tuple[bool, bool, bool, float]:
        lines = page.text.splitlines()
        in_heading = any(has_all(one) for one in lines if one.startswith("#"))
        count = sum(len(one.findall(page.text)) for one in patterns)
        in_line = any(map(has_all, lines))
        in_title = sum(bool(one.search(page.title)) for one in patterns) > len(patterns) / 2
        return not in_title, not in_heading, not in_line, -count / len(page.text)

    return sorted((page for page in pages if has_all(page.text)), key=rank)
