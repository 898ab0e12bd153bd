"""Compilation of code: wrappers, parts of a caller, vectors, and errors."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from gadei_ps.kernels import compiled, engine
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.memory.layout import RING
from gadei_ps.server import units
from gadei_ps.server.symbols import address, floats, structs, words

pytestmark = pytest.mark.usefixtures("compiled")
rings_at = structs(RING)


@compiled.inner
def _double(x: int) -> int:
    return 2 * x


@compiled.inlined
def _sum(at: np.uint64, count: int) -> float:
    total = np.float32(0)
    for one in floats(at, count):
        total += one
    return total


@compiled.inlined
def _triple(at: np.uint64, count: int) -> None:
    values = floats(at, count)
    for i in range(count):
        values[i] *= np.float32(3)


def _triple_chunk(at: np.uint64) -> None:
    _triple(at, 64)


@compiled.compiled
def _sum_of_slices(count: int) -> float:
    values = np.ones(count)
    rest = [values[start:] for start in range(count)]
    return float(rest[count // 2].sum())


def _of_error(number: int) -> int:
    if number < 0:
        raise ValueError
    return number


@compiled.compiled
def _calls(x: int) -> int:
    return _double(x) + 1 + _double(x)


@compiled.compiled
def _summed(array: np.ndarray) -> float:
    return _sum(address(array), array.size)


@compiled.compiled
def _head(at: np.uint64, row: int) -> np.uint64:
    rings = rings_at(at)
    rings[row].head += np.uint64(1)
    return words(address(rings), 1)[0] + rings[row].head


def test_what_only_compiled_code_calls_has_no_wrapper() -> None:
    assert _calls(3) == 13
    (code,) = _double.inspect_llvm().values()  # type: ignore[attr-defined]
    assert "@cpython." not in code
    assert "@cfunc." not in code
    (code,) = _calls.inspect_llvm().values()  # type: ignore[attr-defined]
    assert "@_ZN7cpython" in code


def test_an_inlined_function_is_a_part_of_its_caller() -> None:
    values = np.arange(64, dtype=np.float32)
    assert _summed(values) == values.sum()
    (code,) = _summed.inspect_llvm().values()  # type: ignore[attr-defined]
    assert not [line for line in code.splitlines() if " call " in line and "4_sum" in line]


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """LLVM's code of what is compiled, after each time that it is optimized."""
    found: list[str] = []
    optimize = compiled._optimize

    def note(module: Any, machine: Any) -> None:
        optimize(module, machine)
        found.append(str(module))

    monkeypatch.setattr(compiled, "_optimize", note)
    return found


def test_a_loop_of_known_length_takes_vectors(optimized: list[str]) -> None:
    """LLVM would unroll it if it was inlined before it is optimized."""
    compiled.machine_code("triple", types.void(types.uint64), _triple_chunk)
    assert re.search(r"fmul <\d+ x float>", optimized[-1])


COUNTS = re.compile("atomicrmw|NRT_incref")


@pytest.mark.parametrize("name", ["apply", "assign-0", "move-1-0", f"move-{int(Kind.ADAM)}-1"])
def test_no_loop_counts_references(name: str, optimized: list[str]) -> None:
    """Counting takes as long as the arithmetic of a chunk; Numba adds it without a word."""
    next(one for one in units.units(Kind) if one.name == name).compile()
    assert not COUNTS.search(optimized[-1])


def test_a_count_of_references_is_found() -> None:
    assert _sum_of_slices(3) == 2.0
    (code,) = _sum_of_slices.inspect_llvm().values()  # type: ignore[attr-defined]
    assert COUNTS.search(code)


def test_an_error_ends_the_process() -> None:
    """And nothing of Python's runs: a shard's thread does not have the GIL."""
    code = compiled.machine_code("error", types.int64(types.int64), _of_error)
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(engine.load("error", code))
        os._exit(0 if call(5) == 5 and call(-1) else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (-signal.SIGILL, -signal.SIGTRAP)


def test_structs_at_an_address() -> None:
    rings = np.zeros(3, RING)
    rings["head"] = (7, 8, 9)
    first = int(rings.view(np.uint64)[0])
    assert _head(np.uint64(rings.ctypes.data), 2) == first + 10
    assert rings["head"].tolist() == [7, 8, 10]


SCRIPT = """
import numba
before = numba.config.CACHE_DIR
from gadei_ps.kernels import cache, compiled
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
