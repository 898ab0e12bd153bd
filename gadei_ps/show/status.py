"""`gadei-ps status`: a job with its learners and the staleness of their gradients, or all jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps import metrics
from gadei_ps.metrics import Shown
from gadei_ps.show.counts import counted, rate
from gadei_ps.show.optimizer_line import optimizer
from gadei_ps.show.progress import NO_LOSS, making, no_loss
from gadei_ps.show.tables import FittedTable, age, alike, facts, size, when

SHOWN_S = 5.0  # a learner that others wait for is named after so long
RATE_S = 1.0  # window over which samples/s are taken
PHASE_STYLE = {"serving": "bold green", "draining": "bold yellow", "failed": "bold red"}
BAR_STYLE = "cyan"
BAR_WIDTH = 32
EIGHTHS = " ▏▎▍▌▋▊▉█"
SINGLE_BINS = 16  # bins 0 to 15 of the job's histogram hold one staleness each; then powers of two
SHOWN_BINS = (0, 1, 2, 3, 4, 8, SINGLE_BINS)  # first bin of each line, up to the powers of two


@dataclass
class Rates:
    """Samples per second of each learner, from counters that only grow.

    As long as no learner reports samples, gradients per second.
    """

    _before: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    _rate: dict[tuple[int, int], float] = field(default_factory=dict)
    _counted: str = ""

    def update(self, learners: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        """Return the rates by row; a learner seen for the first time has rate 0."""
        now = time.monotonic()
        rates = {}
        name = _counter(learners)
        if name != self._counted:
            self._before, self._rate, self._counted = {}, {}, name
        for learner in learners:
            key = (learner["row"], learner["generation"])
            then, count = self._before.setdefault(key, (now, learner[name]))
            if now - then >= RATE_S:
                self._rate[key] = (learner[name] - count) / (now - then)
                self._before[key] = (now, learner[name])
            rates[learner["row"]] = self._rate.get(key, 0.0)
        living = {(one["row"], one["generation"]) for one in learners}
        for known in (self._before, self._rate):
            for key in known.keys() - living:
                del known[key]
        return rates


def _counter(learners: Sequence[Mapping[str, Any]]) -> str:
    """The counter of learners that shows their speed."""
    return "samples" if any(one["samples"] for one in learners) else "applied"


def unit(learners: Sequence[Mapping[str, Any]]) -> str:
    """Return the unit of Rates for these learners."""
    return "samples/s" if _counter(learners) == "samples" else "gradients/s"


def job_status(status: Mapping[str, Any], rates: Mapping[int, float] | None = None) -> Group:
    """One job. rates: samples/s of each learner, by row, where they have been measured."""
    parts: list[RenderableType] = [facts(_facts(status, rates))]
    if not status["learners"]:
        return Group(*parts, "", Text("no learner is attached", style="dim"))
    parts += ["", learner_table(status, rates)]
    histograms = (one["staleness_histogram"] for one in status["learners"])
    counts = [sum(column) for column in zip(*histograms, strict=True)]
    if any(counts):
        parts += ["", histogram(counts)]
    return Group(*parts)


def _facts(status: Mapping[str, Any], rates: Mapping[int, float] | None) -> dict[str, str | Text]:
    model, work, applied = status["model"], status["work"], status["gradients_applied"]
    lines = counters(status)
    phase = (status["phase"], PHASE_STYLE.get(status["phase"], ""))
    changing = f" (changing to {status['sync_wanted']})" if status["sync_wanted"] else ""
    rows: dict[str, str | Text] = {
        "job": Text.assemble((status["job"], "bold"), ", ", phase),
        "configuration": f"{status['sync']}{changing}"
        + (f", {counted(status['shards'], 'shard')}" if model else ""),
        "optimizer": optimizer(status["settings"])
        + ("" if model else ", unless the first learner's script sets others"),
        "model": (
            f"{counted(model['values'], 'value')} in {counted(model['tensors'], 'tensor')}, "
            f"{size(model['bytes'])}"
            if model
            else "none yet: the first learner brings it"
        ),
        "gradients": lines.pop("gradients")
        + ("" if applied >= status["version"] else f"; version {status['version']:,}"),
    }
    learners = status["learners"]
    speed = f"{rate(sum(rates.values()))} {unit(learners)}" if rates else ""
    if status["samples"]:
        rows["samples"] = "; ".join(filter(None, (f"{status['samples']:,}", speed)))
    elif speed:
        rows["speed"] = speed
    if no_loss(learners):
        rows["loss"] = NO_LOSS.replace("no loss", "none")
    if status.get("started"):
        rows["started"] = f"{when(status['started'])}, {age(status['started'])} ago"
    if work["state"] != "none":
        rows["work"] = (
            f"epoch {min(work['epochs_done'] + 1, work['epochs'])} of {work['epochs']}, "
            f"{counted(work['batches'], 'batch', 'batches')} each, "
            f"{status['batches_requeued']:,} handed out again"
            + ("; waits until the job owns more batches" if work.get("waits") else "")
        )
    if why := {one["refused_because"] for one in status["learners"] if one["refused"]} - {""}:
        rows["refused"] = Text(f"a gradient that {', or that '.join(sorted(why))}", style="yellow")
    if begins := status.get("start"):
        rows["start"] = (
            f"waits until {counted(begins['of'], 'learner')} have come: {begins['learners']} there"
        )
    if status.get("making"):
        rows["memory to come"] = making(status["making"])
    standby = status.get("standby_pid") or status.get("standby_missing") or "none at the moment"
    rows["processes"] = (
        f"watchdog {status['watchdog_pid']}, server {status['server_pid']}, standby {standby}"
    ) + (f", fork server {fork_server}" if (fork_server := status.get("fork_server_pid")) else "")
    rows |= lines
    if written := checkpoints(status):
        rows["checkpoints"] = written
    rows |= _warnings(status)
    rows["memory"] = f"{size(status['shared_bytes'])} shared" + (
        f", {size(status['server_private_bytes'])} private to the server"
        if "server_private_bytes" in status
        else ""
    )
    return rows


def _warnings(status: Mapping[str, Any]) -> dict[str, Text]:
    """Return the lines that ask for attention, each with its name."""
    rows: dict[str, Text] = {}
    if status.get("checkpoint_warning"):
        rows["warning"] = Text(status["checkpoint_warning"], style="yellow")
    if status.get("server_stuck"):
        rows["server"] = Text(status["server_stuck"], style="yellow")
    if status.get("names_lost"):
        rows["warning"] = Text(
            "the job's segments have lost their names; stop the job (gadei-ps doctor explains why)",
            style="yellow",
        )
    if stands := [one for one in status["learners"] if one.get("others_stand_still")]:
        text = f"learner {stands[0]['row']} (pid {stands[0]['pid']}): all others are paused"
        rows["paused for"] = Text(text, style="yellow")
    if slow := [one for one in status["learners"] if (one.get("holds_up_s") or 0) >= SHOWN_S]:
        rows["waits for"] = Text("; ".join(map(_slow, slow)), style="yellow")
    return rows


def counters(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of metrics by name; lines of zeros are omitted, except `gradients`."""
    lines: dict[str, list[tuple[int, Shown]]] = {}
    for one in metrics.JOB:
        if (shown := one.shown) is not None:
            value = status.get(one.name, shown.base) - shown.base
            lines.setdefault(shown.line, []).append((value, shown))
    return {
        line: ", ".join(
            counted(value, shown.one, shown.several)
            for value, shown in numbers
            if value or shown.if_zero
        )
        for line, numbers in lines.items()
        if line == "gradients" or any(value for value, _ in numbers)
    }


def _slow(learner: Mapping[str, Any]) -> str:
    text = f"learner {learner['row']} (pid {learner['pid']}) for {learner['holds_up_s']:.0f} s"
    if learner["paused"]:
        return f"{text}, which has paused"
    if learner["killed_in_s"] is None:
        return text
    left = f"{learner['killed_in_s']:.0f} s"
    return f"{text}; killed in {left} if it neither pushes nor computes: see optimizer.pause()"


def checkpoints(status: Mapping[str, Any]) -> str:
    """Describe the checkpoints of a job; empty if none has been written or has failed."""
    last, failed = status.get("last_checkpoint") or {}, status["checkpoint_failures"]
    if not status["checkpoints"] and not failed:
        return ""
    text = (
        f"{status['checkpoints']:,} written; the newest is of version "
        f"{status['checkpoint_version']:,}"
    )
    if failed:
        text += f"; {failed:,} failed" + (f": {last['error']}" if "error" in last else "")
    return text


def learner_table(
    status: Mapping[str, Any], rates: Mapping[int, float] | None = None
) -> FittedTable:
    """One row for each learner of a job's status."""
    speed = unit(status["learners"])
    names = ["learner", "pid", speed, "applied", "queue", "staleness", "max", "loss"]
    if rates is None:
        names.remove(speed)
    made = FittedTable(names, right=names, dispensable=("max", "queue"))
    losses = alike([one["loss"] for one in status["learners"]])
    for one, loss in zip(status["learners"], losses, strict=True):
        cells = {
            "learner": str(one["row"]),
            "pid": str(one["pid"]),
            speed: rate((rates or {}).get(one["row"], 0.0)),
            "applied": f"{one['applied']:,}",
            "queue": str(one["queue"]),
            "staleness": f"{one['staleness_mean']:.1f}",
            "max": f"{one['staleness_max']:,}",
            "loss": loss,
        }
        made.add_row(*(cells[name] for name in names))
    return made


def histogram(counts: Sequence[int]) -> FittedTable:
    """Return gradients by staleness. counts: by bins; 0 to 15 are single, then powers of two."""
    numbers = ("staleness", "gradients", "share")
    made = FittedTable((*numbers, ""), right=numbers)
    firsts = [*SHOWN_BINS, *range(SINGLE_BINS + 1, len(counts))]
    bins = list(itertools.pairwise([*firsts, len(counts)]))  # of each line, to before the second
    sums = [sum(counts[first:last]) for first, last in bins]
    total, most = sum(sums), max(sums)
    for (first, last), gradients in zip(bins, sums, strict=True):
        name = _staleness(first, last, len(counts))
        made.add_row(
            name,
            f"{gradients:,}",
            f"{100 * gradients / total:.1f}%",
            Text(bar(gradients / most), style=BAR_STYLE),
        )
        if not any(counts[last:]):
            break
    return made


def _staleness(first: int, last: int, bins: int) -> str:
    """Return the range of a line: `3`, `8-15`, or `65536 and more` for the last bin."""
    low, beyond = _lowest(first), _lowest(last)
    if last == bins:
        return f"{low:,} and more"
    return str(low) if beyond == low + 1 else f"{low:,}-{beyond - 1:,}"


def _lowest(bin_: int) -> int:
    """The least staleness that a bin counts."""
    return bin_ if bin_ < SINGLE_BINS else 1 << (bin_ - SINGLE_BINS + 4)


def bar(part: float, width: int = BAR_WIDTH) -> str:
    """A bar in eighths of a column; what is not 0 is seen."""
    eighths = max(round(part * width * 8), 1) if part else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def statuses(reports: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line for each job."""
    if not reports:
        return Text("no job is running", style="dim")
    numbers = ("learners", "gradients", "dropped", "samples", "epoch", "memory")
    words = ("phase", "sync", "optimizer")
    dispensable = ("dropped", "samples", "memory", "optimizer", "epoch", "sync")
    made = FittedTable(
        ("job", *words, *numbers), right=numbers, whole=words, dispensable=dispensable
    )
    for one in reports:
        work = one["work"]
        made.add_row(
            one["job"],
            Text(one["phase"], style=PHASE_STYLE.get(one["phase"], "")),
            one["sync"],
            one["optimizer"],
            str(len(one["learners"])),
            f"{one['gradients_applied']:,}",
            f"{one['gradients_dropped']:,}",
            f"{one['samples']:,}",
            f"{work['epochs_done']}/{work['epochs']}" if work["state"] != "none" else "",
            size(one["shared_bytes"]),
        )
    return made
