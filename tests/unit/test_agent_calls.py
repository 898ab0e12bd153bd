"""Connections between agents: who is let in, what strangers are told, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import eventually
from support.agents import IDENTITY, certificates, digest, no_threads, nothing_of_agents_left

from gadei_ps.agents import handshake, listener, tls
from gadei_ps.agents.handshake import Hello, Identity, Link, Verdict
from gadei_ps.agents.listener import Address, Host, Listener
from gadei_ps.agents.mesh import Mesh
from gadei_ps.errors import CallRefused, MemberLost, UsageError, in_words

HELLO = Hello(Link.DATA, 1, 2, 1, 10)
HOST = ("127.0.0.1", 0)


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    with nothing_of_agents_left():
        yield


@pytest.fixture
def door() -> Iterator[Listener]:
    made = Listener(HOST, IDENTITY)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 30


def welcome(door: Listener) -> list[socket.socket]:
    """The door takes calls like HELLO from now on, into this list."""
    taken: list[socket.socket] = []

    def take(hello: Hello, connection: socket.socket) -> bool:
        assert hello == HELLO
        taken.append(connection)
        return True

    door.serve(Link.DATA, Host(lambda hello: Verdict.WELCOME, take))
    return taken


def test_strangers_are_refused_and_the_listener_goes_on(door: Listener) -> None:
    taken = welcome(door)
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"\r\n" * 60)
        eventually(lambda: door.refused, what="stranger")
        assert "is no agent of gadei-ps" in door.refused[-1]
    silent = socket.create_connection(door.address)  # keeps a thread, and nobody else waiting
    for identity, words in (
        (Identity("job", b"another token 16"), "has another token"),
        (Identity("other", IDENTITY.token), "is an agent of another job"),
    ):
        with pytest.raises(CallRefused, match=words) as caught:
            listener.call(door.address, HELLO, identity, None, soon())
        assert "\n" not in str(caught.value)
    hello = handshake._HELLO.pack(
        handshake.MAGIC, 9, 1, 1, 2, 1, 10, 0, IDENTITY.digest, os.urandom(32)
    )
    with socket.create_connection(door.address) as newer:
        newer.sendall(hello)
        answer = handshake._ANSWER.unpack(newer.recv(200, socket.MSG_WAITALL)[:76])
        assert answer[1:3] == (handshake.VERSION, Verdict.VERSION)
    hello = handshake._HELLO.pack(
        handshake.MAGIC, handshake.VERSION, 1, 1, 2, 1, 10, 0, IDENTITY.digest, os.urandom(32)
    )
    with socket.create_connection(door.address) as forger:  # goes on without the token
        forger.sendall(hello + bytes(32))
        assert len(forger.recv(76, socket.MSG_WAITALL)) == 76
        assert forger.recv(2, socket.MSG_WAITALL) == handshake._VERDICT.pack(Verdict.TOKEN)
    assert not taken
    with listener.call(door.address, HELLO, IDENTITY, None, soon()):
        eventually(lambda: taken, what="welcome")
    silent.close()
    taken.pop().close()


def test_an_agent_of_another_founding_gets_models_alone(door: Listener) -> None:
    """The group has begun anew since that one began."""
    taken: list[Link] = []

    def take(hello: Hello, connection: socket.socket) -> bool:
        taken.append(hello.link)
        connection.close()
        return True

    before = Identity("job", IDENTITY.token, "before")
    for link in Link:
        door.serve(link, Host(lambda hello: Verdict.WELCOME, take))
        refused = contextlib.nullcontext() if link == Link.MODELS else pytest.raises(CallRefused)
        with refused:
            listener.call(door.address, Hello(link, 1, 2, 1, 10), before, None, soon()).close()
    eventually(lambda: taken == [Link.MODELS], what=lambda: taken)


def test_one_host_does_not_keep_all_others_out(door: Listener) -> None:
    taken = welcome(door)
    idle = [socket.create_connection(door.address) for _ in range(listener.CALLS)]
    with socket.create_connection(door.address, source_address=("127.0.0.2", 0)) as caller:
        handshake.call(caller, HELLO, IDENTITY, soon())
        eventually(lambda: taken, what="welcome")
    for one in (*idle, taken.pop()):
        one.close()


def test_an_agent_can_be_called_by_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    door = Listener(("::1", 0), IDENTITY)
    taken = welcome(door)
    with listener.call(door.address, HELLO, IDENTITY, None, soon()):
        eventually(lambda: taken, what="welcome")
    taken.pop().close()
    door.close()


def test_a_call_that_gets_no_thread_is_refused(door: Listener) -> None:
    taken = welcome(door)
    with no_threads("agent-call"), pytest.raises(OSError):
        listener.call(door.address, HELLO, IDENTITY, None, soon())
    with listener.call(door.address, HELLO, IDENTITY, None, soon()):
        eventually(lambda: taken, what="welcome")
    taken.pop().close()


def test_a_caller_knows_a_false_listener() -> None:
    """One that lacks the token, another version, or no agent at all."""
    answers: list[tuple[bytes, str]] = [
        (handshake._ANSWER.pack(handshake.MAGIC, 1, 0, bytes(32), bytes(32)), "another token"),
        (handshake._ANSWER.pack(handshake.MAGIC, 9, 1, bytes(32), bytes(32)), "speaks version 9"),
        (b"x" * handshake._ANSWER.size, "is no agent"),
    ]
    with socket.create_server(HOST) as server:
        for answer, words in answers:

            def reply(answer: bytes = answer) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(handshake._HELLO.size, socket.MSG_WAITALL)
                    connection.sendall(answer)

            thread = threading.Thread(target=reply)
            thread.start()
            with pytest.raises(CallRefused, match=words):
                listener.call(server.getsockname(), HELLO, IDENTITY, None, soon())
            thread.join()


def test_a_proof_is_not_one_of_the_other_side_or_of_another_hello() -> None:
    proofs = {
        IDENTITY.proof(side, hello, nonce)
        for side in (b"listener", b"caller")
        for hello in (b"a", b"b")
        for nonce in (b"c" * 32, b"d" * 32)
    }
    assert len(proofs) == 8
    with pytest.raises(UsageError, match="can be guessed"):
        Identity("job", b"short")


def meshes(count: int, make: Callable[[], Listener]) -> tuple[list[Mesh], dict[int, Address]]:
    doors = [make() for _ in range(count)]
    made = [Mesh(door, number) for number, door in enumerate(doors)]
    for mesh, door in zip(made, doors, strict=True):
        mesh.door = door  # type: ignore[attr-defined]
    return made, {number: door.address for number, door in enumerate(doors)}


def close(group: list[Mesh]) -> None:
    for mesh in group:
        mesh.close()
        mesh.door.close()  # type: ignore[attr-defined]


def at_once(*calls: Callable[[], object]) -> None:
    """Runs them in threads; raises the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # where one is refused, the others may only see that it has gone
        raise next((one for one in errors if isinstance(one, CallRefused)), errors[0])


def test_members_come_in_any_order_and_are_replaced() -> None:
    """A call for a newer generation waits; one for an older generation is refused."""
    group, addresses = meshes(2, lambda: Listener(HOST, IDENTITY))
    try:
        calls = [lambda one=one: one.join(1, addresses, 8) for one in reversed(group)]
        at_once(*calls)
        first, second = group
        second.close()
        again = Mesh(second.door, 1)  # type: ignore[attr-defined]
        early = threading.Thread(target=again.join, args=(3, addresses, 8))
        early.start()
        eventually(lambda: len(first._members._early) == 2)
        with pytest.raises(CallRefused, match="newer generation"):
            first.join(3, addresses, 8)
            hello = Hello(Link.DATA, 2, 1, 0, 8)
            listener.call(addresses[0], hello, IDENTITY, None, soon())
        early.join()
        out = [np.zeros(8, np.float32) for _ in group]
        at_once(
            lambda: first.aggregate(1, np.ones(8, np.float32), out[0]),
            lambda: again.aggregate(1, np.full(8, 3, np.float32), out[1]),
        )
        assert (out[0] == 2).all() and digest(out[0]) == digest(out[1])
        for hello in (Hello(Link.DATA, 3, 1, 0, 8), Hello(Link.BEATS, 9, 0, 0, 8)):
            with pytest.raises(CallRefused, match="does not await"):
                listener.call(addresses[0], hello, IDENTITY, None, soon())
        again.close()
        with pytest.raises(CallRefused, match="another size"):
            at_once(
                lambda: group[0].join(4, addresses, 8, timeout_s=1),
                lambda: (again := Mesh(second.door, 1), again.join(4, addresses, 9)),  # type: ignore[attr-defined]
            )
    finally:
        close(group)


def test_a_member_that_cannot_wait_blames_itself() -> None:
    """poll() takes no more descriptors than a process may have."""
    group, addresses = meshes(2, lambda: Listener(HOST, IDENTITY))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        at_once(*(lambda one=one: one.join(1, addresses, 8) for one in group))
        resource.setrlimit(resource.RLIMIT_NOFILE, (2, limits[1]))
        with pytest.raises(MemberLost, match="cannot wait for the others") as caught:
            group[0].aggregate(1, np.ones(8, np.float32), np.zeros(8, np.float32))
        assert caught.value.member == 0
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        eventually(lambda: group[1].lost is not None)
        assert group[1].lost is not None and group[1].lost.member == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        close(group)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_lets_in_certificates_of_the_authority_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path, ["agent"])
    authority = tmp_path / "authority.pem"
    ours = tls.contexts(tmp_path / "agent.pem", tmp_path / "agent.key", authority)
    foreign = tls.contexts(tmp_path / "stranger.pem", tmp_path / "stranger.key", authority)
    check_what_is_wrong_with_files(tmp_path)
    for name, host, why in (
        ("stranger", "127.0.0.1", "self-signed certificate; it must be signed by .*/authority.pem"),
        (
            *("agent", "127.0.0.2"),
            "IP .*; it must be .* and name 127.0.0.2 as an IP entry of subjectAltName$",
        ),
        ("agent", "node", "Host.* for 'node'; it .* name node as a DNS entry of subjectAltName$"),
    ):
        files = tmp_path / f"{name}.pem", tmp_path / f"{name}.key", authority
        with pytest.raises(UsageError, match=f"{name}.pem: other agents would refuse it: {why}"):
            tls.checked(*files, host=host)
    values = 300_000
    group, addresses = meshes(2, lambda: Listener(HOST, IDENTITY, ours))
    try:
        calls = [lambda one=one: one.join(1, addresses, values) for one in group]
        at_once(*calls)
        models = [np.random.default_rng(n).random(values, np.float32) for n in range(2)]
        outs = [np.zeros(values, np.float32) for _ in group]
        for number in range(3):
            at_once(
                *(
                    lambda a=a, x=x, o=o, r=number: a.aggregate(r, x, o)
                    for a, x, o in zip(group, models, outs, strict=True)
                )
            )
        assert digest(outs[0]) == digest(outs[1]) == digest((models[0] / 2) + (models[1] / 2))
        for contexts in (foreign, None):
            with pytest.raises((OSError, CallRefused)):
                listener.call(addresses[0], HELLO, IDENTITY, contexts, time.monotonic() + 5)
        stranger = tls.contexts(*(tmp_path / f"stranger.{kind}" for kind in ("pem", "key", "pem")))
        with pytest.raises(OSError, match="its certificate cannot be trusted: self-signed") as it:
            listener.call(addresses[0], HELLO, IDENTITY, stranger, time.monotonic() + 5)
        assert in_words(it.value) == str(it.value)
        group[1].close()
        eventually(lambda: group[0].lost is not None)
    finally:
        close(group)
    monkeypatch.setattr(tls, "LINGER_S", 0.1)
    leave_one_that_does_not_read(ours)


def check_what_is_wrong_with_files(folder: Path) -> None:
    """One file is named, and what to do."""
    (folder / "folder").mkdir()
    agent, stranger = folder / "agent.key", folder / "stranger.key"
    locked, junk = folder / "locked.key", folder / "junk"
    secret = ["openssl", "pkey", "-in", agent, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(secret, check=True, capture_output=True)
    junk.write_text("-----BEGIN")
    good = {"certificate": folder / "agent.pem", "key": agent}
    good |= {"authority": folder / "authority.pem"}
    for name, path, why in (
        *((name, folder / "gone", "No such file.*: each host needs its tls") for name in good),
        *((name, folder / "folder", "Is a directory: each host needs its tls") for name in good),
        *((name, junk, "no certificate in PEM") for name in ("certificate", "authority")),
        ("key", junk, "no key in PEM format: tls.key is to be one$"),
        ("key", stranger, "the key does not fit the certificate: give that of .*/agent.pem$"),
        ("key", locked, "the key has a password: tls.key is to be one without$"),
    ):
        with pytest.raises(UsageError, match=f"^{path}: {why}") as caught:
            tls.contexts(**good | {name: path})
        assert "[" not in str(caught.value) and "\n" not in str(caught.value)


def leave_one_that_does_not_read(contexts: tls.Contexts) -> None:
    """What is left for it is given up, and no thread stays."""
    with socket.create_server(HOST) as server, socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(server.getsockname())
        called = []
        at_once(
            lambda: called.append(
                contexts.listening.wrap_socket(server.accept()[0], server_side=True)
            ),
            lambda: called.append(tls.tunnel(caller, contexts, "127.0.0.1", soon())),
        )
        near = next(one for one in called if not isinstance(one, ssl.SSLSocket))
        near.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        near.close()
        eventually(lambda: "agent-tls" not in [one.name for one in threading.enumerate()])
        for one in called:
            one.close()
