"""Output of the commands of `gadei-ps group`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from gadei_ps.show.counts import counted
from gadei_ps.show.tables import FittedTable, duration

STATE_STYLE = {
    "training": "green",
    "trained": "green",
    "starting": "yellow",
    "away": "red",
    "silent": "red",
}
COLUMNS = (
    *("replica", "group", "host", "state", "exchange", "rounds", "last round", "learners"),
    *("gradients", "samples", "loss"),
)
NUMBERS = ("replica", "group", "rounds", "learners", "gradients", "samples", "loss")
DISPENSABLE = ("samples", "learners", "last round", "host", "loss", "gradients")
"""Columns that are left out where lines are short, the first one first."""
_ASKED = {
    "leave": "has left its group",
    "stop": "was stopped",
    "lost": "is not known to Ray any more, and may train on",
}


def machines(rows: Sequence[Mapping[str, Any]]) -> Group:
    """`status`: a row for each replica, and a line for each of which there is something to say.

    Where lines are short, columns are left out, so that no word of the others is cut.
    """
    made = FittedTable(COLUMNS, right=NUMBERS, whole=COLUMNS, dispensable=DISPENSABLE)
    for row in rows:
        cells = _cells(row)
        made.add_row(*(cells[name] for name in COLUMNS))
    notes = [Text(f"replica {row['machine']}: {note}") for row in rows if (note := _note(row))]
    return Group(made, *notes)


def _cells(row: Mapping[str, Any]) -> dict[str, str | Text]:
    """Return the cells of a row by column name."""
    job, exchange = row.get("job") or {}, row.get("exchange") or {}
    since_s = exchange.get("last_round_s")
    return {
        "replica": str(row["machine"]),
        "group": str(row.get("group", "")),
        "host": row.get("host") or "",
        "state": Text(row["state"], style=STATE_STYLE.get(row["state"], "")),
        "exchange": exchange.get("state", ""),
        "rounds": f"{exchange['rounds']:,}" if exchange else "",
        "last round": "" if since_s is None else f"{duration(since_s)} ago",
        "learners": str(len(job["learners"])) if job else "",
        "gradients": f"{job['gradients_applied']:,}" if job else "",
        "samples": f"{job['samples']:,}" if job else "",
        "loss": _loss(job),
    }


def _note(row: Mapping[str, Any]) -> str:
    """Return the note on a replica; empty if it trains again after a restart."""
    exchange = row.get("exchange") or {}
    if row.get("ended") is not None:
        return how_ended(row["ended"])
    why = exchange.get("why") or (exchange.get("state") != "member" and row.get("why"))
    return why or exchange.get("note") or ""


def _loss(job: Mapping[str, Any]) -> str:
    losses = [one["loss"] for one in job.get("learners", ()) if one.get("loss") is not None]
    return f"{sum(losses) / len(losses):.4f}" if losses else ""


def ran(summary: Mapping[str, Any]) -> str:
    """The end of `run`, in one line."""
    rows = summary["machines"]
    ours = summary["interrupted"]  # a signal to all replicas is not a failure of theirs
    failed = [
        row["machine"] for row in rows if row["exit_code"] and not (ours and row.get("interrupted"))
    ]
    applied = sum(row.get("gradients_applied") or 0 for row in rows)
    text = f"run {summary['run']}: {counted(len(rows), 'replica')}"
    text += f", {counted(applied, 'gradient')} applied"
    if summary["stopped"]:
        text, failed = f"{text}; it was stopped", []
    elif ours:
        text += f"; it was interrupted by {ours}"
    text += f"; failed: {', '.join(map(str, failed))}" if failed else ""
    left = [row["machine"] for row in rows if row.get("asked") == "lost"]
    which = f"replica{'s' * (len(left) > 1)} {', '.join(map(str, left))}"
    return f"{text}; {which} may train on" if left else text


def how_ended(summary: Mapping[str, Any]) -> str:
    """Describe how a replica has ended, to be put after its number."""
    if asked := summary.get("asked"):
        return _ASKED[asked]
    if "error" in summary:
        return f"has failed: {summary['error']}"
    code, applied = summary["exit_code"], summary.get("gradients_applied")
    if code and code < 128:
        reason = f": {summary['reason']}" if summary.get("reason") else ""
        return f"has ended with exit code {code}{reason}; see its log, {summary['log']}"
    text = f": {counted(applied, 'gradient')} applied" if applied is not None else ""
    if summary.get("interrupted"):
        return f"was interrupted by {summary['interrupted']}{text}"
    return f"has ended with exit code {code}{text}"
