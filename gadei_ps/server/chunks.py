"""The loops that change weights: for each chunk the undo log, the cursor, the kernel.

A gradient is cut into pieces of at most CHUNK values, numbered in the order in which they are
changed. A piece is open until the next one is, which is saved in the other half of the undo log.
Compiled; the only writer of the shard's weights and slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import compiled, inlined
from gadei_ps.kernels.optimizers import COEFFICIENTS
from gadei_ps.memory import layout
from gadei_ps.server.constants import CHUNK, ONE
from gadei_ps.server.context import Shard, Streams, integer
from gadei_ps.server.payload import Values, bytes_of, values_of
from gadei_ps.server.structs import PART
from gadei_ps.server.symbols import doubles, floats, mark
from gadei_ps.server.undo import save, save_line

VECTOR = 16  # values that a loop of vectors takes at once
COEFFICIENTS_AT = np.uint64(layout.offset(PART, "coefficients"))
# What moves a buffer, beside the kinds of optimizer that move a parameter.
BUFFER = 0


class Walk(NamedTuple):
    """Which frames in hand are applied, and from where on."""

    members: int
    """Frames; the gradient is their mean."""
    first: int
    """Piece to begin with."""
    reopen: bool
    """Whether a dead server has left that piece open, its old values in the undo log."""


class Move(NamedTuple):
    """How the gradient in hand changes values: the same for all of its pieces."""

    coef: cpu.Scalars
    at: Streams
    cursor: np.uint64
    """Address."""


class Span(NamedTuple):
    """Values start to end, all of one role; the first is the first of the piece-th piece."""

    piece: int
    start: int
    end: int


@compiled
def move_of(s: Shard) -> Move:
    """Works out the optimizer's scalars for the gradient of the shard's record."""
    record = s.state[0].record[s.number]
    coef = doubles(s.here + COEFFICIENTS_AT, COEFFICIENTS)
    cpu.coefficients(s.kind, s.c[0].hyper, record.rate, integer(record.step) + 1, coef)
    return Move(cpu.scalars(coef), s.at, s.cursor)


@inlined
def _update(kind: int, kept: int, m: Move, g: Values, start: int, count: int) -> None:
    """Changes `count` values from `start` on by the kernel. g: their gradient."""
    here = np.uint64(start * 4)
    w = floats(m.at.weights + here, count)
    gradient = values_of(g.form, g.at, count)
    if kind == BUFFER:
        cpu.add(w, gradient)
    else:
        s0 = floats(m.at.slot0 + here, count if kept > 0 else 0)
        s1 = floats(m.at.slot1 + here, count if kept > 1 else 0)
        cpu.move(kind, m.coef, w, s0, s1, gradient)


@inlined
def _change_chunk(
    kind: int, kept: int, m: Move, g: Values, piece: np.uint64, start: int, count: int
) -> None:
    """Changes the values of one piece. g: their gradient."""
    save(m.at, kept, piece, start, count)
    mark(m.cursor, (piece << ONE) | ONE)
    _update(kind, kept, m, g, start, count)


@compiled
def _change_rest(kind: int, kept: int, m: Move, g: Values, span: Span) -> None:
    """Changes a piece that is shorter than a chunk: mostly the end of a row.

    Compiled once for all kinds, and by vectors of a fixed length: a loop over a length that is not
    known to the compiler would take most of so few values one by one.
    """
    start, count, piece = span.start, span.end - span.start, np.uint64(span.piece)
    whole = count - count % VECTOR
    for low in range(0, whole, VECTOR):
        save_line(m.at, kept, piece, start, low, VECTOR)
    if whole < count:
        save_line(m.at, kept, piece, start, whole, count - whole)
    mark(m.cursor, (piece << ONE) | ONE)
    size = bytes_of(g.form)
    for low in range(0, whole, VECTOR):
        here = Values(g.at + np.uint64(low) * size, g.form)
        _update(kind, kept, m, here, start + low, VECTOR)
    if whole < count:
        here = Values(g.at + np.uint64(whole) * size, g.form)
        _update(kind, kept, m, here, start + whole, count - whole)


@inlined
def _change(kind: int, kept: int, m: Move, g: Values, span: Span) -> None:
    """Changes a span of whole chunks.

    kind and kept are constants where this is called, and the length of a chunk is one here: a chunk
    is too short to pay for a choice, or for the rest that a loop of vectors would leave.
    """
    piece = np.uint64(span.piece)
    address = g.at
    for low in range(span.start, span.end, CHUNK):
        _change_chunk(kind, kept, m, Values(address, g.form), piece, low, CHUNK)
        piece += ONE
        address += np.uint64(CHUNK) * bytes_of(g.form)


@compiled
def move_span(kind: int, kept: int, m: Move, g: Values, span: Span) -> None:
    """Changes the values of a span by their gradient g."""
    rest = (span.end - span.start) % CHUNK
    end = span.end - rest
    whole = Span(span.piece, span.start, end)
    if kind == BUFFER:
        _change(BUFFER, 0, m, g, whole)
    elif kind == cpu.SGD:
        _change(cpu.SGD, 0, m, g, whole)
    elif kind == cpu.MOMENTUM_SGD:
        _change(cpu.MOMENTUM_SGD, 1, m, g, whole)
    elif kind == cpu.NESTEROV:
        _change(cpu.NESTEROV, 1, m, g, whole)
    elif kind == cpu.ADAGRAD:
        _change(cpu.ADAGRAD, 1, m, g, whole)
    elif kind == cpu.ADAM:
        _change(cpu.ADAM, 2, m, g, whole)
    elif kind == cpu.ADAMW:
        _change(cpu.ADAMW, 2, m, g, whole)
    if rest > 0:
        done = end - span.start
        g = Values(g.at + np.uint64(done) * bytes_of(g.form), g.form)
        _change_rest(kind, kept, m, g, Span(span.piece + done // CHUNK, end, span.end))
