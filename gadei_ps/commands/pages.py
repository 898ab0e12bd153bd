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
    """Return the page of this name, or the pages with all words, those in titles first."""
    named = [page for page in pages if [page.name] == list(words)]
    if named:
        return named
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}", re.I) for word in words]
    found = [page for page in pages if all(one.search(page.text) for one in patterns)]
    return sorted(found, key=lambda page: not all(one.search(page.title) for one in patterns))
