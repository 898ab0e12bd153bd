"""Where things lie: the directories that docs/operations.md names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gadei_ps.commands import systemd
from gadei_ps.commands.units import Scope
from gadei_ps.errors import ControlError
from gadei_ps.job import config, paths
from gadei_ps.kernels import cache

Where = Callable[[], Path]


def units() -> Path:
    return systemd.directory(Scope.USER)


def jobs() -> Path:
    return systemd.job_directory(Scope.USER)


DIRECTORIES: list[tuple[Where, str, str, str, str]] = [
    # function, our variable, XDG's, the default in the home directory, what is appended
    (config.state_directory, "GADEI_PS_STATE_DIR", "XDG_STATE_HOME", ".local/state", "gadei-ps"),
    (cache.base, "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", ".cache", "gadei-ps"),
    (units, "", "XDG_CONFIG_HOME", ".config", "systemd/user"),
    (jobs, "", "XDG_CONFIG_HOME", ".config", "gadei-ps"),
]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory, and none of the variables."""
    for name in list(os.environ):
        if name.startswith(("GADEI_PS_", "XDG_", "NUMBA_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("where", "ours", "xdg", "default", "inner"), DIRECTORIES)
def test_directories(
    where: Where,
    ours: str,
    xdg: str,
    default: str,
    inner: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert where() == home / default / inner
    monkeypatch.setenv(xdg, "")
    assert where() == home / default / inner
    monkeypatch.setenv(xdg, "relative")  # the specification has these ignored
    assert where() == home / default / inner
    monkeypatch.setenv(xdg, str(home / "given"))
    assert where() == home / "given" / inner
    if ours:
        monkeypatch.setenv(ours, str(home / "ours"))
        assert where() == home / "ours" / ("gadei-ps" if where is cache.base else "")


def test_the_runtime_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345678)
        patch.setattr(Path, "mkdir", lambda path, **how: None)  # not in the real /tmp
        with pytest.raises(ControlError, match="/tmp/gadei-ps-12345678"):
            paths.directory()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert paths.directory() == home / "gadei-ps"
    assert paths.socket_path("demo") == home / "gadei-ps" / "demo.sock"
    assert paths.lock_path("demo") == home / "gadei-ps" / "demo.lock"
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(home / "given"))
    assert paths.directory() == home / "given"


def test_checkpoints_of_the_systems_unit(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The documented command names only the unit's runtime directory."""
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "/run/gadei-ps/")
    assert config.state_directory() == Path("/var/lib/gadei-ps")
    monkeypatch.setenv("GADEI_PS_STATE_DIR", str(home))
    assert config.state_directory() == home
