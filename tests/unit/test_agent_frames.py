"""Headers and checksums of frames between agents: in Python, in C, and damaged in every way."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gadei_ps import _mesh
from gadei_ps.agents import frames, plan
from gadei_ps.agents.frames import HEADER_BYTES, Header
from gadei_ps.errors import AgentError
from gadei_ps.groups.parts import cut

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    Header,
    *(st.sampled_from([4, 5, 6, 7]), U64, U64, U64, U32, U32, st.integers(0, 1 << 20), U32, U32),
)
REDUCE, GATHER, DONE = 1, 2, 3
VALUES = 200
PARTS = cut(VALUES, 2)


@given(st.binary(max_size=2000), st.integers(1, 40))
def test_checksum_is_that_of_the_reference(data: bytes, times: int) -> None:
    data *= times
    assert _mesh.checksum(data) == _mesh.checksum_plain(data)


def test_checksum_is_crc_32c() -> None:
    assert _mesh.checksum(b"123456789") == 0xE3069283


@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_comes_back_and_no_flipped_bit_passes(header: Header, bit: int) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert frames.unpack(data, (4, 5, 6, 7), 1 << 20) == header
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AgentError):
        frames.unpack(bytes(flipped), (4, 5, 6, 7), 1 << 20)


@given(HEADERS)
def test_a_header_of_another_kind_or_length_is_refused(header: Header) -> None:
    data = header.pack()
    with pytest.raises(AgentError, match="nobody awaits"):
        frames.unpack(data, [kind for kind in (4, 5, 6, 7) if kind != header.kind], 1 << 20)
    if header.length:
        with pytest.raises(AgentError, match="at most"):
            frames.unpack(data, (header.kind,), header.length - 1)


class Exchange:
    """Place 0 of two members in an exchange; the test is place 1."""

    def __init__(self, piece_s: float = 60) -> None:
        ours, self.theirs = socket.socketpair()
        self._ours, self._wake = ours, os.eventfd(0)
        self.input = np.arange(VALUES, dtype=np.float32)
        self.out = np.zeros(VALUES, np.float32)
        self.plan = plan.make(
            generation=7,
            round_number=3,
            me=0,
            members=2,
            parts=PARTS,
            fds={1: ours.fileno()},
            wake=self._wake,
            out=self.out,
            piece_s=piece_s,
            start_s=None,
        )
        self._scratch = plan.Scratch()
        plan.to_aggregate(self.plan, self.input, 1, self._scratch)
        self.result: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = _mesh.exchange(self.plan)

    def end(self, timeout_s: float | None = None) -> int | None:
        """The result, once it is there; None after timeout_s."""
        self._thread.join(timeout_s)
        return self.result

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._ours.close()
        self.theirs.close()
        os.close(self._wake)


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    made = Exchange()
    yield made
    made.close()


def frame(kind: int, values: Any = (), **other: int) -> bytes:
    payload = np.asarray(values, np.float32).tobytes()
    fields = {"generation": 7, "round": 3, "value": 1, "sender": 1}
    fields |= {"length": len(payload), "payload_sum": _mesh.checksum(payload)}
    return Header(kind, **(fields | other)).pack() + payload


THEIRS = np.full(VALUES, 2, np.float32)


def test_frames_of_c_have_the_header_of_python(exchange: Exchange) -> None:
    until = time.monotonic() + 60
    data = frames.receive_bytes(exchange.theirs, HEADER_BYTES, until)
    header = frames.unpack(data, (REDUCE,), 4 * VALUES)
    payload = exchange.input[128:].tobytes()
    wanted = Header(REDUCE, 7, 3, 1, 1, 0, len(payload), 0, _mesh.checksum(payload))
    assert header == wanted
    assert frames.receive_bytes(exchange.theirs, len(payload), until) == payload
    mean = (exchange.input + THEIRS) / 2
    exchange.theirs.sendall(
        frame(REDUCE, THEIRS[:128]) + frame(GATHER, mean[128:], part=1) + frame(DONE)
    )
    assert exchange.end() == _mesh.MESH_FINISHED
    assert (exchange.out == mean).all()


@pytest.mark.parametrize(
    ("sent", "result"),
    [
        (b"\0" * HEADER_BYTES, "BAD_HEADER"),
        (frame(REDUCE, THEIRS[:128], sender=2), "BAD_HEADER"),
        (frame(REDUCE, THEIRS[:128], generation=6), "OTHER_ROUND"),
        (frame(REDUCE, THEIRS[:128], round=4), "OTHER_ROUND"),
        (frame(REDUCE, THEIRS[:64]), "UNEXPECTED"),
        (frame(REDUCE, THEIRS[:128], length=1 << 31), "UNEXPECTED"),
        (frame(REDUCE, THEIRS[:128], part=1), "UNEXPECTED"),
        (frame(REDUCE, THEIRS[:128], piece=1), "UNEXPECTED"),
        (2 * frame(REDUCE, THEIRS[:128]), "UNEXPECTED"),
        (frame(GATHER, THEIRS[:128], part=0), "UNEXPECTED"),
        (frame(DONE), "UNEXPECTED"),
        (frame(9), "UNEXPECTED"),
        (frame(REDUCE, THEIRS[:128], payload_sum=5), "BAD_PAYLOAD"),
    ],
)
def test_what_is_not_awaited_ends_the_exchange(
    exchange: Exchange, sent: bytes, result: str
) -> None:
    exchange.theirs.sendall(sent)
    assert exchange.end() == getattr(_mesh, f"MESH_{result}")
    assert exchange.plan.culprit == 1


def test_single_bytes_do_not_put_the_end_of_a_piece_off() -> None:
    exchange = Exchange(piece_s=0.3)
    try:
        data = frame(REDUCE, THEIRS[:128])
        exchange.theirs.sendall(data[:HEADER_BYTES])
        left = list(data[HEADER_BYTES:])
        while left and exchange.end(0.01) is None:
            exchange.theirs.sendall(bytes([left.pop(0)]))
        assert left and exchange.end() == _mesh.MESH_SILENT
    finally:
        exchange.close()


@settings(max_examples=25)
@given(st.data())
def test_any_flipped_bit_of_a_stream_is_found(data: Any) -> None:
    mean = (np.arange(VALUES, dtype=np.float32) + THEIRS) / 2
    stream = bytearray(
        frame(REDUCE, THEIRS[:128]) + frame(GATHER, mean[128:], part=1) + frame(DONE)
    )
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    exchange = Exchange()
    try:
        exchange.theirs.sendall(stream)
        assert exchange.end() not in (_mesh.MESH_FINISHED, _mesh.MESH_WOKEN)
    finally:
        exchange.close()


def test_a_plan_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan"):
        _mesh.exchange(bytearray(_mesh.PLAN_BYTES))
    with pytest.raises(ValueError, match="no plan"):
        _mesh.exchange(bytearray(8))
