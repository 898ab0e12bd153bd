"""Every figure that README shows, and the tables of docs/performance.md, are those of the results.

A comment `<!-- figures: FILE.json, what -->` stands above each paragraph or table of figures, and
FIGURES says, for each such comment, which numbers the paragraph must hold, in order.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gadei_ps.benchmarks import (
    accuracy,
    asynchrony_tables,
    classifier,
    group_tables,
    result_tables,
    script_tables,
    virtual_tables,
)
from gadei_ps.benchmarks.failover import BOTH, CONTROL_ROW, NEXT, OURS, STANDBY
from gadei_ps.benchmarks.gpu import tables as gpu_tables
from gadei_ps.benchmarks.memory import BESIDES
from gadei_ps.benchmarks.reproduce import __main__ as reproduction
from gadei_ps.benchmarks.tables import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "gpu.md")
MARK = re.compile(r"^<!-- figures: (.+?) -->\n(.*?)(?=\n\n|\Z)", re.M | re.S)
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
UNITS = r"(?:ns|µs|ms|s|seconds|minutes|%|times|x|MB|GB|MB/s|GB/s|samples/s)"
PROCESSOR = r"(?:EPYC|Xeon) \d+/\d+"
MEASURED = re.compile(rf"(?<![\w.,-])\d+(?:,\d{{3}})*(?:\.\d+)?\s*{UNITS}(?!\w)")

PROVENANCE = ("performance", "reproduction")  # pages that say which commits are measured

Row = dict[str, Any]


@cache
def results(name: str) -> Row:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def row(name: str, part: str = "rows", **wanted: object) -> Row:
    """The one row of a file that has all these values."""
    fits = [
        one
        for one in results(name)[part]
        if all(one.get(key) == value for key, value in wanted.items())
    ]
    assert len(fits) == 1, (name, wanted, len(fits))
    return fits[0]


def median(name: str, **wanted: object) -> float:
    return float(row(name, **wanted)["median"])


def two_digits(value: float) -> str:
    """7.41 as 7.4, 11.6 as 12, 70.4 as 70."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def nlc(sizes: tuple[int, ...]) -> list[str]:
    shown = []
    for size in sizes:
        shown.append(str(size))
        for contender in ("gadei-ps", "Hogwild sparse", "Hogwild", "DDP gloo", "limit"):
            speed = median("nlc.json", contender=contender, set="mr", learners=2, mini_batch=size)
            shown.append(f"{speed:,.0f}")
    return shown


def kills() -> list[str]:
    calm, killed = results("kills.json")["rows"]
    cores = results("kills.json")["machine"]["cores"]
    roles = [str(killed["killed"][role]) for role in ("learner", "server", "watchdog")]
    found = [str(killed["learners"]), str(cores), f"{calm['median']:.0f}", *roles]
    assert killed["gradients"] == killed["counted"] == calm["gradients"] == calm["counted"]
    wrong = [f"{calm[what] + killed[what]}" for what in ("lost", "applied_twice")]
    return [*found, f"{killed['median']:.0f}", f"{killed['gradients']:,}", *wrong]


def next_gradient(contender: str, megabytes: int = 22) -> float:
    wanted = {"contender": contender, "what": NEXT, "bytes": megabytes * 10**6}
    return median("failover.json", **wanted)


def compared() -> list[str]:
    """Return those of README's table, in which the default time-out of torchft stands twice."""
    seconds = [f"{next_gradient(peer):.1f}" for peer in ("DDP under torchrun", "torchft")]
    mini_batch, *speeds = nlc((1,))[:4]  # of gadei-ps, of Hogwild sparse and dense
    return [mini_batch, f"{1e3 * next_gradient(OURS):.0f}", *speeds, *seconds, "5"]


def first_gradient(kind: str) -> str:
    return f"{median('start.json', contender=kind):.1f}"


def first_gradients() -> list[str]:
    kinds = ("gadei-ps run, NumPy", "gadei-ps run, PyTorch", "Hogwild", "gadei-ps run, empty cache")
    return [first_gradient(kind) for kind in kinds]


def attach() -> list[str]:
    shown = []
    for megabytes in (100, 1000, 1600):
        for optimizer in ("sgd", "adam"):
            wanted = {"optimizer": optimizer, "weights_bytes": megabytes * 10**6}
            ours = row("attach.json", contender="gadei-ps", **wanted)
            zeroing = median("attach.json", contender="zeroing", **wanted)
            seconds = [f"{ours['median']:.2f}", f"{zeroing:.2f}"]
            answer = f"{1e3 * ours['slowest_answer_s']:.0f}"
            shown += [f"{megabytes:,}", f"{ours['bytes'] / 1e9:.1f}", *seconds, answer]
    return shown


def memory() -> list[str]:
    def megabytes(contender: str, of: str = "all together") -> float:
        return median("memory.json", contender=contender, learners=2, of=of) / 1e6

    own = megabytes("gadei-ps", BESIDES)
    peers = ("gadei-ps", "Hogwild", "Hogwild sparse", "DDP gloo")
    return [*(f"{megabytes(one):.0f}" for one in peers), f"{own:.0f}"]


def failover() -> list[str]:
    """Return by size of the weights: p50 without a death; p50 and p99 of each death; peers."""
    shown = ["5"]  # seconds of torchft's default timeout
    for megabytes in (22, 100):

        def ms(contender: str, what: str, quantile: str, size: int = megabytes) -> str:
            wanted = {"contender": contender, "what": what, "bytes": size * 10**6}
            return f"{1e3 * row('failover.json', **wanted)[quantile]:,.0f}"

        shown += [str(megabytes), ms(CONTROL_ROW, NEXT, "p50")]
        for contender, what in ((OURS, NEXT), (OURS, STANDBY), (BOTH, NEXT)):
            shown += [ms(contender, what, quantile) for quantile in ("p50", "p99")]
        shown += [ms(peer, NEXT, "p50") for peer in ("DDP under torchrun", "torchft")]
    return shown


def learners() -> list[str]:
    shown = []
    for count, silent in ((2, 0), (16, 0), (64, 0), (200, 0), (2, 62), (2, 254)):
        found = row("learners.json", contender="gadei-ps", learners=count, silent=silent)
        shown += [str(count), str(silent), f"{found['median']:,.0f}"]
        shown.append(f"{found['share_of_two']:.2f}")
        if not silent:
            peer = {"contender": "Hogwild", "learners": count}
            ratio = row("learners.json", "ratios", **peer)["ratio"]
            shown += [f"{median('learners.json', **peer):,.0f}", f"{ratio:.2f}"]
    return shown


def nlc_ratios() -> list[str]:
    def times(contender: str, set_: str, learners: int = 2) -> float:
        wanted = {"contender": contender, "set": set_, "learners": learners, "mini_batch": 1}
        return float(row("nlc.json", "ratios", **wanted)["ratio"])

    peers = ("Hogwild", "Hogwild sparse")
    ratios = [f"{times(peer, 'mr'):.2f}" for peer in peers]
    ratios += [f"{times(peer, 'banking77'):.2f}" for peer in peers]
    single = times("torch single sparse", "banking77", learners=1)
    wanted = {"contender": "gadei-ps", "set": "mr", "learners": 2, "mini_batch": 1}
    spread = row("nlc.json", **wanted)["spread"]
    return ["1", *ratios[:2], f"{100 * spread:.0f}", *ratios[2:], f"{single:.2f}"]


def time_to_accuracy() -> list[str]:
    shown = []
    for set_, to in (("mr", 0.74), ("trec6", 0.82), ("banking77", 0.8)):
        shown.append(f"{100 * to:.0f}")
        for contender in ("gadei-ps", "Hogwild sparse", "Hogwild", "DDP gloo"):
            taken = row("time_to_accuracy.json", contender=contender, set=set_, accuracy=to)[
                "median"
            ]
            shown += [f"{taken:.1f}"] if taken else []
    return shown


def latencies() -> list[str]:
    def us(contender: str, mode: str) -> str:
        wanted = {"contender": contender, "mode": mode, "quantile": "p50"}
        return two_digits(1e6 * median("latency.json", **wanted))

    spinning = ("gadei-ps", "MPI", "iceoryx2", "Pipe", "ZeroMQ", "Queue")
    asleep = ("gadei-ps", "Pipe", "iceoryx2", "ZeroMQ", "Queue")
    return ["4", *(us(one, "spinning") for one in spinning), *(us(one, "asleep") for one in asleep)]


def ingest() -> list[str]:
    shown = []
    for megabytes in (1, 5, 25, 100):
        shown.append(str(megabytes))
        for contender in ("gadei-ps", "MPI one-sided", "MPI two-sided", "gloo"):
            wanted = {"contender": contender, "bytes": megabytes * 10**6, "learners": 2}
            shown.append(f"{median('ingest.json', **wanted) / 1e9:.1f}")
    return shown


def apply() -> list[str]:
    def times(contender: str, optimizer: str, megabytes: int, wire: str = "float32") -> str:
        wanted = {"contender": contender, "optimizer": optimizer, "wire": wire}
        found = row("apply.json", "ratios", bytes=megabytes * 10**6, threads=2, **wanted)
        return f"{found['ratio']:.2f}"

    shown = ["2", "2", "100", "100", "100"]
    for optimizer in ("SGD", "MOMENTUM", "NESTEROV", "ADAGRAD", "ADAM", "ADAMW"):
        for megabytes in (2, 100):
            shown += [times(peer, optimizer, megabytes) for peer in ("C", "torch")]
        shown.append(times("float32", optimizer, 100, "bfloat16"))
    return shown


def on_one_gpu() -> list[str]:
    """Return speeds over those of torch in one process, which does not run with MPS."""
    shown = []
    for contender, count in ((OURS, 1), (OURS, 4), (OURS, 8), ("Hogwild", 4)):
        shown.append(str(count))
        for network in ("sentence classifier", "LSTM"):
            here = {"network": network, "mini_batch": 1, "unit": "samples/s"}
            alone = median("gpu-learners.json", contender="torch single", **here)
            for block in ("without MPS", "with MPS"):
                wanted = {"contender": contender, "learners": count, "block": block, **here}
                ratio = median("gpu-learners.json", **wanted) / alone
                shown.append(f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}")
    return shown


FIGURES: dict[str, Callable[[], list[str]]] = {
    "kills.json, both runs": kills,
    "failover.json, front": lambda: [f"{1e3 * next_gradient(OURS):.0f}", "22"],
    "failover.json, compared": compared,
    "start.json, front": lambda: [f"{1e3 * median('start.json', contender='attach'):.1f}"],
    "nlc.json, front": lambda: [nlc((1,))[one] for one in (0, 1, 5, 3, 2)],
    "nlc.json, all sizes": lambda: nlc((1, 2, 4, 8, 32, 128)),
    "nlc.json, ratios": nlc_ratios,
    "time_to_accuracy.json, seconds": time_to_accuracy,
    "latency.json, all p50": latencies,
    "ingest.json, two learners": ingest,
    "apply.json, two threads": apply,
    "start.json, first gradient": first_gradients,
    "attach.json, all": attach,
    "memory.json, two learners": memory,
    "failover.json, deaths": failover,
    "learners.json, all": learners,
    "gpu-learners.json, over torch alone": on_one_gpu,
}


def shown(block: str) -> list[str]:
    """The numbers of a paragraph or table, but those of code, targets of links and processors."""
    return NUMBER.findall(re.sub(rf"`[^`]*`|\]\([^)]*\)|{PROCESSOR}", " ", block))


def marked(text: str) -> dict[str, str]:
    found = MARK.findall(text)
    assert len(found) == len(dict(found)), "a mark stands twice"
    return dict(found)


BLOCKS = {mark: block for page in PAGES for mark, block in marked(page.read_text()).items()}


@pytest.mark.parametrize("mark", BLOCKS)
def test_figures_are_those_of_the_results(mark: str) -> None:
    assert shown(BLOCKS[mark]) == FIGURES[mark]()


def test_every_mark_has_its_figures() -> None:
    assert BLOCKS.keys() == FIGURES.keys()
    for mark in BLOCKS:
        assert (RESULTS / mark.split(",")[0]).exists()


def unmarked(text: str) -> list[str]:
    """Return figures with a unit that no mark names the source of."""
    prose = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", MARK.sub("", text), flags=re.M | re.S)
    return MEASURED.findall(re.sub(r"`[^`\n]*`", " ", prose))


def test_readme_has_no_figure_without_a_source() -> None:
    assert not unmarked((ROOT / "README.md").read_text())


def test_what_is_wrong_is_found() -> None:
    assert unmarked("It takes 14 ms, 2 cores.\n\n<!-- figures: x.json, y -->\nNow 15 ms.\n") == [
        "14 ms"
    ]
    assert shown("of 2,735 `x 4` at [a](b-5.md), 3.1 µs; bfloat16, TREC-6") == ["2,735", "3.1"]
    with pytest.raises(AssertionError):
        row("start.json", contender="nobody")


def test_the_reproduction_is_that_of_the_results() -> None:
    """The pages are what `python -m gadei_ps.benchmarks.reproduce --write` writes."""
    for path, text in reproduction.documents().items():
        assert path.read_text() == text, path.name


def test_the_tables_of_virtual_workers_are_those_of_the_results() -> None:
    """They are what `python -m gadei_ps.benchmarks.virtual_tables` writes."""
    page = virtual_tables.PAGE.read_text()
    assert {name for _, name in virtual_tables.MARK.findall(page)} == virtual_tables.TABLES.keys()
    assert page == virtual_tables.filled(page)


TABLES = (
    accuracy.TABLE,
    classifier.TABLE,
    script_tables.TABLE,
    asynchrony_tables.TABLE,
    *group_tables.TABLES,
    *result_tables.TABLES,
    *gpu_tables.TABLES,
)


def named(page: str) -> list[tuple[str, str]]:
    """The results that a page names, with the processor beside each mention, or nothing."""
    there = {path.stem for path in RESULTS.glob("*.json")}
    text = re.sub(r"<!-- \w+: table -->.*?<!-- end of table -->", "", page, flags=re.S)
    found = re.findall(rf"`(\w+)\.json`,?\s?\(?({PROCESSOR})?", text)
    return [(name, cpu) for name, cpu in found if name in there]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_each_figure_names_its_processor(path: Path) -> None:
    """The processors of two result files may differ; a reader must see which figure is whose."""
    mentions = named(path.read_text())
    for name in {name for name, _ in mentions}:
        beside = {cpu for each, cpu in mentions if each == name and cpu}
        assert beside == {result_tables.processor(results(f"{name}.json"))}, name


def test_the_rules_about_processors_see_mistakes() -> None:
    assert named("`nlc.json`: x; (`nlc.json`, EPYC 26/2); `soak.json` (Xeon 6/167) `no.json`") == [
        ("nlc", ""),
        ("nlc", "EPYC 26/2"),
        ("soak", "Xeon 6/167"),
    ]
    assert result_tables.processor({"machine": {"cpu": "AMD EPYC, family 25, model 17"}}) == (
        "EPYC 25/17"
    )


def git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def test_commits_that_the_history_lacks_are_named() -> None:
    """A reader must know that the code behind a figure cannot be had."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no whole history here")
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in PROVENANCE)
    for path in RESULTS.glob("*.json"):
        commit = json.loads(path.read_text()).get("commit")
        if commit:
            name = commit.removesuffix("-dirty").rpartition("-g")[2]
            there = git("merge-base", "--is-ancestor", name, "HEAD") is not None
            assert there or f"no commit {name}" in pages, path.name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.result)
def test_a_table_is_that_of_its_results(table: Table) -> None:
    """It is what `python -m gadei_ps.benchmarks.script_tables`, or another one, writes."""
    page = table.text()
    assert table.mark.search(page)
    assert page == table.filled()
