"""The files of compiled code: what is damaged is compiled again, and no symbol is missing."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from llvmlite import binding

from gadei_ps.kernels import cache, engine
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.server import units

NAME = "assign-0"  # a small one
LIBRARIES = {"cos", "memcpy", "memmove", "memset", "pow", "sqrt"}  # of C and its mathematics


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: None) -> bytes:
    """A unit's code, kept in a directory of its own."""
    made = cache.read(NAME)
    assert made is not None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cache.keep(NAME, made)
    assert cache.read(NAME) == made
    return made


def _path() -> Path:
    return cache.directory() / f"{NAME}.code"


def test_what_is_damaged_is_not_there(whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM sees none of it."""
    data = _path().read_bytes()
    damaged = [data[: len(data) * part // 8] for part in range(8)]
    places = 0, 31, 32, 40, len(data) // 2, len(data) - 1
    damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    damaged += [data + b"\0", b"text"]
    for one in damaged:
        _path().write_bytes(one)
        assert cache.read(NAME) is None
    _path().write_bytes(data)
    other = cache.directory() / "assign-1.code"
    other.write_bytes(data)
    assert cache.read("assign-1") is None, "another unit's"
    elsewhere = cache.directory().with_name("0" * 16)
    elsewhere.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "directory", lambda: elsewhere)
        _path().write_bytes(data)
        assert cache.read(NAME) is None, "of another version"
    assert cache.read(NAME) == whole


LOADS = """
import sys
from gadei_ps.kernels import cache
from gadei_ps.server import units
unit = next(one for one in units.units([1]) if one.name == "assign-0")
kept = unit.is_kept()
unit.load()
print(kept, "numba" in sys.modules, cache.read("assign-0") is not None)
"""


def test_a_damaged_file_is_compiled_anew(whole: bytes) -> None:
    """And kept: the next process imports no Numba. Until then it is missing, for helpers too."""
    path = _path()
    path.write_bytes(path.read_bytes()[:-1])
    for output in ("False True True\n", "True False True\n"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOADS], stdout=subprocess.PIPE, text=True, check=True
        )
        assert done.stdout == output


def test_sources_that_were_replaced_are_not_compiled(
    whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade came after this process had begun: its code would be another build's."""
    assert cache.directory().exists()
    _path().unlink()
    monkeypatch.setattr(units, "_addresses", {})
    monkeypatch.setattr(cache, "SOURCES", cache.SOURCES[:-1])
    unit = next(one for one in units.units([Kind.SGD]) if one.name == NAME)
    with pytest.raises(OSError, match="was installed again meanwhile; start the job again"):
        unit.load()
    assert not _path().exists()


def test_code_that_cannot_be_kept_is_used(whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_addresses", {})
    _path().unlink()
    unit = next(one for one in units.units([Kind.SGD]) if one.name == NAME)
    full = OSError(28, "No space left on device")
    log = mock.Mock()
    units._warn.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(units.log, "get", lambda: log)
        patch.setattr(units.Unit, "compile", lambda _: whole)
        patch.setattr(Path, "rename", mock.Mock(side_effect=full))
        assert unit.load()
    assert not list(cache.directory().iterdir())
    log.warning.assert_called_once_with(
        "compiled code cannot be kept for the next start", reason="No space left on device"
    )


COMPILES = """
from gadei_ps.server import units
units.CHECK.compile()
import numba
print(numba.config.DISABLE_INTEL_SVML)
"""


def test_each_compiler_does_without_the_library_of_intel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NUMBA_DISABLE_INTEL_SVML", raising=False)
    command = [sys.executable, "-P", "-c", COMPILES]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"1\n"


SYMBOL = struct.Struct("<IBBHQQ")  # of an object file: ELF of 64 bits, little-endian


def symbols(code: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield each symbol of an object file: name, kind (local if less than 16), and section.

    A symbol of others has no section, 0.
    """
    tables = {one.name(): one.data() for one in binding.ObjectFileRef.from_data(code).sections()}
    names = tables[b".strtab"]
    for at, kind, _, section, _, _ in SYMBOL.iter_unpack(tables[b".symtab"]):
        if at:
            yield names[at : names.index(b"\0", at)].decode(), kind, section


@pytest.mark.usefixtures("compiled")
def test_nothing_is_undefined_but_c_and_ours() -> None:
    """So nothing of Python's, nor of Numba's, runs in a server's threads, and none can raise."""
    names = {one.name for one in units.units(Kind)}
    kept = {name: code for name in names if (code := cache.read(name))}
    assert {"stand_by", "apply", "arrive", "check", "move-1-0"} <= kept.keys()
    for name, code in kept.items():
        found = list(symbols(code))
        undefined = {symbol for symbol, _, section in found if not section}
        ours = {symbol for symbol in undefined if symbol.startswith("ps_")}
        assert undefined - ours <= LIBRARIES, name
        assert all(map(binding.address_of_symbol, ours)), name
        seen = {symbol for symbol, kind, section in found if section and kind >= 16}
        assert seen == {engine.entry(name)}, "another unit may have others of the same name"


FORKED = """
import os, sys
import numpy as np
threads = os.listdir("/proc/self/task")
from gadei_ps.server import code, units
code.load_kept(1)
assert "numba" not in sys.modules
assert os.listdir("/proc/self/task") == threads
at = units.CHECK.load()
pid = os.fork()
if not pid:
    assert units.CHECK.load() == at
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
