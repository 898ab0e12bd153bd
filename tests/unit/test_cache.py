"""Place of compiled code: what is used stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from gadei_ps.kernels import cache


def test_what_is_used_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    here = cache.directory()
    os.utime(here, times=(0, 0))
    assert cache.directory() == here
    assert here.stat().st_mtime > time.time() - 60, "its last use"
    here.rmdir()
    old, new = ([here.with_name(f"{kind}{number:015x}") for number in range(5)] for kind in "ab")
    for age, path in enumerate(old + new, 1):
        path.mkdir()
        if path in old:
            os.utime(path, times=(time.time() - age * 2 * cache.UNUSED_S,) * 2)
    assert cache.directory() == here
    assert set(here.parent.iterdir()) == {here, *new}
    here.rmdir()
    for path in new:
        path.rmdir()
    for path in old:
        path.mkdir()
        os.utime(path, times=(0, old.index(path)))
    cache.directory()
    assert set(here.parent.iterdir()) == {here, *old[-cache.KEPT :]}


@pytest.mark.parametrize("what", ["layout", "numbers", "codes"])
def test_code_of_another_extension_is_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    here = cache.directory()
    changed = getattr(cache._native, what)() | {"new": 1}
    monkeypatch.setattr(cache._native, what, lambda: changed)
    assert cache.directory() != here


def test_unfinished_files_of_killed_processes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of living ones stay, even of one with the same number in another container."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    here = cache.directory()
    old, new = here / "other.1.new", here / f"some.{os.getpid()}.new"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, times=(time.time() - 2 * cache.UNFINISHED_S,) * 2)
    cache.keep("some", b"code")
    assert set(here.iterdir()) == {here / "some.code", new}
    assert new.read_text() == "half"


class Unit(NamedTuple):
    """A unit of code whose compilation is a call."""

    name: str
    load: Callable[[], object]
    is_kept: Callable[[], bool]


def test_a_start_that_compiles_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two servers does, as long as anything is missing."""
    from gadei_ps.server import loading

    monkeypatch.setattr(loading, "_have_compiled", lambda *_: None)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    file = cache.directory() / "some"
    log = mock.Mock()
    monkeypatch.setattr(loading.log, "get", lambda: log)
    missing = Unit("some", file.touch, file.exists)
    kept = Unit("other", lambda: None, lambda: True)
    loading.load([missing, kept], logs=False)
    assert file.exists()
    assert not log.warning.called
    file.unlink()
    loading.load([missing, kept], logs=True)
    log.warning.assert_called_once()
    assert log.warning.call_args.kwargs == {"kept_in": str(tmp_path / "gadei-ps")}
    loading.load([missing, kept], logs=True)
    log.warning.assert_called_once()
