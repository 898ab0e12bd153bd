"""The paper's learner (GaDei, section 4.1 and Figure 5): compute, push and pull overlap.

The thread that computes hands gradients over and takes weights; a device's link moves both while it
goes on. Gradients and weights are double-buffered: the thread computes with one buffer while
the link moves the other. Buffers are swapped, never copied. At most one push and one pull are on
their way (the paper's pushCnt and pullCnt, 0 or 1).

    with Pipeline(client, devices.choose()) as pipeline:
        while ...:
            weights = pipeline.weights()             # the newest that have arrived
            pipeline.push(gradients, loss=...)       # returns at once unless the last still waits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from gadei_ps.errors import UsageError
from gadei_ps.learners.client import Client
from gadei_ps.learners.device_interface import Device


class Pipeline:
    """A client's weights and gradients on a device.

    Only the pipeline pushes and pulls from now on; batches are still taken from the client. Raises
    UsageError in a job whose learners wait for one another, and DeviceError.
    """

    def __init__(self, client: Client, device: Device) -> None:
        if client.waits_for_others:
            raise UsageError(
                'a pipeline computes ahead of the barrier: use it in a job with sync = "asp"'
            )
        self.client = client
        self._link = device.link(client)
        try:
            self._front, self._back = (self._link.buffer() for _ in range(2))
            self._views, self._other_views = (
                self._link.views(buffer) for buffer in (self._front, self._back)
            )
            self._link.fill(self._front)
            self.version = self._link.version
            """Of the weights that weights() returned last."""
            self._link.pull(self._back)
        except BaseException:
            self._link.abandon()
            raise

    def weights(self) -> dict[str, Any]:
        """The newest weights that have arrived, by name, on the device; valid until the next call.

        Starts the next pull. Raises what the link has failed with.
        """
        if self._link.pulled():
            self._front, self._back = self._back, self._front
            self._views, self._other_views = self._other_views, self._views
            self.version = self._link.version
            self._link.pull(self._back)
        return self._views

    def gradients(self) -> dict[str, Any]:
        """Room for the next gradient, by name, valid until push(): saves a copy on the device."""
        return self._link.gradients()

    def push(self, gradients: Mapping[str, Any], **facts: Any) -> None:
        """Hands gradients over; they must not be changed afterwards. Waits until the gradients of
        the last call are on their way. `facts`: loss, samples, rate_scale, batch."""
        self._link.push(gradients, self.version, **facts)

    def flush(self) -> None:
        """Waits until everything that was handed over is published."""
        self._link.flush()

    def close(self) -> None:
        """Publishes what was handed over and ends what moves it."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._link.abandon()  # does not hide the error behind another one
