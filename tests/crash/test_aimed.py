"""The server dies at a chosen point of a gradient; the next server finishes it exactly once.

If a point lasts long enough to be observed, the test stops the server at random until it is there,
and kills it. Points that last some nanoseconds are reached with a page that is made read-only: the
server dies of SIGSEGV at its first store there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import team
from support import Child, Rig, eventually, same, spin
from team import apart, seen

from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, IDLE, RING, STATE, Action, Role
from gadei_ps.memory.weights import Tensor, place

# Some pages of weights.
TENSORS = [Tensor("w", (4000,)), Tensor("b", (700,), Role.BUFFER)]
KINDS = 3
# When a gradient comes decides how stale it is, so that no two runs would be the same.
NOT_STALE = {"spike_compensation": False}
HITS = max(4, team.ROUNDS // 10)  # of each point
TRIES = 20_000
SLOTS = 64
SHARDS = 2
PROT_READ = 1
WITHIN = layout.PAGE // 4  # a value of the first shard, on its second page


def _entry(row: int, field: str) -> int:
    return layout.offset(CONTROL, "roster") + row * ENTRY.itemsize + layout.offset(ENTRY, field)


# The row whose counts lie on two pages, so that a server can die with only some of them changed.
ROW = next(
    row
    for row in range(layout.MAX_LEARNERS)
    if _entry(row, "applied") // layout.PAGE != _entry(row, "histogram") // layout.PAGE
)
STRETCH_S = 150e-6  # the longest that a server runs between two stops
Where = Callable[[Rig, int], bool]


def _cursor(rig: Rig, shard: int) -> int:
    return int(rig.state["record"]["cursor"][shard])


def _in_chunk(rig: Rig, shard: int) -> bool:
    cursor = _cursor(rig, shard)
    return cursor != IDLE and bool(cursor & 1)


def _between_chunks(rig: Rig, shard: int) -> bool:
    cursor = _cursor(rig, shard)
    return cursor not in (0, IDLE) and not cursor & 1


POINTS: dict[str, Where] = {
    "in a chunk": _in_chunk,
    "between chunks": _between_chunks,
}


def payload(elements: int, number: int) -> np.ndarray:
    noise = np.random.default_rng(number % KINDS).standard_normal(elements)
    return noise.astype(np.float32)


def _protect(address: int) -> None:
    """End this process at its next store to the page of this address."""
    faulthandler.disable()
    page = ctypes.c_void_p(address // layout.PAGE * layout.PAGE)
    assert not ctypes.CDLL(None).mprotect(page, layout.PAGE, PROT_READ)


def _serve(pipe: Connection, rig: Rig) -> None:
    """A server: recovers what the previous one left, then serves until it is killed."""
    pipe.send(rig.recover())
    with rig.serving():
        _protect(pipe.recv())
        pipe.send(None)
        pipe.recv()


class Servers:
    """One server after another, over the same memory."""

    def __init__(self, rig: Rig, publish: Callable[[], None]) -> None:
        self.rig = rig
        self.publish = publish
        self.chance = random.Random(1)
        self._start()

    def _start(self) -> None:
        self.child = Child(_serve, self.rig)
        self.child.receive()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.kill()

    def _progress(self) -> list[int]:
        return [_cursor(self.rig, shard) for shard in range(SHARDS)]

    def _rests(self) -> bool:
        """Return whether the server is idle."""
        rings = [self.rig.ring(row) for row in self.rig.memory.rings]
        return all((ring["tail"]["value"][:SHARDS] == ring["head"]).all() for ring in rings)

    def die(self, where: Where) -> None:
        """Kill the server when `where` holds for a shard. Start the next one."""
        with apart(self.child.pid):
            for _ in range(TRIES):
                self.child.signal(signal.SIGSTOP)
                if any(where(self.rig, shard) for shard in range(self.rig.shards)):
                    break
                self.publish()
                before = self._progress()
                self.child.signal(signal.SIGCONT)
                # On a busy machine it may take a while until the server runs.
                seen(lambda before=before: self._progress() != before, 0.1)
                spin(self.chance, STRETCH_S)
            else:
                raise AssertionError("the server was never seen at this point")
        self.child.kill()
        self._start()

    def fault(self, address: int, left: Callable[[], bool]) -> None:
        """End the server at its next store to this page. left: must hold then."""
        eventually(self._rests)
        self.child.send(address)
        self.child.receive()
        self.publish()
        assert self.child.join() == -signal.SIGSEGV
        assert left()
        self._start()


@pytest.fixture(scope="module")
def payloads() -> list[np.ndarray]:
    return [payload(place(TENSORS).elements, number) for number in range(KINDS)]


class OneRow:
    """A job with one learner, disturbed, and the same job again, undisturbed."""

    def __init__(self, name: str, kind: str, payloads: list[np.ndarray]) -> None:
        self.name = name
        self.how: dict[str, Any] = {
            "optimizer": {"kind": kind, "lr": 0.01, **NOT_STALE},
            "shards": SHARDS,
            "slots": SLOTS,
            "learners": ROW + 1,
        }
        self.payloads = payloads
        self.published = 0

    def _publish(self, rig: Rig) -> None:
        rig.publish(ROW, self.payloads[self.published % KINDS], samples=3)
        self.published += 1

    def fill(self, rig: Rig) -> None:
        """Publish as many gradients as the ring holds."""
        tails = rig.ring(ROW)["tail"]["value"]
        while self.published - int(tails[: rig.shards].min()) < SLOTS:
            self._publish(rig)

    def compare(self, disturb: Callable[[Rig, Servers], None]) -> None:
        with Rig(self.name, TENSORS, **self.how) as rig:
            with Servers(rig, lambda: self.fill(rig)) as servers:
                disturb(rig, servers)
                rig.wait_tail(ROW, self.published)
            # Tails move last, so now no gradient is in flight.
            entry = rig.roster[ROW]
            assert int(rig.control["version"]) == int(entry["applied"]) == self.published
            assert int(entry["samples"]) == 3 * self.published
            assert int(entry["histogram"].sum()) == self.published
            assert (rig.state["record"]["steps"][: rig.shards] == self.published).all()
            disturbed = rig.kept()
        total, self.published = self.published, 0
        with Rig(self.name, TENSORS, **self.how) as rig, rig.serving():
            while self.published < total:
                self._publish(rig)
            rig.wait_tail(ROW, total)
            same(rig.kept(), disturbed)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("point", POINTS)
def test_the_server_dies(point: str, kind: str, job_name: str, payloads: list[np.ndarray]) -> None:
    def disturb(rig: Rig, servers: Servers) -> None:
        for _ in range(HITS):
            servers.die(POINTS[point])

    OneRow(job_name, kind, payloads).compare(disturb)


def _state(rig: Rig, field: str) -> int:
    assert rig.memory.state
    return rig.memory.state.word(STATE, field)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_server_dies_of_a_store(kind: str, job_name: str, payloads: list[np.ndarray]) -> None:
    def disturb(rig: Rig, servers: Servers) -> None:
        counts = rig.control_at + _entry(ROW, "histogram")
        tails = rig.memory.rings[ROW].word(RING, "tail")
        tail = rig.ring(ROW)["tail"]["value"]

        def begun() -> bool:
            """The record is written, and nothing is applied."""
            return any(_cursor(rig, shard) == 0 for shard in range(SHARDS))

        def changing() -> bool:
            """Detect a death within a chunk; others of this gradient are done."""
            return any(_in_chunk(rig, shard) and _cursor(rig, shard) > 1 for shard in range(SHARDS))

        def counted() -> bool:
            """Detect a death in the middle of the journal's transaction."""
            begun = int(rig.roster[ROW]["applied"]) > int(rig.roster[ROW]["histogram"].sum())
            return bool(rig.state["journal"]["used"]) and begun

        def applied() -> bool:
            """All chunks are changed; `applied` is not."""
            return any(_cursor(rig, shard) != IDLE for shard in range(SHARDS))

        def released() -> bool:
            """`applied` is changed; the tail is not."""
            row = rig.state["applied"][:SHARDS, ROW]
            return bool((row > tail[:SHARDS]).any())

        for _ in range(HITS):
            servers.fault(rig.undo(0, 0, 0).ctypes.data, begun)
            for part in (rig.weights, *rig.slots):
                servers.fault(part[WITHIN:].ctypes.data, changing)
            servers.fault(counts, counted)
            servers.fault(_state(rig, "applied"), applied)
            servers.fault(tails, released)

    OneRow(job_name, kind, payloads).compare(disturb)


def test_in_the_accounting_of_a_superstep(job_name: str, payloads: list[np.ndarray]) -> None:
    """Check that applied, dropped and refused rows are each counted once."""
    kinds = (Action.APPLY, Action.DROP, Action.REFUSE)
    actions = {row: kinds[(row - ROW) % 3] for row in range(ROW + 4)}
    how: dict[str, Any] = {"optimizer": {"kind": "adam", "lr": 0.01, **NOT_STALE}, "shards": SHARDS}
    how |= {"learners": len(actions), "collect": True, "slots": 2}
    with Rig(job_name, TENSORS, **how) as rig:
        done = 0

        def step() -> None:
            nonlocal done
            eventually(rig.superstep_done)
            for row in actions:
                rig.publish(row, payloads[done % KINDS])
            rig.superstep(actions)
            done += 1

        def half() -> bool:
            """Some rows are accounted for, another is in the journal, the rest are not."""
            accounted = int(rig.state["record"]["accounted"][0])
            return bool(rig.state["journal"]["used"]) and 0 < accounted < len(actions)

        counts = rig.control_at + _entry(ROW, "histogram")
        with Servers(rig, step) as servers:
            for _ in range(2 * HITS):
                servers.fault(counts, half)
            eventually(rig.superstep_done)
        for row, action in actions.items():
            counts = [int(rig.roster[row][name]) for name in ("applied", "dropped", "refused")]
            assert counts == [done * (action == one) for one in kinds]
        assert int(rig.control["version"]) == done * sum(
            action == Action.APPLY for action in actions.values()
        )
        disturbed = rig.kept()

    with Rig(job_name, TENSORS, **how) as rig, rig.serving():
        for number in range(done):
            for row in actions:
                rig.publish(row, payloads[number % KINDS])
            rig.superstep(actions)
            eventually(rig.superstep_done)
        same(rig.kept(), disturbed)


# -- a second death -----------------------------------------------------------------------------


LARGE = [Tensor("w", (1_000_000,)), Tensor("b", (100_000,), Role.BUFFER)]


def _recover(pipe: Connection, rig: Rig) -> None:
    pipe.send(None)
    if address := pipe.recv():
        _protect(address)
    pipe.send(rig.recover())


def _last_store(rig: Rig) -> int:
    """Return the address of the last value that recovery changes; 0 if nothing was in flight."""
    for shard in range(SHARDS):
        if _cursor(rig, shard) != IDLE:
            _, end = layout.shard_range(rig.model.elements, SHARDS, shard)
            return int(rig.weights[min(end, rig.model.parameters) - 1 :].ctypes.data)
    return 0


def _deaths(rig: Rig, chance: random.Random) -> int:
    """Start servers and kill them in recovery, until one completes it. Return the deaths.

    Some die at a store, because on a busy machine others complete it before they are killed.
    """
    for died in itertools.count():
        child = Child(_recover, rig)
        child.receive()
        before = [_cursor(rig, shard) for shard in range(SHARDS)]
        address = _last_store(rig) if died < 3 and chance.random() < 0.5 else 0
        child.send(address)
        seen(
            lambda before=before, child=child: (
                child.has_sent or before != [_cursor(rig, shard) for shard in range(SHARDS)]
            )
        )
        if address:
            assert child.join() in (0, -signal.SIGSEGV)
        elif died < 3:
            spin(chance, 0.0005)
            child.kill()
        else:
            child.receive()
            child.join()
        if all(_cursor(rig, shard) == IDLE for shard in range(SHARDS)):
            return died
    raise AssertionError


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_deaths_during_recovery(kind: str, job_name: str) -> None:
    chance = random.Random(kind)
    how: dict[str, Any] = {"optimizer": {"kind": kind, "lr": 0.01, **NOT_STALE}, "shards": SHARDS}
    gradients = 0
    second = 0
    with Rig(job_name, LARGE, slots=2, **how) as rig:
        noise = payload(rig.model.elements, 0)
        while second < 2 * HITS:
            gradients += 1
            assert gradients < 50 * HITS, "gradients end before a server can be killed in one"
            child = Child(_serve, rig)
            child.receive()
            if gradients % 2:
                value = chance.randrange(rig.model.parameters)
                rig.wait_tail(0, gradients - 1)
                child.send(rig.weights[value:].ctypes.data)
                child.receive()
                rig.publish(0, noise)
                assert child.join() == -signal.SIGSEGV
            else:
                with apart(child.pid):
                    rig.publish(0, noise)
                    seen(lambda: any(_cursor(rig, one) != IDLE for one in range(SHARDS)), 0.1)
                    child.kill()
            second += _deaths(rig, chance)
        with rig.serving():
            rig.wait_tail(0, gradients)
        entry = rig.roster[0]
        assert int(rig.control["version"]) == int(entry["applied"]) == gradients
        disturbed = rig.kept()
    team.TOLD.append(f"{kind}: {second} servers killed while they recovered: equal")

    with Rig(job_name, LARGE, slots=2, **how) as rig, rig.serving():
        for _ in range(gradients):
            rig.publish(0, noise)
        rig.wait_tail(0, gradients)
        same(rig.kept(), disturbed)
