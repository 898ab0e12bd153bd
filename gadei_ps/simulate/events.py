"""A queue of events in the order of their times. Many events come in batches.

When a barrier releases all learners at once, the ends of their iterations are one batch, which
NumPy sorts. Only the batch's next event is in the heap. While no other event comes first, the batch
is consumed without the heap. So a barrier model needs no heap operation for each iteration.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from gadei_ps.simulate.draws import FloatArray, IntArray

_NOTHING: Iterator[tuple[float, int]] = iter(())


class Events:
    """A queue of (time, key), ordered by both. Iteration removes the events.

    During iteration, events may be added if their time is not before the last one taken.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Iterator[tuple[float, int]]]] = []
        self._serial = 0  # unique, so that the heap never compares batches

    def add(self, time: float, key: int) -> None:
        """One event."""
        self._serial += 1
        heapq.heappush(self._heap, (time, key, self._serial, _NOTHING))

    def add_all(self, times: FloatArray, keys: IntArray) -> None:
        """Add events in any order. Both arrays have shape (events,)."""
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
