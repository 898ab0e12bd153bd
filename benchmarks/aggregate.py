"""Seconds of one aggregation of a model among members of a group, over loopback.

Each member is a process with a model in its own memory; at the end each has the mean of all. They
stand for machines, so all contenders use TCP: Ray has a node for each member, and carries objects
from store to store. Beside it stands Ray with one store for all members, in shared memory, which no
group of machines can have. The cores of this machine are shared by all members, other than those
of a group of machines.

Ours is made of gloo's sends and receives; gloo's own all-reduce sums in place. hivemind's members
look for one another before each aggregation; that time is left out.
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
OURS, GLOO, HIVEMIND = "gadei-ps", "gloo all-reduce", "hivemind"
RAY, ONE_STORE = "Ray's object store", "Ray, one store for all"
REACH = {GLOO: 1.0, HIVEMIND: 3.0, RAY: 3.0, ONE_STORE: None}
TURNS = ((GLOO, HIVEMIND), (RAY,), (ONE_STORE,))
"""Contenders of each minute: Ray's idle processes take time from others."""
NEEDS = {GLOO: "torch", RAY: "ray", ONE_STORE: "ray", HIVEMIND: "hivemind"}
MOST_BESIDE = 0.01
"""Bytes sent beside 2 (m - 1) / m models, as a share of these."""
ASK_S = 180.0
RAY_START_S = 120.0  # of a node for each member

Seconds = Callable[[], float]


class Ours:
    """The processes of a group, which join again for each size."""

    def __init__(self, members: int) -> None:
        self._gang = Gang([["-m", f"{PACKAGE}.peers_exchange", str(i)] for i in range(members)])
        self._members = members
        self._port = self._gang.ask({})[0]["port"]
        self._generation = 0
        self.told: dict[str, Any] = {}

    def join(self, size: int) -> None:
        self._generation += 1
        order = {"port": self._port, "members": self._members, "bytes": size}
        self._gang.ask(order | {"generation": self._generation})

    def seconds(self, times: int) -> float:
        """Return the time of one aggregation (s)."""
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
    """Return the other contenders' start functions; each returns the time of an aggregation (s)."""

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

    def ray(*nodes: str) -> Seconds:
        command = ["-m", f"{PACKAGE}.peers_store", str(scratch), *nodes]
        gang = stack.enter_context(Gang([command], how=signal.SIGTERM, start_s=RAY_START_S))
        order = {"bytes": size, "members": members, "times": times}
        return lambda: gang.seconds(order, timeout_s=ASK_S) / times

    starts = {
        GLOO: gloo,
        RAY: lambda: ray(str(members)),
        ONE_STORE: ray,
        HIVEMIND: lambda: hivemind(members, size, stack),
    }
    return {name: starts[name] for name in wanted}


def sent(report: Report, told: dict[str, Any], members: int, size: int) -> dict[str, Any]:
    """Compare the bytes that a member of ours has sent in an aggregation with the paper's."""
    models, paper = told["sent_bytes"] / size, 2 * (members - 1) / members
    if abs(models / paper - 1) > MOST_BESIDE:
        report.notes.append(
            f"{size / 1e6:g} MB among {members}: {models:.4f} models sent instead of {paper:.4f}"
        )
    return {"models_sent": models, "models_sent_paper": paper}


def compare(
    report: Report, ours: Ours, members: int, size: int, chosen: dict[str, Any], scratch: Path
) -> None:
    """One row of each contender for one size and number of members."""
    times = max(1, round(chosen["bytes_per_call"] / size / members))
    told = {"bytes": size, "members": members}
    what = f"{size / 1e6:g} MB among {members}"
    cells: dict[str, str] = {}
    ours.join(size)
    for turn in TURNS:
        wanted = [one for one in turn if one in chosen["peers"]]
        if not wanted:
            continue
        contenders: dict[str, Seconds] = {OURS: lambda: ours.seconds(times)}
        with ExitStack() as stack:
            for name, start in peers(members, size, times, wanted, stack, scratch).items():
                try:
                    contenders[name] = start()
                    contenders[name]()
                except Failed as error:
                    contenders.pop(name, None)
                    report.notes.append(f"{name} is left out at {what}: {error}")
            figures = alternate(contenders, chosen["rounds"])
        for name, found in figures.items():
            row = {"contender": name, **told, **summary(found)}
            if name == OURS:
                row |= {"beside": wanted} | sent(report, ours.told, members, size)
            report.rows.append(row)
            milliseconds = f"{1e3 * statistics.median(found):.2f} ±{row['spread']:.0%}"
            if name == OURS:
                cells.setdefault(name, milliseconds)
                continue
            ratio = ratios_of(figures[OURS], found)
            reach = REACH[name]
            reached = {} if reach is None else {"reach": reach, "reached": ratio["ratio"] >= reach}
            report.ratios.append({"contender": name, **told, **ratio, **reached})
            cells[name] = f"{milliseconds}, {ratio['ratio']:.2f} times"
    report.lines.append([what, *(cells.get(name, "-") for name in (OURS, *REACH))])


def measure(quick: bool) -> Report:
    """Return the times of an aggregation (ms), and the others' as a multiple of ours."""
    chosen = sizes("aggregate", quick)
    report = Report(["one aggregation, ms", OURS, *REACH])
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
