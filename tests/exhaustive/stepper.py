"""Steps through the code of a shard on a rig's segments (steps.c): images, and their recoveries."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from ctypes import POINTER, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from support import Rig
from support.kept import of_part

from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, RECORD, RING, RUN, SHARD, STATE
from gadei_ps.server import recover, shard
from gadei_ps.server.structs import BOARD, PART

SOURCE = Path(__file__).with_name("steps.c")
COMPILER = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
DEPTHS = 16
ENDS = (
    "came to rest",
    "crashed",
    "does not come to rest",
    "raised an exception",
    "waits for a ring that is there",
    "is not what an undisturbed run leaves",
    "needs more room than the test has",
)
RESTED, DIFFERENT, NONE_LEFT = 0, 5, 7

# Words that no recovery reads, and that differ from one server process to the next: heartbeats
# and bells. They distinguish no images and are not compared.
PASSING = {
    "control": ("shard_bell", "manager_bell", "sleepers"),
    "shard": ("heartbeat", "tid", "recovered", "cpu"),
    "ring": ("released",),
}
# Not compared at rest, because they mean nothing then: the undo log, the journal's words and where
# chunks belong. They do distinguish images. The times of an iteration (`runs`) may be missing.


class _Private(ctypes.Structure):
    _fields_ = [("at", c_void_p), ("fresh", c_void_p), ("bytes", c_uint64)]


class _Setting(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("guarded", "open")),
        ("bytes", c_uint64),
        *((name, c_void_p) for name in ("base", "shadow", "final", "keep", "equal", "lines")),
        *((name, c_uint64) for name in ("line_count", "cursor", "spans", "idle", "chunk")),
        *((name, c_uint64) for name in ("undo", "half")),
        ("private", _Private * 2),
        *((name, c_void_p) for name in ("can_recover", "recover", "serve", "part")),
        *((name, c_uint64) for name in ("part_bytes", "obeyed", "sleepers", "sleeper", "bell")),
        ("quit", c_void_p),
        *((name, c_uint64) for name in ("released", "ring", "ring_bytes")),
        ("broken", c_void_p),
        *((name, c_uint64) for name in ("generation", "damaged")),
    ]


class Told(ctypes.Structure):
    """Figures of a count: `struct told` of steps_images.h."""

    _fields_ = [
        *((name, c_uint64) for name in ("instructions", "stores", "images", "wrong", "runs")),
        ("lost_lines", c_uint64),
        ("deaths", c_uint64 * DEPTHS),
        *((name, c_uint64) for name in ("depth", "ordinal", "offset", "in_hand")),
    ]


def build(directory: Path) -> ctypes.CDLL:
    """Compile steps.c into the directory."""
    made = directory / "steps.so"
    subprocess.run([*COMPILER, "-o", made, SOURCE], check=True)
    library = ctypes.CDLL(str(made))
    library.map_again.restype = c_void_p
    library.map_again.argtypes = [POINTER(c_uint64), POINTER(c_uint64), c_int]
    library.unmap.argtypes = [c_void_p, c_uint64]
    library.first_run.argtypes = [c_int, c_uint64, c_void_p, c_uint64]
    library.next_images.argtypes = [c_uint64]
    library.figures.restype = POINTER(Told)
    library.hash_now.argtypes = [c_void_p]
    library.hash_now.restype = None
    return library


def _code(function: Any) -> int:
    """Address of a compiled function, as Numba calls it."""
    function.compile(of_part())
    made = function.overloads[of_part()]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def _path(dtype: np.dtype, at: int) -> str:
    """Return which word of a struct is at this byte."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        where = ", ".join(str(int(one)) for one in np.unravel_index(at // base.itemsize, shape))
        return f"[{where}]" + _path(base, at % base.itemsize)
    for name, (one, begin, *_) in (dtype.fields or {}).items():
        if begin <= at < begin + one.itemsize:
            return f".{name}" + _path(one, at - begin)
    return ""


class Stepper:
    """One shard of a rig, whose segments hold the state before its first instruction.

    The rig's shards must be at rest, with no thread that serves. One Stepper at a time.
    """

    def __init__(
        self, library: ctypes.CDLL, rig: Rig, index: int = 0, code: Any = recover.recover
    ) -> None:
        """code: what recovers."""
        self._code = code
        self._library, self.rig, self.index = library, rig, index
        memory = rig.memory
        assert memory.weights and memory.state
        named = {"control": memory.control, "weights": memory.weights, "state": memory.state}
        named |= {f"ring.{row}": ring for row, ring in memory.rings.items()}
        self._segments, self._starts, self.bytes = named, {}, 0
        for name, one in named.items():
            self._starts[name] = self.bytes
            self.bytes += one.size
        addresses = (c_uint64 * len(named))(*(one.address for one in named.values()))
        sizes = (c_uint64 * len(named))(*(one.size for one in named.values()))
        self._guarded = library.map_again(addresses, sizes, len(named))
        self._open = library.map_again(addresses, sizes, len(named))
        assert self._guarded and self._open
        rig.control["sleepers"] = 0
        self._copies = np.zeros((3, self.bytes), np.uint8)
        self._lines = np.array(list(self._noted()), np.uint64)
        self._keep = np.full(self.bytes, 255, np.uint8)  # bytes that distinguish images
        self._leave_out_passing()
        self._equal = self._keep.copy()  # bytes that are compared at rest
        self._leave_out_spent()
        self._begin()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *exc: object) -> None:
        self._library.unmap(self._guarded, self.bytes)
        self._library.unmap(self._open, self.bytes)

    def _at(self, segment: str, struct: np.dtype, field: str) -> int:
        return self._starts[segment] + layout.offset(struct, field)

    def _noted(self) -> Iterator[int]:
        """Return where the times of the waiting frames are noted."""
        for row in self.rig.memory.rings:
            first = self._at("state", STATE, "runs") + row * layout.RUNS * RUN.itemsize
            head, tail = int(self.rig.ring(row)["head"]), int(self.rig.state["applied"][0, row])
            for number in range(tail, head):
                yield first + number % layout.RUNS * RUN.itemsize

    def _leave_out_passing(self) -> None:
        def leave(at: int, dtype: np.dtype, names: tuple[str, ...]) -> None:
            for name in names:
                begin = at + layout.offset(dtype, name)
                self._keep[begin : begin + dtype.fields[name][0].itemsize] = 0

        leave(self._starts["control"], CONTROL, PASSING["control"])
        for number in range(self.rig.shards):
            at = self._at("control", CONTROL, "shard") + number * SHARD.itemsize
            leave(at, SHARD, PASSING["shard"])
        for row in self.rig.memory.rings:
            leave(self._starts[f"ring.{row}"], RING, PASSING["ring"])

    def _leave_out_spent(self) -> None:
        def leave(at: int, size: int) -> None:
            self._equal[at : at + size] = 0

        undo = self._starts["state"] + int(self.rig.state["undo_at"])
        leave(undo, self.rig.shards * layout.UNDO_BYTES)
        journal = self._at("state", STATE, "journal")
        leave(journal + layout.offset(layout.JOURNAL_LOG, "words"), layout.JOURNAL * 8)
        leave(self._record + layout.offset(RECORD, "span"), 2 * layout.SPAN.itemsize)
        for at in self._lines:
            leave(int(at), RUN.itemsize)

    @property
    def _record(self) -> int:
        return self._at("state", STATE, "record") + self.index * RECORD.itemsize

    def _moved(self, address: int) -> int:
        """Return where the contents of a segment are in the guarded mapping."""
        for name, one in self._segments.items():
            if one.address <= address < one.address + one.size:
                return int(self._guarded) + self._starts[name] + address - one.address
        raise AssertionError(f"{address:x} is in no segment")

    def _begin(self) -> None:
        self._board, self._part = np.zeros(1, BOARD), self.rig.part(self.index)
        board, part = self._board, self._part
        board[0] = self.rig.board
        board["quit"] = 0
        for row in self.rig.memory.rings:
            board["ring"]["address"][0, row] = self._moved(int(board["ring"]["address"][0, row]))
        part["board"] = board.ctypes.data
        for field in ("control", "state", "weights", "slot0", "slot1", "undo", "tensors_at"):
            if part[field][0]:
                part[field] = self._moved(int(part[field][0]))
        self._fresh = board.copy(), part.copy()
        private = (_Private * 2)(
            *((now.ctypes.data, fresh.ctypes.data, now.nbytes)
              for now, fresh in zip((board, part), self._fresh, strict=True))
        )  # fmt: skip
        base, shadow, final = (one.ctypes.data for one in self._copies)
        me = self._at("control", CONTROL, "shard") + self.index * SHARD.itemsize
        undo = self._starts["state"] + int(self.rig.state["undo_at"])
        undo += self.index * layout.UNDO_BYTES
        setting = _Setting(
            self._guarded, self._open, self.bytes, base, shadow, final,
            self._keep.ctypes.data, self._equal.ctypes.data, self._lines.ctypes.data,
            self._lines.size, self._record + layout.offset(RECORD, "cursor"),
            self._record + layout.offset(RECORD, "span"), layout.ALL_APPLIED, layout.CHUNK,
            undo, layout.UNDO_HALF, private,
            _code(recover.can_recover), _code(self._code), _code(shard.serve),
            part.ctypes.data, PART.itemsize, me + layout.offset(SHARD, "mode"),
            self._at("control", CONTROL, "sleepers"), 1 << self.index,
            self._at("control", CONTROL, "shard_bell"),
            board.ctypes.data + layout.offset(BOARD, "quit"),
            self._at("ring.0", RING, "released"),
            self._starts["ring.0"], self._segments["ring.0"].size,
            board["ring"][0, :1]["broken"].ctypes.data, int(self.rig.roster[0]["generation"]),
            self._at("control", CONTROL, "roster") + layout.offset(layout.ENTRY, "broken"),
        )  # fmt: skip
        assert self._library.begin(ctypes.byref(setting)) == 0

    @property
    def told(self) -> Told:
        """The figures so far."""
        return Told.from_buffer_copy(self._library.figures().contents)

    def first(self, *, every: bool, die: int = 0, trail: np.ndarray | None = None) -> None:
        """The undisturbed run, from which images come.

        every: stop after each instruction, not only after those that store. die: after that many
        stores this process gets SIGKILL. trail: for the hash of the image after each store, uint64
        of shape (stores, 2); zero if the store changed nothing.
        """
        at, count = (0, 0) if trail is None else (trail.ctypes.data, len(trail))
        end = self._library.first_run(every, die, at, count)
        assert end == RESTED, f"the undisturbed run {ENDS[end]}"

    def hash(self) -> list[int]:
        """Return a hash of what the segments hold now, two words."""
        made = np.zeros(2, np.uint64)
        self._library.hash_now(made.ctypes.data)
        return made.tolist()

    def wrong(self) -> Iterator[str]:
        """Recover the images, in the order in which they were found; yield which were wrong."""
        while True:
            end = self._library.next_images(1000)
            if end == NONE_LEFT:
                return
            if end != RESTED:
                yield f"{self._said()} {ENDS[end]}" + (self._seen() if end == DIFFERENT else "")

    def without_ring(self) -> Iterator[str]:
        """Recover the images of the first run without the first ring; yield how it ended."""
        while (end := self._library.next_without_ring()) != NONE_LEFT:
            yield f"{self._said()} {ENDS[end]}"

    def _said(self) -> str:
        figures = self.told
        return f"image after {figures.depth} deaths, store {figures.ordinal} of the last process,"

    def _seen(self) -> str:
        at = self.told.offset
        name = max((one for one in self._starts if self._starts[one] <= at), key=self._starts.get)
        struct = {"control": CONTROL, "weights": layout.WEIGHTS, "state": STATE}.get(name, RING)
        within = at - self._starts[name]
        path = _path(struct, within) if within < struct.itemsize else f" at byte {within}"
        right = int(self._copies[2][at : at + 8].view(np.uint64)[0])
        now = int(ctypes.c_uint64.from_address(int(self._open) + at).value)
        return f": {name}{path} is {now:#x}, not {right:#x}"
