"""Names of Numba and llvmlite that are not public: none is used.

A release of Numba may change or remove any of them. The bound on Numba's version in pyproject.toml
relies on this test. Not found: what a subclass uses of itself.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gadei_ps import __file__ as package

PUBLIC = {"numba", "numba.types", "numba.extending", "llvmlite", "llvmlite.ir", "llvmlite.binding"}
PRIVATE = {"core", "np", "misc", "cpython", "parfors"}  # packages within Numba
OTHERS = {"self", "cls", "os", "torch"}
# Numba's pages on extending it show how an intrinsic returns an array that it has built.
DOCUMENTED = {"_getvalue"}


def private(text: str) -> set[str]:
    """Return names of Numba and llvmlite that a source uses and that are not public."""
    found: set[str] = set()
    attributes: list[ast.Attribute] = []
    imports = False
    for node in ast.walk(ast.parse(text)):
        modules: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            modules = [(one.name, "") for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(node.module or "", one.name) for one in node.names]
        elif isinstance(node, ast.Attribute):
            attributes.append(node)
        for module, name in modules:
            if module.partition(".")[0] in ("numba", "llvmlite"):
                imports = True
                if module not in PUBLIC or name in PRIVATE or name.startswith("_"):
                    found.add(f"{module} {name}")
    for one in attributes if imports else ():
        owner = ast.unparse(one.value)
        if owner == "numba" and one.attr in PRIVATE:
            found.add(f"numba.{one.attr}")
        if re.match("_(?!_)", one.attr) and owner not in OTHERS:
            found.add(one.attr)
    return found - DOCUMENTED


def test_no_other_private_name_of_numba_is_used() -> None:
    root = Path(package).parents[1]
    folders = ("gadei_ps", "learners", "watchdog", "benchmarks")
    sources = sorted(path for one in folders for path in (root / one).rglob("*.py"))
    found = {path.name: sorted(names) for path in sources if (names := private(path.read_text()))}
    assert found == {}, "use a public name"


@pytest.mark.parametrize(
    "text",
    [
        "from numba.core import types",
        "import numba.core.caching",
        "import numba\nnumba.core.config.OPT",
        "from numba import njit\nnjit(f)._cache",
        "from llvmlite.binding import _x",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    assert private(text)
