"""The connections of a group's members to one another, for one generation.

Of two members, the one with the lower number listens and the other one calls. Members may start at
any time: a call to one that does not listen yet is repeated, and a call to one that does not know
the generation yet waits there.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping

from gadei_ps.agents import listener
from gadei_ps.agents.addresses import Address
from gadei_ps.agents.handshake import Hello, Link, Verdict
from gadei_ps.agents.listener import Host, Listener
from gadei_ps.errors import AgentError, CallRefused, in_words

MOST_WAITING = 256
"""Connections of a generation that this member has not come to yet."""
_AGAIN_S, _ATTEMPT_S, _LOOK_S = 0.02, 1.0, 0.05
_LINKS = (Link.DATA, Link.BEATS)
# Not refused for good: the other side may come to it.
_PASSING = (Verdict.BUSY, Verdict.NOT_AWAITED)

Links = dict[tuple[int, Link], socket.socket]


class Members:
    """Makes connections of one generation after another. Members are named by their numbers."""

    def __init__(self, door: Listener, number: int) -> None:
        self._door, self._number = door, number
        self._changed = threading.Condition()
        self._generation = 0
        self._values = 0
        self._awaited: frozenset[int] = frozenset()
        self._there: Links = {}
        self._early: dict[tuple[int, Link], tuple[Hello, socket.socket]] = {}
        for link in _LINKS:
            door.serve(link, Host(self._judge, self._take))

    def connect(
        self,
        generation: int,
        members: Mapping[int, Address],
        values: int,
        until: float,
        given_up: Callable[[], bool],
    ) -> Links:
        """Two connections with each other member. Raises AgentError, which names who is missing.

        given_up: is asked from time to time whether the generation is not wanted any more.
        """
        others = members.keys() - {self._number}
        self._await(generation, frozenset(one for one in others if one > self._number), values)
        made: Links = {}
        try:
            for one in sorted(one for one in others if one < self._number):
                for link in _LINKS:
                    hello = Hello(link, generation, self._number, one, values)
                    made[one, link] = self._call(members[one], hello, until, given_up)
            return made | self._those_who_called(until, given_up)
        except BaseException:
            _close(made)
            self._await(generation, frozenset(), values)
            raise

    def close(self) -> None:
        """Lets nobody in any more."""
        for link in _LINKS:
            self._door.serve(link, None)
        with self._changed:
            _close(self._there)
            _close({key: one for key, (_, one) in self._early.items()})
            self._there, self._early = {}, {}

    def _await(self, generation: int, numbers: frozenset[int], values: int) -> None:
        """From now on these numbers may call for this generation; nobody for an older one."""
        with self._changed:
            _close(self._there)
            self._generation, self._awaited, self._values = generation, numbers, values
            self._there = {}
            early, self._early = self._early, {}
            for hello, connection in early.values():
                if not self._keep(hello, connection):
                    connection.close()

    def _those_who_called(self, until: float, given_up: Callable[[], bool]) -> Links:
        """The connections of all who were to call, once they are there."""
        wanted = {(one, link) for one in self._awaited for link in _LINKS}
        with self._changed:
            while not self._there.keys() >= wanted:
                left = until - time.monotonic()
                if left <= 0 or given_up():
                    missing = sorted({one for one, _ in wanted - self._there.keys()})
                    raise AgentError(
                        f"no call from member {', '.join(map(str, missing))} for generation "
                        f"{self._generation}: look whether its agent runs"
                    )
                self._changed.wait(min(left, _LOOK_S))
            there, self._there, self._awaited = self._there, {}, frozenset()
            return there

    def _call(
        self, address: Address, hello: Hello, until: float, given_up: Callable[[], bool]
    ) -> socket.socket:
        where = f"member {hello.called} at {address[0]}:{address[1]}"
        door = self._door
        while True:
            attempt = min(until, time.monotonic() + _ATTEMPT_S)
            try:
                return listener.call(address, hello, door.identity, door.contexts, attempt)
            except CallRefused as error:
                over = given_up() or time.monotonic() + _AGAIN_S > until
                if error.verdict not in _PASSING or over:
                    raise CallRefused(f"{where} {error}", error.verdict) from None
            except OSError as error:
                if given_up() or time.monotonic() + _AGAIN_S > until:
                    raise AgentError(f"{where} cannot be reached: {in_words(error)}") from None
            time.sleep(_AGAIN_S)

    def _judge(self, hello: Hello) -> Verdict:
        with self._changed:
            return self._verdict(hello)

    def _verdict(self, hello: Hello) -> Verdict:
        if hello.called != self._number or hello.caller <= self._number:
            return Verdict.NOT_AWAITED
        if hello.generation < self._generation:
            return Verdict.OLD
        if hello.generation > self._generation:
            known = (hello.caller, hello.link) in self._early
            return Verdict.WELCOME if known or len(self._early) < MOST_WAITING else Verdict.BUSY
        if hello.caller not in self._awaited:
            return Verdict.NOT_AWAITED
        return Verdict.WELCOME if hello.values == self._values else Verdict.SIZE

    def _take(self, hello: Hello, connection: socket.socket) -> bool:
        with self._changed:
            return self._keep(hello, connection)

    def _keep(self, hello: Hello, connection: socket.socket) -> bool:
        """Keeps a connection where it belongs; of two alike the newer one."""
        if self._verdict(hello) != Verdict.WELCOME:
            return False
        key = hello.caller, hello.link
        if hello.generation == self._generation:
            before = self._there.get(key)
            self._there[key] = connection
            self._changed.notify_all()
        else:
            waiting, before = self._early.get(key, (hello, None))
            if waiting.generation > hello.generation:
                return False
            self._early[key] = hello, connection
        if before is not None:
            before.close()
        return True


def _close(links: Links) -> None:
    for connection in links.values():
        with contextlib.suppress(OSError):
            connection.close()
