"""Names of Numba, llvmlite, Ray and torch.distributed that are not public: none is used.

A release may change or remove any of them. The bounds on versions in pyproject.toml rely on this
test. Not found: what a subclass uses of itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gadei_ps import __file__ as package

PUBLIC = {"numba", "numba.types", "numba.extending", "llvmlite", "llvmlite.ir", "llvmlite.binding"}
PRIVATE = {"core", "np", "misc", "cpython", "parfors"}  # packages within Numba
OTHERS = {"self", "cls", "os", "torch"}
PRIVATE_OF_RAY = re.compile(r"(ray|torch\.distributed)\.(\w+\.)*_(?!_)|torch\._C\.")
# Torch has no public way to ask which leaves a backward() reaches. Without the name, linear()
# computes the gradient.
WITHOUT_OTHER = {"torch._C._will_engine_execute_node"}
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


def private_of_ray(text: str) -> set[str]:
    """Return names of Ray and torch.distributed that a source uses and that are not public."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call):
            names = [f"{ast.unparse(node.func)}.{one.arg}" for one in node.keywords]
        found |= {one for one in names if PRIVATE_OF_RAY.match(one)}
    return found - WITHOUT_OTHER


def private_in_sources(private: Callable[[str], set[str]]) -> dict[str, list[str]]:
    root = Path(package).parents[1]
    folders = ("gadei_ps", "learners", "watchdog", "benchmarks")
    sources = sorted(path for one in folders for path in (root / one).rglob("*.py"))
    return {path.name: sorted(names) for path in sources if (names := private(path.read_text()))}


def test_no_other_private_name_of_numba_is_used() -> None:
    assert private_in_sources(private) == {}, "use a public name"


def test_no_private_name_of_ray_is_used() -> None:
    assert private_in_sources(private_of_ray) == {}, "use a public name"


@pytest.mark.parametrize(
    "text",
    [
        "ray._raylet.GcsClient",
        "from ray._private import worker",
        "ray.init(_node_ip_address='127.0.0.2')",
        "from torch._C._distributed_c10d import TCPStore",
        "import torch.distributed._tensor",
    ],
)
def test_a_private_name_of_ray_is_found(text: str) -> None:
    assert private_of_ray(text)
    assert not private_of_ray(re.sub(r"\b_", "", text))


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
