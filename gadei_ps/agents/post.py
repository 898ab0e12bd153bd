"""Letters from every agent to every other one that it knows, and certain news of deaths.

A connection goes one way: an agent that has letters calls. The one that is called says which of its
lives has been reached, and never closes the connection while that life lasts. So the end of the
stream is certain news: the process has ended. A connection that is reset, and any end under TLS,
may have other reasons. Then the caller calls again: the life has ended if nobody listens at that
address any more, or if another life answers there. A caller may end its connection at any time.

Letters may be lost: those that wait are few, and nobody sends one again. The agreement repeats what
is due.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from gadei_ps import _mesh
from gadei_ps.agents import frames, letters, listener, threads, tls, troubles
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.frames import GREETING, HEADER_BYTES, LETTER, Header
from gadei_ps.agents.handshake import Hello, Link, Verdict
from gadei_ps.agents.letters import Entry, Letter
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.errors import AgentError, CallRefused, in_words
from gadei_ps.groups.membership import Member
from gadei_ps.groups.messages import Message

MOST_WAITING = 64
"""Letters to one agent; of more, the oldest are lost."""
MOST_CALLERS = 256
_FIRST_REST_S, _MOST_REST_S = 0.02, 0.25
_LAST_S = 0.25
"""Patience for a letter that is left when a life ends."""
_READ_S = 1.0
"""Patience for letters that a life has sent before it ended."""
_RESET = (BrokenPipeError, ConnectionResetError)
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 3}


class _Ended(AgentError):
    """The other side has ended its stream."""


class Post:
    """One agent's letters, until `close`, which ends this life for all others."""

    def __init__(
        self,
        door: Listener,
        me: Member,
        address: Address,
        heard: Callable[[Letter], None],
        ended: Callable[[Member], None],
        *,
        terms: str = "",
        piece_s: float = 5.0,
    ) -> None:
        """me: this life; its machine is the agent's number. address: where others reach it.

        terms: see Letter.

        heard, ended: are called in threads of this object, for a letter that has come, and for a
        life that has certainly ended. piece_s: patience for a letter that is sent.
        """
        self.me, self.number = me, int(me.machine)
        self.door, self.terms, self.piece_s = door, terms, piece_s
        self.ended = ended
        self._heard = heard
        self._lock = threading.Lock()
        self._book: letters.Book = {self.number: Entry(me.incarnation, *address)}
        self._ways: dict[int, _Way] = {}
        self._last: tuple[Letter, bytes] | None = None
        self._callers: dict[tuple[int, int], socket.socket] = {}
        self._readers: set[threading.Thread] = set()
        self._read_out = threading.Condition(self._lock)
        """A connection of a caller has been read to its end."""
        self._closed = False
        # While letters go on, a try follows the one before in less than this.
        self.troubles = troubles.Troubles(pause_s=piece_s + troubles.LASTS_S)
        """Of agents that cannot be reached, or have sent what cannot be read: why."""
        self.refusals: dict[int, str] = {}
        """Of agents that live, and with which this one cannot speak until a person acts: why."""
        door.serve(Link.LETTERS, Host(self._judge, self._take))

    @property
    def book(self) -> letters.Book:
        """Where each agent can be reached that is known, this one included."""
        with self._lock:
            return dict(self._book)

    def learn(self, book: letters.Book, teller: int | None = None) -> None:
        """Takes over where agents can be reached; of two lives of one agent the later one counts.

        teller: the agent that says so; of itself it knows better than others. For the thread that
        sends, alone: what goes to another address than before gets a way of its own.
        """
        for number, entry in book.items():
            with self._lock:
                known = self._book.get(number)
                if number == self.number or not _counts(entry, known, number == teller):
                    continue
                if known is None and len(self._book) >= letters.MOST_AGENTS:
                    continue
                self._book[number] = entry
            if known is not None and (known.host, known.port) != (entry.host, entry.port):
                way = self._ways.pop(number, None)
                if way is not None:
                    way.end()

    def send(self, to: Member, message: Message) -> None:
        """Sends a letter, or loses it; waits for nothing. For one thread."""
        number = int(to.machine)
        entry = self.book.get(number)
        if entry is None or self._closed:
            return
        if number not in self._ways:
            try:
                self._ways[number] = _Way(self, number, (entry.host, entry.port))
            except (AgentError, OSError) as error:  # no thread left, say: they come back
                self.troubles.note(number, f"agent {number}: {in_words(error)}")
                return
        self._ways[number].send(self._encoded(message))

    def _encoded(self, message: Message) -> bytes:
        """As bytes; once for all to whom it goes, one right after the other."""
        letter = Letter(message, self.book, self.terms)
        if self._last is None or self._last[0] != letter:
            self._last = letter, letters.encode(letter)
        return self._last[1]

    def close(self) -> None:
        """Ends all threads and connections. For the thread that sends."""
        with self._lock:
            self._closed = True
            self._read_out.notify_all()
        self.door.serve(Link.LETTERS, None)
        for way in self._ways.values():
            way.end()
        for way in self._ways.values():
            way.thread.join()
        with self._lock:
            callers, readers = list(self._callers.values()), list(self._readers)
        for connection in callers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in readers:
            thread.join()

    def over(self, life: Member) -> None:
        """Tells that a life has certainly ended, after all that it has said.

        It may have said that there is a new view, in which others go on: an agent that stood still
        meanwhile must not learn first that it is alone.
        """
        key = int(life.machine), life.incarnation
        with self._lock:
            self._read_out.wait_for(lambda: self._closed or key not in self._callers, _READ_S)
        self.ended(life)

    # -- callers ----------------------------------------------------------------------------------

    def _judge(self, hello: Hello) -> Verdict:
        if hello.called != self.number or hello.caller == self.number:
            return Verdict.NOT_AWAITED
        with self._lock:
            known = (hello.caller, hello.generation) in self._callers
            return Verdict.WELCOME if known or len(self._callers) < MOST_CALLERS else Verdict.BUSY

    def _take(self, hello: Hello, connection: socket.socket) -> bool:
        key = hello.caller, hello.generation
        with contextlib.suppress(OSError):  # not what TLS gives: a socket of this machine
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():  # who is gone leaves no thread here
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            if self._closed:
                return False
            self._readers.add(threads.start("agent-letters", self._read, key, connection))
            before = self._callers.get(key)
            self._callers[key] = connection
        if before is not None:  # this life has left it: it calls once at a time
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        return True

    def _read(self, key: tuple[int, int], connection: socket.socket) -> None:
        """Reads the letters of one life of an agent, until it ends the connection."""
        caller, _ = key
        try:
            greeting = Header(GREETING, self.me.incarnation, 0, sender=self.number)
            frames.send(connection, [greeting.pack()], time.monotonic() + self.piece_s)
            while True:
                letter = self._letter(connection)
                if int(letter.message.sender.machine) != caller:
                    raise AgentError("sends letters in the name of another agent")
                self._heard(letter)
        except (AgentError, TimeoutError, MemoryError) as error:
            self.troubles.note(caller, f"agent {caller}: {in_words(error)}")
            self._wait_for_end(connection)
        except OSError:
            pass
        finally:
            with self._lock:
                if self._callers.get(key) is connection:
                    del self._callers[key]
                self._readers.discard(threading.current_thread())
                self._read_out.notify_all()
            connection.close()

    def _letter(self, connection: socket.socket) -> Letter:
        header = frames.unpack(
            frames.receive_bytes(connection, HEADER_BYTES, math.inf), (LETTER,), letters.MOST_BYTES
        )
        until = time.monotonic() + self.piece_s
        payload = frames.receive_bytes(connection, header.length, until)
        if _mesh.checksum(payload) != header.payload_sum:
            raise AgentError("sends a damaged letter")
        return letters.decode(payload)

    @staticmethod
    def _wait_for_end(connection: socket.socket) -> None:
        """Nothing more is read as letters; but only the other side may end the connection."""
        with contextlib.suppress(OSError):
            connection.settimeout(None)
            while connection.recv(1 << 16):
                pass


def _counts(entry: Entry, known: Entry | None, of_itself: bool) -> bool:
    """Whether an address takes the place of the one that is known."""
    if known is None or entry.incarnation > known.incarnation:
        return True
    return of_itself and entry.incarnation == known.incarnation and entry != known


def _is_refusal(error: BaseException) -> bool:
    """Whether the other agent lives, and would be called in vain again."""
    if isinstance(error, CallRefused):
        return error.verdict in (Verdict.VERSION, Verdict.TOKEN, Verdict.JOB)
    return isinstance(error, tls.Distrusted)


class _Way:
    """One address's thread: what is sent to the agent there."""

    def __init__(self, owner: Post, number: int, address: Address) -> None:
        self._owner, self._number, self._address = owner, number, address
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=MOST_WAITING)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended, self._ending = threading.Event(), threading.Lock()
        self._rest_s = _FIRST_REST_S
        self._life: Member | None = None
        """That was reached last; of which it is not known for certain that it has ended."""
        self._doubtful: Member | None = None
        """The same, where its connection has been reset: to call again at once will tell."""
        try:
            self.thread = threads.start("agent-post", self._run)
        except AgentError:
            os.close(self._bell)
            raise

    def send(self, data: bytes) -> None:
        self._waiting.append(data)
        os.eventfd_write(self._bell, 1)

    def end(self) -> None:
        """The thread ends, soon: it may be in the middle of a call. Nothing is sent after this."""
        with self._ending:
            self._ended.set()
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wait_for_letters()
            try:
                self._talk()
            except (AgentError, OSError, MemoryError) as error:
                self._waiting.clear()  # what is due will be said again
                self._note(error)
                self._ended.wait(self._rest_s)
                self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        with self._ending:
            os.close(self._bell)

    def _note(self, error: BaseException) -> None:
        """Why nobody is reached. Once this way has been given up, another one knows it."""
        owner, number = self._owner, self._number
        line = f"agent {number} at {self._address[0]}:{self._address[1]}: {in_words(error)}"
        with self._ending:
            if self._ended.is_set():
                return
            owner.troubles.note(number, line)
            owner.refusals.pop(number, None)
            if _is_refusal(error):
                owner.refusals[number] = line

    def _wait_for_letters(self) -> None:
        """Without letters there is no need to call, unless to learn of a death."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if not self._waiting and self._doubtful is None and not self._ended.is_set():
            poll.poll()
            os.eventfd_read(self._bell)

    def _talk(self) -> None:
        """Sends letters on one connection."""
        if self._ended.is_set():
            return
        owner = self._owner
        me = owner.me.incarnation, owner.number
        hello = Hello(Link.LETTERS, *me, self._number)
        door, until = owner.door, time.monotonic() + owner.piece_s
        try:
            facts = door.identity, door.contexts, until, owner.piece_s
            connection = listener.call(self._address, hello, *facts)
        except ConnectionRefusedError:
            self._is_over()
            raise
        with connection:
            data = frames.receive_bytes(connection, HEADER_BYTES, until)
            incarnation = frames.unpack(data, (GREETING,), 0).generation
            if self._life is not None and self._life.incarnation != incarnation:
                self._is_over()
            self._life, self._doubtful = Member(str(self._number), incarnation), None
            owner.troubles.over(self._number)
            owner.refusals.pop(self._number, None)
            self._rest_s = _FIRST_REST_S
            try:
                self._send_letters(connection)
            except _Ended:
                if door.contexts is None:
                    self._is_over()
                self._doubtful = self._life
                raise
            except _RESET:
                self._doubtful = self._life
                raise

    def _is_over(self) -> None:
        """The life that was reached last has certainly ended.

        Unless this way has been given up: the agent may have another one, and may end this.
        """
        life, self._life, self._doubtful = self._life, None, None
        if life is not None and not self._ended.is_set():
            self._owner.over(life)

    def _send_letters(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(connection, select.POLLIN)
        while not self._ended.is_set():
            while self._waiting:
                self._send(connection, self._waiting.popleft())
            ready = [fd for fd, _ in poll.poll()]
            if connection.fileno() in ready:
                connection.settimeout(1.0)
                if not connection.recv(1):
                    raise _Ended("has ended")
                raise AgentError("sends what nobody awaits")
            os.eventfd_read(self._bell)
        while self._waiting:  # the last ones of this life, or to this address
            self._send(connection, self._waiting.popleft())

    def _send(self, connection: socket.socket, payload: bytes) -> None:
        header = Header(
            *(LETTER, self._owner.me.incarnation, 0),
            length=len(payload),
            sender=self._owner.number,
            payload_sum=_mesh.checksum(payload),
        )
        patience_s = _LAST_S if self._ended.is_set() else self._owner.piece_s
        until = time.monotonic() + patience_s
        frames.send(connection, [header.pack(), payload], until)
