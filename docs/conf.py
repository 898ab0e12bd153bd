"""Sphinx: `make docs`."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any, Final

project = "gadei-ps"
author = "the authors of gadei-ps"
project_copyright = author
release = importlib.metadata.version("gadei-ps")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gadei-ps {release}"

myst_heading_anchors = 4  # as GitHub makes them, for links such as memory.md#out-of-memory

default_role = "code"  # docstrings write `name` as in Markdown
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Their modules are described where they are not installed.
autodoc_mock_imports = ["cupy", "jax", "keras"]


def _literal_blocks(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """An indented paragraph of a docstring is code or a table, not a quotation."""
    made: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not literal and made and not made[-1]:
            made += ["::", ""]
            literal = True
        elif line and not indented:
            literal = False
        made.append(line)
    lines[:] = made


ROOT: Final = Path(__file__).parents[1]
# Pages that are files of the repository's root.
ROOT_PAGES: Final = {
    "readme": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}


# The variant for light pages also adapts to dark ones.
PICTURE: Final = re.compile(r'<picture>.*?src="docs/([^"]+)" alt="([^"]*)">\s*</picture>', re.S)


def _root_page(app: Any, name: str, source: list[str]) -> None:
    """Replace the text of such a page; its links are written for the root."""
    if name in ROOT_PAGES:
        text = PICTURE.sub(r"![\2](docs/\1)", (ROOT / ROOT_PAGES[name]).read_text())
        source[0] = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", _moved, text)


def _moved(link: re.Match[str]) -> str:
    text, target = link.groups()
    for name, file in ROOT_PAGES.items():
        if target == file:
            return f"[{text}]({name}.md)"
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')})"
    return text if target.endswith(".md") else f"[{text}](../{target})"  # no page of the site


def setup(app: Any) -> None:
    app.connect("source-read", _root_page)
    app.connect("autodoc-process-docstring", _literal_blocks)
