"""The table and the plot of `gadei-ps simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps.errors import UsageError
from gadei_ps.show import plot_style, tables
from gadei_ps.show.colours import colours

Result = Mapping[str, Any]

# The tables: by header, how str.format writes the cells.
SPEEDS = {
    "model": "{model}",
    "seconds": "{seconds:,.1f}",
    "gradients /s": "{gradients_per_s:,.4g}",
    "of oracle": "{oracle_share:.1%}",
    "updates /s": "{updates_per_s:,.4g}",
    "waiting": "{waiting_share:.1%}",
    "s / iteration": "{waiting_s_per_iteration:.3g}",
    "abandoned": "{given_up:,}",
    "lost s": "{lost_s:,.1f}",
}
STALENESS = {
    "staleness": "{model}",
    "mean": "{staleness[mean]:,.1f}",
    "50%": "{staleness[p50]:,}",
    "90%": "{staleness[p90]:,}",
    "99%": "{staleness[p99]:,}",
    "max": "{staleness[max]:,}",
    "dropped": "{dropped:,}",
}
DEATHS = {"deaths": "{deaths:,}", "joins": "{joins:,}", "iterations lost": "{lost_iterations:,}"}
LOSSES = {
    "learning": "{model}",
    "loss at the end": "{last[loss]:.4f}",
    "least loss": "{least[loss]:.4f}",
    "at": "{least[seconds]:,.1f} s",
    "accuracy at the end": "{last[accuracy]:.1%}",
}


def render(result: Result) -> RenderableType:
    """The result of compare.compare(), with its setting, for people."""
    best = result["oracle"]
    rows = {
        "learners": f"{result['learners']:,}",
        "run times": f"{result['times']}, seed {result['seed']}",
        "oracle": f"{best['gradients_per_s']:,.4g} gradients/s, "
        f"{best['mean_cutoff']:,.1f} of {result['learners']:,} a superstep",
    }
    speeds = tables.formatted(SPEEDS, result["models"], ("lost s", "abandoned"))
    parts: list[RenderableType] = [tables.facts(rows), "", speeds, "", _staleness(result)]
    if any(one["curve"] for one in result["models"]):
        parts += ["", _losses(result)]
    early = [one for one in result["models"] if one["ended"] != "done"]
    parts += [Text(f"{one['model']} ended early: {one['ended']}") for one in early]
    parts += ["", Text(f"virtual time; it took {result['wall_s']:.1f} s", style="dim")]
    return Group(*parts)


def _staleness(result: Result) -> RenderableType:
    died = any(one["deaths"] or one["joins"] for one in result["models"])
    return tables.formatted(STALENESS | (DEATHS if died else {}), result["models"])


def _losses(result: Result) -> RenderableType:
    rows = []
    for one in result["models"]:
        if curve := one["curve"]:
            least = min(curve, key=lambda point: float(point["loss"]))
            rows.append({"model": one["model"], "last": curve[-1], "least": least})
    return tables.formatted(LOSSES, rows)


def check_plot(path: Path) -> None:
    """Raise UsageError if plot() could not write this file. Call it before the simulation."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise UsageError(f"{path}: {what}; name another file for --plot")
    try:
        from matplotlib import backend_bases
    except ModuleNotFoundError:
        raise UsageError("--plot needs matplotlib: pip install 'gadei-ps[plot]'") from None
    known = backend_bases.FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise UsageError(f"{path}: give --plot a name that ends in .svg, .png or .pdf")


def plot(result: Result, path: Path) -> None:
    """Draw loss against time, if weights were trained, else speed and staleness.

    The ending of the file's name gives the format, such as .svg. Call check_plot() before. Raises
    UsageError.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(plot_style.STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        if any(one["curve"] for one in result["models"]):
            _draw_losses(result, figure)
        else:
            _draw_speeds(result, figure)
    try:
        if path.suffix == ".svg":
            path.write_text(plot_style.svg(figure, "gadei-ps"))
        else:
            with matplotlib.rc_context(plot_style.STYLE):
                figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name another file for --plot") from None
    except ValueError as error:
        raise UsageError(f"{path}: {str(error).splitlines()[0]}") from None


def _draw_losses(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    colour = colours(one["model"] for one in result["models"])
    for one in result["models"]:
        points = [(point["seconds"], point["loss"]) for point in one["curve"]]
        axes.plot(*zip(*points, strict=True), label=one["model"], color=colour[one["model"]])
    axes.set_xlabel("virtual time, s")
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()


def _draw_speeds(result: Result, figure: Any) -> None:
    names = [one["model"] for one in result["models"]]
    found = colours(names)
    colour = [found[name] for name in names]
    left, middle, right = figure.subplots(1, 3)
    left.barh(names, [one["gradients_per_s"] for one in result["models"]], color=colour)
    left.axvline(result["oracle"]["gradients_per_s"], color="black", linestyle="--", label="oracle")
    left.set_xlabel("gradients/s")
    left.legend(fontsize=8)
    done = [0.0 for _ in names]
    for key, label, shade in (("waiting_share", "waiting", 1.0), ("lost_share", "lost", 0.45)):
        parts = [one[key] for one in result["models"]]
        middle.barh(names, parts, left=done, color=colour, alpha=shade, label=label)
        done = [a + b for a, b in zip(done, parts, strict=True)]
    middle.set_xlabel("share of the learners' time")
    middle.set_yticklabels([])
    middle.legend(fontsize=8)
    for key, shade in (("p99", 0.35), ("p50", 1.0)):
        parts = [one["staleness"][key] for one in result["models"]]
        right.barh(names, parts, color=colour, alpha=shade, label=key)
    right.set_xlabel("staleness, gradients")
    right.set_yticklabels([])
    right.legend(fontsize=8)
    for axes in (left, middle, right):
        axes.invert_yaxis()
