"""Machines of a group: processes that a test can stop and kill, and what lies between them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gadei_ps.agents.handshake import Identity, Link
from gadei_ps.agents.listener import Address, Listener
from gadei_ps.agents.mesh import Mesh
from gadei_ps.errors import AgentError, MemberLost
from support.processes import Child
from support.waiting import eventually

IDENTITY = Identity("job", b"a token of the tests")
HELLO = struct.Struct("<8sHH")


def model(number: int, values: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What machine `number` has trained."""
    return np.random.default_rng(number).standard_normal(values, np.float32)


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


SAID_BYTES = 40
"""What each member says in each round."""


def said_by(number: int, round_number: int, members: Sequence[int]) -> bytes:
    return f"{number} {round_number} {list(members)}".ljust(SAID_BYTES).encode()


def check_said(mesh: Mesh, round_number: int) -> None:
    """With a result goes what all members of its generation have said."""
    members = json.loads(mesh.said[0].decode().split(" ", 2)[2])
    assert list(mesh.said) == [said_by(one, round_number, members) for one in members]


def _machine(pipe: Any, number: int, silence_s: float, piece_s: float) -> None:
    """Carries out orders: a method of Machine, and its arguments."""
    door = Listener(("127.0.0.1", 0), IDENTITY)
    mesh = Mesh(door, number, silence_s=silence_s, piece_s=piece_s)
    pipe.send(door.address)
    values = out = np.empty(0, np.float32)
    with contextlib.suppress(EOFError):
        while True:
            order, *args = pipe.recv()
            try:
                if order == "join":
                    mesh.join(*args)
                    if values.size != args[2]:
                        values, out = model(number, args[2]), np.empty(args[2], np.float32)
                    pipe.send(mesh.members)
                elif order == "aggregate":
                    before = mesh.sent_bytes
                    said = said_by(number, args[0], mesh.members)
                    mesh.aggregate(args[0], values, out, samples=args[1], said=said)
                    check_said(mesh, args[0])
                    pipe.send((digest(out), digest(values), mesh.sent_bytes - before))
                else:
                    done = mesh.settle(args[0], out)
                    if done:
                        check_said(mesh, args[0])
                    pipe.send((done, digest(out)))
            except MemberLost as error:
                pipe.send(("lost", error.member, error.why))
            except AgentError as error:
                pipe.send(("error", str(error)))


class Machine:
    """One agent's process, with a member of a group."""

    def __init__(self, number: int, silence_s: float, piece_s: float) -> None:
        self.number = number
        self.child = Child(_machine, number, silence_s, piece_s)
        self.address: Address = self.child.receive()

    def begin(self, order: str, *args: Any) -> None:
        self.child.send((order, *args))

    def end(self) -> Any:
        return self.child.receive()


@contextlib.contextmanager
def machines(
    count: int, *, silence_s: float = 1.0, piece_s: float = 5.0
) -> Iterator[list[Machine]]:
    """The processes of a group that has no generation yet."""
    made = [Machine(number, silence_s, piece_s) for number in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.child.kill()


def together(group: list[Machine], order: str, *args: Any) -> list[Any]:
    """Gives all machines one order, then returns all answers."""
    for one in group:
        one.begin(order, *args)
    return [one.end() for one in group]


def join(
    group: list[Machine],
    generation: int,
    values: int,
    addresses: Mapping[int, Mapping[int, Address]] | None = None,
) -> None:
    """Forms a group of all these. addresses: those that one machine is given otherwise."""
    for one in group:
        listed = {other.number: other.address for other in group}
        one.begin("join", generation, listed | dict((addresses or {}).get(one.number, {})), values)
    for one in group:
        assert one.end() == tuple(sorted(other.number for other in group))


@contextlib.contextmanager
def nothing_of_agents_left() -> Iterator[None]:
    """No thread and no descriptor outlives what it belongs to."""
    descriptors = Path("/proc/self/fd")
    threads, files = threading.active_count(), len(list(descriptors.iterdir()))
    yield
    eventually(lambda: threading.active_count() <= threads, what=threading.enumerate)
    assert len(list(descriptors.iterdir())) <= files


def certificates(folder: Path, names: list[str], host: str = "127.0.0.1") -> None:
    """An authority, and a certificate for the host for each name; also one of a stranger."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("authority", "stranger"):
        openssl(
            *("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{host}"),
        )
    (folder / "names").write_text(f"subjectAltName=IP:{host}\n")
    for name in names:
        openssl(
            *("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "authority.pem", "-CAkey"),
            *("authority.key", "-CAcreateserial", "-days", "2", "-extfile", "names"),
            *("-out", f"{name}.pem"),
        )


@contextlib.contextmanager
def no_threads(name: str) -> Iterator[None]:
    """Meanwhile, threads of this name do not start."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(threading.Thread, "start", fail)
        yield


@dataclass
class _Pair:
    """A connection through a proxy."""

    caller: socket.socket
    called: socket.socket
    is_data: bool = False
    """Whether it is for data or models, as its first bytes say; known once they have come."""
    count: int = 0
    """Bytes from the caller so far."""


class Proxy:
    """Between a caller and an address: hands its bytes on, or what `change` makes of them.

    change(at, data): the caller's bytes from `at` on, of a connection for data or models. It
    returns what is sent instead; None: nothing now, though the connection stays open.
    """

    def __init__(self, to: Address, change: Callable[[int, bytes], bytes | None]) -> None:
        self._to, self._change = to, change
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._door.getsockname()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.close()
        self._thread.join()
        self._stopped.close()
        self._door.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        pairs: list[_Pair] = []
        while True:
            watched = {end: pair for pair in pairs for end in (pair.caller, pair.called)}
            ready, _, _ = select.select([self._door, self._stopped, *watched], [], [])
            if self._stopped in ready:
                break
            if self._door in ready:
                caller, _ = self._door.accept()
                pairs.append(_Pair(caller, socket.create_connection(self._to)))
            for end in ready:
                pair = watched.get(end)
                if pair is not None and pair in pairs and not self._hand_on(pair, end):
                    pairs.remove(pair)
        for pair in pairs:
            pair.caller.close()
            pair.called.close()

    def _hand_on(self, pair: _Pair, end: socket.socket) -> bool:
        """Whether the connection goes on."""
        try:
            data = end.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            if end is pair.called:
                pair.caller.sendall(data)
                return True
            at, pair.count = pair.count, pair.count + len(data)
            if at == 0:
                pair.is_data = HELLO.unpack_from(data)[2] != Link.BEATS
            changed = self._change(at, data) if pair.is_data else data
            if changed is not None:
                pair.called.sendall(changed)
            return True
        except OSError:
            pair.caller.close()
            pair.called.close()
            return False


HANDSHAKE_BYTES = 136
"""That a caller sends before its first frame."""
