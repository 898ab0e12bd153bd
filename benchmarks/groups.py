"""The cost of parameter groups: the server's loop over one group compared with ten groups.

One thread applies one dense float32 gradient again and again to the same memory, which is shared,
as in a job: the server's own `apply_dense` with its undo log. `ten groups` cuts the same values
into ten groups of about equal size, each with a learning rate and a weight decay of its own;
`gadei-ps` has one group. The sizes are those of the benchmark `undo`, and a small model.

Times of one gradient are medians with half the distance between the quartiles. The table shows the
time with ten groups over that with one, so 1.05 means that they cost 5 %. The first number is the
median over the rounds, the second compares the fastest rounds.
"""

from __future__ import annotations

from collections.abc import Callable

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.sizes import sizes
from gadei_ps.benchmarks.undo import Work, timed, with_log
from gadei_ps.kernels.optimizers import Kind

GROUPS = 10


def cut(work: Work, groups: int, times: int) -> Callable[[], float]:
    """Return a function that measures the seconds of one gradient with so many groups."""
    measure_once = timed(with_log, work, times)

    def measured() -> float:
        work.cut(groups)
        return measure_once()

    return measured


def measure(quick: bool) -> Report:
    """Measure each optimizer at each size. ratio: time with ten groups over time with one."""
    size = sizes("groups", quick)
    report = Report(["optimizer", "weights", "one group us", "ten groups us", "ten/one"])
    for weights in size["bytes"]:
        for kind in Kind:
            work = Work(kind, weights // 4, GROUPS)
            times = max(1, round(size["call_s"] / timed(with_log, work, 2)()))
            seconds = alternate(
                {"ten groups": cut(work, GROUPS, times), "gadei-ps": cut(work, 1, times)},
                size["rounds"],
            )
            told = {"optimizer": kind.name, "bytes": weights, "threads": 1}
            line = [kind.name, f"{weights / 1e6:g} MB"]
            for who in ("gadei-ps", "ten groups"):
                figures = summary(seconds[who])
                report.rows.append({"contender": who, **told, "passes": times, **figures})
                line.append(f"{figures['median'] * 1e6:.1f} ±{figures['spread']:.0%}")
            found = ratios_of(seconds["gadei-ps"], seconds["ten groups"])
            report.ratios.append({"contender": "ten groups", **told, **found})
            report.lines.append([*line, f"{found['ratio']:.3f} {found['best_ratio']:.3f}"])
    return report
