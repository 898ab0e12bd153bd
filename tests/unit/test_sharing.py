"""Units of compiled code are divided among processes, and all are loaded whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gadei_ps.kernels import sharing
from gadei_ps.kernels.unit import Unit

NAMES = ("first", "second", "third")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


def unit(name: str, load: Callable[[], object] = lambda: None, *, kept: bool = False) -> Unit:
    return Unit(name, load, lambda: kept)


def holding(name: str) -> int:
    """A process that has a unit for ever; its pid."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with sharing._locks() as file:
            sharing._is_free(file, unit(name))
            os.write(write, b".")
            signal.pause()
        os._exit(1)
    assert os.read(read, 1) == b"."
    os.close(read)
    os.close(write)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def in_child(call: Callable[[], object]) -> None:
    """The call in a process of its own, which must succeed."""
    pid = os.fork()
    if not pid:
        call()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def units(order: list[str], at: dict[str, Callable[[], object]]) -> list[Unit]:
    """Return units that note the order in which they are loaded. at: what else one of them does."""

    def load(name: str) -> None:
        order.append(name)
        at.get(name, lambda: None)()

    return [unit(name, partial(load, name)) for name in NAMES]


def test_a_unit_of_another_process_comes_last_and_that_of_a_dead_one_is_loaded() -> None:
    pid = holding("first")
    order: list[str] = []
    sharing.load(units(order, {"third": partial(end, pid)}))
    assert order == ["second", "third", "first"]


def test_nobody_is_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LATE_S", 0.0)
    pids = [holding("second"), holding("third")]
    order: list[str] = []
    sharing.load(units(order, {}))
    assert sorted(order) == sorted(NAMES)
    for pid in pids:
        end(pid)


def test_without_locks_all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LOCKS", "no such directory/locks")
    order: list[str] = []
    sharing.load(units(order, {}))
    assert order == list(NAMES)
    sharing.compile_free(units(order, {}), lambda: False)
    assert order == list(NAMES), "a helper would do what its server does"


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*given: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(sharing.fcntl, "lockf", lockf)
    order: list[str] = []
    sharing.load(units(order, {}))
    sharing.compile_free(units(order, {}), lambda: False)
    assert order == list(NAMES)


def test_a_unit_is_free_once_it_is_loaded() -> None:
    """Check it even if the process continues with others."""
    order: list[str] = []
    again = partial(in_child, lambda: sharing.load([unit("first")]))  # waits if it is not free
    sharing.load(units(order, {"second": again}))
    assert order == list(NAMES)


def test_a_helper_compiles_what_nobody_has() -> None:
    pid = holding("first")
    order: list[str] = []
    first, second, third = units(order, {})
    sharing.compile_free([first, second._replace(is_kept=lambda: True), third], lambda: False)
    assert order == ["third"]
    end(pid)
    sharing.compile_free([first, second, third], lambda: bool(order[1:]))
    assert order == ["third", "first"], "it stops once nothing can be kept"
