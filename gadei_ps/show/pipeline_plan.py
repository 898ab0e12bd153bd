"""Output of `partition`: the plan's stages as a table, and their timeline as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from gadei_ps.show.counts import counted
from gadei_ps.show.tables import FittedTable, facts, size

LEAST_WIDTH, MOST_WIDTH = 40, 110  # columns of the picture
SLOWEST = 8  # columns of a mini-batch in the slowest stage
FORWARD, BACKWARD, IDLE = ("›", "cyan"), ("‹", "green"), ("·", "dim")
FULL = 0.05  # a smaller bubble needs no advice
SHORT_S = 1e-3  # for a mini-batch; Python computes for one stage at a time


def drawn(in_flight: int) -> int:
    """Mini-batches that the picture has room for."""
    return min(in_flight, MOST_WIDTH) + 2 * MOST_WIDTH // SLOWEST


def plan(made: Mapping[str, Any], passes: Sequence[Any], cores: int) -> RenderableType:
    """All of it. made: a plan as JSON. cores: of this process."""
    stages = made["stages"]
    slowest = max(one["total_s"] for one in stages)
    column = max(slowest / SLOWEST, 3 / made["mini_batches_per_s"] / MOST_WIDTH)
    return Group(
        _stages(stages),
        Text(),
        facts(_facts(made, slowest, cores)),
        Text(),
        Timeline([one["device"] for one in stages], passes, column),
    )


def _stages(stages: Sequence[Mapping[str, Any]]) -> FittedTable:
    """Narrow enough for 80 columns, unless something is brought from other devices."""
    times = ["forward", "backward", "transfer", "total"]
    if not any(one["transfer_s"] for one in stages):
        times.remove("transfer")
    numbers = ("parameters", *times, "idle", "memory")
    made = FittedTable(("", "device", "layers", *numbers), right=numbers)
    for number, one in enumerate(stages):
        first, last = one["first_layer"], one["end_layer"] - 1
        share = one["memory_bytes"] / one["memory_limit_bytes"]
        made.add_row(
            str(number),
            one["device"],
            str(first) if first == last else f"{first} to {last}",
            f"{one['parameters']:,}",
            *(_time(one[f"{name}_s"]) for name in times),
            f"{one['idle_share']:.0%}",
            f"{size(one['memory_bytes'])}, {share:.0%}",
        )
    return made


def _facts(made: Mapping[str, Any], slowest: float, cores: int) -> dict[str, str | Text]:
    in_flight, full = made["in_flight"], made["full_in_flight"]
    own = made["copy_s"] + made["step_s"]
    rows: dict[str, str | Text] = {
        "speed": (
            f"{made['mini_batches_per_s']:,.1f} mini-batches/s with {in_flight:,} in flight, "
            "without pushes and pulls"
        ),
        "bubble": f"{made['bubble_share']:.0%} of the time the slowest stage waits",
        "learner": (
            f"{_time(made['copy_s'])} to copy weights and {_time(made['step_s'])} for the "
            f"update, for each mini-batch; {size(made['learner_bytes'])} more on the host"
        ),
    }
    advice = []
    if made["left_out"]:
        advice.append(
            f"{', '.join(made['left_out'])} left out: nothing fits there, or it would make nothing "
            "faster"
        )
    if own > slowest:
        advice.append("the learner's own thread takes longer than the slowest stage")
    elif made["bubble_share"] > FULL and full is not None and full > in_flight:
        model = f"wsp:D=1,s_local={full - 1}"
        advice.append(f"--sync {model} fills the pipeline, if the memory is enough")
    elif len(made["stages"]) > 1 and slowest < SHORT_S:
        advice.append(
            "stages this short wait for each other's Python: larger mini-batches or fewer devices "
            "come closer to this speed"
        )
    hosts = [one["device"] for one in made["stages"] if one["device"].startswith("host")]
    threads = sum(int(one.partition(":")[2] or 0) for one in hosts)
    if threads > cores:
        advice.append(
            f"the stages on the host have {threads} threads for {counted(cores, 'core')}: at once "
            "they take longer than this"
        )
    for number, line in enumerate(advice):
        rows["note" if not number else " " * number] = line
    return rows


def _time(seconds: float) -> str:
    if seconds >= 0.1:  # not 100.0 ms, which is wider
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0"


class Timeline:
    """A row for each stage, and in it a block for each pass, with the mini-batch's number."""

    def __init__(self, devices: Sequence[str], passes: Sequence[Any], column: float) -> None:
        """passes: as learners.virtual.schedule.Pass. column: seconds."""
        labels = [f"{number} {device}" for number, device in enumerate(devices)]
        width = max(map(len, labels)) + 1
        self._labels = [one.ljust(width) for one in labels]
        self._passes = passes
        self._column = column

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST_WIDTH, min(MOST_WIDTH, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = min(MOST_WIDTH, options.max_width)
        for stage, label in enumerate(self._labels):
            yield Text(label) + self._row(stage, whole - len(label))
        signs = ", ".join(
            f"{sign} {what}"
            for (sign, _), what in ((FORWARD, "forward"), (BACKWARD, "backward"), (IDLE, "idle"))
        )
        yield Text(f"a column is {_time(self._column)}; {signs}", style="dim")

    def _row(self, stage: int, width: int) -> Text:
        cells = [IDLE] * width
        for one in self._passes:
            if one.stage != stage:
                continue
            begin, end = (round(at / 1e9 / self._column) for at in (one.begin, one.end))
            sign, style = BACKWARD if one.backward else FORWARD
            block = str(one.mini_batch).ljust(end - begin, sign)
            if len(block) > end - begin:
                block = sign * (end - begin)
            cells[begin:end] = [(cell, style) for cell in block]
        row = Text()
        for sign, style in cells[:width]:
            row.append(sign, style)
        return row
