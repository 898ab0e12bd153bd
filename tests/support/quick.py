"""Processes of gadei-ps that start quickly, as forks of the tests' process.

A new interpreter spends most of a second of a core on imports; a fork has made them already. These
start as users start them: the first line of each command in docs/test_command_lines.py; what
test_build.py, test_installed.py and test_start.py in end_to_end/ are about; the first test of
crash/test_deaths.py; and each test that asks for `interpreters`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self
from unittest import mock

from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import JobConfig
from gadei_ps.machine import process
from gadei_ps.watchdog import fork_server as fork_server_process
from gadei_ps.watchdog.restart import Policy
from gadei_ps.watchdog.server_starter import ServerStarter
from support.waiting import PATIENCE_S, eventually

# Programs by the names that they are started by, and the modules whose main() they run.
PROGRAMS = {
    "clients.driver": "clients.driver",
    "gadei_ps": "gadei_ps.cli.app",
    "gadei_ps.chaos.counted_learner": "gadei_ps.chaos.counted_learner",
    "gadei_ps.monitoring.curves": "gadei_ps.monitoring.curves",
    "gadei_ps.server.manager": "gadei_ps.server.manager",
    "gadei_ps.server.fork_server": "gadei_ps.server.fork_server",
    "gadei_ps.watchdog": "gadei_ps.watchdog.__main__",
    "gadei_ps.watchdog.history_writer": "gadei_ps.watchdog.history_writer",
    "gadei_ps.watchdog.checkpoint_writer": "gadei_ps.watchdog.checkpoint_writer",
}
# They load PyTorch, so only processes that have loaded it fork them.
PROGRAMS_OF_TORCH = {"gadei_ps.classifier.learner": "gadei_ps.classifier.learner"}
# Modules that watchdogs and servers import when they run.
IMPORTED_LATE = ("gadei_ps.watchdog.entry", "structlog")
# What commands import when they run.
COMMANDS = (
    *("chaos.campaign", "commands.doctor", "commands.run", "commands.saved", "commands.unit_files"),
    *(
        "run_times.run_time_recorder",
        "show.display",
        "show.picture",
        "show.status",
        "simulate.compare",
    ),
    *("simulate.report", "storage.export"),
)
STACKS, STACKS_S = signal.SIGUSR1, 5.0  # a fork then prints where its threads are, within this time
PR_SET_NAME = 15
STARTING: list[Callable[[str], None]] = []  # called in each fork with its program's name
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, -1
Stream = int | IO[bytes] | None


class Forked:
    """A fork of this process that runs a program of PROGRAMS, with the part of Popen that is used.

    /proc/PID/comm names the program, as a fork has its parent's command line. /proc/PID/environ is
    its parent's too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Sequence[int] = (),
        process_group: int | None = None,
        how: int | None = None,
        protected: bool = True,
    ) -> None:
        """Start as Popen and process.spawn do; how: signal that it gets when this thread ends.

        protected: nothing changes here, as a fork has what its parent has.
        """
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        with contextlib.ExitStack() as ours:
            streams = [
                self._stream(number, given, ours)
                for number, given in enumerate((stdin, stdout, stderr))
            ]
            parent = os.getpid()
            self.pid = os.fork()
            if not self.pid:
                arranged = process_group, how, parent
                self._run(list(command), env, cwd, streams, pass_fds, arranged)
            if process_group is not None:  # as Popen, which returns when the child has its group
                with contextlib.suppress(OSError):
                    os.setpgid(self.pid, process_group)

    def _stream(self, number: int, given: Stream, ours: contextlib.ExitStack) -> int:
        """The descriptor that the child gets as `number`; `ours` closes what only it uses."""
        if given is None:
            return number
        if given == subprocess.PIPE:
            read, write = os.pipe()
            mine, theirs = (write, read) if number == 0 else (read, write)
            pipe = os.fdopen(mine, "rb" if number else "wb")
            setattr(self, ("stdin", "stdout", "stderr")[number], pipe)
        elif given == subprocess.DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR)
        else:
            return given if isinstance(given, int) else given.fileno()
        ours.callback(os.close, theirs)
        return theirs

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the child runs."""
        with self._reaping:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # support.children() has reaped it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the child has ended. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = 1.0 if until is None else until - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            try:  # a look a millisecond would take the cores from those that are waited for
                pidfd = os.pidfd_open(self.pid)
            except OSError:  # another thread has reaped it, or no descriptor is free
                time.sleep(0.001)
                continue
            try:
                process.gone(pidfd, left_s)
            finally:
                os.close(pidfd)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _run(
        self,
        command: list[str],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        streams: Sequence[int],
        pass_fds: Sequence[int],
        arranged: tuple[int | None, int | None, int],
    ) -> NoReturn:
        """The child."""
        code = 1
        try:
            _become_plain(*arranged)
            _keep_only(streams, pass_fds)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            if cwd is not None:
                os.chdir(cwd)
            at = command.index("-m") + 1
            sys.argv = command[at:]
            shown = command[at].rpartition(".")[2]
            ctypes.CDLL(None).prctl(PR_SET_NAME, shown.encode(), 0, 0, 0)
            if "torch" in sys.modules:  # a fork would wait for ever for its parent's threads
                sys.modules["torch"].set_num_threads(1)
            for call in STARTING:
                call(command[at])
            code = _main(programs()[command[at]])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _become_plain(process_group: int | None, how: int | None, parent: int) -> None:
    """Nothing of the tests is left that a new interpreter would not have."""
    # So that support.wounds may reach into it even where Yama forbids that (an error elsewhere).
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_long(PR_SET_PTRACER_ANY), 0, 0, 0)
    gc.freeze()  # no finalizer of the parent's objects may close a descriptor of the child
    atexit._clear()
    faulthandler.disable()
    faulthandler.register(STACKS, file=2)
    if process_group is not None:
        os.setpgid(0, process_group)
    if how is not None:
        process.die_with_parent(parent, how)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _keep_only(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    """Standard input, output and error from these descriptors, and no others but pass_fds."""
    for number, fd in enumerate([os.dup(fd) for fd in streams]):
        os.dup2(fd, number)
    keep = {0, 1, 2, *pass_fds}
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd in pass_fds:
        os.set_inheritable(fd, True)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def _main(module: str) -> int:
    """Run the program to its end, as an interpreter does; return its exit code."""
    code = 0
    try:
        importlib.import_module(module).main()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    return code


def print_stacks(pid: int, printed: Callable[[], str]) -> None:
    """Have a process that waits for STACKS print where it is, and wait until it has."""
    os.kill(pid, STACKS)
    with contextlib.suppress(AssertionError):
        eventually(lambda: "most recent call first" in printed(), STACKS_S)


def programs() -> dict[str, str]:
    """Return the programs that this process can fork."""
    return PROGRAMS | PROGRAMS_OF_TORCH if "torch" in sys.modules else PROGRAMS


def can_fork(command: Sequence[str]) -> bool:
    """Return whether a command runs one of these programs in this interpreter."""
    words = [word for word in command[:4] if word != "-P"]
    return words[:2] == [sys.executable, "-m"] and words[2] in programs()


def load_commands() -> None:
    """Make what each command makes at its start, and import what it imports later."""
    from gadei_ps.cli.app import command_tree

    command_tree()
    for name in COMMANDS:
        importlib.import_module(f"gadei_ps.{name}")


@contextlib.contextmanager
def without_fork_server() -> Iterator[None]:
    """Let watchdogs start their servers themselves in this block."""
    with (
        mock.patch.object(fork_server_process, "start_early", lambda: None),
        mock.patch.object(ServerStarter, "_start", lambda self, now: None),
    ):
        yield


@contextlib.contextmanager
def fork_quickly(*, fork_server: bool = False) -> Iterator[None]:
    """Fork the product's processes from the process that starts them, in this block.

    fork_server: jobs have one. It costs a fork more, and is of no use to forks.
    """
    from gadei_ps.server import units

    units.load()
    for module in (*programs().values(), *IMPORTED_LATE):
        importlib.import_module(module)
    spawn = process.spawn

    def forked(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes] | Forked:
        if not can_fork(command):
            return spawn(command, **how)
        defaults = {"stdin": subprocess.DEVNULL, "how": signal.SIGKILL, "process_group": 0}
        return Forked(command, **(defaults | how))

    how = contextlib.nullcontext() if fork_server else without_fork_server()
    with mock.patch.object(process, "spawn", forked), how:
        yield


def servers_die_once(there: Path) -> Callable[[str], None]:
    """Return a function for STARTING by which servers die at their start once the file is there.

    One that is killed from outside may have been of use before, and is started again.
    """

    def starting(program: str) -> None:
        if program == "gadei_ps.server.manager" and there.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    return starting


class QuickDaemon(Daemon):
    """A daemon whose processes start quickly, and however often they are killed; it is patient."""

    policy = Policy(limit=10_000)

    def __init__(self, config: JobConfig, *, fork_server: bool = False, **how: Any) -> None:
        super().__init__(config, **how)
        self._fork_server = fork_server

    def __enter__(self) -> Self:
        with fork_quickly(fork_server=self._fork_server):
            return super().__enter__()

    def check(self) -> None:
        with fork_quickly(fork_server=self._fork_server):
            super().check()

    def request(self, message: Any, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return super().request(message, timeout_s)
