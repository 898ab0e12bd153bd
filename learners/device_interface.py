"""Interface of the memory that a learner computes in; each kind of memory has a file.

A device moves gradients from its own memory into a ring's slot and weights out of the segment,
while the learner computes. One conformance suite runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gadei_ps.learners.client import Client


class Link(Protocol):
    """Moves one client's weights and gradients to and from a device.

    Belongs to the thread that computes. A transfer keeps its place among the computations that
    thread has asked for, before the call and after it. Every call raises what has failed on the way
    since the last call.
    """

    version: int
    """Version of the job's weights when the last pull began."""

    def buffer(self) -> Any:
        """Return room for all weights on the device, float32 zeros of shape
        (client.model.elements,)."""

    def views(self, buffer: Any) -> dict[str, Any]:
        """Return each tensor by name, as a view of a buffer."""

    def fill(self, buffer: Any) -> None:
        """Pull: what is computed from now on sees the weights as they are now, or newer ones.

        A pull that began before never arrives."""

    def pull(self, buffer: Any) -> None:
        """Begin a pull, once there are newer weights than those pulled last (section 4.1).

        Does nothing while a pull is in flight.
        """

    def pulled(self) -> bool:
        """Return whether that pull has arrived; what is computed from now on sees it. Never
        waits."""

    def gradients(self) -> dict[str, Any]:
        """Return room for the next gradient, by tensor's name: what is computed into it and then
        given to push() is not copied on the device. Valid until that push()."""

    def push(self, gradients: Mapping[str, Any], version: int, **facts: Any) -> None:
        """Have gradients, given by name, published once they are computed; returns before that.

        None and missing ones count as zero; version: of the weights they were computed from. Waits
        while the last push is still in flight, and for a free slot. The arrays must not be changed
        afterwards. facts: loss, samples, rate_scale and batch, as Client.push takes them.
        """

    def flush(self) -> None:
        """Wait until all that was pushed is published."""

    def close(self) -> None:
        """Publish what was pushed, and release the client's memory."""

    def abandon(self) -> None:
        """Release the client's memory after an error; never raises, and pushes may be lost."""


class Device(Protocol):
    """Memory that a learner computes in."""

    name: str

    def link(self, client: Client) -> Link:
        """Connect a client. Raises DeviceError if the device cannot reach the client's memory, or
        has too little."""
