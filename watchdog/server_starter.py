"""Start of servers: as forks of the fork server or, if there is none, as programs.

The fork server is a convenience: while it is dead, servers start as programs of their own, which
takes longer. It is restarted when it dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.errors import in_words
from gadei_ps.job import fork_server_messages as messages
from gadei_ps.job.fork_server_messages import (
    Ended,
    Load,
    Message,
    NotStarted,
    Ready,
    Start,
    Started,
)
from gadei_ps.machine import process
from gadei_ps.memory import build
from gadei_ps.watchdog import fork_server, restart
from gadei_ps.watchdog.durations import FORK_SERVER_KILL_S, FORK_SERVER_SILENT_S
from gadei_ps.watchdog.fork_server import ENVIRONMENT, ForkServer
from gadei_ps.watchdog.liveness import Watch, progress
from gadei_ps.watchdog.restart import USEFUL_S, Exit, Policy

CODE_TIMEOUT_S = 0.1  # for the exit code of a server whose end the kernel has reported
POLICY = Policy(first_s=0.5, longest_s=30.0)
FORK_LIMIT_S = 3.0  # a fork takes milliseconds, on a very busy machine a second
FILES_INTERVAL_S = 1.0  # between two looks at the files of a build that is another one


@dataclass(frozen=True)
class Server:
    """A server process that has started: a program (child), or a fork of this fork server.

    files: of the build that it runs, before that was loaded.
    """

    number: int
    pid: int
    start: int
    pidfd: int
    files: frozenset[tuple[str, int, int]]
    child: subprocess.Popen[bytes] | None = None
    fork_server: ForkServer | None = None


@dataclass(eq=False)
class ServerStarter:
    """Starter of servers and of the fork server.

    started: called with each server. failed: called if one could not be started. died: called when
    the fork server has died, unless it was of another build.
    """

    selector: selectors.BaseSelector
    log: Any
    started: Callable[[Server], None]
    failed: Callable[[OSError], None]
    died: Callable[[], None]
    _fork_server: ForkServer | None = None
    _ready_at: float | None = None
    _has_started_any: bool = False
    _killed: bool = False  # because it hangs
    _deaths: tuple[Exit, ...] = ()
    _died_at: float = float("-inf")
    _ending: tuple[ForkServer, float, Callable[[int], None]] | None = None
    """A killed fork server, since when, and a function that is called with its exit code."""
    _refused: frozenset[tuple[str, int, int]] | None = None  # files of another build
    _looked_at: float = 0.0
    _request: Start | None = None
    _loads: tuple[Load, int] | None = None
    _codes: dict[int, int] = field(default_factory=dict)  # of servers that have ended, by pid
    _watch: Watch = field(default_factory=lambda: Watch(FORK_SERVER_SILENT_S))

    @property
    def coming(self) -> bool:
        """Whether a server is about to begin."""
        return self._request is not None

    @property
    def pid(self) -> int:
        """Pid of the fork server; 0 while there is none."""
        return 0 if self._fork_server is None else self._fork_server.child.pid

    @property
    def busy_s(self) -> float:
        """Processor time of a fork server that still loads (s)."""
        if self._fork_server is None or self._ready_at is not None:
            return 0.0
        return process.cpu_s(self._fork_server.child.pid)

    def take(self, made: ForkServer) -> None:
        """Use a fork server that has been started."""
        self._fork_server = made
        self._ready_at, self._has_started_any, self._killed = None, False, False
        self.selector.register(made.end, selectors.EVENT_READ, lambda _: self._receive())
        if self._loads is not None:
            self._send(self._loads[0])

    def prepare(self, optimizer: int, compiled: int) -> None:
        """Have its code loaded for the next server. compiled: servers that have theirs.

        A server that has just compiled it has stored it, so the fork server looks again.
        """
        wanted = Load(optimizer), compiled
        if wanted != self._loads:
            self._loads = wanted
            self._send(wanted[0])

    def ask(self, number: int, arguments: list[str]) -> None:
        """Start a server; `started` or `failed` is called, perhaps before this returns."""
        self._request = Start(number, arguments)
        if not self._send(self._request):
            self._start_program()

    def _send(self, message: Message) -> bool:
        """Send a message; False if no fork server receives it."""
        if self._fork_server is None:
            return False
        try:
            messages.send(self._fork_server.end, message)
        except OSError:
            # The end of its socket reports its death.
            self._fork_server.kill()
            return False
        return True

    def _start_program(self) -> None:
        request, self._request = self._request, None
        if request is None:
            return
        command = process.module_command("gadei_ps.server.manager", *request.arguments)
        files = build.files()
        try:
            child = process.spawn(command, env=os.environ | ENVIRONMENT, stdout=2, how=None)
            pidfd, ticks = fork_server.watched(child)
        except OSError as error:
            self.failed(error)
            return
        self.started(Server(request.number, child.pid, ticks, pidfd, files, child))

    # -- the fork server ------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Start a fork server that is missing and due, kill one that hangs. Called every tick."""
        if self._ending is not None and now >= self._ending[1] + FORK_SERVER_KILL_S:
            self._end_ending()
        if self._fork_server is None:
            if self._ending is None and now >= self._died_at + restart.delay(
                self._deaths, now, POLICY
            ):
                self._start(now)
            return
        loads = self._ready_at is None
        self._watch.limit_s = FORK_SERVER_SILENT_S if loads else FORK_LIMIT_S
        signs: dict[Hashable, Hashable] = {}
        if loads:
            signs["loading"] = progress(self.busy_s, FORK_SERVER_SILENT_S)
        elif self._request is not None:
            signs["request"] = self._request.number
        if self._watch.check(now, signs) and not self._killed:
            self._killed = True
            self.log.warning("the fork server hangs and is killed", pid=self.pid)
            self._fork_server.kill()

    def _start(self, now: float) -> None:
        if self._refused is not None:
            if now < self._looked_at + FILES_INTERVAL_S:
                return
            self._looked_at = now
            if build.files() == self._refused:
                return
            self._refused = None
        try:
            self.take(fork_server.start())
        except OSError as error:
            self.log.warning("cannot start the fork server", reason=in_words(error))
            self._note_death(now, useful=False)

    def _note_death(self, now: float, *, useful: bool) -> None:
        self._deaths = restart.remembered((*self._deaths, Exit(now, useful)), POLICY)
        self._died_at = now

    def _receive(self) -> None:
        """Process the fork server's messages."""
        while (made := self._fork_server) is not None:
            try:
                message, pidfd = messages.receive(made.end)
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                self.log.error("invalid message from the fork server", reason=in_words(error))
                message = None
            if message is None:
                self._lost()
                return
            self._handle(made, message, pidfd)

    def _handle(self, made: ForkServer, message: Message, pidfd: int | None) -> None:
        if isinstance(message, Ready):
            self._ready_at = time.monotonic()
        elif isinstance(message, Ended):
            self._codes[message.pid] = message.code
        elif isinstance(message, Started):
            self._request = None
            self._codes.pop(message.pid, None)  # of one that had the pid before
            if pidfd is None:  # for want of a descriptor; unknown as it is, the server ends
                self.failed(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
                return
            self._has_started_any = True
            pid, start = message.pid, message.start
            self.started(Server(message.number, pid, start, pidfd, made.files, fork_server=made))
        elif isinstance(message, NotStarted):
            self._request = None
            self.failed(OSError(message.errno, os.strerror(message.errno)))

    def _lost(self) -> None:
        """Handle the fork server's death. The requested server starts without it."""
        assert self._fork_server is not None
        now = time.monotonic()
        lived = self._ready_at is not None and now - self._ready_at > USEFUL_S
        useful, files = self._has_started_any or lived, self._fork_server.files

        def ended(code: int) -> None:
            now = time.monotonic()
            self._note_death(now, useful=useful)
            if code == build.REFUSED:
                self._refused, self._looked_at = files, now
                how = "gadei-ps has been replaced since this job began"
            else:
                how = process.signal_name(-code) if code < 0 else f"exit code {code}"
                self.died()
            self.log.warning(
                "the fork server died; servers start as programs until it is back", how=how
            )

        self._forget(ended)
        self._start_program()

    def _forget(self, ended: Callable[[int], None]) -> None:
        """Kill the fork server without waiting. ended: called with its exit code."""
        assert self._fork_server is not None
        made, self._fork_server = self._fork_server, None
        self._codes.clear()
        self.selector.unregister(made.end)
        made.end.close()
        made.kill()
        self._ending = made, time.monotonic(), ended  # the kernel may take its time
        self.selector.register(made.pidfd, selectors.EVENT_READ, lambda _: self._end_ending())

    def _end_ending(self, timeout_s: float = 0.0) -> None:
        assert self._ending is not None
        (made, _, ended), self._ending = self._ending, None
        self.selector.unregister(made.pidfd)
        ended(made.exit_code(timeout_s))

    def renew(self) -> None:
        """Replace a fork server whose build cannot serve the job by one of the current files."""
        if self._fork_server is not None:
            self._refused, self._looked_at = self._fork_server.files, time.monotonic()
            self._forget(lambda code: None)
        self._start_program()

    def code_of(self, server: Server) -> int | None:
        """The exit code of a server that is dead; None if nobody knows it."""
        if server.child is not None:
            return server.child.wait()
        until = time.monotonic() + CODE_TIMEOUT_S
        while server.pid not in self._codes and server.fork_server is self._fork_server is not None:
            poll = select.poll()
            poll.register(self._fork_server.end, select.POLLIN)
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                break
            self._receive()
        return self._codes.pop(server.pid, None)

    def close(self) -> None:
        """Kill the fork server, and a server of it that was not reported yet."""
        self._request = None
        if self._ending is not None:
            self._end_ending(FORK_SERVER_KILL_S)
        if self._fork_server is None:
            return
        self._fork_server.kill()
        self._fork_server.exit_code(FORK_SERVER_KILL_S)
        with contextlib.suppress(OSError, ValueError):
            while (received := messages.receive(self._fork_server.end))[0] is not None:
                if received[1] is not None:
                    signal.pidfd_send_signal(received[1], signal.SIGKILL)
                    os.close(received[1])
        self.selector.unregister(self._fork_server.end)
        self._fork_server.end.close()
        self._fork_server = None
