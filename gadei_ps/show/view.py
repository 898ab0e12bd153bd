"""Output of the commands: lists, checks and summaries on standard output."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gadei_ps.show.counts import counted, rate
from gadei_ps.show.tables import FittedTable, age, duration, facts, size, when

LEARNERS = "command of the learners"
STATE_STYLE = {"running": "green", "stale": "yellow", "silent": "red", "foreign": "red"}


def jobs(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """`ls`."""
    if not rows:
        return Text("no jobs", style="dim")
    numbers = ("watchdog", "server", "learners", "memory")
    made = FittedTable(
        ("job", "state", "started", "age", *numbers),
        right=("age", *numbers),
        whole=("state", "started"),
        dispensable=("watchdog", "memory", "started"),
    )
    commands = FittedTable(("job", LEARNERS), cut=LEARNERS)
    for one in rows:
        made.add_row(
            one["name"],
            Text(one["state"], style=STATE_STYLE.get(one["state"], "")),
            when(one["started"]) if one["started"] else "",
            age(one["started"]) if one["started"] else "",
            *(
                "" if one[name] is None else str(one[name])
                for name in ("watchdog_pid", "server_pid", "learners")
            ),
            size(one["shared_bytes"]),
        )
        if one["command"]:
            commands.add_row(one["name"], one["command"])
    parts: list[RenderableType] = [made, "", commands] if commands.rows else [made]
    if any(one["state"] == "stale" for one in rows):
        parts.append(
            Text(
                "a stale job is still in memory: serve, run or export continues with it, "
                "gadei-ps gc JOB removes it",
                style="dim",
            )
        )
    if any(one["state"] == "foreign" for one in rows):
        parts.append(
            Text(
                "another file has the name of a foreign job's file: gadei-ps gc lists it",
                style="dim",
            )
        )
    return Group(*parts)


# -- doctor and gc --------------------------------------------------------------------------------

LEVEL_STYLE = {"ok": "green", "warning": "yellow", "error": "bold red"}


def checks(rows: Sequence[Mapping[str, Any]]) -> FittedTable:
    """`doctor`."""
    made = FittedTable(("", "check", "found", "what to do"), whole=("", "check"))
    for one in rows:
        made.add_row(
            Text(one["level"], style=LEVEL_STYLE[one["level"]]),
            one["name"],
            Text(one["finding"]),
            Text(one["remedy"]),
        )
    return made


def removed(result: Mapping[str, Any]) -> str:
    """`gc`, one line for each thing and one for the sum."""
    lines = [
        f"{'would remove' if result['dry_run'] else 'removed'} {one['kind']} {one['path']}"
        + (f" ({size(one['bytes'])})" if one["bytes"] else "")
        for one in result["removed"]
    ]
    if not lines:
        return "nothing to remove"
    verb = "would be freed" if result["dry_run"] else "freed"
    return "\n".join([*lines, f"{size(result['bytes'])} {verb}"])


# -- summaries ------------------------------------------------------------------------------------


def trained(summary: Mapping[str, Any], test_file: str | None) -> Table:
    """The end of `train`."""
    held_out = counted(summary["held_out_rows"], "held-out row")
    accuracy = f"{summary['validation_accuracy']:.4f} on {held_out}"
    if summary["test_accuracy"] is not None:
        accuracy = f"{summary['test_accuracy']:.4f} on {test_file}, {accuracy}"
    directory = summary["model_dir"]
    rows = {
        "accuracy": f"{accuracy} (epoch {summary['measured_epoch']:g})",
        "epochs": f"{summary['epochs']:g} of {summary['planned_epochs']:,}",
        "speed": (
            f"{summary['samples_per_s']:,.0f} samples/s with "
            f"{counted(summary['learners'], 'learner')}{_where(summary)}; "
            f"{counted(summary['gradients_applied'], 'gradient')} applied, "
            f"{summary['gradients_dropped']:,} dropped"
        ),
        "time": (
            f"{duration(summary['seconds'])}, of them {duration(summary['training_seconds'])} "
            "training"
        ),
        "model": directory,
        "try": f'gadei-ps predict {shlex.quote(directory)} "a sentence of your own"',
    }
    if summary["learner_deaths"]:
        rows["learners"] = f"{summary['learner_deaths']} died and were replaced"
    return facts(rows)


def _where(summary: Mapping[str, Any]) -> str:
    if "machines" not in summary:
        return ""
    machines = counted(summary["machines"], "machine")
    return f" on {machines}, {counted(summary['rounds'], 'round')}"


def ran(summary: Mapping[str, Any]) -> str:
    """The end of `run`, in one line."""
    parts = [f"{counted(summary['gradients_applied'], 'gradient')} applied"]
    parts += [
        f"{summary[f'gradients_{what}']:,} {what}"
        for what in ("dropped", "refused")
        if summary[f"gradients_{what}"]
    ]
    if summary["samples"] and summary["samples_per_s"]:
        parts.append(f"{rate(summary['samples_per_s'])} samples/s")
    elif summary["gradients_per_s"]:
        parts.append(f"{rate(summary['gradients_per_s'])} gradients/s")
    if summary["restarts"]:
        parts.append(f"{counted(summary['restarts'], 'learner')} started again")
    saved = f"; weights in {summary['out']}" if summary["out"] else ""
    return f"job {summary['job']}: {', '.join(parts)}, {summary['seconds']:.1f} s{saved}"


def kept(summary: Mapping[str, Any], again: str = "the same command continues it") -> str:
    """The line on a job that has failed and is kept; empty if nothing of it is left.

    again: what another start does with a job in memory.
    """
    version, where, job = summary["kept_version"], summary["kept_in"], summary["job"]
    if where is None:
        return ""
    source = job if where == "memory" else shlex.quote(where)
    export = f"gadei-ps export {source} {job}.safetensors"
    if where == "memory":
        return (
            f"job {job} stays in memory at version {version:,}: {again}, "
            f"{export} writes its weights, gadei-ps gc {job} removes it"
        )
    return (
        f"the newest checkpoint of job {job} has version {version:,}: the same command continues "
        f"with it, {export} writes its weights"
    )


def stopped(report: Mapping[str, Any]) -> str:
    """The end of `stop`, in one line."""
    return (
        f"job {report['job']} has stopped: "
        f"{counted(report['gradients_applied'], 'gradient')} applied, "
        f"{report['gradients_dropped']:,} dropped, {report['gradients_refused']:,} refused, "
        f"{counted(report['samples'], 'sample')}"
    )


def checkpointed(outcome: Mapping[str, Any]) -> str:
    """Return the output of `checkpoint`."""
    return (
        f"checkpoint of version {outcome['version']:,}: {outcome['path']} "
        f"({size(outcome['bytes'])}; training paused {outcome['pause_ms']:.1f} ms)"
    )


def exported(result: Mapping[str, Any]) -> str:
    """Return the output of `export`."""
    return (
        f"{counted(result['tensors'], 'tensor')} of version {result['version']} written: "
        f"{result['out']} "
        f"(from {result['from']})"
    )


def killed(sent: Mapping[str, Any]) -> str:
    """Return the output of `kill`."""
    which = sent["role"] if sent["row"] is None else f"learner {sent['row']}"
    ended = ", which is gone" if sent["ended"] else ""
    return f"sent {sent['signal']} to the {which} of job {sent['job']}: pid {sent['pid']}{ended}"


def chaos_summary(report: Mapping[str, Any]) -> Table:
    """The end of `chaos`."""
    hits = [
        f"{number:,} {role}{what}"
        for kind, what in (("kills", ""), ("stops", " stopped"))
        for role, number in report[kind].items()
        if number or kind == "kills"
    ]
    rows = {"killed": f"{', '.join(hits)} in {duration(report['seconds'])} (seed {report['seed']})"}
    if report["missed"]:
        rows["not tested"] = f"{', '.join(report['missed'])}: never hit; use a longer --for"
    rows |= {
        "failover": _spread(report["failover_ms"], "kill to the next applied gradient"),
        "restart": _spread(
            report["restart_ms"], "kill to the next applied gradient, without a standby"
        ),
        "activation": _spread(report["activation_ms"], "kill to the next active server"),
        "ring reclaimed": _spread(report["reclaim_ms"], "after a learner's death"),
    }
    consumed = f"{report['applied']:,} applied, {report['dropped']:,} dropped"
    if report["own_job"]:
        rows["gradients"] = f"{report['published']:,} published, {consumed}"
        if not report["published"]:
            rows["gradients"] += ": nothing was tested; use a longer --for"
        rows["lost"] = f"{report['lost']:,}"
        rows["applied twice"] = f"{report['applied_twice']:,}"
        rows["torn"] = (
            f"{counted(report['torn_values'], 'value')}, counted in the weights themselves"
        )
    else:
        rows["gradients"] = f"{consumed}, by the job's counters"
        rows["lost"] = report["ledger"]
    return facts(rows)


def _spread(times: Mapping[str, Any], what: str) -> str:
    if not times["samples"]:
        return "not measured"
    numbers = ", ".join(f"{name} {times[name]:.1f}" for name in ("p50", "p99", "max"))
    return f"{numbers} ms {what} ({counted(times['samples'], 'time')})"
