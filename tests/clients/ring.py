"""The ring's protocol on plain memory, without any job: both sides are called from the test."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import support
from support.frames import claim

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, ENTRY, FRAME, RING, Phase

LONG_NS = 30_000_000_000
ROW, GENERATION = 5, 77
SLOTS_AT = layout.rounded(RING.itemsize, layout.PAGE)
SLOT_BYTES = layout.PAYLOAD_AT + 64

# The server's side, which compiled Python calls by symbol.
_library = ctypes.CDLL(_native.__file__)
_u64, _u32 = ctypes.c_uint64, ctypes.c_uint32
ps_release = _library.ps_release
ps_release.argtypes, ps_release.restype = [_u64, _u64, _u64], None
ps_pass = _library.ps_pass
ps_pass.argtypes, ps_pass.restype = [_u64, _u64, _u64], None
ps_hand_out = _library.ps_hand_out
ps_hand_out.argtypes, ps_hand_out.restype = [_u64, _u64, _u64], None
ps_shard_sleep = _library.ps_shard_sleep
ps_shard_sleep.argtypes = [_u64, _u64, _u64, _u64, _u64, _u64, _u32, _u64]
ps_shard_sleep.restype = None


class _Frame(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * FRAME.itemsize)]


_publish_frame = _library.ps_publish_frame
_publish_frame.argtypes, _publish_frame.restype = [_u64, _u64, _Frame], ctypes.c_int


def publish(ring_at: int, control_at: int, frame: np.ndarray) -> int:
    """Publish a header, shape (1,), as a learner does in the slot that it has just claimed.

    Returns the frame's sequence number, or a result < 0.
    """
    sequence = _native.load(ring_at + layout.offset(RING, "head"))
    frame[0]["sequence"] = sequence
    result: int = _publish_frame(ring_at, control_at, _Frame.from_buffer(frame))
    return result or sequence


class Ring:
    """A ring and its control segment in this process' memory."""

    def __init__(self, shards: int, slots: int, begin: int = 0, spin_ns: int = 0) -> None:
        self.shards, self.slots = shards, slots
        self._ring_memory = np.zeros(SLOTS_AT + slots * SLOT_BYTES, np.uint8)
        self._control_memory = np.zeros(1, CONTROL)
        self.at = self._ring_memory.ctypes.data
        self.control_at = self._control_memory.ctypes.data
        self.control = self._control_memory[0]
        self.ring = self._ring_memory[: RING.itemsize].view(RING)[0]
        self.entry = self.control["roster"][ROW]
        self.control["shards"] = shards
        self.control["spin_ns"] = spin_ns
        self.control["phase"] = Phase.SERVING
        self.entry["wanted"] = GENERATION
        self.ring["header"]["index"] = ROW
        self.ring["header"]["generation"] = GENERATION
        self.ring["shards"] = shards
        self.ring["slots"] = slots
        self.ring["slot_bytes"] = SLOT_BYTES
        self.ring["slots_at"] = SLOTS_AT
        self.ring["head"] = begin
        self.ring["tail"]["value"] = begin

    def claim(self, timeout_ns: int = 0) -> int:
        return claim(self.at, self.control_at, timeout_ns)

    def slot(self, sequence: int) -> int:
        return self.at + SLOTS_AT + sequence % self.slots * SLOT_BYTES

    def frame(self, sequence: int) -> np.void:
        at = self.slot(sequence) - self.at
        return self._ring_memory[at : at + FRAME.itemsize].view(FRAME)[0]

    def payload(self, sequence: int) -> np.ndarray:
        at = self.slot(sequence) - self.at + layout.PAYLOAD_AT
        return self._ring_memory[at : at + 64]

    def publish(self, clock: int = 0) -> int:
        frame = np.zeros(1, FRAME)
        frame[0]["clock"], frame[0]["version"] = clock, 3
        frame[0]["dtype"], frame[0]["kind"], frame[0]["payload_bytes"] = 1, 1, 64
        frame[0]["batch"], frame[0]["samples"], frame[0]["squares"] = 9, 32, 4.0
        frame[0]["rate_scale"], frame[0]["momentum"], frame[0]["loss"] = 0.5, 0.5, 1.25
        frame[0]["started"], frame[0]["finished"] = 10.0, 11.0
        return publish(self.at, self.control_at, frame)

    def head(self) -> int:
        return int(self.ring["head"])

    def tail(self, shard: int) -> int:
        return int(self.ring["tail"]["value"][shard])

    def release(self, shard: int) -> None:
        ps_release(self.at, shard, self.tail(shard) + 1)

    def wait_applied(self, sequence: int, timeout_ns: int = 0) -> int:
        return _native.wait_applied(self.at, self.control_at, sequence, timeout_ns)

    def wait_grant(self, clock: int, timeout_ns: int = 0) -> int:
        return _native.wait_grant(self.at, self.control_at, clock, timeout_ns)

    def ask_exclusive(self, on: int) -> None:
        _native.ask_exclusive(self.at, self.control_at, on)

    def is_exclusive(self) -> bool:
        return _native.is_exclusive(self.at, self.control_at)

    def take(self, timeout_ns: int = 0) -> int:
        return _native.take_work(self.at, self.control_at, timeout_ns)

    def hand_out(self, item: int) -> None:
        ps_hand_out(self.at, int(self.ring["work_head"]), item)

    def word(self, field: str) -> int:
        return self.at + layout.offset(RING, field)

    def ring_bell(self, field: str) -> None:
        """Wake the threads that sleep on a word of the roster's row."""
        roster = self.control_at + layout.offset(CONTROL, "roster") + ROW * ENTRY.itemsize
        _native.bell(roster + layout.offset(ENTRY, field))


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self._value = call()

    def done(self) -> Any:
        self._thread.join(support.PATIENCE_S)
        assert not self._thread.is_alive()
        return self._value
