"""The fork server: a process that has loaded what a server needs, and forks the servers of a job.

A fork is there within milliseconds, and the servers share the memory of what was loaded. The
fork server is single-threaded, never compiles, and has nothing of the job: neither segments nor
leases. It ends when the watchdog that has started it is gone. Its servers live on without it.

    python -m gadei_ps.server.fork_server DESCRIPTOR BUILD ROOM

BUILD is the watchdog's, ROOM as much text as the command lines of forks need. The descriptor is one
end of a socket on which each message is a JSON object (gadei_ps/job/fork_server_messages.py). The
watchdog sends Load and Start, and receives Ready, Started, NotStarted and Ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from importlib.abc import MetaPathFinder
from typing import NoReturn

import setproctitle

from gadei_ps.errors import GadeiError, OtherVersion, in_words
from gadei_ps.job import fork_server_messages as messages
from gadei_ps.job.fork_server_messages import Ended, Load, NotStarted, Ready, Start, Started
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.machine import log, process
from gadei_ps.memory import build
from gadei_ps.server import code, manager

FAILED = 1
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the fork server's end is the watchdog's
SERVER, FORK_SERVER = "gadei_ps.server.manager", "gadei_ps.server.fork_server"


class _Replaced(OtherVersion):
    """A module is wanted that was not loaded before its file was replaced."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}: restart the job with the new build, or install the old"


class _Closed(MetaPathFinder):
    """No module of ours is imported any more: the files on the disk are those of another build."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "gadei_ps":
            raise _Replaced(name, "has been replaced since this job began")


class ForkServer:
    """The process. end: its end of the socket to the watchdog. files: of the build, as loaded."""

    def __init__(self, end: socket.socket, files: frozenset[tuple[str, int, int]]) -> None:
        self._end = end
        self._files = files
        self._closed = False
        self._children: dict[int, int] = {}  # pids, by their pidfds
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def run(self) -> None:
        """Handle requests until the watchdog has exited."""
        self._send(Ready())
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                message = messages.receive(self._end)[0]
                if message is None:
                    return
                self._close_if_replaced()
                self._handle(message)

    def _close_if_replaced(self) -> None:
        if not self._closed and build.files() != self._files:
            self._closed = True
            sys.meta_path.insert(0, _Closed())

    def _send(self, message: messages.Message, *descriptors: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # run() detects that
            messages.send(self._end, message, *descriptors)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, Load):
            try:
                code.load_kept(message.optimizer)
            except Exception:  # a server that needs it reports the error
                log.get().exception("the fork server cannot load the code of servers")
        elif isinstance(message, Start):
            self._fork(message)

    def _fork(self, wanted: Start) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._send(NotStarted(number=wanted.number, errno=error.errno or 0))
            return
        if not pid:
            self._become_server(wanted.arguments)
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            self._send(
                Started(number=wanted.number, pid=pid, start=process.start_ticks(pid)), pidfd
            )
        except OSError as error:  # the watchdog does not know this process
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            self._send(NotStarted(number=wanted.number, errno=error.errno or 0))
            return
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(Ended(pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _become_server(self, arguments: list[str]) -> NoReturn:
        """Become a server in the forked process, which keeps only the fork server's code."""
        try:
            self._end.close()
            for pidfd in self._children:
                os.close(pidfd)
            os.setpgid(0, 0)
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            command = process.module_command(SERVER, *arguments)
            setproctitle.setproctitle(" ".join(command))
            setproctitle.setthreadtitle("gadei-server")
            sys.argv = [SERVER, *arguments]
            manager.main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)


def main() -> None:
    """Run the fork server, which the watchdog starts and which dies with it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    files = build.files()
    log.set_up(quiet=True)  # imports what servers would import later
    if build.of_server() != int(sys.argv[2], 16):
        os._exit(build.REFUSED)  # the watchdog logs it
    setproctitle.setproctitle(" ".join(process.module_command(FORK_SERVER, sys.argv[1])))
    try:
        end = socket.socket(fileno=int(sys.argv[1]))
        end.set_inheritable(False)
        process.allow_files(process.MANY_FILES)
        code.set_up()
        code.load_kept(Kind.SGD)  # most of it is every job's
        gc.freeze()  # to look for garbage among these would copy their pages in each fork
        ForkServer(end, files).run()
    except (GadeiError, OSError) as error:
        log.get().error("the fork server has failed", reason=in_words(error))
        os._exit(FAILED)
    os._exit(0)


if __name__ == "__main__":
    main()
