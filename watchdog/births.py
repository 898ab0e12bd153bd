"""How servers come into being: as forks of the nursery or, where there is none, as programs.

The nursery is a convenience: while it is dead, or hangs, servers start as programs of their own,
which takes a second instead of milliseconds. It is started anew when it dies.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gadei_ps.errors import in_words
from gadei_ps.job import births
from gadei_ps.job.births import Born, Ended, Load, NotBorn, Ready, Start
from gadei_ps.machine import process
from gadei_ps.memory import build
from gadei_ps.watchdog import begun, restart
from gadei_ps.watchdog.begun import ENVIRONMENT, Begun
from gadei_ps.watchdog.liveness import Watch, progress
from gadei_ps.watchdog.restart import Exit, Policy

CODE_S = 0.1  # how long the word of a server's end may take, which the kernel has told of
POLICY = Policy(first_s=0.5, longest_s=30.0)
START_LIMIT_S = 60.0  # how long the nursery may load without progress
FORK_LIMIT_S = 1.0  # a fork takes milliseconds


@dataclass(frozen=True)
class Server:
    """A server process that has begun. child: None if it is a fork of the nursery.

    files: of the build that it runs, before that was loaded.
    """

    number: int
    pid: int
    start: int
    pidfd: int
    files: frozenset[tuple[str, int, int]]
    child: subprocess.Popen[bytes] | None = None


class Births:
    """born: called with each server. failed: called if one could not be started."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        log: Any,
        born: Callable[[Server], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self._selector = selector
        self._log = log
        self._born = born
        self._failed = failed
        self._nursery: Begun | None = None
        self._ready = False
        self._killed = False  # because it hangs
        self._ending = False
        self._deaths: tuple[Exit, ...] = ()
        self._died_at = float("-inf")
        self._asked: Start | None = None
        self._loads: Load | None = None
        self._codes: dict[int, int] = {}  # of servers that have ended, by pid
        self._watch = Watch(START_LIMIT_S)

    @property
    def coming(self) -> bool:
        """Whether a server is about to begin."""
        return self._asked is not None

    @property
    def pid(self) -> int:
        """Of the nursery; 0 while there is none."""
        return 0 if self._nursery is None else self._nursery.child.pid

    @property
    def busy_s(self) -> float:
        """Processor time of a nursery that still loads, s."""
        if self._nursery is None or self._ready:
            return 0.0
        return process.cpu_s(self._nursery.child.pid)

    def take(self, nursery: Begun) -> None:
        """Uses a nursery that was started before."""
        self._nursery, self._ready, self._killed = nursery, False, False
        self._selector.register(nursery.end, selectors.EVENT_READ, lambda _: self._hear())
        if self._loads is not None:
            self._say(self._loads)

    def prepare(self, optimizer: int, sync: str) -> None:
        """The next server needs the code of these."""
        wanted = Load(optimizer, sync)
        if wanted != self._loads:
            self._loads = wanted
            self._say(wanted)

    def ask(self, number: int, arguments: list[str]) -> None:
        """A server is to begin; `born` or `failed` tells, perhaps before this returns."""
        self._asked = Start(number, arguments)
        if self._nursery is None or not self._say(self._asked):
            self._start_program()

    def _say(self, message: births.Message) -> bool:
        """False if there is no nursery that hears it."""
        if self._nursery is None:
            return False
        try:
            births.send(self._nursery.end, message)
        except OSError:
            self._nursery.child.kill()  # the end of its socket tells
            return False
        return True

    def _start_program(self) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        command = process.module_command("gadei_ps.server.manager", *asked.arguments)
        files = build.files()
        try:
            child = process.spawn(command, env=os.environ | ENVIRONMENT, stdout=2, how=None)
            try:
                pidfd, start = os.pidfd_open(child.pid), process.start_ticks(child.pid)
            except OSError:  # it cannot be watched, and nothing knows of it yet
                child.kill()
                child.wait()
                raise
        except OSError as error:
            self._failed(error)
            return
        self._born(Server(asked.number, child.pid, start, pidfd, files, child))

    # -- the nursery ----------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Starts a nursery that is missing and due, kills one that hangs. Called every tick."""
        if self._nursery is None:
            if now >= self._died_at + restart.delay(self._deaths, now, POLICY):
                self._begin(now)
            return
        self._watch.limit_s = FORK_LIMIT_S if self._ready else START_LIMIT_S
        signs: dict[Hashable, Hashable] = {}
        if not self._ready:
            signs["loading"] = progress(self.busy_s, START_LIMIT_S)
        elif self._asked is not None:
            signs["asked"] = self._asked.number
        if self._watch.look(now, signs) and not self._killed:
            self._killed = True
            self._log.warning("the nursery hangs and is killed", pid=self._nursery.child.pid)
            self._nursery.child.kill()

    def _begin(self, now: float) -> None:
        try:
            self.take(begun.begin())
        except OSError as error:
            self._log.warning("cannot start the nursery", reason=in_words(error))
            self._note_death(now)

    def _note_death(self, now: float) -> None:
        self._deaths = restart.remembered((*self._deaths, Exit(now, self._ready)), POLICY)
        self._died_at = now

    def _hear(self) -> None:
        """Whatever the nursery has said."""
        while self._nursery is not None:
            try:
                message, pidfd = births.receive(self._nursery.end)
            except BlockingIOError:
                return
            if message is None:
                self._lost()
                return
            self._take_in(message, pidfd)

    def _take_in(self, message: births.Message, pidfd: int | None) -> None:
        if isinstance(message, Ready):
            self._ready = True
        elif isinstance(message, Ended):
            self._codes[message.pid] = message.code
        elif isinstance(message, Born):
            assert self._nursery is not None
            self._asked = None
            if pidfd is None:  # for want of a descriptor; unknown as it is, the server ends
                self._fail(errno.EMFILE)
                return
            files = self._nursery.files
            self._born(Server(message.number, message.pid, message.start, pidfd, files))
        elif isinstance(message, NotBorn):
            self._asked = None
            self._fail(message.errno)

    def _fail(self, number: int) -> None:
        self._failed(OSError(number, os.strerror(number)))

    def _lost(self) -> None:
        """The nursery is dead. What it was asked for begins without it."""
        code = self._forget()
        self._note_death(time.monotonic())
        how = process.signal_name(-code) if code < 0 else f"exit code {code}"
        self._log.warning("the nursery died; servers start as programs until it is back", how=how)
        if self._asked is not None:
            self._start_program()

    def _forget(self) -> int:
        """Returns the exit code."""
        assert self._nursery is not None
        nursery, self._nursery = self._nursery, None
        self._codes.clear()
        self._selector.unregister(nursery.end)
        nursery.end.close()
        nursery.child.kill()
        return nursery.child.wait()

    def renew(self) -> None:
        """The nursery runs a build that cannot serve the job: the next one is of the files then."""
        if self._nursery is not None:
            self._forget()

    def code_of(self, server: Server) -> int | None:
        """The exit code of a server that is dead; None if nobody knows it."""
        if server.child is not None:
            return server.child.wait()
        until = time.monotonic() + CODE_S
        while server.pid not in self._codes and self._nursery is not None:
            poll = select.poll()
            poll.register(self._nursery.end, select.POLLIN)
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                break
            self._hear()
        return self._codes.pop(server.pid, None)

    def end(self) -> None:
        """Ends the nursery, after the servers."""
        self._asked = None
        if self._nursery is not None:
            self._forget()
