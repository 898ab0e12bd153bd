"""The memory that a learner computes in: the interface of a device, and its choice.

A device moves gradients from its own memory into a ring's slot and weights out of the segment,
while the learner computes. Each kind has a file (host.py, cuda/), and one conformance suite runs
against all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.learners.client import AsyncPublisher, Client
from gadei_ps.learners.host import Host
from gadei_ps.machine import cuda
from gadei_ps.machine.launch import DEVICE_VARIABLE

NAMES = ("auto", "cuda", "host")


class Link(AsyncPublisher, Protocol):
    """Moves one client's weights and gradients to and from a device.

    Belongs to the thread that computes. A transfer keeps its place among the computations that
    thread has asked for, before the call and after it. Every call raises what has failed on the way
    since the last call.
    """

    version: int
    """Version of the job's weights when the last pull began."""

    def buffer(self) -> Any:
        """Return float32 zeros on the device, shape (client.model.elements,)."""

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
        """Return whether that pull has arrived; what is computed next sees it. Never waits."""

    def gradients(self) -> dict[str, Any]:
        """Return room for the next gradient, by tensor's name: what is computed into it and then
        given to push() is not copied on the device. Valid until that push()."""

    def push(self, gradients: Mapping[str, Any], version: int, **facts: Any) -> None:
        """Have gradients, given by name, published once they are computed; returns before that.

        None and missing ones count as zero; version: of the weights they were computed from. Waits
        while the last push is still in flight, and for a free slot. The arrays must not be changed
        afterwards. facts: loss, samples, rate_scale and batch, as Client.push takes them.
        """

    def abandon(self) -> None:
        """Release the client's memory after an error; never raises, and pushes may be lost."""


class Device(Protocol):
    """Memory that a learner computes in."""

    name: str

    def link(self, client: Client) -> Link:
        """Connect a client. Raises DeviceError if the device cannot reach the client's memory, or
        has too little."""


def choose(name: str | None = None) -> Device:
    """Return the device of this name; by default that of `gadei-ps run --device`, else auto.

    auto: CUDA if it can be used, else the host, with a line on stderr. Raises DeviceError, which
    names what is missing, and UsageError for an unknown name.
    """
    if name is None:
        name = os.environ.get(DEVICE_VARIABLE) or "auto"
    if name not in NAMES:
        raise UsageError(f"device {name!r}: use {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    why = "" if name == "host" else cuda.missing()
    if name == "cuda" and why:
        raise DeviceError(f"device cuda: {why}")
    if why:
        print(f"gadei-ps: this learner computes on the host: {why}", file=sys.stderr)
    if name == "host" or why:
        return Host()
    from gadei_ps.learners.cuda import Cuda

    return Cuda()
