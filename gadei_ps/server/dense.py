"""Applies gradients that are dense: all values of the shard, chunk by chunk. Compiled."""

from __future__ import annotations

import numpy as np

from gadei_ps.kernels import cpu
from gadei_ps.kernels.compiled import inner
from gadei_ps.server.chunks import Span, Walk, move_span
from gadei_ps.server.constants import BFLOAT16, CHUNK, FLOAT16
from gadei_ps.server.context import Shard, integer, is_lost
from gadei_ps.server.payload import (
    BFLOAT16_FORM,
    FLOAT32_FORM,
    MEAN,
    SCRATCH,
    as_float32,
    mean_at,
    scale_of,
)
from gadei_ps.server.structs import WINDOW
from gadei_ps.server.symbols import floats

STRETCH = 1 << 16
"""Values of a frame that is read in place, between two looks whether it was lost; whole chunks."""


@inner
def apply_dense(s: Shard, walk: Walk) -> None:
    """Apply the current frames, all of which are dense.

    They move parameters, group by group. Each group begins at a chunk, so the pieces are the
    shard's chunks. A single frame that is lost on the way is left as it is then.
    """
    payload, dtype = s.hands[0].payload, s.hands[0].dtype
    # Several frames, or a clipped one, are worked out window by window before they are applied.
    mixed = walk.members > 1 or scale_of(s, 0) != 1.0
    start = walk.start
    group = 0
    high = min(s.high, integer(s.part[0].parameters))
    while start < high:
        if walk.members == 1 and is_lost(s):
            return
        while start >= s.part[0].group_end[group]:
            group += 1  # the last group ends with the parameters
        end = min(high, s.part[0].group_end[group])
        end = min(end, start + (WINDOW if mixed or dtype == FLOAT16 else STRETCH))
        count = end - start
        piece = walk.first + -(-(start - walk.start) // CHUNK)
        span = Span(piece, start, end)
        if not mixed and dtype == BFLOAT16:
            g = payload + np.uint64(start * 2)
            move_span(s, group, BFLOAT16_FORM, g, span)
        else:
            if mixed:
                mean = mean_at(s.here + MEAN, count)
                for k in range(walk.members):
                    hand = s.hands[k]
                    one = as_float32(hand.payload, hand.dtype, start, count, s.here + SCRATCH)
                    cpu.accumulate(mean, floats(one, count), scale_of(s, k))
                cpu.scale(mean, 1.0 / walk.members)
                g = s.here + MEAN
            else:
                g = as_float32(payload, dtype, start, count, s.here + SCRATCH)
            move_span(s, group, FLOAT32_FORM, g, span)
        start = end
