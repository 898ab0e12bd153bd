"""Exchange within a group: sums, traffic, and members that die or hang in the middle."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from gadei_ps.errors import ExchangeFailed
from gadei_ps.groups import parts
from gadei_ps.simulate import groups_traffic as traffic

torch = pytest.importorskip("torch")
from gadei_ps.replicas import transport  # noqa: E402

VALUES = 64 * 5000 + 3
LIMIT_S, SHORT_S = 2.0, 0.5
LONG_S = 2 * support.PATIENCE_S
"""Limit of a process group: the test fails before."""
APART = ["unshare", "--user", "--map-root-user", "--net"]
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
HOST = "127.0.0.1"


def model(place: int) -> np.ndarray:
    return np.random.default_rng(place).standard_normal(VALUES).astype(np.float32)


def keep_store(port: Connection) -> None:
    """A store has threads, which a process must not have that forks."""
    from torch.distributed import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def member(
    port: int, place: int, count: int, out: Any, what: Callable[[transport.Transport, Any], None]
) -> None:
    from torch.distributed import TCPStore

    transport.PIECE = 1 << 14
    patience = timedelta(seconds=LONG_S)
    store = TCPStore(HOST, port, wait_for_workers=False, timeout=patience)
    what(transport.Transport(store, place, count, HOST, LONG_S), out)


class Members:
    """Processes that are members of one generation."""

    def __init__(self, count: int, what: Callable[[transport.Transport, Any], None]) -> None:
        context = get_context("fork")
        ours, theirs = context.Pipe()
        self.store = context.Process(target=keep_store, args=(theirs,))
        self.store.start()
        assert ours.poll(support.PATIENCE_S)
        port = ours.recv()
        # One for each: who is killed may hold the lock of a queue.
        self.pipes = [context.Pipe(duplex=False) for _ in range(count)]
        self.processes = [
            context.Process(target=member, args=(port, place, count, out, what))
            for place, (_, out) in enumerate(self.pipes)
        ]
        for one in self.processes:
            one.start()

    def results(self, places: Iterable[int]) -> dict[int, Any]:
        """Return the messages of these members, and of others that came before."""
        found: dict[int, Any] = {}
        while not found.keys() >= set(places):
            ready = wait([one for one, _ in self.pipes], support.PATIENCE_S)
            assert ready and isinstance(ready[0], Connection), f"only {sorted(found)}"
            place, what = ready[0].recv()
            found[place] = what
        return found

    def close(self) -> None:
        for one in (*self.processes, self.store):
            one.kill()
            one.join()


def sums(one: transport.Transport, out: Any) -> None:
    got = np.empty(VALUES, np.float32)
    one.aggregate(model(one.place), [0.5, 0.25, 0.0, 0.25][: one.members], got)
    out.send((one.place, (got, one.sent)))
    signal.pause()  # another member may still receive


@pytest.mark.parametrize("count", [2, 4])
def test_all_members_have_the_mean_and_send_as_little_as_the_paper(count: int) -> None:
    made = Members(count, sums)
    try:
        found = made.results(range(count))
    finally:
        made.close()
    weights = np.array([0.5, 0.25, 0.0, 0.25][:count], np.float32)
    wanted = np.empty(VALUES, np.float32)
    parts.aggregate([model(place) for place in range(count)], weights, wanted)
    for got, _ in found.values():
        np.testing.assert_array_equal(got, wanted)
    sent = [found[place][1] for place in range(count)]
    assert sent == traffic.aggregation(VALUES, count)
    models = sum(sent) / count / (4 * VALUES)
    assert models == pytest.approx(2 * (count - 1) / count, rel=0.01)


BEGUN = -1
"""Place of the message with the process of member 1."""


def until_it_fails(one: transport.Transport, out: Any) -> None:
    got = np.empty(VALUES, np.float32)
    try:
        for number in range(10**6):
            one.aggregate(model(one.place), [1 / one.members] * one.members, got)
            if number == 3:  # all are connected
                one._limit = timedelta(seconds=LIMIT_S)
            if number == 4 and one.place == 1:  # all have that limit
                out.send((BEGUN, os.getpid()))
    except ExchangeFailed as error:
        out.send((one.place, str(error)))
        signal.pause()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_hangs_ends_the_exchange_of_all(number: int) -> None:
    made = Members(3, until_it_fails)
    try:
        os.kill(made.results([BEGUN])[BEGUN], number)
        made.results([0, 2])
    finally:
        made.close()


def connects(port: int, out: Connection) -> None:
    """Connect to a store before and after it hangs."""
    store = transport.store_at(HOST, port, LIMIT_S)
    out.send("connected")
    assert out.recv() == "it hangs"
    for connect in (
        lambda: transport.store_at(HOST, port, SHORT_S),
        lambda: transport.Transport(store, 1, 2, HOST, SHORT_S),
    ):
        with pytest.raises(ExchangeFailed):
            connect()
        out.send("failed")
    os._exit(0)  # threads still wait


def test_a_first_member_that_hangs_ends_the_connection_of_others() -> None:
    """PyTorch has no time limit for its store."""
    context = get_context("fork")
    (stores, theirs), (ours, others) = context.Pipe(), context.Pipe()
    store = context.Process(target=keep_store, args=(theirs,))
    store.start()
    try:
        assert stores.poll(support.PATIENCE_S)
        client = context.Process(target=connects, args=(stores.recv(), others))
        client.start()
        try:
            assert ours.poll(support.PATIENCE_S) and ours.recv() == "connected"
            os.kill(store.pid or 0, signal.SIGSTOP)
            ours.send("it hangs")
            for _ in range(2):
                assert ours.poll(support.PATIENCE_S) and ours.recv() == "failed"
        finally:
            client.kill()
            client.join()
    finally:
        store.kill()
        store.join()


def gives_state(one: transport.Transport, out: Any) -> None:
    arrays = [model(0), model(1)]
    if one.place == 0:
        one.send_state(b"text", arrays, [1, 2])
        out.send((0, None))
    else:
        text, got = one.receive_state(0)
        is_same = all(np.array_equal(*pair) for pair in zip(got, arrays, strict=True))
        out.send((one.place, (text, is_same)))
    signal.pause()


def test_newcomers_receive_the_state_of_the_group() -> None:
    made = Members(3, gives_state)
    try:
        assert made.results(range(3)) == {0: None, 1: (b"text", True), 2: (b"text", True)}
    finally:
        made.close()


def test_gloo_listens_at_the_address_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2, where a cluster of one host has its nodes, is of the loopback interface, too."""
    name = transport.INTERFACE_VARIABLE
    monkeypatch.delenv(name, raising=False)
    for host, wanted in ((HOST, "lo"), ("127.0.0.2", "lo"), ("192.0.2.1", None)):
        with transport._listening(host):
            assert os.environ.get(name) == wanted
        assert name not in os.environ
    monkeypatch.setenv(name, "eth7")
    with transport._listening(HOST):
        assert os.environ[name] == "eth7"
    assert os.environ[name] == "eth7"


def test_no_private_name_of_a_process_group_is_used() -> None:
    assert not re.findall(r"ProcessGroup\w*\._|options\._", Path(transport.__file__).read_text())


# -- a network that is gone for a while, in a namespace of its own ---------------------------------


def loopback(up: bool) -> None:
    """The only device of the namespace. While it is down, all that is sent is lost."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_one, GET_FLAGS, request))
        flags = flags | UP if up else flags & ~UP
        fcntl.ioctl(any_one, SET_FLAGS, struct.pack("16sh22x", b"lo", flags))


def cut_off() -> None:
    """Both members see that the other one is gone; the next generation makes the sum again."""
    loopback(True)
    for one in range(2):
        made = Members(2, until_it_fails)
        made.results([BEGUN])
        loopback(up=bool(one))  # in the second generation nothing happens but a death
        if one:
            made.processes[1].kill()
        found = made.results([0] if one else [0, 1])
        assert all("failed" not in text for text in found.values())
        made.close()
        loopback(True)
    made = Members(2, sums)
    made.results(range(2))
    made.close()


def _why_not() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip()


@pytest.mark.skipif(bool(_why_not()), reason="no network namespace can be made")
def test_members_whose_network_is_gone_end_the_exchange() -> None:
    done = subprocess.run(
        [*APART, sys.executable, "-P", __file__],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=support.PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    cut_off()
