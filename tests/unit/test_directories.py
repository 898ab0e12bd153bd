"""Directories that docs/environment.md names."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hostile import NOBODY

from gadei_ps import homes
from gadei_ps.commands import doctor, unit_files
from gadei_ps.commands.service_manager import Scope
from gadei_ps.errors import DirectoryMistake
from gadei_ps.job import config, paths
from gadei_ps.kernels import cache

Where = Callable[[], Path]


def units() -> Path:
    return unit_files.directory(Scope.USER)


def jobs() -> Path:
    return unit_files.job_directory(Scope.USER)


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
        with pytest.raises(DirectoryMistake, match="/tmp/gadei-ps-12345678"):
            paths.directory(make=True)
        patch.setenv("XDG_RUNTIME_DIR", "relative")
        assert paths.directory() == Path("/tmp/gadei-ps-12345678"), "as its specification requires"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert paths.directory() == home / "gadei-ps"
    assert paths.socket_path("demo") == home / "gadei-ps" / "demo.sock"
    assert paths.lock_path("demo") == home / "gadei-ps" / "demo.lock"
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(home / "given"))
    assert paths.directory() == home / "given"
    paths.owner()
    assert not list(home.iterdir()), "who only looks makes none"
    assert paths.directory(make=True).is_dir()
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(home / "given" / "a" / "b"))
    (home / "given" / "a").touch()
    with pytest.raises(DirectoryMistake, match="Not a directory"):
        paths.directory()
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "given")
    with pytest.raises(DirectoryMistake, match="give a path that starts with /"):
        paths.directory()


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """Replace /run/gadei-ps-root; /tmp is the home directory."""
    if os.getuid() != 0:
        pytest.skip("only root can have files of other users")
    monkeypatch.setattr(paths, "ROOTS", home / "run" / "gadei-ps-root")
    monkeypatch.setattr(paths, "TEMPORARY", home)
    (home / "run").mkdir()
    return paths.ROOTS


def _of_nobody(path: Path) -> Path:
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)
    return path


def test_nobody_makes_roots_directory(roots: Path, home: Path) -> None:
    _of_nobody(home / "gadei-ps-0")
    assert paths.directory() == roots
    assert not roots.exists()
    assert paths.directory(make=True) == roots
    assert (roots.stat().st_mode & 0o777, paths.owner()) == (0o700, 0)


def test_root_where_run_cannot_be_written(roots: Path, home: Path) -> None:
    """Check a container, or a user namespace, where it is another's."""
    roots.parent.rmdir()
    assert paths.directory() == home / "gadei-ps-0"
    paths.directory(make=True).rmdir()
    occupied = _of_nobody(home / "gadei-ps-0")
    with pytest.raises(
        DirectoryMistake, match=r"not a directory that only you .* to see the jobs of"
    ):
        paths.directory()
    roots.parent.mkdir()
    _of_nobody(roots)
    with pytest.raises(DirectoryMistake, match=f"{occupied} is not a directory"):
        paths.directory()


def test_root_and_the_session_of_another_user(
    roots: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _of_nobody(home / "session")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    with pytest.raises(DirectoryMistake, match=f"set GADEI_PS_RUNTIME_DIR={session}/gadei-ps"):
        paths.directory()
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", f"{session}/gadei-ps")
    with pytest.raises(DirectoryMistake, match="there is no such directory, so user "):
        paths.directory()
    assert not list(session.iterdir()), "it would be in that user's way"
    _of_nobody(session / "gadei-ps")
    assert paths.directory() == session / "gadei-ps"
    assert paths.owner() == NOBODY
    with pytest.raises(DirectoryMistake, match="sudo -u"):
        paths.check_own()


def test_a_user_whose_directory_another_one_has_made(
    roots: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _of_nobody(home / "gadei-ps-1234")
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    with pytest.raises(DirectoryMistake) as raised:
        paths.directory()
    assert str(raised.value).endswith("): set GADEI_PS_RUNTIME_DIR to a directory of your own")


def test_checkpoints_of_the_systems_unit(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The documented command names only the unit's runtime directory."""
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "/run/gadei-ps/")
    assert config.state_directory() == Path("/var/lib/gadei-ps")
    monkeypatch.setenv("GADEI_PS_STATE_DIR", str(home))
    assert config.state_directory() == home


def test_compiled_code_of_the_systems_unit(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Apply the same rule; only the units' user may trust what lies there."""
    unit = home / "var/cache/gadei-ps"
    monkeypatch.setattr(homes, "CACHE", unit)
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "/run/gadei-ps/")
    own = home / ".cache/gadei-ps"
    assert cache.base() == own, "the units' directory is not there, and is not made"
    unit.mkdir(parents=True)
    assert cache.base() == unit
    assert str(cache.directory()) in doctor.numba()[1], "doctor shows it"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(home))
    assert cache.base() == home / "gadei-ps"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    os.chown(unit, NOBODY, NOBODY)
    assert cache.base() == own, "pickles of another user"
    assert f"; the units use {unit}" in doctor.numba()[1], "root's is not that of the jobs"


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="gps-", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize(
    ("name", "root", "others"),
    [
        ("x_1.y@z+-", True, True),
        ("x;touch${IFS}PWNED;", False, True),
        ("a b'c", False, True),
        ("a\x1b[2Jb", False, False),
        ("a\u202eb", False, False),
        ("a\udcffb", False, False),
    ],
    ids=["plain", "commands", "blanks", "escape code", "backwards", "not UTF-8"],
)
def test_a_runtime_directory_that_another_user_has_named(
    short: Path, monkeypatch: pytest.MonkeyPatch, name: str, root: bool, others: bool
) -> None:
    directory = short / name
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/.demo.sock.7")
        assert paths.of_watchdog("demo", os.getpid()) == directory
    for uid, named in ((0, root), (1, others)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        shown = directory if named else "..."
        variable = paths.variable(directory)
        assert shlex.split(variable) == [f"GADEI_PS_RUNTIME_DIR={shown}"]
        assert variable.isprintable()


def test_a_line_that_the_name_of_another_users_socket_forges(
    short: Path, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a line feed, and the kernel reports it as it is."""
    theirs = short / "theirs"
    _of_nobody(theirs)
    monkeypatch.chdir(short)
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as forger:
        ours.bind("any")
        inode = os.fstat(ours.fileno()).st_ino
        forged = f"x\n0: 0 0 0 1 1 {inode} {theirs}/.demo.sock.7"
        Path(forged).parent.mkdir(parents=True)
        forger.bind(forged)
        assert paths.of_watchdog("demo", os.getpid()) is None
