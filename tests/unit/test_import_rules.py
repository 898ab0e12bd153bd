"""Imports run downwards only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "gadei_ps"
FOLDERS = {PACKAGE: ROOT / PACKAGE}
FOLDERS |= {f"{PACKAGE}.{name}": ROOT / name for name in ("learners", "watchdog", "benchmarks")}
CEXT = f"{PACKAGE}._native"


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


def _imports(module: str) -> set[str]:
    """Modules of the package that it imports, anywhere in its text."""
    path = MODULES[module]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                base = f"{package}.{base}" if base else package
            for one in node.names:
                inner = f"{base}.{one.name}"
                found.add(inner if inner in MODULES or inner == CEXT else base)
    return {one for one in found if one.split(".")[0] == PACKAGE} - {module}


IMPORTS = {module: _imports(module) for module in MODULES}


def within(package: str) -> set[str]:
    """Modules of a subpackage."""
    full = f"{PACKAGE}.{package}"
    return {module for module in MODULES if module == full or module.startswith(f"{full}.")}


def named(*names: str) -> set[str]:
    return {f"{PACKAGE}.{name}" for name in names}


LEAVES = named("memory.layout", "errors")
BASE = {CEXT} | LEAVES
# What each may import; a module that is named here must exist.
MAY: dict[str, set[str]] = {
    "memory.layout": set(),
    "errors": set(),
    "server.places": named("memory.layout"),
    "storage.files": named("errors"),
    "storage.snapshot": LEAVES | named("storage.files", "memory.weights") | {PACKAGE},
    "storage.export": named("errors", "storage.files", "storage.snapshot"),
    "storage.checkpoint": named("errors", "storage.files", "storage.snapshot"),
    "kernels.compiled": {f"{PACKAGE}.kernels.cache"},
    "server.journal": LEAVES | named("kernels.compiled", "server.symbols"),
    "machine.process": {CEXT},
    "machine.gpus": named("errors", "machine.process", "learners.devices"),
    "server.symbols": {CEXT},
    "memory.segment": BASE | named("machine.process"),
    "memory.weights": LEAVES | named("memory.segment"),
    "server.ledger": BASE | named("kernels.compiled", "server.symbols"),
    "job.paths": LEAVES,
    "job.control": LEAVES | named("job.paths", "memory.segment"),
    "machine.log": set(),
    "classifier.dataset": LEAVES,
}


def test_the_walk_sees_imports() -> None:
    assert len(MODULES) > 30
    assert CEXT in IMPORTS["gadei_ps.memory.segment"]
    assert "gadei_ps.memory.layout" in IMPORTS["gadei_ps.memory.segment"]
    assert "gadei_ps.learners.client" in IMPORTS["gadei_ps.learners.torch"]
    for module, imported in IMPORTS.items():
        assert imported <= MODULES.keys() | {CEXT, PACKAGE}, module


@pytest.mark.parametrize("module", sorted(MAY))
def test_low_modules_import_what_lies_below(module: str) -> None:
    assert IMPORTS[f"{PACKAGE}.{module}"] <= MAY[module]


@pytest.mark.parametrize(("package", "more"), [("kernels", ()), ("sync", ("kernels.compiled",))])
def test_packages_that_know_only_themselves(package: str, more: tuple[str, ...]) -> None:
    modules = within(package)
    assert len(modules) > 4
    for module in modules:
        assert IMPORTS[module] <= modules | named(*more), module


SERVER = named(
    "server.manager",
    "server.shard",
    "server.apply",
    "server.account",
    "server.places",
    "server.ledger",
    "server.symbols",
)
SERVER |= named(
    "server.change",
    "kernels.compiled",
    "server.driver",
    "server.journal",
    "server.recover",
    "server.rings",
)


def test_learners_and_watchdog_know_neither_each_other_nor_the_server() -> None:
    learners, watchdog = within("learners"), within("watchdog")
    assert len(learners) > 5
    assert len(watchdog) > 3
    for module in learners:
        assert not IMPORTS[module] & (watchdog | SERVER), module
    for module in watchdog:
        assert not IMPORTS[module] & (learners | SERVER), module
    for module in SERVER:
        assert not IMPORTS[module] & (learners | watchdog), module


def test_nothing_knows_the_commands() -> None:
    top = within("cli") | within("commands") | within("chaos") | within("classifier")
    top |= named("__main__")
    top |= within("benchmarks")
    for module, imported in IMPORTS.items():
        if module not in top:
            assert not imported & top, module


def test_there_is_no_circle() -> None:
    seen: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in seen:
            for one in sorted(IMPORTS.get(module, ())):
                if one != PACKAGE:
                    visit(one, (*path, module))
            seen[module] = True

    for module in MODULES:
        visit(module, ())


HEAVY = {"numba", "llvmlite", "torch", "safetensors", "typer", "scipy"}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("gadei_ps.watchdog.supervisor", HEAVY),
        ("gadei_ps.commands.daemon", HEAVY),
        ("gadei_ps.learners.client", HEAVY | {"psutil"}),
        ("gadei_ps.learners.devices", HEAVY | {"psutil", "cupy"}),
        ("gadei_ps.machine.launch", HEAVY | {"numpy", "cupy"}),
        ("gadei_ps.server.manager", {"torch", "typer"}),
    ],
)
def test_processes_load_no_more_than_they_need(module: str, without: set[str]) -> None:
    script = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    told = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(told.stdout)} & without
    assert not loaded
