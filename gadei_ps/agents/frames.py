"""Headers of frames between agents, and bytes over a connection with a deadline.

Every frame begins with the header that native/mesh.h draws; this file has it for the frames that
Python sends: signs of life, states, models. A header is checked before a byte of its payload is
used.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gadei_ps import _mesh
from gadei_ps.errors import AgentError

MAGIC = 0x4D535047  # "GPSM"
VERSION = 1
_FIELDS = struct.Struct("<IHHQQQIIIII")
_SUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _SUM.size
assert HEADER_BYTES == 56

# 1 to 3 are REDUCE, GATHER and DONE of native/mesh.h.
STATE, BEAT, ABORT, MODEL, GREETING, LETTER, SNAPSHOT, WANT, GONE, BOOK = range(4, 14)

LEAST_RATE = 1 << 17
"""Bytes a second. A model of another group that is slower is given up."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of itself. `value` is what its kind says: samples, parts, a member."""

    kind: int
    generation: int
    round: int
    value: int = 0
    part: int = 0
    piece: int = 0
    length: int = 0
    """Bytes of the payload."""
    sender: int = 0
    payload_sum: int = 0

    def pack(self) -> bytes:
        """The header as bytes, with its checksum."""
        fields = _FIELDS.pack(
            *(MAGIC, VERSION, self.kind, self.generation, self.round, self.value),
            *(self.part, self.piece, self.length, self.sender, self.payload_sum),
        )
        return fields + _SUM.pack(_mesh.checksum(fields))


def unpack(data: bytes, kinds: Sequence[int], most_bytes: int) -> Header:
    """The header in these 56 bytes. Raises AgentError, in words, if it is none that is expected.

    kinds: those that may come now. most_bytes: of the payload.
    """
    magic, version, *fields = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise AgentError("sends what is no frame")
    if version != VERSION:
        raise AgentError(f"sends frames of version {version} instead of {VERSION}")
    if _SUM.unpack_from(data, _FIELDS.size)[0] != _mesh.checksum(data[: _FIELDS.size]):
        raise AgentError("sends a damaged header")
    header = Header(*fields)
    if header.kind not in kinds:
        raise AgentError(f"sends a frame of kind {header.kind}, which nobody awaits")
    if header.length > most_bytes:
        raise AgentError(f"announces {header.length} bytes where at most {most_bytes} are awaited")
    return header


def _left(until: float) -> float | None:
    """Seconds until then; None: without end."""
    if until == math.inf:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left


def receive(connection: socket.socket, into: memoryview, until: float) -> None:
    """Fills the memory. Raises OSError: TimeoutError, or ConnectionError if it is closed."""
    while into.nbytes:
        connection.settimeout(_left(until))
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("closed by the other side")
        into = into[count:]


def receive_bytes(connection: socket.socket, count: int, until: float) -> bytes:
    """This many bytes. Raises OSError."""
    room = bytearray(count)
    receive(connection, memoryview(room), until)
    return bytes(room)


class Pace:
    """Deadlines of a model that goes in pieces: of each piece, and of all of them together.

    Without the second one, who drips could keep the other side busy for hours.
    """

    def __init__(self, size: int, piece_s: float) -> None:
        """size: of the model, bytes. piece_s: patience for a piece, and once more for all."""
        self._piece_s = piece_s
        self._end = time.monotonic() + piece_s + size / LEAST_RATE

    def until(self) -> float:
        """By when the next piece is due. Raises AgentError if all of them are."""
        now = time.monotonic()
        if now >= self._end:
            raise AgentError(f"takes less than {LEAST_RATE >> 10} KB/s for a model")
        return min(now + self._piece_s, self._end)


def send(connection: socket.socket, buffers: Sequence[bytes | memoryview], until: float) -> int:
    """Sends all of them, and returns how many bytes that were. Raises OSError."""
    left = [memoryview(one).cast("B") for one in buffers]
    total = 0
    while left:
        connection.settimeout(_left(until))
        count = connection.sendmsg(left, (), socket.MSG_NOSIGNAL)
        total += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
    return total
