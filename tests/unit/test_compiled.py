"""What is compiled: only what runs by itself becomes machine code, and once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding
from numba.core.caching import NullCache

from gadei_ps.kernels import compiled
from gadei_ps.memory.layout import RING
from gadei_ps.server.symbols import address, floats, structs, words

pytestmark = pytest.mark.usefixtures("compiled")
rings_at = structs(RING)


def _compiled(function: Any) -> Any:
    """Compiled, and not kept on disk: what another run has kept is not compiled again."""
    made: Any = compiled.compiled(function)
    made._cache = NullCache()
    return made


@compiled.inner
def _double(x: int) -> int:
    return 2 * x


@compiled.inlined
def _sum(at: np.uint64, count: int) -> float:
    total = np.float32(0)
    for one in floats(at, count):
        total += one
    return total


@_compiled
def _called(x: int) -> int:
    return _double(x) + 1


@_compiled
def _calls(x: int) -> int:
    return _called(x) + _double(x)


@_compiled
def _summed(array: np.ndarray) -> float:
    return _sum(address(array), array.size)


@_compiled
def _head(at: np.uint64, row: int) -> np.uint64:
    rings = rings_at(at)
    rings[row].head += np.uint64(1)
    return words(address(rings), 1)[0] + rings[row].head


def _library(function: Any) -> Any:
    (made,) = function.overloads.values()
    return made.library


def test_only_what_python_calls_becomes_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    add = binding.ExecutionEngine.add_module

    def note(engine: Any, module: Any) -> None:
        loaded.extend(one.name for one in module.functions if not one.is_declaration)
        add(engine, module)

    monkeypatch.setattr(binding.ExecutionEngine, "add_module", note)
    assert _calls(3) == 13
    own = [name for name in loaded if "_double" in name or "_called" in name]
    assert not own, "they are in the code of their caller, inlined"
    assert isinstance(_library(_double), compiled._Part)
    assert not _called.overloads, "nothing that Python could call"
    assert _called(3) == 7
    assert any("_called" in name for name in loaded)


def test_a_loop_is_optimized_before_it_becomes_a_part() -> None:
    values = np.arange(64, dtype=np.float32)
    assert _summed(values) == values.sum()
    library = _library(_sum)
    assert isinstance(library, compiled._LoopPart)
    assert library.get_pointer_to_function("any") == 0
    assert "alloca" not in library.get_llvm_str()


def test_structs_at_an_address() -> None:
    rings = np.zeros(3, RING)
    rings["head"] = (7, 8, 9)
    first = int(rings.view(np.uint64)[0])
    assert _head(np.uint64(rings.ctypes.data), 2) == first + 10
    assert rings["head"].tolist() == [7, 8, 10]


LOADS = """
import gc, sys
import numpy as np
from gadei_ps.machine import log
from gadei_ps.kernels import cpu
log.set_up(quiet=True)
assert gc.isenabled() and gc.get_freeze_count() > 50_000
print([name for name in ("numba.typed.dictimpl", "numba.np.linalg", "rich") if name in sys.modules])
weights = np.ones(3, np.float32)
cpu.scale(weights, 2.0)
print(weights[0])
"""


def test_a_kernel_is_loaded_without_preparing_for_compiling() -> None:
    """Numba's own cache, for tests and for tools that measure."""
    done = subprocess.run([sys.executable, "-P", "-c", LOADS], stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == ["[]", "2.0"]


SCRIPT = """
import numba
before = numba.config.CACHE_DIR
from gadei_ps.kernels import cache
from gadei_ps.sync import search
@numba.njit(cache=True)
def of_a_script(number):
    return number + 1
assert of_a_script(1) == 2
assert numba.config.CACHE_DIR == before
assert not list(cache.directory().rglob("*of_a_script*"))
print(of_a_script.stats.cache_path)
"""


def test_the_functions_of_a_script_are_kept_where_it_says(tmp_path: Path) -> None:
    """Importing modules of ours changes nothing in Numba."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-P", script], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
