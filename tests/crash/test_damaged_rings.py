"""A learner damages its own ring. It is evicted, and nobody else is harmed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Child, Pusher, daemon, eventually, live_weights, ring_of, status
from team import Team, apart, push_ones, seen, send, stopped

from gadei_ps.errors import GadeiError
from gadei_ps.job.faults import Processes, Role
from gadei_ps.learners.client import Client
from gadei_ps.memory import layout, segment, shm
from gadei_ps.memory.layout import RING

VALUES = 4_000_000  # so that a server can be seen in the middle of a gradient
MINE = slice(1, None, 2)  # values that only the other learners' gradients leave to this one
THEIRS = slice(0, None, 2)


def _vandal(pipe: Connection, job: str) -> None:
    """Push, and write into its own ring, as ordered."""
    client = Client(job)
    gradient = np.zeros(client.model.elements, np.float32)
    gradient[MINE] = 1.0
    pipe.send((client.row, client.generation))
    while True:
        what = pipe.recv()
        try:
            if callable(what):
                what(client)
            else:
                for _ in range(what):
                    client.push(gradient, samples=1)
            pipe.send(client.published)
        except GadeiError as error:
            pipe.send(type(error).__name__)


class Vandal:
    """A learner that does harm."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.child = Child(_vandal, job)
        self.row, self.generation = self.child.receive()
        self.name = shm.segment_name(job, f"ring.{self.row}")
        self.ring = ring_of(job, self.row)

    def do(self, what: int | Callable[[Client], Any]) -> Any:
        self.child.send(what)
        return self.child.receive()


@contextlib.contextmanager
def vandal(job: str) -> Iterator[Vandal]:
    made = Vandal(job)
    try:
        yield made
    finally:
        made.child.kill()
        _renamed(made).unlink(missing_ok=True)


def _zero(client: Client) -> None:
    client.place.ring.view(RING)["header"] = np.zeros((), layout.HEADER)


def _settle(client: Client) -> None:
    client.wait_applied()


def _unlink(wild: Vandal) -> None:
    segment.unlink(wild.name)


def _truncate(wild: Vandal) -> None:
    os.truncate(shm.SHM / wild.name[1:], 0)


def _grow(wild: Vandal) -> None:
    os.truncate(shm.SHM / wild.name[1:], 2 * wild.ring.size)


def _renamed(wild: Vandal) -> Path:
    return shm.SHM / f"{wild.name[1:]}-renamed"


def _rename(wild: Vandal) -> None:
    (shm.SHM / wild.name[1:]).rename(_renamed(wild))


def _replace(wild: Vandal) -> None:
    """Replace the file by a copy, which nobody writes to."""
    copy = _renamed(wild)
    copy.write_bytes(bytes(wild.ring.memory))
    copy.chmod(0o600)
    copy.rename(shm.SHM / wild.name[1:])


def _state(team: Team) -> np.void:
    name = shm.segment_name(team.name, "state")
    attached = segment.attach(name, layout.SegmentKind.STATE, writable=False)
    view: np.void = attached.view(layout.STATE)
    return view


def _stands_still(pid: int) -> bool:
    """Return whether all of its threads are stopped."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all(b") T" in (task / "stat").read_bytes() for task in tasks)


@contextlib.contextmanager
def _caught(team: Team, wild: Vandal) -> Iterator[None]:
    """The active server is stopped in the middle of this learner's gradient."""
    server = team.find(Role.SERVER)
    record = _state(team)["record"]

    def inside(shard: int) -> bool:
        cursor = int(record["cursor"][shard])
        return cursor < layout.ALL_APPLIED and int(record["ring"][shard]) == wild.row

    for _ in range(200):
        with apart(server.pid):
            wild.child.send(1)
            seen(lambda: inside(0) or inside(1), 0.2)
            with stopped(server):
                eventually(lambda: _stands_still(server.pid))
                if inside(0) or inside(1):
                    yield
                    return
        wild.child.receive()
        wild.do(_settle)  # else the next push might wait for a slot
    raise AssertionError("it was never seen there")


def _rest(team: Team, wild: Vandal) -> None:
    """All learners are gone and the others' gradients are in the weights exactly once."""
    team.fire()
    wild.child.kill()
    roster = team.control["roster"]
    eventually(lambda: (roster["retired"] == roster["generation"]).all(), what="all are detached")
    theirs = team.buried
    np.testing.assert_array_equal(team.weights[THEIRS], -theirs)


DAMAGES: dict[str, Callable[[Vandal], object]] = {
    "zeroed": lambda wild: wild.do(_zero),
    "unlinked": _unlink,
    "truncated": _truncate,
    "grown": _grow,
    "renamed": _rename,
    "replaced": _replace,
}
UNHARMED = ("unlinked", "grown", "renamed", "replaced")
"""The learner's own mapping is as it was."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_next_server_finds_it_damaged(damage: str, job_name: str, tmp_path: Path) -> None:
    """The server dies in the middle of a gradient whose ring the next one has not mapped."""
    with (
        Team(job_name, tmp_path, values=VALUES, learners=1, hang_s=60.0) as team,
        vandal(job_name) as wild,
    ):
        server, standby = team.find(Role.SERVER), team.find(Role.STANDBY)
        with _caught(team, wild):
            wild.child.receive()
            DAMAGES[damage](wild)
            send(standby)
            eventually(lambda: team.find(Role.STANDBY).pid != standby.pid)
            send(server)
        team.goes_on()
        if damage in UNHARMED:
            wild.do(3)
            assert wild.do(_settle) == wild.do(0), "it trains on"
        published = int(wild.ring.view(RING)["head"]) if damage != "truncated" else 0
        _rest(team, wild)
        if published:
            np.testing.assert_array_equal(team.weights[MINE], -team.buried - published)
            assert status(job_name)["gradients_refused"] == 0


def test_everyone_dies_in_a_truncated_ring(job_name: str, tmp_path: Path) -> None:
    """The next watchdog cannot adopt the ring, nor its server map it."""
    with (
        Team(job_name, tmp_path, values=VALUES, learners=1, hang_s=60.0) as team,
        vandal(job_name) as wild,
    ):
        everyone = [team.find(role) for role in (Role.STANDBY, Role.WATCHDOG, Role.SERVER)]
        with _caught(team, wild):
            wild.child.receive()
            _truncate(wild)
            for target in everyone:
                send(target)
        team.serve_again()
        assert status(job_name)["parts_torn"] >= 1
        team.goes_on()
        _rest(team, wild)


def test_a_truncated_ring_ends_nobody_else(job_name: str, tmp_path: Path) -> None:
    with (
        Team(job_name, tmp_path, values=VALUES, learners=1) as team,
        vandal(job_name) as wild,
    ):
        roles = (Role.SERVER, Role.STANDBY, Role.WATCHDOG)
        before = [team.find(role).pid for role in roles]
        wild.do(5)
        _truncate(wild)
        eventually(lambda: int(team.control["roster"][wild.row]["retired"]) == wild.generation)
        team.goes_on()
        assert [team.find(role).pid for role in roles] == before
        assert status(job_name)["server_deaths"] == 0
        _rest(team, wild)


# -- wild words ---------------------------------------------------------------------------------


def _fields() -> list[tuple[str, str, int, int]]:
    """Every field of a ring's header and of a frame's: struct, name, offset and bytes."""
    found = []
    for struct, dtype in (("ring", RING), ("frame", layout.FRAME), ("block", layout.BLOCK)):
        for name, (kind, at, *_) in dtype.fields.items():
            if kind.names:
                found += [
                    (struct, one, at + more, of.itemsize) for one, (of, more) in kind.fields.items()
                ]
            else:
                found.append((struct, name, at, kind.itemsize))
    return found


THEIR_FIRST = layout.BLOCK.itemsize // 4  # in a dense frame, a block's words are values


def _scribble(pipe: Connection, job: str, struct: str, name: str, at: int, size: int) -> None:
    """Publish zeros and write random bytes over one field: of its ring, or of each frame.

    Report once it has written for the first time.
    """
    client = Client(job)
    pipe.send((client.row, client.generation))
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it may end in many ways
    ring = client.place.ring
    head = ring.view(RING).copy()
    draw = np.random.default_rng([at, size])
    for number in range(10_000):
        client.wait_turn()
        client.push({}, samples=1)
        base = 0
        if struct != "ring":
            base = int(head["slots_at"]) + number % int(head["slots"]) * int(head["slot_bytes"])
            base += layout.PAYLOAD_AT if struct == "block" else 0
        elif number != 5:
            continue
        wild = np.frombuffer(draw.bytes(size), np.uint8).copy()
        if name == "rate_scale":
            wild[-1] |= 128  # negative: a large one is a learner's right
        ring.array(np.uint8, size, base + at)[:] = wild
        if number == (5 if struct == "ring" else 0):
            pipe.send("has written")


def _push_in_turn(client: Client) -> None:
    client.wait_turn()
    push_ones(client)


@pytest.mark.parametrize("model", ["asp", "bsp"])
def test_wild_words_in_every_field(model: str, job_name: str) -> None:
    """Each learner writes over another field; the others train on, and count once."""
    tensors = [{"name": "w", "shape": [300]}]
    how: dict[str, Any] = {"tensors": tensors, "shards": 2, "sync": model, "slots": 3}
    with daemon(job_name, **how, learner_timeout_s=1.0) as job:
        weights, control = live_weights(job_name), Processes(job_name).control
        roster = control["roster"]
        good = [Pusher(job_name, _push_in_turn) for _ in range(2)]
        fields = _fields()
        for first in range(0, len(fields), 8):
            wild = [Child(_scribble, job_name, *one) for one in fields[first : first + 8]]
            rows = [child.receive() for child in wild]
            for child in wild:
                assert child.receive() == "has written"
            before = [one.published for one in good]
            eventually(
                lambda before=before: all(
                    one.published > then + 10 for one, then in zip(good, before, strict=True)
                ),
                what=lambda first=first: fields[first : first + 8],
            )
            for child in wild:
                child.kill()
            for row, generation in rows:
                eventually(lambda row=row, than=generation: int(roster[row]["retired"]) >= than)
        for one in good:
            one.kill()
        eventually(lambda: (roster["retired"] == roster["generation"]).all())
        now = status(job_name)
        assert now["server_deaths"] == 0
        assert np.isfinite(weights[THEIR_FIRST:]).all()
        if model == "asp":  # a mean is rounded
            expected = -sum(one.published for one in good)
            np.testing.assert_array_equal(weights[THEIR_FIRST:300], expected)
        job.check()
