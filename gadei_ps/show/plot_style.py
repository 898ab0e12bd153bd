"""The style of all plots, and SVG that is readable on light and on dark pages."""

from __future__ import annotations

import io
from typing import Any

PAPER, INK, GRID = "#ffffff", "#1f2328", "#d8dee4"
DARK = {
    PAPER: "#0d1117",
    INK: "#e6edf3",
    GRID: "#30363d",
    "#eef2f7": "#161b22",  # an area
    "#000000": "#e6edf3",
    "#000080": "#79a8ff",  # navy
    "#006400": "#5fbf5f",  # darkgreen
    "#4b0082": "#b58cff",  # indigo
    "#8b0000": "#ff7b72",  # darkred
}
"""Colours on light pages, and those in their place on dark ones. Other colours suit both."""
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
}
"""Settings of matplotlib; a plot is made and saved with them in force."""


def svg(figure: Any, salt: str) -> str:
    """Return the figure as SVG that adapts to the page.

    salt: makes the file's identifiers, so that the same figure gives the same file.
    """
    import matplotlib

    made = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure.savefig(made, format="svg", metadata={"Date": None})
    return adapted(made.getvalue())


def adapted(text: str) -> str:
    """Return the SVG with the colours of DARK where the viewer prefers dark pages."""
    rules = [
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    media = "\n".join(["", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>"])
    return text.replace("</style>", media, 1)


def dark(text: str) -> str:
    """Return what svg() has made in the colours of dark pages alone."""
    begin, _, rest = text.partition("\n@media ")
    text = begin + "</style>" + rest.partition("</style>")[2]
    for light, colour in DARK.items():
        text = text.replace(light, colour)
    return text
