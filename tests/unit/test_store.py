"""The files of compiled code: what is damaged is compiled again, and no symbol is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gadei_ps.kernels import cache, compiled, engine, loaded, store
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.kernels.store import Code
from gadei_ps.server import units

NAME = "assign-0"  # a small one
LIBRARIES = {"cos", "memcpy", "memmove", "memset", "pow", "sqrt"}  # of C and its mathematics


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: None) -> Code:
    """A unit's code, kept in a directory of its own."""
    made = store.read(NAME)
    assert made is not None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    store.keep(NAME, made)
    assert store.read(NAME) == made
    return made


def _path() -> Path:
    return cache.directory() / f"{NAME}.code"


def test_what_is_damaged_is_not_there(whole: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM sees none of it."""
    data = _path().read_bytes()
    damaged = [data[: len(data) * part // 8] for part in range(8)]
    places = 0, 31, 32, 40, len(data) // 2, len(data) - 1
    damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    damaged += [data + b"\0", b"text"]
    for one in damaged:
        _path().write_bytes(one)
        assert store.read(NAME) is None
    other = cache.directory() / "assign-1.code"
    other.write_bytes(data)
    assert store.read("assign-1") is None, "another unit's"
    with monkeypatch.context() as patch:
        patch.setattr(store, "FORMAT", store.FORMAT + b"0")
        _path().write_bytes(data)
        assert store.read(NAME) is None, "of another format"
    elsewhere = cache.directory().with_name("0" * 16)
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "directory", lambda: elsewhere)
        _path().write_bytes(data)
        assert store.read(NAME) is None, "of another version"
    assert store.read(NAME) == whole


LOADS = """
import sys
from gadei_ps.kernels import store
from gadei_ps.server import units
unit = next(one for one in units.units([1]) if one.name == "assign-0")
kept = unit.is_kept()
unit.load()
print(kept, "numba" in sys.modules, store.read("assign-0") is not None)
"""


def test_a_damaged_file_is_compiled_anew(whole: Code) -> None:
    """And kept: the next process imports no Numba. Until then it is missing, for helpers too."""
    path = _path()
    path.write_bytes(path.read_bytes()[:-1])
    for output in ("False True True\n", "True False True\n"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOADS], stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout == output


def test_sources_that_were_replaced_are_not_compiled(
    whole: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade came after this process had begun: its code would be another build's."""
    assert cache.directory().exists()
    _path().unlink()
    monkeypatch.setattr(loaded, "_addresses", {})
    monkeypatch.setattr(cache, "SOURCES", cache.SOURCES[:-1])
    unit = next(one for one in units.units([Kind.SGD]) if one.name == NAME)
    with pytest.raises(OSError, match="was installed again meanwhile; start the job again"):
        unit.load()
    assert not _path().exists()


def test_code_that_cannot_be_kept_is_used(whole: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    full: Callable[[int], None] = _raise_full
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        store.keep("other", whole)
    assert [path.name for path in cache.directory().iterdir()] == [f"{NAME}.code"]
    assert cache.has_failed()
    cache._problems.clear()


def _raise_full(fd: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.usefixtures("compiled")
def test_nothing_is_undefined_but_c_and_ours() -> None:
    """So nothing of Python's, nor of Numba's, runs in a server's threads, and none can raise."""
    names = {one.name for one in units.units(Kind)}
    kept = set(filter(store.is_kept, names))
    assert {"stand_by", "apply", "arrive", "check", "move-1-0"} <= kept
    for name in kept:
        code = store.read(name)
        assert code is not None, name
        found = list(compiled.symbols(code.object))
        undefined = {symbol for symbol, _, section in found if symbol and not section}
        assert undefined == set(code.needs)
        ours = {symbol for symbol in undefined if symbol.startswith("ps_")}
        assert undefined - ours <= LIBRARIES, name
        seen = {symbol for symbol, kind, section in found if section and kind >= 16}
        assert seen == {code.entry}, "another unit may have others of the same name"


def test_code_that_needs_what_is_not_there(whole: Code) -> None:
    with pytest.raises(engine.Unresolved, match="needs ps_of_tomorrow, which this process"):
        engine.load(whole._replace(needs=(*whole.needs, "ps_of_tomorrow")))


FORKED = """
import os, sys
import numpy as np
threads = os.listdir("/proc/self/task")
from gadei_ps.server import code, units
from gadei_ps.kernels import engine
code.load_kept(1)
engine.give_back()
assert "numba" not in sys.modules
assert os.listdir("/proc/self/task") == threads
at = units._CHECK.load()
pid = os.fork()
if not pid:
    assert units._CHECK.load() == at
    frame = np.zeros(512, np.uint64)
    print(units.check_frame(frame.ctypes.data, 0, 7, 0, 0), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.usefixtures("compiled")
def test_a_fork_runs_what_was_loaded_before() -> None:
    """Leave no thread behind, and give back LLVM's own memory."""
    from gadei_ps.memory.layout import Reason

    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKED], stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == f"{int(Reason.BAD_GENERATION)}\n"
