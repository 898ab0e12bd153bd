"""Batches that a program assigns to a job: for jobs that train together, each with a part of the
batches of an epoch.

    owned = AssignedBatches(client)
    owned.take_back()                      # nothing is handed out from here on
    while owned.copy(weights).unanswered:  # learners answer what they have
        ...
    owned.give([(0, 0, 100)])              # batches 0 to 99 of epoch 0
    ...
    copied = owned.copy(weights)           # weights, and what is not in them

The job file has `owned = true`. One program at a time may assign batches to a job.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gadei_ps.errors import ConnectionLost, JobNotFound
from gadei_ps.job.control import Connection, Copy, LastingConnection, Own
from gadei_ps.learners.client import Client, copied
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL
from gadei_ps.memory.owned import Ranges
from gadei_ps.memory.weights import FloatArray

OWNED_COPY_TIMEOUT_S = 60.0
"""Time limit of a copy (s): a checkpoint or a failover may be under way."""
CONNECTION_LOST_S = 10.0
"""Time limit until there is another watchdog (s)."""
_ASK_INTERVAL_S = 0.05


@dataclass(frozen=True)
class WeightsCopy:
    """Contents of weights that were copied. version, samples: of all gradients applied before.
    unanswered: owned batches without a gradient in the weights."""

    version: int
    samples: int
    unanswered: Ranges


class AssignedBatches:
    """Batches that one job owns. For one thread at a time."""

    def __init__(self, client: Client) -> None:
        """Connect to the job of a client, which must stay attached. Raises ControlError."""
        self._job = client.job
        self._control = client.place.control.view(CONTROL)
        self._elements = client.model.elements
        self._connection = LastingConnection(client.job)

    def take_back(self) -> None:
        """Withdraw all batches: the job hands out none of those it was given.

        Learners answer what they have; what comes back from one that dies is dropped. Raises
        ControlError.
        """
        self._connection.request(Own(number=self._given, take_back=True))

    def give(self, ranges: Iterable[tuple[int, int, int]]) -> Ranges:
        """Assign batches to the job: epoch, first index, the index after the last.

        Returns those for which there is no room now: give them again later. Raises ControlError.
        """
        wanted = list(ranges)
        while wanted:
            number, asked = self._given, wanted[: layout.OWNED]
            reply = self._connection.request(Own(number=number, ranges=asked))
            taken = int(reply["given"]) - number
            wanted = wanted[taken:]
            if taken < len(asked):
                break
        return wanted

    def finish(self, passes: int) -> None:
        """Declare that no batch of the first `passes` epochs will follow.

        After the last epoch the job's learners end. Raises ControlError.
        """
        self._connection.request(Own(number=self._given, passes=passes))

    def copy(self, out: FloatArray) -> WeightsCopy:
        """Copy the weights, shape (model.elements,), between two gradients.

        All shards pause meanwhile. Raises ControlError.
        """
        until = time.monotonic() + CONNECTION_LOST_S
        while True:
            try:
                with Connection(self._job, OWNED_COPY_TIMEOUT_S) as connection:
                    reply, values = copied(connection, Copy(slots=False), self._elements)
                break
            except (ConnectionLost, JobNotFound):
                if time.monotonic() > until:
                    raise
                time.sleep(_ASK_INTERVAL_S)
        np.copyto(out, values)
        ranges = [(int(epoch), int(begin), int(end)) for epoch, begin, end in reply["unanswered"]]
        return WeightsCopy(int(reply["version"]), int(reply["samples"]), ranges)

    def close(self) -> None:
        """End the connection. The job owns what it was given."""
        self._connection.close()

    @property
    def _given(self) -> int:
        return int(self._control["owned_given"])
