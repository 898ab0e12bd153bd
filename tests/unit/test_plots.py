"""Plots: each contender has one colour in all of them, and a bar is as long as its figure."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib import colors, pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gadei_ps.benchmarks import plots, suite
from gadei_ps.benchmarks.reproduce import order_statistics, part
from gadei_ps.benchmarks.reproduce.__main__ import PARTS, redraw
from gadei_ps.cli.research import ProblemName, simulate
from gadei_ps.show import plot_style
from gadei_ps.show.colours import SYNC, colours

DOCS = suite.RESULTS.parents[1] / "docs" / "plots"
RED = colors.to_rgb("tab:red")


def test_names_of_one_plot_have_colours_of_their_own() -> None:
    many = [*SYNC, "ssp:s=1", "ssp:s=3", "elastic-bsp:R=15", "other"]
    found = colours(many)
    assert len(set(found.values())) == len(many)
    assert {name: found[name] for name in SYNC} == SYNC
    assert colours(["ssp:s=3"]) == {"ssp:s=3": SYNC["ssp"]}
    assert len(colours(map(str, range(50)))) == 50


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Figure]]:
    """The figures that are saved, by the name of their file."""
    found: dict[str, Figure] = {}
    svg = plot_style.svg

    def keep(figure: Figure, salt: str) -> str:
        found[f"{Path(salt).stem}.svg"] = figure
        return svg(figure, salt)

    monkeypatch.setattr(plot_style, "svg", keep)
    monkeypatch.setattr(part, "PLOTS", tmp_path)
    yield found
    pyplot.close("all")


def lines(axes: Axes) -> list[Any]:
    """The curves of one axis: all lines but single points and marks."""
    return [one for one in axes.lines if len(np.atleast_1d(one.get_xdata())) > 2]


def named(figure: Figure) -> Iterator[tuple[str, Any]]:
    """Return the names of a legend, with their colours."""
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            patches = getattr(handle, "patches", None)
            shades = {one.get_facecolor() for one in patches or ()}
            if patches is None and hasattr(handle, "get_color"):
                yield name, colors.to_rgba(handle.get_color())
            elif len(shades) == 1:  # bars of one contender
                yield name, *shades


def faults(figure: Figure) -> list[str]:
    """Return what would mislead a reader."""
    found = []
    for axes in figure.axes:
        curves = lines(axes)
        shades = [colors.to_rgba(one.get_color(), one.get_alpha()) for one in curves]
        if len(set(shades)) < len(shades):
            found.append("two lines of an axis share a colour")
        if len(curves) > 1 and any(str(one.get_label()).startswith("_") for one in curves):
            found.append("a line has no name")
        for bars in axes.containers:
            along = getattr(bars, "orientation", None)
            scale, limits = (
                (axes.get_xscale(), axes.get_xlim())
                if along == "horizontal"
                else (axes.get_yscale(), axes.get_ylim())
            )
            if along and (scale != "linear" or limits[0] != 0):
                found.append("bars on an axis that is not linear or does not begin at zero")
        tops = [bars[0].get_facecolor() for bars in axes.containers if hasattr(bars, "patches")]
        if len(set(tops)) < len(tops):
            found.append("bars of two contenders share a colour")
    return found


def check(figures: dict[str, Figure]) -> None:
    """Each plot alone, and the contenders' colours in all of them."""
    assert figures
    assert {name: found for name in figures if (found := faults(figures[name]))} == {}
    known: dict[str, Any] = {}
    for figure in figures.values():
        for name, colour in named(figure):
            assert known.setdefault(name, colour) == colour, name
            if not name.startswith(plots.OURS):
                assert colour[:3] != RED, name


def test_benchmarks_and_the_reproduction(drawn: dict[str, Figure], tmp_path: Path) -> None:
    list(plots.draw(suite.RESULTS, tmp_path))
    redraw(PARTS)
    parts = [importlib.import_module(f"gadei_ps.benchmarks.reproduce.{one}") for one in PARTS]
    measured = [name for name in plots.DRAWN if (suite.RESULTS / f"{name}.json").exists()]
    assert len(drawn) == len(measured) + sum(hasattr(one, "draw") for one in parts)
    times = 1 + np.random.default_rng(0).random((3, 10))
    shown = dict.fromkeys(order_statistics.SHOWN, (times[0], times[1], times[2]))
    one = order_statistics.Measured(order_statistics.Cluster(10, 2), None, {}, shown)  # type: ignore[arg-type]
    order_statistics._plot([one])
    check(drawn)
    for name in ("nlc", "ingest", "latency", "scale"):
        assert all(axes.collections for axes in drawn[f"{name}.svg"].axes), "no spread is drawn"
    for name in drawn:
        again, kept = (tmp_path / name).read_text(), (DOCS / name).read_text()
        if name == "cutoff_order_statistics.svg":
            continue  # drawn from other times here
        if f"Matplotlib v{matplotlib.__version__}" in kept:
            assert again == kept, f"{name} is not that of the results: draw it again"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.name)
def test_plots_of_the_documents_have_the_style(path: Path) -> None:
    """Also those of the simulator, and of measurements that are not repeated here."""
    drawn_part = path.read_text().partition("</style>")[2]
    assert any(shade in drawn_part for shade in (plot_style.GRID, plot_style.DARK[plot_style.GRID]))
    assert "#cccccc" not in drawn_part  # the frame of matplotlib's own legends


@pytest.mark.parametrize("loss", [None, ProblemName.CONVEX])
def test_the_simulator(drawn: dict[str, Figure], tmp_path: Path, loss: ProblemName | None) -> None:
    models = ["bsp", "ssp:1", "ssp:3", "asp", "elastic-bsp", "cutoff:by=order", "wsp:0"]
    assert simulate(models, learners=3, iterations=5, loss=loss, plot=tmp_path / "a.svg") == 0
    assert all(not faults(figure) for figure in drawn.values())
    if loss:
        check(drawn)


def test_dark_pages_have_readable_colours() -> None:
    """Every colour is far from the paper behind it, on light and on dark pages."""
    figure = Figure()
    figure.subplots().plot([1, 2, 3], color="black")
    light = plot_style.svg(figure, "x")
    dark = plot_style.dark(light)
    assert "@media" not in dark and plot_style.INK not in dark and "</style>" in dark
    assert light == plot_style.svg(figure, "x")
    shades = {*plots.COLOURS.values(), *SYNC.values(), plot_style.INK}
    for paper, replaced in (
        (plot_style.PAPER, {}),
        (plot_style.DARK[plot_style.PAPER], plot_style.DARK),
    ):
        for shade in shades:
            hexed = colors.to_hex(shade)
            assert _contrast(paper, replaced.get(hexed, hexed)) > 1.6, (paper, shade)


def _contrast(one: str, other: str) -> float:
    """The ratio of luminances, as the Web Content Accessibility Guidelines define it."""

    def luminance(shade: str) -> float:
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in colors.to_rgb(shade)
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _shared(axes: Axes) -> None:
    for _ in range(2):
        axes.plot([1, 2, 3], [1, 2, 3], color="tab:blue", label="x")


def _logarithmic(axes: Axes) -> None:
    axes.bar(["x", "y"], [1, 100])
    axes.set_yscale("log")


def _cut(axes: Axes) -> None:
    axes.barh(["x", "y"], [90, 100])
    axes.set_xlim(left=80)


def _nameless(axes: Axes) -> None:
    axes.plot([1, 2, 3], [[1, 2], [2, 3], [3, 4]])


@pytest.mark.parametrize("draw", [_shared, _logarithmic, _cut, _nameless])
def test_what_misleads_is_found(draw: Callable[[Axes], None]) -> None:
    figure = Figure()
    draw(figure.subplots())
    assert faults(figure)


def test_a_contender_without_a_colour_is_refused() -> None:
    result = json.loads((suite.RESULTS / "ingest.json").read_text())
    result["rows"][0]["contender"] = "stranger"
    with pytest.raises(KeyError, match="stranger"):
        plots.DRAWN["ingest"](result, Figure())
