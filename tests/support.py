"""What tests share: waiting for a condition, processes to kill, jobs with and without a daemon."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

from gadei_ps import _native
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.control import Status, ask
from gadei_ps.learners.client import Client, rows_at
from gadei_ps.machine import process
from gadei_ps.memory import layout, segment
from gadei_ps.memory.layout import Action, FrameKind, Phase, Reason, WireType
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model, Tensor, data, payload_bytes, write_table
from gadei_ps.memory.weights import place as placed
from gadei_ps.server import places as place
from gadei_ps.watchdog.memory import JobMemory

FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0  # for what takes milliseconds on an idle machine


def eventually(
    condition: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    what: Callable[[], object] | str = "",
) -> Any:
    """Waits until the condition holds and returns its value; fails when it does not."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > until:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s} s: {said or condition}")
        time.sleep(0.001)
    return value


def spin(chance: random.Random, most_s: float) -> None:
    """A random time, without giving the core away: until anywhere in what another is doing."""
    end = time.perf_counter() + chance.random() * most_s
    while time.perf_counter() < end:
        pass


# -- processes ----------------------------------------------------------------------------------


def children() -> set[int]:
    """Pids of this process' children; those that have ended are reaped."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in path.read_text().split()}
    for pid in list(found):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.discard(pid)
    return found


def described(before: set[int]) -> list[list[str]]:
    """Command lines of children that were not there before."""
    said = []
    for pid in children() - before:
        with contextlib.suppress(psutil.Error):
            said.append([str(pid), *psutil.Process(pid).cmdline()])
    return said


def _child(function: Callable[..., None], pipe: Connection, parent: int, args: Any) -> None:
    _native.die_with_parent(signal.SIGKILL)
    if os.getppid() == parent:
        function(pipe, *args)


class Child:
    """A forked process that runs function(pipe, *args), to be killed at any instant."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(
            target=_child, args=(function, theirs, os.getpid(), args), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._process.pid
        self.pid = self._process.pid

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next thing that it sends; fails when it ends or stays silent."""
        ready = wait([self._pipe, self._process.sentinel], timeout_s)
        if self._pipe not in ready and not self._pipe.poll():
            raise AssertionError(f"child {self.pid} ended: {self._process.exitcode}, {ready=}")
        return self._pipe.recv()

    @property
    def has_sent(self) -> bool:
        """Whether there is something to receive, its end included."""
        return bool(wait([self._pipe, self._process.sentinel], 0))

    def send(self, value: Any = None) -> None:
        self._pipe.send(value)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self.join()

    def join(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, negative for a signal; fails when it does not end."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"child {self.pid} does not end"
        self._pipe.close()
        return self._process.exitcode


class Stopped:
    """A process that does not run meanwhile, none of its threads."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def __enter__(self) -> None:
        self._process.suspend()
        tasks = Path(f"/proc/{self._process.pid}/task")
        eventually(lambda: all(b") T" in (task / "stat").read_bytes() for task in tasks.iterdir()))

    def __exit__(self, *exc: object) -> None:
        self._process.resume()


@contextlib.contextmanager
def fork(count: int, function: Callable[..., None], *args: Any) -> Iterator[list[Child]]:
    """Children that are killed at the block's end, if they have not ended."""
    made = [Child(function, *args) for _ in range(count)]
    try:
        yield made
    finally:
        for child in made:
            child.kill()


def gone(pid: int) -> bool:
    """Ended with all its threads, though perhaps nobody has asked for its exit code yet."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return process.gone(pidfd, 0)
    finally:
        os.close(pidfd)


def kill_all(job: str, socket: Path | None = None) -> None:
    """SIGKILL for the job's watchdog and servers, all at once; its memory stays."""
    pids = [status(str(socket or job))["watchdog_pid"], *segment.server_pids(job)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        eventually(lambda pid=pid: gone(pid), what=f"{pid} of {pids}")


class Manager:
    """systemd's end of a service's notify socket: a path, or @NAME for the abstract namespace."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """Every datagram since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.socket.recv(4096).decode())
        return found

    def close(self) -> None:
        self.socket.close()


# -- processes that start quickly -----------------------------------------------------------------


class Forked(subprocess.Popen[bytes]):
    """What spawn() would start, as a fork of this process: all that it imports is there already.

    A watchdog and a server take a second of a core to start, most of which are imports. Whether
    they start on their own is seen where the command line and crash/test_deaths.py start them.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None, **how: Any) -> None:
        self.args, self.stdin, self.stdout, self.stderr = command, None, None, None
        self.returncode = None
        self._child_created, self._waitpid_lock = True, threading.Lock()  # Popen's own
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._run(command, env, parent, **how)

    def _run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        parent: int,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        how: int | None = signal.SIGKILL,
    ) -> None:
        code = 1
        try:
            gc.freeze()  # nothing of the parent's is ever closed here, whatever has its number
            os.setpgid(0, 0)
            if how is not None:
                process.dies_with_parent(parent, how)()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            keep = {0, 1, 2, *pass_fds}
            for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if fd not in keep:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            if stdout is not None:
                os.dup2(stdout, 1)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            sys.argv = list(command[2:])
            sys.modules[command[2]].main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def fork_quickly() -> contextlib.AbstractContextManager[Any]:
    """In this block watchdogs are forks of this process, and their servers are forks of them."""
    from gadei_ps.server import manager as server
    from gadei_ps.server import shard

    shard.load()
    loaded = (server.__name__, Daemon.__module__)
    spawn = process.spawn

    def forked(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        return Forked(command, **how) if command[2] in loaded else spawn(command, **how)

    return mock.patch.object(process, "spawn", forked)


class QuickDaemon(Daemon):
    """A daemon whose processes start quickly."""

    def _start(self, *, fresh: bool) -> None:
        with fork_quickly():
            super()._start(fresh=fresh)


# -- jobs ---------------------------------------------------------------------------------------


def segments(prefix: str) -> list[str]:
    """Segments of the jobs whose name begins so."""
    return [found.name for found in segment.find() if found.job.startswith(prefix)]


def config(name: str, **values: Any) -> JobConfig:
    """SGD with a rate of 1, so that integer gradients give integer weights, unless told."""
    return from_mapping({"optimizer": {"kind": "sgd", "lr": 1.0}, "name": name} | values, "test")


def daemon(name: str, **values: Any) -> Daemon:
    """A job's daemon, to be used in a with statement; with one server, which starts quicker."""
    return QuickDaemon(config(name, **({"standby": False} | values)))


def status(job: str) -> dict[str, Any]:
    return ask(job, Status())


def learner(job: str, pid: int) -> dict[str, Any] | None:
    """The row of the status that this process has."""
    return next((row for row in status(job)["learners"] if row["pid"] == pid), None)


def ring_of(job: str, row: int) -> Segment:
    """A learner's ring, read-only: it can be read after the learner is dead and the name gone."""
    return segment.attach(
        segment.segment_name(job, f"ring.{row}"), layout.SegmentKind.RING, writable=False
    )


def live_weights(job: str) -> np.ndarray:
    """The job's weights, read-only, shape (elements,)."""
    name = segment.segment_name(job, "weights")
    return data(segment.attach(name, layout.SegmentKind.WEIGHTS, writable=False))


def _push_for_ever(pipe: Connection, job: str, push: Callable[[Client], object]) -> None:
    client = Client(job)
    pipe.send((client.row, client.generation))
    pipe.recv()  # who wants to know our ring's head after our death has mapped it
    while True:
        push(client)


class Pusher:
    """A process that calls push(client) for ever, and its ring."""

    def __init__(self, job: str, push: Callable[[Client], object]) -> None:
        self.child = Child(_push_for_ever, job, push)
        try:
            self.row, self.generation = self.child.receive()
            self.ring = ring_of(job, self.row)
        except BaseException:
            self.child.kill()
            raise
        self.child.send()

    @property
    def published(self) -> int:
        """Gradients; also after its death."""
        return _native.load(self.ring.address + layout.offset(layout.RING, "head"))

    def kill(self) -> None:
        self.child.kill()


def same(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> None:
    """To the last bit."""
    for one, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(one, other)


class Loose:
    """A weights segment's table in private memory, for weights.write_table."""

    def __init__(self, model: Model) -> None:
        size = layout.WEIGHTS.itemsize + len(model.tensors) * layout.TENSOR.itemsize
        self._bytes = np.zeros(size, np.uint8)
        write_table(self, model)  # type: ignore[arg-type]

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    def view(self, dtype: np.dtype[np.void]) -> np.void:
        one: np.void = self._bytes[: dtype.itemsize].view(dtype)[0]
        return one

    def array(self, dtype: np.dtype[np.void], count: int, at: int) -> np.ndarray:
        return self._bytes[at : at + count * dtype.itemsize].view(dtype)


def payload_of(
    model: Model,
    gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
    wire: WireType = WireType.FLOAT32,
    *,
    spare: bool = False,
    left: np.ndarray | None = None,
) -> tuple[np.ndarray, FrameKind, int, float]:
    """What a client writes into a slot, uint8; its kind, blocks and sum of squares."""
    room = np.zeros(payload_bytes(model) + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :]
    where: list[int] = []
    kept = []
    for number in range(len(model.tensors)):
        given = gradients.get(number)
        if given is None:
            where += (0, 0, 0, 0)
        elif isinstance(given, np.ndarray):
            kept.append(np.ascontiguousarray(given, np.float32))
            where += (kept[-1].ctypes.data, 0, 0, 0)
        else:
            indices = np.ascontiguousarray(given[0], np.int64)
            values = np.ascontiguousarray(given[1], np.float32)
            kept += [indices, values]
            where += rows_at(indices.ctypes.data, values.ctypes.data, indices.size)
    table = Loose(model)
    kept_left = 0 if left is None else left.ctypes.data
    kind, blocks, size, squares = _native.write_frame(
        table.address, wire, spare, kept_left, room.ctypes.data, *where
    )
    return room[:size].copy(), FrameKind(kind), blocks, squares


def decoded_frame(
    model: Model, payload: np.ndarray, kind: FrameKind, blocks: int, wire: WireType
) -> dict[int, np.ndarray]:
    """The dense gradients that a payload says, by tensor's number."""

    def read(at: int, count: int) -> np.ndarray:
        raw = payload[at : at + count * layout.WIRE_BYTES[wire]]
        if wire == WireType.BFLOAT16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(np.float16 if wire == WireType.FLOAT16 else np.float32).astype(np.float32)

    found = {}
    if kind is FrameKind.DENSE:
        for number, tensor in enumerate(model.tensors):
            at = tensor.start * layout.WIRE_BYTES[wire]
            found[number] = read(at, tensor.count).reshape(tensor.shape)
        return found
    for i in range(blocks):
        block = payload[i * layout.BLOCK.itemsize :][: layout.BLOCK.itemsize].view(layout.BLOCK)[0]
        tensor = model.tensors[int(block["tensor"])]
        if int(block["form"]) == FrameKind.DENSE:
            values = read(int(block["values_at"]), tensor.count).reshape(tensor.shape)
        else:
            count, at = int(block["rows"]), int(block["indices_at"])
            values = np.zeros(tensor.shape, np.float32)
            indices = payload[at : at + 8 * count].view(np.int64)
            width = tensor.count // tensor.rows
            values[indices] = read(int(block["values_at"]), count * width).reshape(count, width)
        found[int(block["tensor"])] = values
    return found


def rows_payload(
    model: Model,
    gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
    wire: WireType = WireType.FLOAT32,
) -> tuple[np.ndarray, int]:
    """Payload of a frame of rows, uint8, and how many blocks it has."""
    if any(isinstance(given, tuple) for given in gradients.values()):
        payload, _, blocks, _ = payload_of(model, gradients, wire)
        return payload, blocks
    # A client makes a dense frame of these; one of rows may hold whole tensors only, too.
    at = layout.rounded(len(model.tensors) * layout.BLOCK.itemsize, 64)
    room = np.zeros(payload_bytes(model) + 64, np.uint8)
    for block, (number, given) in enumerate(sorted(gradients.items())):
        values = np.ascontiguousarray(given, np.float32)
        entry = room[block * layout.BLOCK.itemsize :][: layout.BLOCK.itemsize].view(layout.BLOCK)
        entry["tensor"], entry["form"], entry["values_at"] = number, FrameKind.DENSE, at
        _native.copy(wire, room.ctypes.data + at, values.ctypes.data, values.size, 0)
        at += layout.rounded(values.size * layout.WIRE_BYTES[wire], 64)
    return room[:at].copy(), len(gradients)


class Rig:
    """A job's real segments without a daemon: this process serves the shards, or a child of it.

    Rows 0 to learners - 1 of the roster are taken, with generations from 1 on.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        values: dict[str, np.ndarray] | None = None,
        *,
        learners: int = 1,
        collect: bool = False,
        **settings: Any,
    ) -> None:
        # Here: the tests that need no shard are spared Numba.
        from gadei_ps import sync
        from gadei_ps.server import apply, recover, rows, shard

        self._rooms: list[tuple[np.ndarray, np.ndarray]] = []
        self._apply, self._recover, self._rows, self._shard = apply, recover, rows, shard
        self.memory = JobMemory(config(name, **settings))
        self.memory.create_control(sync.parse("bsp" if collect else "asp"))
        try:
            self._make(placed(tensors), values, learners)
        except BaseException:
            self.memory.remove()
            raise

    def _make(self, model: Model, values: dict[str, np.ndarray] | None, learners: int) -> None:
        flat = np.zeros(model.elements, np.float32) if values is None else model.flatten(values)
        self.memory.create_model(model, flat)
        assert self.memory.weights
        assert self.memory.state
        self.model = model
        self.control_at = self.memory.control.address
        self.control = self.memory.control.view(layout.CONTROL)
        self.roster = self.control["roster"]
        self.state = self.memory.state.view(layout.STATE)
        self.weights = data(self.memory.weights)
        self.shards = int(self.control["shards"])
        self.slots = [
            self.memory.state.array(
                np.float32,
                model.elements,
                int(self.state["slots_at"]) + stream * int(self.state["slot_bytes"]),
            )
            for stream in range(int(self.state["streams"]))
        ]
        self.table = np.zeros((layout.MAX_LEARNERS, place.TABLE), np.uint64)
        self.words = np.zeros(place.WORDS, np.uint64)
        for row in range(learners):
            self.add(row, row + 1)
        self.control["phase"] = Phase.SERVING

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.memory.remove()

    def add(self, row: int, generation: int) -> None:
        """A learner attaches."""
        ring = self.memory.create_ring(row, generation)
        ring.view(layout.RING)["wants"] = layout.WANTS_TURN | layout.WANTS_WORK
        head = ring.view(layout.RING)
        for field in ("generation", "wanted", "served"):
            self.roster[row][field] = generation
        self.roster[row]["grant"] = layout.UNBOUNDED
        self.state["applied"][:, row] = 0
        for field in ("drained", "handed", "unasked"):
            self.roster[row][field] = 0
        self.roster[row]["outstanding"] = layout.NO_BATCH
        self.table[row] = ring.address, generation, int(head["slot_bytes"]), int(head["slots_at"])
        self.words[place.TABLE_VERSION] += 1
        self.bell()

    def forget(self, row: int) -> None:
        """A learner that has departed is let go; its row may be taken again."""
        self.table[row] = 0
        self.words[place.TABLE_VERSION] += 1
        self.bell()
        seen = self.words[place.SEEN : place.SEEN + self.shards]
        eventually(lambda: (seen == self.words[place.TABLE_VERSION]).all())
        self.memory.remove_ring(row)

    def word(self, field: str) -> int:
        return self.control_at + layout.offset(layout.CONTROL, field)

    def bell(self) -> None:
        _native.bell(self.word("shard_bell"))

    def ring(self, row: int) -> np.void:
        return self.memory.rings[row].view(layout.RING)

    def range(self, index: int) -> tuple[int, int]:
        return layout.shard_range(self.model.elements, self.shards, index)

    def places(self, index: int) -> np.ndarray:
        """What a shard works with."""
        memory = self.memory
        assert memory.weights
        assert memory.state
        places = np.zeros(place.PLACES, np.uint64)
        places[place.CONTROL_AT] = self.control_at
        places[place.STATE_AT] = memory.state.address
        places[place.WEIGHTS_AT] = self.weights.ctypes.data
        for stream, slot in enumerate(self.slots):
            places[place.SLOT0_AT + stream] = slot.ctypes.data
        places[place.UNDO_AT] = memory.state.address + int(self.state["undo_at"])
        places[place.UNDO_AT] += np.uint64(index * layout.UNDO_BYTES)
        places[place.TABLE_AT] = self.table.ctypes.data
        places[place.WORDS_AT] = self.words.ctypes.data
        head = memory.weights.view(layout.WEIGHTS)
        tensors = int(head["tensors"])
        places[place.TENSORS_AT] = memory.weights.address + int(head["table_at"])
        places[place.TENSORS] = tensors
        places[place.APPLY_AT] = self._rows.applier()
        mine = self._apply.room()
        self._rooms.append(mine)
        places[place.HANDS_AT], places[place.ROOM_AT] = (part.ctypes.data for part in mine)
        places[place.CAPACITY] = payload_bytes(self.model)
        places[place.ELEMENTS] = self.model.elements
        places[place.PARAMETERS] = self.model.parameters
        return places

    def kept(self) -> list[np.ndarray]:
        """Copies of weights and slots."""
        return [part.copy() for part in (self.weights, *self.slots)]

    def undo(self, index: int, stream: int, chunk: int) -> np.ndarray:
        """A stream of a shard's undo log, as that chunk is logged."""
        at = int(self.state["undo_at"])
        at += index * layout.UNDO_BYTES + chunk % 2 * layout.UNDO_HALF + stream * layout.CHUNK * 4
        assert self.memory.state
        return self.memory.state.array(np.float32, layout.CHUNK, at)

    def recover(self) -> list[int]:
        """For each shard whether a gradient was in hand."""
        return [
            self._recover.recover(index, *self.range(index), self.places(index))
            for index in range(self.shards)
        ]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Shard threads in this process."""
        self._shard.load()  # here, where nobody waits yet
        self.words[place.QUIT] = 0
        threads = [
            threading.Thread(
                target=self._shard.serve, args=(index, *self.range(index), self.places(index))
            )
            for index in range(self.shards)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.words[place.QUIT] = 1
            self.bell()
            for thread in threads:
                thread.join()

    def publish(
        self,
        row: int,
        payload: np.ndarray,
        wire: WireType = WireType.FLOAT32,
        timeout_s: float = PATIENCE_S,
        **fields: Any,
    ) -> int:
        """Publishes a frame as a learner does; `fields` are written over what is right."""
        ring = self.memory.rings[row]
        slot = _native.claim(ring.address, self.control_at, int(timeout_s * 1e9))
        assert slot >= 0, f"claim: {slot}"
        at = slot - ring.address
        ring.array(payload.dtype, payload.size, at + layout.PAYLOAD_AT)[:] = payload
        head = self.ring(row)
        sequence = int(head["head"])
        frame = ring.array(layout.FRAME, 1, at)
        frame[:] = 0
        good = {
            "sequence": sequence,
            "generation": int(head["header"]["generation"]),
            "clock": sequence,
            "version": int(self.control["version"]),
            "kind": FrameKind.DENSE,
            "dtype": wire,
            "payload_bytes": payload.nbytes,
            "flags": layout.CHECKED,
            "batch": layout.NO_BATCH,
            "samples": 1,
            "rate_scale": 1.0,
        }
        for field, value in (good | fields).items():
            frame[0][field] = value
        head_at = ring.address + layout.offset(layout.RING, "head")
        _native.store(head_at, sequence + 1)
        _native.futex_wake(head_at)
        return sequence

    def publish_rows(
        self,
        row: int,
        gradients: dict[int, tuple[np.ndarray, np.ndarray] | np.ndarray],
        wire: WireType = WireType.FLOAT32,
        **fields: Any,
    ) -> int:
        """Publishes a frame of rows: by tensor's number its indices and values, or all values."""
        payload, blocks = rows_payload(self.model, gradients, wire)
        fields = {"kind": FrameKind.ROWS, "blocks": blocks} | fields
        return self.publish(row, payload, wire, **fields)

    def superstep(self, actions: dict[int, Action]) -> None:
        """What the manager does: tells what becomes of these rows' oldest frames."""
        self.control["superstep_action"] = Action.SKIP
        for row, action in actions.items():
            self.control["superstep_action"][row] = action
            self.control["superstep_reason"][row] = (
                Reason.NOT_FINITE if action == Action.REFUSE else Reason.OK
            )
            self.control["superstep_upto"][row] = self.state["applied"][0, row] + 1
        _native.store(self.word("superstep"), int(self.control["superstep"]) + 1)
        self.bell()

    def superstep_done(self) -> bool:
        done = self.state["record"]["supersteps"][: self.shards]
        return bool((done == self.control["superstep"]).all())

    def wait_tail(self, row: int, tail: int) -> None:
        """Waits until every shard has let go of the frames below."""
        tails = self.ring(row)["tail"]["value"]
        eventually(lambda: (tails[: self.shards] == tail).all(), what=lambda: tails[: self.shards])

    def wait_applied(self, row: int, sequence: int, timeout_s: float = PATIENCE_S) -> None:
        result = _native.wait_applied(
            self.memory.rings[row].address, self.control_at, sequence, int(timeout_s * 1e9)
        )
        assert result == 0, f"wait_applied: {result}"
