"""Watchdogs and servers that start quickly, as forks of the tests' process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from gadei_ps.commands.daemon import Daemon
from gadei_ps.machine import process


class Forked(subprocess.Popen[bytes]):
    """What spawn() would start, as a fork of this process: all that it imports is there already.

    A watchdog and a server take a second of a core to start, most of which are imports. Whether
    they start on their own is seen where the command line and crash/test_deaths.py start them.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None, **how: Any) -> None:
        self.args, self.stdin, self.stdout, self.stderr = command, None, None, None
        self.returncode = None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # Popen's own
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._run(command, env, parent, **how)

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
            gc.freeze()  # nothing of the parent's is ever closed here, whatever has its number
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
    """In this block watchdogs are forks of this process, and their servers are forks of them."""
    from gadei_ps.server import manager as server
    from gadei_ps.server import shard

    shard.load()
    loaded = (server.__name__, Daemon.__module__)
    spawn = process.spawn

    def forked(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        ours = any(module in command for module in loaded)
        return Forked(command, **how) if ours else spawn(command, **how)

    return mock.patch.object(process, "spawn", forked)


class QuickDaemon(Daemon):
    """A daemon whose processes start quickly."""

    def _start(self, *, fresh: bool) -> None:
        with fork_quickly():
            super()._start(fresh=fresh)
