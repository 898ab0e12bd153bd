"""The paper's learner (GaDei, section 4.1 and Figure 5): compute, push and pull overlap.

The thread that computes hands gradients over and takes weights; a device's link moves both while it
continues. Gradients and weights are double-buffered: the thread computes with one buffer while
the link moves the other. Buffers are swapped, never copied. At most one push and one pull are on
their way (the paper's pushCnt and pullCnt, 0 or 1).

    with Pipeline(client, devices.choose()) as pipeline:
        while ...:
            weights = pipeline.weights()             # the newest that have arrived
            pipeline.push(gradients, loss=...)       # returns at once unless the last still waits

Where learners wait for one another, weights() waits for the turn and pulls then. Under WSP only the
last mini-batch of a wave waits: the others continue with the weights at hand while the wave before
leaves. The gradients of a wave are added up on the device and leave as one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Self

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.learners.client import REST_FIRST, Batch, Client, Rows
from gadei_ps.learners.devices import Device
from gadei_ps.learners.gradients import check_names


class Pipeline:
    """A client's weights and gradients on a device.

    Only the pipeline pushes and pulls from now on; batches are still taken from the client. Raises
    UsageError in a job that collects gradients (BSP, Cutoff), and DeviceError.
    """

    def __init__(self, client: Client, device: Device) -> None:
        if client.drops:
            raise UsageError(
                "a pipeline computes ahead of the barrier: use it in a job whose model applies "
                "gradients as they arrive, such as asp or wsp"
            )
        self.client = client
        self._pushed = 0  # mini-batches of the current wave
        self._wave = 1  # mini-batches in it
        self._cut = False  # batches() sets how many
        self._rest: deque[Batch] = deque()  # of a batch of the server's: no gradient pushed yet
        self._handed = False  # the first of them, to who computes
        self._ready = False  # weights() has waited for the current mini-batch
        self._joined = False  # it has waited at all
        self._of = -1  # version of the weights that the current wave began with
        self._sum: dict[str, Any] = {}
        self._losses: list[float] = []
        self._samples = 0
        self._room: dict[str, Any] = {}  # under WSP, for the gradient of a mini-batch
        self._link = device.link(client)
        try:
            self._front, self._back = (self._link.buffer() for _ in range(2))
            self._views, self._other_views = (
                self._link.views(buffer) for buffer in (self._front, self._back)
            )
            self._link.fill(self._front)
            self.version = self._link.version
            """Version of the weights that weights() returned last; see Client.base_version."""
            if not client.waits_for_others:
                self._link.pull(self._back)
        except BaseException:
            self._link.abandon()
            raise

    def weights(self) -> dict[str, Any]:
        """Return the newest weights that have arrived, by name, on the device; valid until the next
        call.

        Starts the next pull. Where learners wait for one another it waits for the turn instead, and
        pulls then: call it once for each push(). Raises what the link has failed with.
        """
        if self.client.waits_for_others:
            self._await_turn()
        else:
            if self._link.pulled():
                self._front, self._back = self._back, self._front
                self._views, self._other_views = self._other_views, self._views
                self.version = self._link.version
            self._link.pull(self._back)
        return self._views

    def _await_turn(self) -> None:
        """Wait until the next mini-batch may begin, and pull if it ends its wave."""
        if self._ready:
            return
        last = self._pushed + 1 == self._begin_wave()
        if last:
            self._link.flush()  # a wave counts once it is published
        self.client.wait_mini_batch(self.client.wave - 1 if last else 0)
        if last or not self._joined:
            self._link.fill(self._front)
            self.version = self._link.version
        self._ready = self._joined = True

    def _begin_wave(self) -> int:
        """Return the number of mini-batches in the current wave."""
        if not self._pushed and not self._cut:
            self._wave = self.client.wave
        return self._wave

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Take mini-batches from the server; see Client.batches. One push() for each."""
        self._cut = True
        try:
            # After a loop that was left in the middle of a batch, the rest of that comes first.
            left = [list(self._rest)] if self._rest else []
            done = self._pushed if left else 0
            if self._pushed and not left:
                self._push_wave({})  # of the learner's own data
            self._handed = False
            for parts in chain(left, self.client.waves(samples, batch_size, epochs, seed)):
                if self._pushed != done:
                    raise UsageError("push() was called twice for a batch: call it once for each")
                self._rest = deque(parts)
                self._wave = done + len(parts)
                done = 0
                for part in parts:
                    if self.client.waits_for_others:
                        self._await_turn()
                    self._handed = True
                    yield part
                    if self._handed:
                        raise UsageError("push() was not called for a batch: call it for each")
        except JobStopped:
            return
        finally:
            self._cut = False

    def gradients(self) -> dict[str, Any]:
        """Return room for the next gradient, by name, until push(): saves a copy on the device."""
        if self._begin_wave() == 1:
            return self._link.gradients()
        self._room = self._room or self._link.views(self._link.buffer())
        return self._room

    def push(self, gradients: Mapping[str, Any], **facts: Any) -> None:
        """Hand gradients over; they must not be changed afterwards. Waits until the gradients of
        the last call are in flight. `facts`: loss, samples, rate_scale, batch.

        Under WSP it adds them to those of the wave, and hands the sum over with the last: then they
        are given as whole arrays. The mean loss and all samples go with it.
        """
        if self._rest and not self._handed:
            raise UsageError(REST_FIRST)
        wave = self._begin_wave()
        self._ready = False
        if wave == 1:
            self._link.push(gradients, self.version, **facts)
            self._take_from_rest()
            return
        if not self._pushed:
            self._sum, self._losses, self._samples = self._link.gradients(), [], 0
            self._of = self.version
        self._add(gradients)
        self._samples += facts.pop("samples", 0)
        if not math.isnan(loss := float(facts.pop("loss", math.nan))):
            self._losses.append(loss)
        self._pushed += 1
        if self._pushed == wave:
            self._push_wave(facts)
        self._take_from_rest()

    def _take_from_rest(self) -> None:
        if self._handed:
            self._rest.popleft()
            self._handed = False

    def _add(self, gradients: Mapping[str, Any]) -> None:
        """Add the gradients of a mini-batch to those of its wave."""
        check_names(gradients, self._sum)
        for name, total in self._sum.items():
            given = gradients.get(name)
            if isinstance(given, Rows):
                raise UsageError(f"{name!r}: the gradients of a wave are whole arrays, not Rows")
            if not self._pushed:
                total[...] = 0 if given is None else given
            elif given is not None:
                total += given

    def _push_wave(self, facts: Mapping[str, Any]) -> None:
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._pushed = 0
        self._link.push(self._sum, self._of, loss=loss, samples=self._samples, **facts)

    def flush(self) -> None:
        """Wait until everything that was handed over is published."""
        self._link.flush()

    def close(self) -> None:
        """Publish what was handed over, an unfinished wave included, and end the link."""
        if self._pushed:
            self._push_wave({})
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self._link.abandon()  # does not hide the error behind another one
