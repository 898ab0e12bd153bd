"""A first start compiles in several processes, of which each may fail, hang or be killed.

The server is a process that loads the loops over weights, which take about a second each. It begins
on request, so that its helper has compiled, or compiles, by then.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import eventually

COMPILED_S = 400.0  # on a busy machine
HELPER = "gadei_ps.server.helper"
# Arguments: a file whose appearance lets it begin, and how long a helper may be late, s.
SERVER = """
import os, sys, time
from pathlib import Path
from unittest import mock
from gadei_ps.kernels import cache, sharing, store
from gadei_ps.kernels.unit import Unit
from gadei_ps.machine import process
from gadei_ps.server import code, loading, units as of_server

def wait():
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)

code.set_up()
process.cores = lambda: 2
sharing.LATE_S = float(sys.argv[2])
log = mock.Mock()
units = [one for one in of_server.units([1]) if one.name.startswith(("move-1-", "assign"))]
loading.load([Unit(f"wait-{os.getpid()}", wait, lambda: True), *units], log, True)
lines = [call.args[0] for call in log.warning.call_args_list]
print(cache.directory(), sum(store.is_kept(unit.name) for unit in units), *lines, sep="\\n")
cache.remove_temporary()
"""
LOOPS = 4  # of SGD; as many as a helper is worth
COMPILES = "compiling the kernels once, for up to half a minute"

pytestmark = pytest.mark.timeout(900)


class Server:
    """Such a process. late_s: as its argument. setup: called in it before it begins."""

    def __init__(
        self,
        scratch: Path,
        cache: Path | str,
        late_s: float = COMPILED_S,
        setup: Callable[[], None] = lambda: None,
    ) -> None:
        self._go = scratch / "go"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(self._go), str(late_s)],
            env=os.environ
            | {"NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(scratch)}
            | {"GADEI_PS_RUNTIME_DIR": str(scratch / "runtime")},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=setup,
        )
        self.helpers: list[psutil.Process] = []

    def helper(self) -> psutil.Process:
        """Return its helper, which is there within a moment."""
        me = psutil.Process(self.process.pid)

        def found() -> list[psutil.Process]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                return [one for one in me.children() if ended(one) or HELPER in one.cmdline()]
            return []

        one: psutil.Process = eventually(found, COMPILED_S)[0]
        self.helpers.append(one)
        return one

    def compiling_helper(self) -> psutil.Process:
        """The same, once it has a unit."""
        one = self.helper()
        lock = re.compile(rf"POSIX +ADVISORY +WRITE {one.pid} ")
        eventually(lambda: lock.search(Path("/proc/locks").read_text()), COMPILED_S)
        return one

    def ends_help(self) -> None:
        """Wait until its helper has ended."""
        one = self.helper()
        eventually(lambda: ended(one), COMPILED_S)

    def go(self) -> list[str]:
        """Let it begin; return what it prints at its end: directory, loops kept, warnings."""
        self._go.touch()
        out, _ = self.process.communicate(timeout=COMPILED_S)
        assert self.process.returncode == 0
        for one in self.helpers:
            assert not one.is_running(), "it has not ended with its server"
        return out.splitlines()


def ended(helper: psutil.Process) -> bool:
    """Return whether it has ended; its server detects that at the end only."""
    try:
        return helper.status() == psutil.STATUS_ZOMBIE
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


def times(cache: Path) -> dict[str, int]:
    """Return when each file of code was written."""
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*.code")}


def test_a_helper_compiles_for_the_server(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with server(tmp_path, cache) as one:
        one.ends_help()
        made = times(cache)
        assert len(made) == LOOPS, "it ends once all is compiled"
        assert one.go()[1:] == [str(LOOPS), COMPILES]
    assert times(cache) == made, "the server has compiled nothing again"
    with server(tmp_path, cache) as one:
        assert one.go()[1:] == [str(LOOPS)], "all is there: it prints nothing and needs no helper"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_helper_that_is_killed_or_hangs(tmp_path: Path, number: int) -> None:
    with server(tmp_path, tmp_path / "cache", 0.1) as one:
        one.compiling_helper().send_signal(number)
        assert one.go()[1:] == [str(LOOPS), COMPILES]


def test_a_server_that_is_killed_leaves_no_helper(tmp_path: Path) -> None:
    """Check that the next one continues with what is there."""
    cache = tmp_path / "cache"
    with server(tmp_path, cache) as one:
        helper = one.compiling_helper()
        one.process.kill()
        eventually(lambda: ended(helper))
    made = times(cache)
    assert len(made) < LOOPS
    with server(tmp_path, cache) as one:
        assert one.go()[1:] == [str(LOOPS), COMPILES]
    assert made.items() <= times(cache).items()


def test_two_jobs_that_start_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with server(tmp_path, cache) as one, server(tmp_path, cache) as other:
        for each in (one, other):
            each.ends_help()
        made = times(cache)
        assert len(made) == LOOPS
        for each in (one, other):
            assert each.go()[1:] == [str(LOOPS), COMPILES]
    assert times(cache) == made


def test_code_that_cannot_be_kept(tmp_path: Path) -> None:
    """Fill the disk: the helper ends, and the server compiles all for itself."""

    def setup() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))

    with server(tmp_path, tmp_path / "cache", setup=setup) as one:
        one.ends_help()
        told = one.go()[1:]
    assert told == ["0", COMPILES, "compiled code cannot be kept for the next start"]


def test_no_directory_for_code_can_be_written(tmp_path: Path) -> None:
    """It is in the runtime directory for all servers, and those that are killed leave nothing."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    with server(tmp_path, "/proc/none") as one:
        one.ends_help()
        assert len(times(runtime)) == LOOPS
        one.process.kill()
    with server(tmp_path, "/proc/none") as one:
        directory, *told = one.go()
    assert Path(directory).is_relative_to(runtime)
    assert told == [str(LOOPS)], "the next one has it"
    assert not list(tmp_path.glob("gadei-ps-cache-*"))


def test_without_memory_for_helpers(tmp_path: Path) -> None:
    """The server compiles alone."""
    from gadei_ps.memory import reserve
    from gadei_ps.server import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserve, "for_processes", lambda: loading.HELPER_BYTES - 1)
        patch.setattr(loading.process, "cores", lambda: 8)
        assert loading._start_helpers(["a"] * LOOPS) == []
