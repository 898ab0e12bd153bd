"""Where compiled code is kept: what is used stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
