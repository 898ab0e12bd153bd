"""Write the tables of pages that are made from the code: commands, status, limits, memory layout.

`python docs/tables.py` writes them between `<!-- NAME: table -->` and `<!-- end of table -->`, and
draws the structs of native/ps_layout.h above their lists. A test compares the files with what this
would write. After a change of the layout, build the extension before and after it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gadei_ps import _native, metrics
from gadei_ps.cli.app import command_tree
from gadei_ps.cli.exits import EXIT_CODES
from gadei_ps.job import config, optimizer_config, replies
from gadei_ps.memory import layout, weights
from gadei_ps.metrics import Kind, Lifetime, Metric
from gadei_ps.replicas import config as replicas
from gadei_ps.watchdog import sockets

DOCS = Path(__file__).parent
HEADER = DOCS.parent / "native" / "ps_layout.h"
MARK = re.compile(
    r"(?P<begin><!-- (?P<name>[\w: -]+): table -->\n).*?(?P<end>\n<!-- end of table -->)", re.S
)
LIVES = {
    Lifetime.NOW: "now",
    Lifetime.LEARNER: "learner",
    Lifetime.MEMORY: "memory",
    Lifetime.CHECKPOINT: "checkpoint",
}


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(one) for one in line)} |" for line in lines)


# -- commands -------------------------------------------------------------------------------------


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, one in inner.items():
        yield from _below(f"{name} {word}".strip(), one)


def _word(one: Any) -> str:
    name = (one.metavar or one.name.upper()).strip("[].").replace("|", "\\|")
    name += "..." if one.nargs == -1 else ""
    return name if one.required else f"[{name}]"


def _commands(panel: str) -> str:
    root = command_tree()
    rows = []
    for word, top in root.commands.items():
        if getattr(top, "rich_help_panel", None) != panel:
            continue
        for name, one in _below(word, top):
            words = [_word(each) for each in one.params if not each.opts[0].startswith("-")]
            options = [each.opts[0] for each in one.params if each.opts[0].startswith("-")]
            does = " ".join((one.help or "").split("\n\n")[0].split()).split(": gadei-ps ")[0]
            usage = f"`{' '.join([name, *words])}`"
            shown = " ".join(f"`{each}`" for each in options if each != "--json")
            rows.append((usage, does.rstrip(".") + ".", shown))
    return _table(("command", "does", "options"), rows)


# -- status ---------------------------------------------------------------------------------------


def _metric_rows(table: Iterable[Metric]) -> str:
    rows = []
    for one in table:
        kind = "counter" if one.kind is Kind.COUNTER else "gauge"
        rows.append((f"`{one.name}`", f"{one.help}.", one.unit, kind, LIVES[one.lifetime]))
    return _table(("field", "meaning", "unit", "kind", "kept in"), rows)


FACTS = {
    "job": "Name of the job.",
    "job_id": "Random number of the memory, in hexadecimal.",
    "phase": "`starting`, `serving`, `draining`, `kept`, `stopped` or `failed`.",
    "sync": "Synchronization model in force.",
    "sync_wanted": "Model that replaces it at the next barrier, or null.",
    "optimizer": "Kind of the optimizer.",
    "settings": "Optimizer settings; `from` names what set each of them.",
    "history": "Path of the history, or null.",
    "settings_pending": "Whether a change of hyperparameters is under way.",
    "when_idle": "`wait` or `stop`.",
    "work": "The batch ledger: state, batches, epochs, next batch.",
    "learners": "A list; see below.",
    "model": "Tensors, values and bytes of the model, or null.",
    "watchdog_pid": "Process id.",
    "server_pid": "Process id of the active server.",
    "fork_server_pid": "Process id; 0: none.",
    "standby_pid": "Process id of the standby server, or null.",
    "standby_missing": "Reason why there is no standby, or null.",
    "last_checkpoint": "Outcome of the last checkpoint: `ok`, `time`, `error`, `path`, `version`.",
    "checkpoint_warning": "Reason why no checkpoint can be made or a newer one exists, or null.",
    "newer_checkpoint": "Version of a checkpoint that is newer than the memory, or null.",
    "names_lost": "Whether segments have lost their names in `/dev/shm`.",
    "saves_on_stop": "Whether a stop ends with a checkpoint.",
    "stop_reason": "Reason given to `stop`, or null.",
    "commands": "Commands that start learners, with their reserved numbers.",
    "making": "Progress of segments that are being made, or null.",
    "start": "Learners that have come, of those that begin together, or null.",
    "replicas": "Processes of a worker group that are attached to the job, as in `learners`.",
    "server_stuck": "A server that SIGKILL does not end, or null.",
}
LEARNER_FACTS = {
    "row": "Row of the roster.",
    "generation": "Number of this learner among all that the job has had.",
    "name": "Name of the learner.",
    "pid": "Process id.",
    "leaving": "Whether it leaves.",
    "refused_because": "Reason of its last refused gradient, or empty.",
    "staleness_histogram": "Gradients by staleness: 0 to 15 each, then powers of two.",
    "paused": "Whether its script has paused it.",
    "others_stand_still": "Whether all others pause for it.",
}


def _fields(model: type[BaseModel], counted: Iterable[Metric], facts: dict[str, str]) -> str:
    skipped = {one.name for one in counted} | {"v", "ok"}
    names = [one for one in model.model_fields if one not in skipped]
    missing = [one for one in names if one not in facts]
    assert not missing, f"docs/tables.py lacks the meaning of {', '.join(missing)}"
    return _table(("field", "meaning"), ((f"`{one}`", facts[one]) for one in names))


# -- limits ---------------------------------------------------------------------------------------


def _bounds(model: type[BaseModel], field: str) -> str:
    found = {type(one).__name__: one for one in model.model_fields[field].metadata}
    return f"{found['Ge'].ge:,} to {found['Le'].le:,}"


def _limits() -> str:
    job = config.JobConfig
    rows = (
        ("learners of a job", f"{layout.MAX_LEARNERS}"),
        ("shards", f"{layout.MAX_SHARDS}"),
        ("slots of a ring (`slots`)", _bounds(job, "slots")),
        ("batches handed out ahead (`ahead`)", _bounds(job, "ahead")),
        ("groups of parameters", f"{optimizer_config.MOST_GROUPS} and the rest"),
        ("tensors of a model, other names included", f"{weights.MAX_NAMES:,}"),
        ("dimensions of a tensor", f"{layout.MAX_DIMS}"),
        ("name of a tensor", f"{weights.NAME_BYTES} bytes of UTF-8"),
        ("name of a job", "1 to 48 letters, digits, `-` and `_`"),
        ("checkpoints kept (`keep`)", _bounds(config.CheckpointConfig, "keep")),
        ("connections to a watchdog", f"{sockets.MAX_CLIENTS}"),
        ("externally assigned ranges that wait", f"{layout.OWNED - layout.AHEAD}"),
        ("run times kept of each learner", f"{layout.RUNS} iterations"),
        ("worker groups of a run", f"{replicas.MOST_GROUPS}"),
        ("replicas of a worker group", f"{replicas.MOST_MACHINES}"),
    )
    return _table(("what", "limit"), rows)


def _exit_codes() -> str:
    rows = (
        (one.code, one.meaning, ", ".join(f"`{name}`" for name in one.commands) or "all")
        for one in EXIT_CODES
    )
    return _table(("exit code", "meaning", "commands"), rows)


def _decisions() -> str:
    rows = []
    for path in sorted((DOCS / "decisions").glob("0*.md")):
        title, status = path.read_text().split("\n\n")[:2]
        number, _, title = title.removeprefix("# ").partition(". ")
        found = re.fullmatch(r"Status: (.+)\. Date: (\S+)\. Area: (.+)\.", status)
        assert found, f"{path.name}: the second line has no status, date and area"
        rows.append((number, f"[{title}]({path.name})", found[3], found[1], found[2]))
    return _table(("number", "decision", "area", "status", "date"), rows)


# -- memory layout --------------------------------------------------------------------------------

LINE = 64  # bytes of a cache line
WIDTH = 96  # characters of a drawing
STRUCTS = _native.layout()
CODES = _native.codes()
ANCHORS = {"entry": "#a-row-of-the-roster", "header": "memory-layout.md#header-of-every-segment"}
Cell = tuple[int, int, str]


def drawing(tag: str) -> list[str]:
    """Draw a ruler: offsets in bytes above the bars, fields between them; blank: not used.

    A double bar marks the beginning of a cache line.
    """
    size, fields = STRUCTS[tag]
    cells: list[Cell] = []
    end = 0
    for name, (at, width, _, dims, _, _) in fields.items():
        if at > end:
            cells.append((end, at, ""))
        cells.append((at, at + width, name + dims))
        end = at + width
    if size > end:
        cells.append((end, size, ""))
    lines: list[list[Cell]] = []  # cells of whole cache lines
    for cell in cells:
        if cell[0] % LINE == 0:
            lines.append([])
        lines[-1].append(cell)
    rows: list[list[Cell]] = [[]]
    for line in lines:
        if rows[-1] and _width(rows[-1] + line) > WIDTH:
            rows.append([])
        for cell in line:
            if rows[-1] and _width([*rows[-1], cell]) > WIDTH:
                rows.append([])
            rows[-1].append(cell)
    return [line for row in rows for line in _lines(row)]


def _bar(at: int) -> str:
    return "||" if at % LINE == 0 else "|"


def _cell(cell: Cell) -> tuple[str, str]:
    at, _, text = cell
    below = f"{_bar(at)} {text} " if text else f"{_bar(at)} "
    size = max(len(below), len(str(at)) + 1)
    return str(at).ljust(size), below.ljust(size)


def _lines(row: list[Cell]) -> tuple[str, str]:
    above, below = zip(*(_cell(cell) for cell in row), strict=True)
    end = row[-1][1]
    return "".join(above) + str(end), "".join(below) + _bar(end)


def _width(row: list[Cell]) -> int:
    return max(len(line) for line in _lines(row))


def _drawn(text: str) -> str:
    """Renew the drawings of the header: the lines before the end of a comment."""

    def renewed(match: re.Match[str]) -> str:
        lines = "".join(f" * {line}".rstrip() + "\n" for line in drawing(match["tag"].lower()))
        return f"{match['comment']} *\n{lines} */\n#define {match['tag']}_FIELDS("

    pattern = r"(?P<comment>^/\* (?:.+\n)(?: \* \S.*\n)*?) \*\n(?: \* .*\n)* \*/\n"
    return re.sub(pattern + r"#define (?P<tag>PS_\w+)_FIELDS\(", renewed, text, flags=re.M)


def _struct(tag: str) -> str:
    size, fields = STRUCTS[tag]
    rows = []
    for name, (at, width, kind, dims, writer, meaning) in fields.items():
        counts = [f"{int(one):,}" for one in re.findall(r"\d+", dims)]
        if f"ps_{kind}" in STRUCTS:
            kind = f"[{kind}]({ANCHORS.get(kind, f'#{kind}')})"
        typed = f"{width} bytes" if kind in ("char", "u8") and len(counts) == 1 else kind
        if counts and typed == kind:
            typed = f"{kind} × {' × '.join(counts)}"
        rows.append((f"`{name}`", f"{at:,}", typed, writer.replace("/", ", "), _escaped(meaning)))
    table = _table(("field", "at", "type", "writer", "holds"), rows)
    return "\n".join([f"{size:,} bytes.", "", "```", *drawing(tag), "```", "", table])


def _codes(tag: str) -> str:
    rows = (
        (value, f"`{name}`", _escaped(meaning)) for name, (value, meaning) in CODES[tag].items()
    )
    return _table(("code", "name", "meaning"), rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


# -- pages -----------------------------------------------------------------------------------------

PANELS = ("Train", "Jobs", "Checkpoints", "Faults", "This machine", "Research")
TABLES: dict[str, Callable[[], str]] = {
    **{f"commands: {panel}": functools.partial(_commands, panel) for panel in PANELS},
    "decisions": _decisions,
    "exit codes": _exit_codes,
    "limits": _limits,
    "status: metrics": lambda: _metric_rows(metrics.JOB),
    "status: facts": lambda: _fields(replies.JobStatus, metrics.JOB, FACTS),
    "status: learner metrics": lambda: _metric_rows(metrics.LEARNER),
    "status: learner": lambda: _fields(replies.LearnerStatus, metrics.LEARNER, LEARNER_FACTS),
    **{tag: functools.partial(_struct, tag) for tag in STRUCTS},
    **{tag: functools.partial(_codes, tag) for tag in CODES},
}


def pages() -> dict[Path, str]:
    """Return each page that has such a table, and the header, with its text as it should be."""
    found = {HEADER: _drawn(HEADER.read_text())}
    for path in sorted([*DOCS.glob("*.md"), DOCS / "decisions" / "index.md"]):
        text = path.read_text()
        made = MARK.sub(_made, text)
        if MARK.search(text) and any(one["name"] in TABLES for one in MARK.finditer(text)):
            found[path] = made
    return found


def _made(match: re.Match[str]) -> str:
    make = TABLES.get(match["name"])
    return f"{match['begin']}{make()}\n{match['end']}" if make else match.group()


def main() -> None:
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
