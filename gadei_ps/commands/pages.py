"""Pages of the documentation, as the wheel or a checkout has them."""

from __future__ import annotations

import contextlib
import pydoc
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

PATTERNS = ("*.md", "learn/*.md", "scripts/*.md", "reference/*.md", "reference/*.rst")
ROOT_PAGES = ("CHANGELOG", "CONTRIBUTING", "README")  # beside docs/ in a checkout


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
            found = [path for pattern in PATTERNS for path in place.glob(pattern)]
            texts = {str(path.relative_to(place).with_suffix("")): path for path in found}
            for name in ROOT_PAGES:
                if (path := place.parent / f"{name}.md").is_file():
                    texts[name] = path
            pages = [Page(name, _text(path)) for name, path in sorted(texts.items())]
            return [page for page in pages if page.text.startswith("# ")]
    raise UsageError(f"no documentation in {' or '.join(map(str, PLACES))}; reinstall gadei-ps")


def _text(path: Path) -> str:
    """Return the text of a page; pages of the API (.rst) are made Markdown, as the others are."""
    text = path.read_text("utf-8")
    if path.suffix != ".rst":
        return text
    for line, mark in (("=", "#"), ("-", "##")):
        text = re.sub(rf"^(.+)\n{line}+$", rf"{mark} \1", text, flags=re.M)
    module = r"^\.\. automodule:: (\S+)(?:\n   :.*)*"
    return re.sub(module, r"`gadei-ps docs \1` shows this module.", text, flags=re.M)


def _docstrings(name: str) -> str:
    """Describe a module, class or function. Raises ImportError, or UsageError without PyTorch."""
    try:
        return pydoc.plain(pydoc.render_doc(name, "%s"))
    except pydoc.ErrorDuringImport as error:
        raise UsageError(f"{name} cannot be imported: {error.value}") from None


def search(pages: Sequence[Page], words: Sequence[str]) -> list[Page]:
    """Return the page of this name, the docstrings of this module, or the pages with all words.

    First are those with most of the words in the title, then with all in one heading, then in one
    line, such as a row of a table; among equals, those in which the words are more frequent.
    """
    name = " ".join(words)
    named = [page for page in pages if page.name.lower() == name.lower()]
    if named:
        return named
    if name.startswith("gadei_ps."):
        with contextlib.suppress(ImportError):
            return [Page(name, _docstrings(name))]
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
