"""Place of compiled code: what is used stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
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


def test_what_fields_and_codes_mean_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reworded meaning keeps the code, a field that has moved or a code's value does not."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    here = cache.directory()
    layout, codes = cache._native.layout(), cache._native.codes()
    size, fields = layout["ps_ring"]
    *compiled, writer, meaning = fields["head"]
    code, text = codes["ps_kind"]["PS_RING"]

    def with_field(*field: object) -> dict[str, Any]:
        return layout | {"ps_ring": (size, fields | {"head": field})}

    def with_code(*entry: object) -> dict[str, Any]:
        return codes | {"ps_kind": codes["ps_kind"] | {"PS_RING": entry}}

    def directory(what: str, values: dict[str, Any]) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(cache._native, what, lambda: values)
            return cache.directory()

    assert directory("layout", with_field(*compiled, writer, meaning + ", reworded")) == here
    assert directory("codes", with_code(code, text + ", reworded")) == here
    offset, *rest = compiled
    seen = {
        here,
        directory("layout", with_field(offset + 8, *rest, writer, meaning)),
        directory("layout", layout | {"ps_ring": (size + 64, fields)}),
        directory("codes", with_code(code + 1, text)),
        directory("numbers", cache._native.numbers() | {"PS_CHUNK": 1}),
    }
    assert len(seen) == 5


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
    missing = Unit("some", file.touch, file.exists)
    kept = Unit("other", lambda: None, lambda: True)
    loading.load([missing, kept], log, logs=False)
    assert file.exists()
    assert not log.warning.called
    file.unlink()
    loading.load([missing, kept], log, logs=True)
    log.warning.assert_called_once()
    assert log.warning.call_args.kwargs == {"kept_in": str(cache.directory())}
    loading.load([missing, kept], log, logs=True)
    log.warning.assert_called_once()
