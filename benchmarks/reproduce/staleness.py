"""The staleness of gradients under ASP: two laws, simulated figures and measured figures.

GaDei, section 2.1: the weights' timestamp rises by one with each update, and a gradient's staleness
is its difference over the time that the gradient was computed; ASGD reaches SGD's accuracy while it
is bounded, 'typically up to a dozen of learners'. Section 2.3: it 'is usually proportional to the
total number of learners'. The paper gives no number; two follow from the definition:

- Mean. Count the pairs of a gradient of one learner and a gradient of another applied while it is
  computed. Seen from the others each gradient falls into exactly one iteration of every other
  learner, since nobody waits. So the mean over all gradients is n - 1, whatever the speeds.
- Maximum. In an iteration of at most b seconds another learner ends at most floor(b / a) + 1 of at
  least a seconds each. So no gradient is staler than (n - 1)(floor(b / a) + 1), which is 2(n - 1)
  for learners that differ by less than a factor of two.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import pyplot

from gadei_ps.benchmarks.nlc_texts import data_directory
from gadei_ps.benchmarks.reproduce import part
from gadei_ps.benchmarks.reproduce.part import Part, Row
from gadei_ps.simulate import compare
from gadei_ps.simulate.run_times import parse
from gadei_ps.simulate.setting import Setting

EQUAL = "normal:mean=1,std=0.05"
UNEQUAL = "speeds:1,1.5,2,4,std=0.1"
TEAMS = (2, 4, 8, 16, 32, 64, 128, 256, 1024)
LEARNERS = 8  # the same as in the measured runs
ITERATIONS = 4000
LEAST = 200  # of large teams; the first gradients are not stale yet
MODELS = ("asp", "ssp:0", "ssp:3", "bsp")

Counts = dict[int, int]
"""Number of gradients by staleness."""


def run(quick: bool = False) -> Part:
    """Compare simulated and measured staleness with the two laws."""
    iterations = 100 if quick else ITERATIONS
    teams = TEAMS[:4] if quick else TEAMS
    found: dict[str, Counts] = {
        "equal": _simulated("asp", EQUAL, LEARNERS, iterations),
        "unequal": _simulated("asp", UNEQUAL, LEARNERS, iterations),
    }
    measured = _measured()
    growth = {
        kind: {n: _simulated("asp", spec, n, max(LEAST, iterations // n)) for n in teams}
        for kind, spec in (("equal", EQUAL), ("unequal", UNEQUAL))
    }
    bounded = {model: _simulated(model, UNEQUAL, LEARNERS, iterations) for model in MODELS}
    law = f"mean {LEARNERS - 1}"
    most = 2 * (LEARNERS - 1)
    rows = [
        Row("8 equal learners, simulated", f"{law}, at most {most}", _told(found["equal"])),
        Row(
            "8 learners of speeds 1, 1.5, 2, 4, twice, simulated",
            f"{law}, at most {_bound(UNEQUAL, LEARNERS, iterations)}",
            _told(found["unequal"]),
            "the slow ones' gradients are the stale ones; the mean hides this",
        ),
        *_measured_rows(measured, law),
        *(
            Row(
                f"{n} equal learners, simulated",
                f"mean {n - 1}, at most {2 * (n - 1)}",
                _told(growth["equal"][n]),
            )
            for n in teams
            if n != LEARNERS
        ),
        *(
            Row(f"8 unequal learners under {model}, simulated", "", _told(counts))
            for model, counts in bounded.items()
            if model != "asp"
        ),
    ]
    data = {
        "simulated": found,
        "measured": measured,
        "by_learners": growth,
        "by_model": bounded,
    }
    draw(data)
    return Part(
        "Staleness under ASP",
        "GaDei, section 2.1: the staleness of a gradient is the number of versions by which the "
        "weights advance while it is computed. It must be bounded, and grows with the number of "
        "learners (section 2.3). If no learner waits, each gradient falls into exactly one "
        "iteration of every other learner, so the mean is n - 1 at any speeds. If an iteration "
        "takes a to b seconds, it overlaps at most floor(b / a) + 1 iterations of another learner, "
        "so the maximum is (n - 1)(floor(b / a) + 1). The measured delays are of 8 workers and of "
        "other systems. One is a shared-memory method with one delay for each update. The other "
        "has a master and workers; the delay of a gradient is counted when it arrives, and several "
        "may arrive in one iteration.",
        rows,
        plots=["staleness.svg"],
        data=data,
    )


def _simulated(model: str, spec: str, learners: int, iterations: int) -> Counts:
    """Simulated counts."""
    setting = Setting(learners, parse(spec, 0), iterations=iterations)
    return compare.run(compare.model(model, learners), setting).staleness.counts()


def _bound(spec: str, learners: int, iterations: int) -> int:
    """The maximum by the law, for the run times that occurred."""
    grid = np.arange(learners)[:, None], np.arange(4 * iterations)[None, :]
    times = parse(spec, 0).draw(*grid)
    longest, least = times.max(axis=1), times.min(axis=1)
    each = np.floor(longest[:, None] / least[None, :]) + 1
    return int((each.sum(axis=1) - each.diagonal()).max())


def _mean(counts: Counts) -> float:
    return sum(value * times for value, times in counts.items()) / sum(counts.values())


def _quantile(counts: Counts, part: float) -> int:
    values = np.array(sorted(counts))
    seen = np.cumsum([counts[value] for value in values.tolist()])
    return int(values[np.searchsorted(seen, part * seen[-1])])


def _told(counts: Counts) -> str:
    parts = [f"{_quantile(counts, part)}" for part in (0.5, 0.9, 0.99)]
    return f"mean {_mean(counts):.2f}; 50, 90, 99%: {', '.join(parts)}; at most {max(counts)}"


# -- measured -----------------------------------------------------------------------------------


def _measured() -> dict[str, Counts]:
    """Measured counts by name of the file. Missing files are left out."""
    directory = data_directory() / "trace-async-delay"
    found: dict[str, Counts] = {}
    shared, master = directory / "async-bcd.csv", directory / "piag.csv"
    if shared.exists():
        with open(shared, newline="") as file:
            found["async-bcd"] = dict(Counter(int(row["delay"]) for row in csv.DictReader(file)))
    if master.exists():
        found["piag"] = _arrivals(master)
    return found


def _arrivals(path: Any) -> Counts:
    """Count the ages of gradients at their arrival, from a table of ages.

    A worker's column increases while its gradient grows old, and falls when a new one arrives.
    """
    runs: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            ages = [int(row[f"worker{k}"]) for k in range(LEARNERS)]
            runs[row["stepsize"], row["dataset"]].append(ages)
    counts: Counter[int] = Counter()
    for rows in runs.values():
        ages_: npt.NDArray[np.int64] = np.array(rows)
        new = np.diff(ages_, axis=0) != 1
        counts.update(ages_[1:][new].tolist())
    return dict(counts)


def _measured_rows(measured: dict[str, Counts], law: str) -> list[Row]:
    rows = []
    if "async-bcd" in measured:
        rows.append(Row("8 workers, measured: async-bcd", law, _told(measured["async-bcd"])))
    if "piag" in measured:
        rows.append(
            Row(
                "8 workers, measured: piag",
                "below the mean of 7",
                _told(measured["piag"]),
                "counted in iterations, each of which takes in one gradient or several",
            )
        )
    return rows


# -- plot ---------------------------------------------------------------------------------------

COLOURS = {
    "equal": "tab:blue",
    "unequal": "tab:orange",
    "async-bcd": "tab:green",
    "piag": "tab:purple",
}
MOST = {"equal": "navy", "unequal": "tab:brown"}


def draw(data: dict[str, Any]) -> None:
    """Draw the distributions for 8 learners, and the mean and the maximum by learners."""
    figure = pyplot.figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    growth = data["by_learners"]
    for name, kept in {**data["simulated"], **data["measured"]}.items():
        counts = _counts(kept)
        values = list(range(max(counts) + 1))
        total = sum(counts.values())
        shares = [counts.get(value, 0) / total for value in values]
        kind = "simulated, " if name in growth else "measured, "
        left.plot(values, shares, color=COLOURS[name], label=kind + name)
    left.axvline(LEARNERS - 1, color="black", linewidth=0.5)
    left.set_xlabel("staleness, gradients (8 learners)")
    left.set_ylabel("share of the gradients")
    left.legend()
    for kind, runs in growth.items():
        teams = [int(team) for team in runs]
        counted = [_counts(counts) for counts in runs.values()]
        means = [_mean(counts) for counts in counted]
        style = {"color": COLOURS[kind], "marker": "o", "markersize": 3}
        right.plot(teams, means, label=f"{kind}, mean", **style)
        most = [max(counts) for counts in counted]
        right.plot(teams, most, color=MOST[kind], linestyle=":", label=f"{kind}, maximum")
    right.plot(teams, [n - 1 for n in teams], color="black", linestyle="--", label="n - 1")
    right.plot(teams, [2 * (n - 1) for n in teams], color="grey", linestyle="--", label="2(n - 1)")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("learners")
    right.set_ylabel("staleness, gradients")
    right.legend()
    part.save(figure, "staleness.svg")


def _counts(kept: Mapping[Any, int]) -> Counts:
    """Convert counts whose keys may be text, as in a result file."""
    return {int(value): count for value, count in kept.items()}
