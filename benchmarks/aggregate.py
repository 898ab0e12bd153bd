"""Seconds of one aggregation of a model among members of a group, over loopback.

Each member is a process with a model in its own memory; at the end each has the mean of all. They
stand for machines, so all contenders use TCP except Ray, whose store is shared memory. The cores
of this machine are shared by all members, other than those of a group of machines.

gloo sums in place, without checksums and without knowing who has died. hivemind's members look for
one another before each aggregation; that time is left out.
"""

from __future__ import annotations

import importlib.util
import signal
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Failed, Gang
from gadei_ps.benchmarks.sizes import sizes

PACKAGE = "gadei_ps.benchmarks"
OURS, GLOO, RAY, HIVEMIND = "gadei-ps", "gloo all-reduce", "Ray's object store", "hivemind"
REACH = {GLOO: 1.0, RAY: 3.0, HIVEMIND: 3.0}
NEEDS = {GLOO: "torch", RAY: "ray", HIVEMIND: "hivemind"}
MOST_BESIDE = 0.01
"""Bytes sent beside 2 (m - 1) / m models, as a share of these."""
ASK_S = 180.0

Seconds = Callable[[], float]


class Ours:
    """The processes of a group; joins anew for each size."""

    def __init__(self, members: int) -> None:
        self._gang = Gang([["-m", f"{PACKAGE}.peers_mesh", str(i)] for i in range(members)])
        self._addresses = [one["address"] for one in self._gang.ask({})]
        self._generation = 0
        self.told: dict[str, Any] = {}

    def join(self, size: int) -> None:
        self._generation += 1
        order = {"addresses": self._addresses, "bytes": size, "generation": self._generation}
        self._gang.ask(order)

    def seconds(self, times: int) -> float:
        """Of one aggregation."""
        answers = self._gang.ask({"times": times}, timeout_s=ASK_S)
        self.told = answers[0]
        ends, begins = (max(a["end"] for a in answers), min(a["begin"] for a in answers))
        return float(ends - begins) / times

    def close(self) -> None:
        self._gang.close()


def hivemind(members: int, size: int, stack: ExitStack) -> Seconds:
    """A group of hivemind for models of this size. Raises Failed."""
    gang = stack.enter_context(
        Gang([["-m", f"{PACKAGE}.peers_hivemind", str(i), str(members)] for i in range(members)])
    )
    peers = gang.ask({}, first=1)[0]["peers"]
    gang.ask({"peers": peers, "bytes": size}, timeout_s=ASK_S)

    def seconds() -> float:
        gang.ask({"meet": True}, timeout_s=ASK_S)
        return gang.seconds({"go": True}, timeout_s=ASK_S)

    return seconds


def peers(
    members: int, size: int, times: int, wanted: list[str], stack: ExitStack, scratch: Path
) -> dict[str, Callable[[], Seconds]]:
    """How to start the other contenders; each gives the seconds of one aggregation."""

    def gloo() -> Seconds:
        meet = str(scratch / f"meet{members}-{size}")
        ranks = range(members)
        module = f"{PACKAGE}.peers_all_reduce"
        gang = stack.enter_context(
            Gang(
                [["-m", module, str(rank), str(members), meet] for rank in ranks],
                env={"GLOO_SOCKET_IFNAME": "lo"},
            )
        )
        order = {"bytes": size, "times": times}
        return lambda: gang.seconds(order, timeout_s=ASK_S) / times

    def ray() -> Seconds:
        gang = stack.enter_context(
            Gang([["-m", f"{PACKAGE}.peers_store", str(scratch)]], how=signal.SIGTERM)
        )
        order = {"bytes": size, "members": members, "times": times}
        return lambda: gang.seconds(order, timeout_s=ASK_S) / times

    starts = {GLOO: gloo, RAY: ray, HIVEMIND: lambda: hivemind(members, size, stack)}
    return {name: starts[name] for name in wanted}


def sent(report: Report, told: dict[str, Any], members: int, size: int) -> dict[str, Any]:
    """What a member of ours has sent in an aggregation, beside the paper's figure."""
    models, paper = told["sent_bytes"] / size, 2 * (members - 1) / members
    if abs(models / paper - 1) > MOST_BESIDE:
        report.notes.append(
            f"{size / 1e6:g} MB among {members}: {models:.4f} models sent instead of {paper:.4f}"
        )
    return {"models_sent": models, "models_sent_paper": paper, "calls": told["calls"]}


def compare(
    report: Report, ours: Ours, members: int, size: int, chosen: dict[str, Any], scratch: Path
) -> None:
    """One row of each contender for one size and number of members."""
    times = max(1, round(chosen["bytes_per_call"] / size / members))
    with ExitStack() as stack:
        ours.join(size)
        contenders: dict[str, Seconds] = {OURS: lambda: ours.seconds(times)}
        started = peers(members, size, times, chosen["peers"], stack, scratch)
        for name, start in started.items():
            try:
                contenders[name] = start()
                contenders[name]()
            except Failed as error:
                contenders.pop(name, None)
                note = f"{name} is left out at {size / 1e6:g} MB among {members}: {error}"
                report.notes.append(note)
        figures = alternate(contenders, chosen["rounds"])
    told = {"bytes": size, "members": members}
    line = [f"{size / 1e6:g} MB among {members}"]
    for name in (OURS, *REACH):
        if name not in figures:
            line += ["-"] if name == OURS else ["-", "-"]
            continue
        row = {"contender": name, **told, **summary(figures[name])}
        if name == OURS:
            row |= sent(report, ours.told, members, size)
        report.rows.append(row)
        line.append(f"{1e3 * statistics.median(figures[name]):.2f} ±{row['spread']:.0%}")
        if name != OURS:
            found = ratios_of(figures[OURS], figures[name])
            reached = found["ratio"] >= REACH[name]
            whole = {"contender": name, **told, **found, "reach": REACH[name], "reached": reached}
            report.ratios.append(whole)
            line.append(f"{found['ratio']:.2f}")
    report.lines.append(line)


def measure(quick: bool) -> Report:
    """Milliseconds of an aggregation, and the others' as a multiple of ours."""
    chosen = sizes("aggregate", quick)
    header = ["one aggregation, ms", OURS]
    for name in REACH:
        header += [name, "times"]
    report = Report(header)
    missing = [one for one in chosen["peers"] if importlib.util.find_spec(NEEDS[one]) is None]
    report.notes += [f"{one} is left out: pip install {NEEDS[one]}" for one in missing]
    chosen = chosen | {"peers": [one for one in chosen["peers"] if one not in missing]}
    with tempfile.TemporaryDirectory(prefix="gadei-ps-", ignore_cleanup_errors=True) as scratch:
        for members in chosen["members"]:
            ours = Ours(members)
            try:
                for size in chosen["bytes"]:
                    compare(report, ours, members, size, chosen, Path(scratch))
            finally:
                ours.close()
    return report
