"""SVG picture of a terminal with the output of a command."""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType
from rich.measure import Measurement

LEAST_WIDTH, MOST_WIDTH = 60, 120  # columns
# rich names a font on a server of others; a picture must not make its viewer ask there.
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
NAME = (
    "gadei-ps"  # prefix of the picture's CSS classes; fixed, so that equal tables are equal files
)


def svg(shown: RenderableType, title: str) -> str:
    """The picture, as wide as its longest line. title: above it, where a window has its name."""
    console = Console(
        record=True,
        width=MOST_WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    width = Measurement.get(console, console.options, shown).maximum
    console.width = min(max(width, LEAST_WIDTH), MOST_WIDTH)
    console.print(shown)
    return WEB_FONT.sub("", console.export_svg(title=title, unique_id=NAME))
