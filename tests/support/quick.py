"""Watchdogs and servers that start quickly, as forks of the tests' process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

from gadei_ps.commands.daemon import Daemon
from gadei_ps.machine import process


class Forked:
    """A fork of this process that runs the main() of a loaded module; in place of spawn()'s child.

    It has the part of Popen's interface that the product uses. A watchdog and a server take a
    second of a core to start, most of which are imports; a fork has made them already. Tests of the
    command line and crash/test_deaths.py start both as users do.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None, **how: Any) -> None:
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._run(command, env, parent, **how)

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
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            time.sleep(0.001)
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
        command: Sequence[str],
        env: Mapping[str, str] | None,
        parent: int,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        how: int | None = signal.SIGKILL,
    ) -> None:
        code = 1
        try:
            gc.freeze()  # no finalizer of the parent's objects may close a descriptor of the child
            os.setpgid(0, 0)
            if how is not None:
                process.dies_with_parent(parent, how)()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            keep = {0, 1, 2, *pass_fds}
            for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if fd not in keep:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            if stdout is not None:
                os.dup2(stdout, 1)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            at = command.index("-m") + 1
            sys.argv = list(command[at:])
            sys.modules[command[at]].main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def fork_quickly() -> contextlib.AbstractContextManager[Any]:
    """In this block watchdogs are forks of this process, and servers forks of their watchdog."""
    from gadei_ps.server import manager as server
    from gadei_ps.server import shard

    shard.load()
    loaded = (server.__name__, Daemon.__module__)
    spawn = process.spawn

    def forked(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes] | Forked:
        ours = any(module in command for module in loaded)
        return Forked(command, **how) if ours else spawn(command, **how)

    return mock.patch.object(process, "spawn", forked)


class QuickDaemon(Daemon):
    """A daemon whose processes start quickly."""

    def __enter__(self) -> Self:
        with fork_quickly():
            return super().__enter__()

    def check(self) -> None:
        with fork_quickly():
            super().check()
