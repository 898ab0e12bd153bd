"""The loops that change weights: for each chunk the undo log, the cursor, the new values.

A gradient is cut into pieces of at most CHUNK values, numbered in the order in which they are
changed. A piece is open until the next one is, which is saved in the other half of the undo log.
Compiled; the only writer of the shard's weights and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inlined, inner
from gadei_ps.kernels.optimizers import COEFFICIENTS, slots
from gadei_ps.memory import layout
from gadei_ps.server.constants import CHUNK, IDLE, ONE, ZERO
from gadei_ps.server.context import (
    CURRENT,
    CURSOR,
    RECORD_BYTES,
    RECORDS,
    SPAN_END,
    SPAN_START,
    Shard,
    Streams,
    current_at,
    integer,
    span_at,
)
from gadei_ps.server.payload import FORMS, Values, bytes_of, values_of
from gadei_ps.server.structs import PART
from gadei_ps.server.symbols import call, doubles, floats, get, mark, structs

VECTOR = 16  # values that a loop of vectors takes at once
COEFFICIENTS_AT = np.uint64(layout.offset(PART, "coefficients"))
COEFFICIENT_BYTES = np.uint64(COEFFICIENTS * 8)  # of a group

# The undo log has two halves, which consecutive pieces use in turn, so the old values of the open
# piece stay until the cursor has moved on.
HALF_BYTES = np.uint64(layout.UNDO_HALF)
STREAM_BYTES = np.uint64(layout.CHUNK * 4)
SLOT0 = STREAM_BYTES  # where a half of the log has the optimizer's slots
SLOT1 = STREAM_BYTES + STREAM_BYTES

_part_at = structs(PART)


class Walk(NamedTuple):
    """Choice of the current frames that are applied, and the place to start at."""

    members: int
    """Frames; the gradient is their mean."""
    first: int
    """Number of the first piece."""
    start: int
    """The first value of that piece. A dead server has changed those before it."""


class Span(NamedTuple):
    """Values start to end, of one group or of buffers; the first is that of the piece-th piece."""

    piece: int
    start: int
    end: int


class _Move(NamedTuple):
    """Change of values by the current gradient: the same for all of its pieces."""

    coef: cpu.Scalars
    at: Streams
    cursor: np.uint64
    """Address."""


# -- undo log -------------------------------------------------------------------------------------


@inlined
def _copy(to: np.ndarray, source: np.ndarray) -> None:
    for i in range(source.size):
        to[i] = source[i]


@inlined
def _half(at: Streams, piece: np.uint64) -> np.uint64:
    """Return the address of the half of the log in which this piece is saved."""
    return at.undo + (piece & ONE) * HALF_BYTES


@inlined
def save(at: Streams, kept: int, piece: np.uint64, start: int, count: int) -> None:
    """Copy a piece's weights and slots into the log, in one loop, as the optimizer reads them."""
    here, undo = np.uint64(start * 4), _half(at, piece)
    old, w = floats(undo, count), floats(at.weights + here, count)
    old0, s0 = floats(undo + SLOT0, count), floats(at.slot0 + here, count)
    old1, s1 = floats(undo + SLOT1, count), floats(at.slot1 + here, count)
    if kept == 0:
        _copy(old, w)
    elif kept == 1:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
    else:
        for i in range(count):
            old[i] = w[i]
            old0[i] = s0[i]
            old1[i] = s1[i]


@inlined
def save_line(at: Streams, kept: int, piece: np.uint64, start: int, low: int, count: int) -> None:
    """Copy some values of the piece that begins at `start`, from its low-th on."""
    here, there = np.uint64((start + low) * 4), _half(at, piece) + np.uint64(low * 4)
    _copy(floats(there, count), floats(at.weights + here, count))
    if kept > 0:
        _copy(floats(there + SLOT0, count), floats(at.slot0 + here, count))
    if kept > 1:
        _copy(floats(there + SLOT1, count), floats(at.slot1 + here, count))


@inlined
def restore(at: Streams, kept: int, piece: np.uint64, start: int, count: int) -> None:
    """Copy a piece's weights and slots from the log back to where they belong."""
    here, undo = np.uint64(start * 4), _half(at, piece)
    _copy(floats(at.weights + here, count), floats(undo, count))
    if kept > 0:
        _copy(floats(at.slot0 + here, count), floats(undo + SLOT0, count))
    if kept > 1:
        _copy(floats(at.slot1 + here, count), floats(undo + SLOT1, count))


# -- pieces ---------------------------------------------------------------------------------------


@inner
def prepare(s: Shard) -> None:
    """Compute each group's coefficients for the gradient of the shard's record."""
    record = s.state[0].record[s.number]
    step = integer(record.step) + 1
    missed, moved = integer(record.staleness), record.momentum
    for group in range(s.groups):
        coef = doubles(_coefficients_at(s, group), COEFFICIENTS)
        hyper = s.c[0].hyper[group]
        cpu.coefficients(s.kind, hyper, record.rate[group], step, missed, moved, coef)


@inner
def _coefficients_at(s: Shard, group: int) -> np.uint64:
    """Return the address of a group's coefficients."""
    at: np.uint64 = s.here + COEFFICIENTS_AT + np.uint64(group) * COEFFICIENT_BYTES
    return at


@inner
def _note_span(s: Shard, span: Span) -> None:
    """Write down where the pieces of a span belong, before the first one is opened.

    The next server needs no frame to restore the open piece, which is of this span or the one
    before. So two of them are kept. After a recovery both may begin with the open piece, so the
    one that is written over is marked as unused first.
    """
    at = span_at(s, s.part[0].spans & 1)
    mark(at, IDLE)
    mark(at + SPAN_START, np.uint64(span.start))
    mark(at + SPAN_END, np.uint64(span.end))
    mark(at, np.uint64(span.piece))
    s.part[0].spans += 1


@inner
def reopen(s: Shard, piece: np.uint64, is_open: bool) -> int:
    """Restore the piece that a dead server has left open; return its first value."""
    which = 0
    other = get(span_at(s, 1))
    if other <= piece and (get(span_at(s, 0)) > piece or other > get(span_at(s, 0))):
        which = 1
    at = span_at(s, which)
    start = integer(get(at + SPAN_START)) + integer(piece - get(at)) * CHUNK
    if is_open:
        count = min(CHUNK, integer(get(at + SPAN_END)) - start)
        kept = s.kept if start < integer(s.part[0].parameters) else 0
        restore(s.at, kept, piece, start, count)
    s.part[0].spans = which + 1  # the other one is written next
    return start


@inner
def move_span(s: Shard, group: int, form: int, gradient: np.uint64, span: Span) -> None:
    """Change the values of a span by their gradient.

    group: theirs. form: FLOAT32_FORM or BFLOAT16_FORM. gradient: address of that of the
    span's first value.
    """
    _note_span(s, span)
    code = s.part[0].move[s.current[0].kind, form]
    coef = _coefficients_at(s, group)
    call(code, s.here, coef, gradient, span.piece, span.start, span.end)


# -- loops ----------------------------------------------------------------------------------------


@inlined
def _move_of(part: np.uint64, coefficients: np.uint64) -> _Move:
    """Return the result of `prepare`. Both are addresses."""
    p = _part_at(part)[0]
    coef = cpu.scalars(doubles(coefficients, COEFFICIENTS))
    at = Streams(p.weights, p.slot0, p.slot1, p.undo)
    return _Move(coef, at, p.state + RECORDS + np.uint64(p.index) * RECORD_BYTES + CURSOR)


@inlined
def _update(kernel: Any, kept: int, m: _Move, g: Values, start: int, count: int) -> None:
    """Change `count` values from `start` on by the kernel. g: their gradient."""
    here = np.uint64(start * 4)
    w = floats(m.at.weights + here, count)
    s0 = floats(m.at.slot0 + here, count if kept > 0 else 0)
    s1 = floats(m.at.slot1 + here, count if kept > 1 else 0)
    kernel(m.coef, w, s0, s1, values_of(g.form, g.at, count))


@inlined
def _change_whole(kernel: Any, kept: int, m: _Move, g: Values, span: Span) -> None:
    """Change a span of whole chunks.

    kept is a constant where this is called, and the length of a chunk is one here: a chunk is too
    short to pay for a choice, or for the rest that a loop of vectors would leave.
    """
    piece = np.uint64(span.piece)
    address = g.at
    for start in range(span.start, span.end, CHUNK):
        save(m.at, kept, piece, start, CHUNK)
        mark(m.cursor, (piece << ONE) | ONE)
        _update(kernel, kept, m, Values(address, g.form), start, CHUNK)
        piece += ONE
        address += np.uint64(CHUNK) * bytes_of(g.form)


@inlined
def _change_rest(kernel: Any, kept: int, m: _Move, g: Values, span: Span) -> None:
    """Change a piece that is shorter than a chunk: mostly the end of a row.

    By vectors of a fixed length: a loop over a length that is not known to the compiler would take
    most of so few values one by one.
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
        _update(kernel, kept, m, here, start + low, VECTOR)
    if whole < count:
        here = Values(g.at + np.uint64(whole) * size, g.form)
        _update(kernel, kept, m, here, start + whole, count - whole)


@inlined
def _change(kernel: Any, kept: int, m: _Move, g: Values, span: Span) -> None:
    """Change a span by one of the kernels of `cpu`."""
    end = span.end - (span.end - span.start) % CHUNK
    _change_whole(kernel, kept, m, g, Span(span.piece, span.start, end))
    if end < span.end:
        done = end - span.start
        rest = Values(g.at + np.uint64(done) * bytes_of(g.form), g.form)
        _change_rest(kernel, kept, m, rest, Span(span.piece + done // CHUNK, end, span.end))


def _loop(kind: int, form: Any) -> Callable[..., None]:
    """Return the loop that changes a span, for one kind of optimizer and one form of gradient.

    The kernel and the number of slots are constants of the loop.
    """
    kernel, kept = cpu.KERNELS[kind], slots(kind)

    def move(
        part: np.uint64, coef: np.uint64, gradient: np.uint64, piece: int, start: int, end: int
    ) -> None:
        m = _move_of(part, coef)
        g = Values(gradient, form)
        _change(kernel, kept, m, g, Span(piece, start, end))

    return move


@inlined
def _put(m: _Move, g: Values, current: Any, kept: int, start: int, count: int) -> None:
    """Put values in the place of `count` weights, or of those of a slot, from `start` on.

    Or adds them to weights. The chunk is in the undo log, so a death amid it is undone.
    """
    here = np.uint64(start * 4)
    values = values_of(g.form, g.at, count)
    if current.stream == 0:
        w = floats(m.at.weights + here, count)
        if current.adds:
            for i in range(count):
                w[i] += cpu.wide(values[i])
        else:
            for i in range(count):
                w[i] = cpu.wide(values[i])
    elif current.stream <= kept:
        slot = floats((m.at.slot0 if current.stream == 1 else m.at.slot1) + here, count)
        for i in range(count):
            slot[i] = cpu.wide(values[i])
    if current.stream == 0 and current.reset and kept > 0:
        first = floats(m.at.slot0 + here, count)
        for i in range(count):
            first[i] = np.float32(0)
    if current.stream == 0 and current.reset and kept > 1:
        second = floats(m.at.slot1 + here, count)
        for i in range(count):
            second[i] = np.float32(0)


def _assignment(form: Any) -> Callable[..., None]:
    """Return the loop that assigns to a span, of parameters or of buffers, for any optimizer.

    A buffer has no slots: an assignment to its slots changes nothing.
    """

    def assign(
        part: np.uint64, coef: np.uint64, gradient: np.uint64, piece: int, start: int, end: int
    ) -> None:
        p = _part_at(part)[0]
        m = _move_of(part, coef)
        current = current_at(part + CURRENT)[0]
        kept = 0
        if start < integer(p.parameters):
            kept = integer(p.slot0 != ZERO) + integer(p.slot1 != ZERO)
        number = np.uint64(piece)
        address = gradient
        for low in range(start, end, CHUNK):
            count = min(CHUNK, end - low)
            save(m.at, kept, number, low, count)
            mark(m.cursor, (number << ONE) | ONE)
            _put(m, Values(address, form), current, kept, low, count)
            number += ONE
            address += np.uint64(CHUNK) * bytes_of(form)

    return assign


LOOPS: dict[str, Callable[..., Callable[..., None]]] = {"move": _loop, "assign": _assignment}
"""Sources of the loops that kinds.py names."""

LOOP = types.void(types.uint64, types.uint64, types.uint64, types.int64, types.int64, types.int64)


def source(name: str) -> tuple[Any, Callable[..., None]]:
    """Return the source of a unit.

    name: NAME-FORM, or NAME-KIND-FORM. NAME is one of LOOPS, KIND the optimizer's, FORM a place in
    FORMS.
    """
    what, *numbers = name.split("-")
    *kind, form = map(int, numbers)
    return LOOP, LOOPS[what](*kind, FORMS[form])
