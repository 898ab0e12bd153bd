"""The plots of docs/: drawn from the result files, so that they show what those say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Result = dict[str, Any]
DRAWN: dict[str, Callable[[Result, Any], None]] = {}


def draw(results: Path, directory: Path) -> Iterator[Path]:
    """Draws every plot whose result file is there; yields the files written."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, function in DRAWN.items():
        source = results / f"{name}.json"
        if source.exists():
            figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
            function(json.loads(source.read_text()), figure)
            path = directory / f"{name}.svg"
            # The same figures give the same file.
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            yield path
