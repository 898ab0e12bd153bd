"""Sphinx: `make docs`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

project = "gadei-ps"
author = "the authors of gadei-ps"
project_copyright = author
release = importlib.metadata.version("gadei-ps")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gadei-ps {release}"

myst_heading_anchors = 4  # as GitHub makes them, for links such as operations.md#memory

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


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _literal_blocks)
