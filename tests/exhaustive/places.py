"""Places that may be left out: stores, fences, leases, checks of a generation.

A store is a call of one of STORES, or an assignment to a word of a shared structure: of a segment
(SHARED), which other processes see, or in ps_calls.c of what other threads see. What a process
keeps for itself is not taken, and neither are the loops and copies that move whole weights,
gradients and slots.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORES = {"put", "put32", "mark", "fence", "store", "store32", "lease_make", "lease_release"}
LEASE_IS_HELD = {"lease_take": "0"}  # what it returns when the lease is taken
# What words of segments are called where they are assigned to: in numpy's records,
SHARED = {
    *("control", "control_", "_control", "roster", "_roster", "entry", "entries", "line", "_line"),
    *("head", "header", "state", "view", "action", "upto", "memory"),
}
# and in compiled code, which also writes to pieces of the undo log, the journal and a ring.
COMPILED = {("c",), ("e",), ("record",), ("s", "c"), ("s", "state")}
PIECES = {"saved", "to", "old", "old0", "old1", "items"}
PRIVATE = {"part", "board"}  # of one process
IN_C = re.compile(
    r"\b(?:ps_store_release(?:32)?|ps_fence|__atomic_(?:store_n|exchange_n|fetch_and|fetch_or))"
    r"\((?:[^;{}]|\n)*?\);"
)
# Statements: assignments to words of a segment, and what a lease is made of.
ASSIGNED_IN_C = re.compile(
    r"(?<=\n)[ \t]+((?:\*ps_slot\([^;=]*?\)|(?:ring|control)->\w+(?:\[[^;\]]*\])?)"
    r"(?: [-+|&]?= [^;]*|\+\+);"
    r"|(?:error = )?pthread_mutex(?:attr_set\w+|_consistent|_unlock)\([^;]*?\);"
    r"|memset\(\(void \*\)lease[^;]*;)"
)
# Expressions: what stands there instead if they are left out.
TAKEN_IN_C = {
    re.compile(r"__atomic_compare_exchange_n\([^;{}]*?__ATOMIC_RELAXED\)"): "1",
    re.compile(r"(?<=if \()__atomic_exchange_n\([^;{}]*?__ATOMIC_SEQ_CST\)"): "0",
}
GENERATION_IN_C = re.compile(r"[\w>.-]*(?:\([^()]*\))? [=!]= [\w>.-]*\bgeneration\b")
# Where a store is one of the ring's own words and no order depends on it, nothing is left out.
PASSED_OVER = re.compile(r"no_waitv|&chosen")


@dataclass(frozen=True)
class Room:
    """Files, and the tests that must notice what is left out in them, the telling ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


def _in(folder: str, ending: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.{ending}" for name in names)


ROOMS = (
    Room(
        _in(
            "gadei_ps/server",
            "py",
            *("record", "chunks", "recover", "journal", "account", "ledger", "superstep"),
            *("arrival", "context", "frames", "known", "shard", "statistics"),
        ),
        (
            "tests/exhaustive/test_instructions.py",
            "tests/unit/test_undo_log.py",
            "tests/unit/test_recovery.py",
            "tests/unit/test_superstep.py",
            "tests/unit/test_shard.py",
            "tests/unit/test_work.py",
            "tests/unit/test_owned.py",
            "tests/unit/test_stand_by.py",
            "tests/unit/test_broken_ring.py",
            "tests/end_to_end/test_exactly_once.py",
            "tests/end_to_end/test_assign.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_aimed.py",
            "tests/crash/test_deaths.py",
            "tests/crash/test_traces.py",
        ),
    ),
    Room(
        (
            *_in("gadei_ps/server", "py", "code", "driver", "manager", "rings", "shards"),
            "gadei_ps/job/sync_change.py",
            "gadei_ps/job/hyperparameters.py",
        ),
        (
            "tests/unit/test_take_in.py",
            "tests/unit/test_driven.py",
            "tests/unit/test_global_pauses.py",
            "tests/end_to_end/test_exclusive.py",
            "tests/unit/test_rings_followed.py",
            "tests/unit/test_succession.py",
            "tests/end_to_end/test_exactly_once.py",
            "tests/end_to_end/test_set.py",
            "tests/end_to_end/test_set_numbers.py",
            "tests/end_to_end/test_sync.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_deaths.py",
            "tests/end_to_end/test_supervision.py",
            "tests/exhaustive/test_statements.py",
            "tests/crash/test_models.py",
        ),
    ),
    Room(
        (
            "watchdog/*.py",
            *_in("gadei_ps/memory", "py", "segment", "weights"),
            "learners/attach.py",
        ),
        (
            "tests/unit/test_new_memory.py",
            "tests/unit/test_adopted_memory.py",
            "tests/unit/test_servers.py",
            "tests/unit/test_watchdog_words.py",
            "tests/unit/test_recorded.py",
            "tests/unit/test_loading.py",
            "tests/unit/test_roster.py",
            "tests/unit/test_segment.py",
            "tests/unit/test_owned.py",
            "tests/end_to_end/test_clean_stop.py",
            "tests/end_to_end/test_supervision.py",
            "tests/end_to_end/test_adoption.py",
            "tests/end_to_end/test_client.py",
            "tests/end_to_end/test_exactly_once.py",
            "tests/crash/test_deaths.py",
            "tests/crash/test_litter.py",
            "tests/exhaustive/test_statements.py",
            "tests/unit/test_checkpoint_writer.py",
            "tests/cli/test_checkpoint.py",
        ),
    ),
    Room(
        _in(
            "native",
            "c",
            *("ps_calls", "ps_frame", "ps_guard", "ps_land", "ps_lease", "ps_pull", "ps_ring"),
            *("gadei_attach", "gadei_push", "gadei_segments"),
        ),
        (
            "tests/native",
            "tests/conformance/test_clients.py",
            "tests/conformance/test_client_threads.py",
            "tests/conformance/test_client_waits.py",
            "tests/conformance/test_devices.py",
            "tests/end_to_end/test_clean_stop.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_aimed.py",
            "tests/crash/test_deaths.py",
        ),
    ),
)


@dataclass(frozen=True)
class Mutant:
    """A place in a file, and what stands there instead."""

    file: str
    line: int
    begin: int  # characters
    end: int
    instead: str
    where: str  # the function
    what: str

    @property
    def kind(self) -> str:
        """store, fence, lease or check, for people."""
        if self.instead not in ("pass", "(void)0;"):
            return "lease" if "generation" not in self.what else "check"
        return "fence" if "fence()" in self.what else "store"

    @property
    def key(self) -> str:
        return f"{self.file} {self.where}: {self.what} -> {self.instead}"

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.where}: {self.what} -> {self.instead}"


def mutants(root: Path = ROOT) -> Iterator[tuple[Mutant, Room]]:
    """Everything that is left out."""
    for room in ROOMS:
        for pattern in room.files:
            for path in sorted(root.glob(pattern)):
                text = path.read_text()
                file = str(path.relative_to(root))
                found = _of_python(file, text) if path.suffix == ".py" else _of_c(file, text)
                known: Counter[str] = Counter()
                for one in sorted(found, key=lambda one: (one.begin, one.instead)):
                    known[one.key] += 1
                    again = f" (number {known[one.key]})" if known[one.key] > 1 else ""
                    parts = one.begin, one.end, one.instead, one.where, one.what + again
                    yield Mutant(one.file, one.line, *parts), room


def _of_python(file: str, text: str) -> Iterator[Mutant]:
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def made(node: ast.expr | ast.stmt, instead: str, where: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        what = " ".join(raw[begin:end].decode().split())
        chars = len(raw[:begin].decode()), len(raw[:end].decode())
        return Mutant(file, node.lineno, *chars, instead, where, what)

    def visit(node: ast.AST, where: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _called(node.value) in STORES:
                yield made(node, "pass", where)
        elif isinstance(node, ast.Assign | ast.AugAssign) and _is_shared(node):
            yield made(node, "pass", where)
        elif isinstance(node, ast.Call) and _called(node) in LEASE_IS_HELD:
            yield made(node, LEASE_IS_HELD[_called(node)], where)
        elif isinstance(node, ast.Compare) and _of_one_generation(node):
            yield made(node, "True", where)
            yield made(node, "False", where)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    yield from visit(ast.parse(text), "")


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(name) | ast.Attribute(ast.Name("_native"), name):
            return name
    return ""


def _is_shared(node: ast.Assign | ast.AugAssign) -> bool:
    """Return whether all targets of an assignment are words of segments."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    each = [one for to in targets for one in (to.elts if isinstance(to, ast.Tuple) else [to])]
    return all(map(_in_segment, each))


def _in_segment(target: ast.expr) -> bool:
    path: list[str] = []  # names from the first on
    node = target
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(value, name):
                path.insert(0, name)
                node = value
            case ast.Subscript(value) | ast.Call(value):
                node = value
            case _:
                return False
    path.insert(0, node.id)
    if isinstance(target, ast.Name) or PRIVATE & set(path):
        return False
    if len(path) > 1 and ((path[0],) in COMPILED or tuple(path[:2]) in COMPILED):
        return True
    return isinstance(target, ast.Subscript) and (
        path in [[one] for one in PIECES] or bool(SHARED & set(path))
    )


def _of_one_generation(node: ast.Compare) -> bool:
    """Not where whole columns of the roster are compared: True or False would not fit there."""
    text = ast.unparse(node)
    columns = re.findall(r"\b(?:entries|roster|retired|generation)\b(?:\['\w+'\])?(?!\[)", text)
    whole = [one for one in columns if one.startswith(("entries[", "roster["))]
    return len(node.ops) == 1 and bool(re.search(r"\bgeneration\b", text)) and not whole


def _of_c(file: str, text: str) -> Iterator[Mutant]:
    function = re.compile(r"^\w[\w *]*?(\w+)\([^;]*?\)\n?\s*\{", re.M)
    heads = [(one.start(), one[1]) for one in function.finditer(text)]

    def made(match: re.Match[str], instead: str, group: int = 0) -> Mutant:
        begin, end = match.span(group)
        where = next((name for at, name in reversed(heads) if at < begin), "")
        line = text.count("\n", 0, begin) + 1
        what = " ".join(match[group].replace("\\\n", " ").split())
        return Mutant(file, line, begin, end, instead, where, what)

    for match in IN_C.finditer(text):
        if not PASSED_OVER.search(match[0]):
            yield made(match, "(void)0;")
    for match in ASSIGNED_IN_C.finditer(text):
        yield made(match, "(void)0;", 1)
    for pattern, instead in TAKEN_IN_C.items():
        for match in pattern.finditer(text):
            yield made(match, instead)
    for match in GENERATION_IN_C.finditer(text):
        yield made(match, "0")
        yield made(match, "1")
