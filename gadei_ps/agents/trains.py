"""What an agent needs of that which its machine trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gadei_ps.agents.constants import Buffers
from gadei_ps.agents.plan import Floats
from gadei_ps.groups.shares import Shares


class Training(Protocol):
    """What a machine trains. `copy` and `write` may take long; one thread calls them, in turn."""

    values: int
    buffers: Buffers
    look_s: float
    """Between two calls of `check`."""

    def copy(self, number: int, into: Floats) -> int:
        """Trains for round `number`, then copies the weights.

        Returns the samples that they were trained with, at least 1; or 0 if the weights are not
        finite, and do not count. Round 0 is copied at once, as the weights are; later copies have
        zeros in the place of the group's constants.
        """

    def write(self, rounds: int, weights: Floats, constants: Sequence[str]) -> None:
        """The job continues with the weights after this many rounds.

        constants: of the group: the job keeps what it has in these buffers. The same in each call.
        """

    def check(self) -> None:
        """Raises GadeiError once the job has ended or is to end. For any thread; never waits."""


class Owning(Protocol):
    """The part of a training whose group divides the batches."""

    said: bytes
    """What this machine says of its last copy."""
    shares: Shares
    """Those before the first round."""

    def own(self, shares: Shares) -> None:
        """The batches of each machine after the round that was written last."""
