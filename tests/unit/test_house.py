"""Each room has a layer, and imports run downwards only, however many modules lie between.

A script that is started with `-m` counts as imported, and so does an `#include` of the C sources.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gadei_ps.kernels import cache
from gadei_ps.memory import build

ROOT = Path(__file__).parents[2]
PACKAGE = "gadei_ps"
DOCUMENTS = {".md", ".rst"}
FOLDERS = {PACKAGE: ROOT / PACKAGE}
FOLDERS |= {
    f"{PACKAGE}.{name}": ROOT / name for name in ("learners", "watchdog", "systemd", "benchmarks")
}
CEXT = f"{PACKAGE}._native"

# A room or module of a layer may import its own room and what lies in the layers before it. Rooms
# of one layer know nothing of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("gadei_ps", "_native", "errors", "homes", "metrics", "systemd"),
    ("machine", "kernels"),
    ("memory", "sync", "show"),
    ("storage", "groups"),
    ("job", "run_times"),
    ("server", "learners", "simulate", "monitoring"),
    ("watchdog",),
    ("commands",),
    ("replicas",),
    ("chaos", "classifier", "dashboard"),
    ("benchmarks",),
    ("cli",),
    ("__main__",),
)
# Pairs of rooms that must not meet in one process, though the layers would allow it: the watchdog
# starts servers and learners, and fails apart from them.
APART = (("watchdog", "server"), ("watchdog", "learners"))
# Benchmarks start the product as its users do: as a command, from outside.
FROM_OUTSIDE = {"benchmarks": {f"{PACKAGE}.__main__"}}

Graph = Mapping[str, set[str]]


def _modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


MODULES = _modules()


def _imported(module: str, tree: ast.AST) -> set[str]:
    """Return modules of the package that it imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are written in full"
            base = node.module or ""
            for one in node.names:
                inner = f"{base}.{one.name}"
                found.add(inner if inner in MODULES or inner == CEXT else base)
    return {one for one in found if one.split(".")[0] == PACKAGE} - {module}


def _started(module: str, tree: ast.AST) -> set[str]:
    """Return modules of the package that it starts as scripts.

    Seen by `-m` and a name in one sequence, or by a name given to module_command().
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            texts = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
            pairs = itertools.pairwise(texts)
            names |= {name for flag, name in pairs if flag == "-m" and isinstance(name, str)}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            names |= {node.args[0].value} if called == "module_command" else set()
    mains = {name: f"{name}.__main__" for name in names}
    found = {main if main in MODULES else name for name, main in mains.items()}
    return {one for one in found if one.split(".")[0] == PACKAGE} - {module}


def room(module: str) -> str:
    """The room of a module; the package itself and the modules beside the rooms are their own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _others(tree: ast.AST) -> set[str]:
    """Return the names of all packages that it imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def _finds_the_current_directory(tree: ast.AST) -> list[str]:
    """Return commands of the interpreter that would find modules in the current directory."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for one, flag in itertools.pairwise(node.elts):
                if getattr(flag, "value", "") in ("-m", "-c"):
                    found += [ast.unparse(node)] * (ast.unparse(one) == "sys.executable")
    return found


@dataclass(frozen=True)
class Text:
    """Contents of a module's text. The trees are not kept: they are large, and tests fork."""

    imports: set[str]
    starts: set[str]
    others: set[str]
    loose: list[str]


def _read(module: str, path: Path) -> Text:
    tree = ast.parse(path.read_text())
    starts = _started(module, tree) - FROM_OUTSIDE.get(room(module), set())
    found = _imported(module, tree), starts, _others(tree), _finds_the_current_directory(tree)
    return Text(*found)


@functools.cache
def texts() -> dict[str, Text]:
    """Return the texts of all modules."""
    return {module: _read(module, path) for module, path in MODULES.items()}


def imports() -> dict[str, set[str]]:
    return {module: text.imports for module, text in texts().items()}


def starts() -> dict[str, set[str]]:
    return {module: text.starts for module, text in texts().items()}


def layer(module: str) -> int:
    for number, rooms in enumerate(LAYERS):
        if room(module) in rooms:
            return number
    raise AssertionError(f"{module}: its room has no layer in tests/unit/test_house.py")


def ways(graph: Graph, start: str) -> Iterator[tuple[str, ...]]:
    """A way from `start` to every module that it reaches, shortest first."""
    seen, next_ones = {start}, [(start,)]
    while next_ones:
        here, next_ones = next_ones, []
        for way in here:
            for module in sorted(graph.get(way[-1], ())):
                if module not in seen:
                    seen.add(module)
                    next_ones.append((*way, module))
                    yield next_ones[-1]


def upward(graph: Graph) -> list[str]:
    """Return imports of modules that do not lie below, each with its path."""
    wrong = []
    for module in graph:
        for way in ways(graph, module):
            below = layer(way[-1]) < layer(module) or room(way[-1]) == room(module)
            if not below:
                wrong.append(" -> ".join(way))
    return wrong


def meetings(graph: Graph) -> list[str]:
    """Return paths between packages that must stay apart."""
    return [
        " -> ".join(way)
        for module in graph
        for way in ways(graph, module)
        for one, other in APART
        if (room(module), room(way[-1])) in ((one, other), (other, one))
    ]


def circles(graph: Graph) -> list[str]:
    """Return modules that reach themselves."""
    found = []
    for module in graph:
        for way in ways(graph, module):
            if module in graph.get(way[-1], ()):
                found.append(" -> ".join((*way, module)))
                break
    return found


def together(*graphs: Graph) -> dict[str, set[str]]:
    return {module: set().union(*(graph[module] for graph in graphs)) for module in graphs[0]}


def test_the_walk_sees_imports() -> None:
    assert len(MODULES) > 100
    assert CEXT in imports()["gadei_ps.memory.segment"]
    assert "gadei_ps.memory.layout" in imports()["gadei_ps.memory.segment"]
    assert "gadei_ps.server.manager" in starts()["gadei_ps.watchdog.server_starter"]
    assert "gadei_ps.machine.cuda_probe" in starts()["gadei_ps.machine.gpus"]
    for module, imported in imports().items():
        assert imported | starts()[module] <= MODULES.keys() | {CEXT, PACKAGE}, module


def test_every_room_has_a_layer() -> None:
    named = [one for rooms in LAYERS for one in rooms]
    assert len(named) == len(set(named))
    assert {room(module) for module in MODULES} == set(named) - {"_native"}


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


def test_imports_run_downwards() -> None:
    assert not upward(together(imports(), starts()))


def test_what_fails_apart_is_imported_apart() -> None:
    assert not meetings(imports())


def test_there_is_no_circle() -> None:
    assert not circles(imports())


def test_an_upward_import_two_hops_away_is_found() -> None:
    graph: dict[str, set[str]] = {
        "gadei_ps.memory.segment": {"gadei_ps.machine.process"},
        "gadei_ps.machine.process": {"gadei_ps.errors"},
        "gadei_ps.errors": set(),
    }
    assert not upward(graph)
    graph["gadei_ps.errors"] = {"gadei_ps.learners.client"}
    assert (
        "gadei_ps.memory.segment -> gadei_ps.machine.process -> gadei_ps.errors"
        " -> gadei_ps.learners.client"
    ) in upward(graph)
    tree = ast.parse('command = [sys.executable, "-P", "-m", "gadei_ps.learners.client"]')
    graph["gadei_ps.errors"] = _started("gadei_ps.errors", tree)
    assert len(upward(graph)) == 3
    tree = ast.parse('process.module_command("gadei_ps.learners.client", "--quiet")')
    assert _started("gadei_ps.errors", tree) == {"gadei_ps.learners.client"}


def test_children_do_not_find_the_current_directory() -> None:
    """Started within a source tree, they would find it instead of the installed package."""
    assert _finds_the_current_directory(ast.parse('run([sys.executable, "-m", "gadei_ps"])'))
    assert not [command for text in texts().values() for command in text.loose]


def test_rooms_that_meet_are_found() -> None:
    graph = {
        "gadei_ps.watchdog.servers": {"gadei_ps.job.config"},
        "gadei_ps.job.config": {"gadei_ps.server.manager"},
    }
    assert len(meetings(graph)) == 1
    assert circles(graph | {"gadei_ps.server.manager": {"gadei_ps.watchdog.servers"}})


def test_sources_of_c_run_downwards() -> None:
    """Check that headers include headers without a circle; a source's own header comes first."""
    native = ROOT / "native"
    include = re.compile(r'^#include "([^"]+)"', re.M)
    found = {
        path.name: set(include.findall(path.read_text()))
        for path in (*native.glob("*.h"), *native.glob("*.c"))
    }
    assert len(found) > 15
    assert not circles(found)
    for name, included in found.items():
        assert included <= found.keys(), name
        assert not any(one.endswith(".c") for one in included), name
    assert found["ps_layout.h"] == {"ps_codes.h", "ps_structs.h"}
    assert found["ps_structs.h"] == set()
    assert found["ps_codes.h"] == set()
    assert found["gadei.h"] == set()


def calls_in_c(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return for each C source the sources whose functions it names.

    The sources are formatted so that a function's body begins with a brace in the first column.
    """
    code = {name: re.sub(r"/\*.*?\*/", "", text, flags=re.S) for name, text in sources.items()}
    definition = re.compile(r"^(?!static|#|\s|})[\w \*]*?\b([a-z]\w*)\([^;{}]*\)\s*\{", re.M)
    owner = {function: name for name, text in code.items() for function in definition.findall(text)}
    return {
        name: {
            other
            for function, other in owner.items()
            if other != name and re.search(rf"\b{function}\b", text)
        }
        for name, text in code.items()
    }


def test_sources_of_c_call_downwards() -> None:
    """No two files of native/ stand on each other, and the protocol knows neither client."""
    native = ROOT / "native"
    calls = calls_in_c({path.name: path.read_text() for path in native.glob("*.c")})
    assert "gadei_wait.c" in calls["gadei_push.c"] and "ps_frame.c" in calls["gadei_push.c"]
    assert not circles(calls)
    for name, called in calls.items():
        if name.startswith("ps_"):
            assert all(one.startswith("ps_") for one in called), name
        assert not any(one.startswith("module") for one in called) or name.startswith("module")
    # Functions of gadei.h are not one another's servants across files.
    tops = {f"gadei_{part}.c" for part in ("attach", "pull", "push", "work")}
    for top in tops:
        assert not calls[top] & tops, top


def test_a_circle_of_c_sources_is_found() -> None:
    one = "int first(int a)\n{\n    return second(a);\n}\n"
    other = "static int third(int a)\n{\n    return first(a);\n}\n"
    assert not circles(calls_in_c({"a.c": one, "b.c": other}))
    assert circles(calls_in_c({"a.c": one, "b.c": other + "int second(int a)\n{\n}\n"}))


COMPILERS = {"numba", "llvmlite"}
# They import compilers late, and have no code that is compiled.
USERS_OF_COMPILERS = {f"{PACKAGE}.kernels.cache", f"{PACKAGE}.server.units"}


def _keeps_code(module: str, graph: Graph) -> bool:
    """Return whether a module makes functions that Numba keeps on disk, or parts of them."""
    if room(module) == "benchmarks" or module in USERS_OF_COMPILERS:
        return False
    return (
        bool(texts()[module].others & COMPILERS) or f"{PACKAGE}.kernels.compiled" in graph[module]
    )


def compiled_sources(graph: Graph) -> set[str]:
    """Return modules whose text decides what is compiled: those with code, and their imports."""
    keeping = {module for module in MODULES if _keeps_code(module, graph)}
    reached = {way[-1] for module in keeping for way in ways(graph, module)}
    return (keeping | reached) - {CEXT}


def test_the_name_of_the_cache_covers_all_that_is_compiled() -> None:
    found = compiled_sources(imports())
    assert {f"{PACKAGE}.server.shard", f"{PACKAGE}.kernels.cpu"} <= found
    assert not {MODULES[module] for module in found} - {*cache.SOURCES}


def test_a_new_source_of_compiled_code_is_found() -> None:
    graph = imports() | {f"{PACKAGE}.errors": {f"{PACKAGE}.kernels.compiled"}}
    assert compiled_sources(graph) == compiled_sources(imports()) | {f"{PACKAGE}.errors"}
    graph = imports() | {f"{PACKAGE}.memory.layout": {f"{PACKAGE}.memory.weights"}}
    assert f"{PACKAGE}.memory.weights" in compiled_sources(graph) - compiled_sources(imports())


def test_the_build_of_a_server_covers_all_that_a_server_runs() -> None:
    """Except texts of errors and names of directories: these do not touch a job's records."""
    server = f"{PACKAGE}.server.manager"
    run = {server} | {way[-1] for way in ways(imports(), server)}
    assert f"{PACKAGE}.job.sync_change" in run
    known = {path.resolve() for path in build._sources()}
    missing = {module for module in run - {CEXT} if MODULES[module].resolve() not in known}
    assert missing == {f"{PACKAGE}.errors", f"{PACKAGE}.homes"}


def test_benchmarks_keep_no_compiled_code() -> None:
    for module, path in MODULES.items():
        if room(module) == "benchmarks":
            assert "cache=True" not in path.read_text(), module


HEAVY = {"numba", "llvmlite", "torch", "safetensors", "typer", "scipy"}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("gadei_ps.watchdog.supervisor", HEAVY),
        ("gadei_ps.commands.daemon", HEAVY),
        ("gadei_ps.watchdog.__main__", HEAVY | {"numpy", "pydantic", "structlog"}),
        ("gadei_ps.learners.client", HEAVY | {"psutil"}),
        ("gadei_ps.learners.devices", HEAVY | {"psutil", "cupy"}),
        ("gadei_ps.machine.launch", HEAVY | {"numpy", "cupy"}),
        ("gadei_ps.server.manager", HEAVY | {"structlog", "psutil", "pydantic"}),
    ],
)
def test_processes_load_no_more_than_they_need(module: str, without: set[str]) -> None:
    script = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(result.stdout)} & without
    assert not loaded


PRINTERS = {
    "show/plain.py": 1,
    "show/tables.py": 1,
    "cli/app.py": 2,  # the version; and help, which rich lays out
    "cli/exits.py": 2,  # the error, in one line; and JSON
    "cli/training.py": 1,  # to a file, the sentences as they are
    "commands/run.py": 1,  # above a learner's line, by cursor movements
}
"""Calls of print() by what runs in a terminal; everything else calls show.plain.print_text()."""


def test_text_is_escaped_where_it_is_printed() -> None:
    """It may be another user's. Calls of Console.print() are in show/ only."""
    found: dict[str, int] = {}
    for room in ("cli", "commands", "show"):
        for path in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                    name = str(path.relative_to(ROOT / PACKAGE))
                    found[name] = found.get(name, 0) + 1
    assert found == PRINTERS


MOST_LINES, MOST_PARAMETERS = 60, 8


def documented() -> set[str]:
    """Return the paths of the modules in the reference, whose constructors users call.

    Of a package, those that it imports its names from.
    """
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*") if page.suffix in DOCUMENTS]
    found = re.findall(r"automodule(?:::|})\s+(\S+)", "\n".join(pages))
    packages = [name for name in found if MODULES[name].name == "__init__.py"]
    names = {*found}.union(*(texts()[name].imports for name in packages)) - {CEXT}
    return {str(MODULES[name].relative_to(ROOT)) for name in names}


def sizes(path: str, tree: ast.AST, where: str = "") -> Iterator[tuple[str, int, int, int]]:
    """Yield for each function its name, the lines of its body without docstring, and the counts
    of its parameters without self: of all, and of those that may be given without a name."""
    for node in ast.iter_child_nodes(tree):
        inner = where
        if isinstance(node, ast.ClassDef):
            inner = f"{where}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{where}{node.name}."
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            given = node.args
            unnamed = len([*given.posonlyargs, *given.args]) - 1 + (given.vararg is not None)
            count = unnamed + len(given.kwonlyargs) + (given.kwarg is not None)
            yield f"{path}:{inner[:-1]}", lines, count, unnamed
        yield from sizes(path, node, inner)


def above_the_limits(
    trees: Mapping[str, ast.AST], public: Collection[str] = ()
) -> tuple[dict[str, int], dict[str, int]]:
    """Return long functions with their lines, and classes with wide constructors.

    public: paths of modules whose constructors may have any number of parameters with a name.
    """
    long, wide = {}, {}
    for path, tree in trees.items():
        for name, lines, all_, unnamed in sizes(path, tree):
            parameters = unnamed if path in public else all_
            if lines > MOST_LINES:
                long[name] = lines
            if name.endswith(".__init__") and parameters > MOST_PARAMETERS:
                wide[name.removesuffix(".__init__")] = parameters
    return long, wide


def test_functions_are_short_and_constructors_narrow() -> None:
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for module, path in MODULES.items()
        if room(module) != "benchmarks"
    }
    public = documented() | {"gadei_ps/classifier/network.py"}  # the sizes of a network, by name
    assert above_the_limits(trees, public) == ({}, {})


def test_long_functions_and_wide_constructors_are_found() -> None:
    def text(lines: int, parameters: int) -> ast.AST:
        names = ", ".join(f"p{number}" for number in range(parameters))
        body = "\n".join(["        pass"] * lines)
        doc = '        """A docstring\n\n        does not count.\n        """'
        return ast.parse(f"class A:\n    def __init__(self, {names}):\n{doc}\n{body}\n")

    assert above_the_limits({"a.py": text(60, 8)}) == ({}, {})
    assert above_the_limits({"a.py": text(61, 9)}) == ({"a.py:A.__init__": 61}, {"a.py:A": 9})
    named = ast.parse(f"class A:\n    def __init__(self, *, {', '.join('abcdefghi')}): ...\n")
    assert above_the_limits({"a.py": named})[1] == {"a.py:A": 9}
    assert above_the_limits({"a.py": named}, {"a.py"})[1] == {}
