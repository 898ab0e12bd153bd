"""What happens next: events in the order of their times, many of which come in sorted batches.

When a barrier lets all learners go on at once, their ends are one batch, sorted by NumPy; only the
batch's next event stands in the heap. It is taken event by event without touching the heap while
nothing else comes before, so that a barrier model costs no heap operation for each iteration.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from gadei_ps.simulate.draws import FloatArray, IntArray

_NOTHING: Iterator[tuple[float, int]] = iter(())


class Events:
    """A queue of (time, key), ordered by both; iterating takes them out.

    While it is iterated, events may be added whose time is not before that of the last one taken.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Iterator[tuple[float, int]]]] = []
        self._serial = 0  # so that batches themselves are never compared

    def add(self, time: float, key: int) -> None:
        """One event."""
        self._serial += 1
        heapq.heappush(self._heap, (time, key, self._serial, _NOTHING))

    def add_all(self, times: FloatArray, keys: IntArray) -> None:
        """Many events, in any order; both of shape (events,)."""
        if not len(keys):
            return
        order = np.lexsort((keys, times))
        batch = iter(zip(times[order].tolist(), keys[order].tolist(), strict=True))
        time, key = next(batch)
        self._serial += 1
        heapq.heappush(self._heap, (time, key, self._serial, batch))

    def __iter__(self) -> Iterator[tuple[float, int]]:
        heap = self._heap
        while heap:
            time, key, serial, batch = heapq.heappop(heap)
            yield time, key
            for event in batch:
                if heap and heap[0] < event:
                    heapq.heappush(heap, (*event, serial, batch))
                    break
                yield event
