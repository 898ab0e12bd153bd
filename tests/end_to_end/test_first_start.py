"""A first start compiles in a process of its own and its forks, which may fail, hang or be killed.

The server is a process that loads the loops over weights, which take about a second each. It ends
on request, so that its compiler is at work, or has ended, by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from support import eventually

from gadei_ps.kernels.cache import directory
from gadei_ps.server import compiler

COMPILED_S = 400.0  # on a busy machine
COMPILER = "gadei_ps.server.compiler"
# Arguments: a file whose appearance lets it end; one whose appearance makes a hung compiler late;
# how long a compiler may hang until then, s.
SERVER = """
import sys, threading, time
from pathlib import Path
from unittest import mock
from gadei_ps.kernels import cache
from gadei_ps.machine import log as logs, process
from gadei_ps.server import code, loading, units as of_server

code.set_up()
process.cores = lambda: 2
loading.LATE_S = float(sys.argv[3])

def hurry():
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    loading.LATE_S = 0.0

threading.Thread(target=hurry, daemon=True).start()
log = mock.Mock()
logs.get = lambda: log
units = [one for one in of_server.units([1]) if one.name.startswith(("move-1-", "assign"))]
loading.load(units, True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
lines = [call.args[0] for call in log.warning.call_args_list]
kept = sum(cache.read(unit.name) is not None for unit in units)
print(cache.directory(), kept, *lines, sep="\\n")
"""
LOOPS = 4  # of SGD
COMPILES = "compiling the kernels once, for up to half a minute"

pytestmark = pytest.mark.timeout(900)


class Server:
    """Such a process. setup: called in it before it begins."""

    def __init__(
        self,
        scratch: Path,
        cache: Path | str,
        setup: Callable[[], None] = lambda: None,
    ) -> None:
        self._go, self._late = scratch / "go", scratch / "late"
        files = str(self._go), str(self._late)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, *files, str(COMPILED_S)],
            env=os.environ
            | {"NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
            | {"GADEI_PS_RUNTIME_DIR": str(scratch / "runtime")},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=setup,
        )
        self.compilers: list[psutil.Process] = []

    def compiler(self) -> psutil.Process:
        """Return its compiler, once that runs."""
        me = psutil.Process(self.process.pid)

        def found() -> list[psutil.Process]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it begins just now
                return [one for one in me.children() if COMPILER in one.cmdline()]
            return []

        one: psutil.Process = eventually(found, COMPILED_S)[0]
        self.compilers.append(one)
        return one

    def hurry(self) -> None:
        """Make it kill a hung compiler at once."""
        self._late.touch()

    def go(self) -> list[str]:
        """Let it end; return what it prints: directory, loops kept, warnings."""
        self._go.touch()
        out, _ = self.process.communicate(timeout=COMPILED_S)
        assert self.process.returncode == 0
        eventually(lambda: all(map(ended, self.compilers)), what="they end with their server")
        return out.splitlines()


def ended(one: psutil.Process) -> bool:
    """Return whether it has ended, reaped or not."""
    try:
        return one.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def server(*args: object, **how: object) -> Iterator[Server]:
    made = Server(*args, **how)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Be a compiler at work in this block: all others wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(cache))
        path = directory() / compiler.LOCK
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(cache: Path) -> bool:
    """Return whether a compiler is at work."""
    for path in cache.rglob(compiler.LOCK):
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def times(cache: Path) -> dict[str, int]:
    """Return when each file of code was written."""
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.code")}


def compiled(cache: Path) -> dict[str, int]:
    """Wait until all is compiled; return times()."""
    eventually(lambda: len(times(cache)) == LOOPS, COMPILED_S)
    return times(cache)


def test_a_compiler_compiles_for_the_server(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with server(tmp_path, cache) as one:
        made = compiled(cache)
        assert one.go()[1:] == [str(LOOPS), COMPILES]
    assert times(cache) == made, "the server has compiled nothing again"
    with server(tmp_path, cache) as one:
        assert one.go()[1:] == [str(LOOPS)], "all is there: it prints nothing and needs no compiler"
    for path in [*cache.rglob("*.code")][1:]:
        path.unlink()
    kept = times(cache)
    with server(tmp_path, cache) as one:
        assert one.go()[1:] == [str(LOOPS), COMPILES]
    assert kept.items() <= times(cache).items(), "it continues with what is there"


def test_a_compiler_that_is_killed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with locked(cache), server(tmp_path, cache) as one:
        one.compiler().kill()
        assert one.go()[1:] == [str(LOOPS), COMPILES]


def test_a_compiler_that_hangs(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with server(tmp_path, cache) as one:
        it = one.compiler()
        eventually(lambda: is_locked(cache) or ended(it), COMPILED_S)
        with contextlib.suppress(psutil.NoSuchProcess):  # it was quicker than this process
            it.suspend()
        one.hurry()
        assert one.go()[1:] == [str(LOOPS), COMPILES]


def test_a_server_that_is_killed_leaves_no_compiler(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with locked(cache), server(tmp_path, cache) as one:
        one.compiler()
        one.process.kill()
        eventually(lambda: all(map(ended, one.compilers)))


def test_two_jobs_that_start_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(cache))
        with server(tmp_path, cache) as one, server(tmp_path, cache) as other:
            for each in (one, other):
                each.compiler()
            stack.close()
            made = compiled(cache)
            for each in (one, other):
                assert each.go()[1:] == [str(LOOPS), COMPILES]
    assert times(cache) == made


def test_code_that_cannot_be_kept(tmp_path: Path) -> None:
    """Fill the disk: the compiler ends, and the server compiles all for itself."""

    def setup() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))

    with server(tmp_path, tmp_path / "cache", setup=setup) as one:
        printed = one.go()[1:]
    assert printed == ["0", COMPILES, "compiled code cannot be kept for the next start"]


def test_no_directory_for_code_can_be_written(tmp_path: Path) -> None:
    """It is in the runtime directory for all servers."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    with server(tmp_path, "/proc/none") as one:
        compiled(runtime)
        one.process.kill()
    with server(tmp_path, "/proc/none") as one:
        where, *printed = one.go()
    assert Path(where).is_relative_to(runtime)
    assert printed == [str(LOOPS)], "the next one has it"


@pytest.mark.parametrize("missing", [1, 448 << 20])
def test_without_memory_for_a_compiler(missing: int) -> None:
    """The server compiles alone."""
    from gadei_ps.memory import reserve
    from gadei_ps.server import loading
    from gadei_ps.server.units import Unit

    alone = mock.Mock(Unit)
    alone.is_kept.return_value = False
    with pytest.MonkeyPatch.context() as patch:
        wanted = loading.PROCESS_BYTES + loading.FORKING_BYTES
        patch.setattr(reserve, "for_processes", lambda: wanted - missing)
        patch.setattr(loading, "_have_compiled", mock.Mock(side_effect=AssertionError))
        loading.load([alone], logs=False)
    alone.load.assert_called_once()
