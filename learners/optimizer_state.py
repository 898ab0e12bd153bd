"""The state of the job's optimizer, which lies in the server: read it, and load it."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import UsageError
from gadei_ps.job import control
from gadei_ps.job.control import Lasting
from gadei_ps.kernels.optimizers import slots
from gadei_ps.learners.assign import Assigns, Checked, Values
from gadei_ps.learners.frame import NONE
from gadei_ps.memory.layout import SAME_STEPS, Role
from gadei_ps.memory.weights import FloatArray

COPY_S = 120.0  # for the watchdog to have the job copied
ASK_S = 0.02  # between two looks whether another learner has loaded


class JobState(NamedTuple):
    """A job between two gradients."""

    weights: FloatArray
    """Shape (model.elements,); model.views() cuts it up by name."""
    slots: tuple[FloatArray, ...]
    """Of the optimizer, each of that shape: momentum, Adagrad's sum, or exp_avg and exp_avg_sq."""
    steps: int
    """Of the optimizer."""


class OptimizerState(Assigns):
    """The part of a client that reads and loads the optimizer's state."""

    generation: int
    _learner: _native.Learner
    _connection: Lasting

    @property
    def left(self) -> bool:
        """Whether it has detached."""
        return self._learner.left

    def job_state(self) -> JobState:
        """Weights and optimizer state, as they are between two gradients of all learners.

        Waits until what this learner has pushed is in them. The server stands still while they are
        copied in memory. Raises what push() raises, and ControlError.
        """
        self._land()
        self.wait_applied()
        count = slots(int(self.hyper[0, 0]))
        elements = self.model.elements
        size = (1 + count) * elements * 4
        file = control.memory_file(size, [])
        try:
            # A connection of its own: large models take longer than other requests may.
            connection = Lasting(str(self._connection.path), COPY_S)
            try:
                reply = connection.request(control.Copy(), fds=[file])
            finally:
                connection.close()
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        arrays = np.split(np.frombuffer(memory, np.float32, (1 + count) * elements), 1 + count)
        return JobState(arrays[0], tuple(arrays[1:]), int(reply["steps"]))

    def load_optimizer_state(
        self, values: Sequence[Values], steps: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Replaces the state of the job's optimizer; False if the job has another one and keeps it.

        values: for each slot its values by name; what is not named becomes zero. steps: that the
        optimizer has made; None: as before. Before its first gradient, a learner shares this with
        the others, whose scripts load the same: one of them writes it, if the job has made no step
        yet, and the others wait for that. Later, the learner writes it itself. Raises what assign()
        raises.
        """
        count = slots(int(self.hyper[0, 0]))
        if len(values) != count:
            raise UsageError(f"the state has {len(values)} slots, the job's optimizer {count}")
        zeros = {
            one.name: np.zeros(one.shape, np.float32)
            for one in self.model.tensors
            if one.role is Role.PARAMETER
        }
        checked = [self._checked(zeros | dict(one)) for one in values]  # before any is written
        if self.published > self.assigned:
            self._write(checked, steps, timeout_s)
            return True
        digest = _digest(checked, steps)
        while (answer := self._ask(digest)) == "wait":
            time.sleep(ASK_S)
        if answer == "write":
            self._write(checked, steps, timeout_s)
            self._ask(digest, done=True)
        return answer != "other"

    def _ask(self, digest: int, *, done: bool = False) -> str:
        asked = control.Load(generation=self.generation, digest=digest, done=done)
        return str(self._connection.request(asked)["answer"])

    def _write(
        self, checked: Sequence[Checked], steps: int | None, timeout_s: float | None
    ) -> None:
        count = SAME_STEPS if steps is None else steps
        for stream, (where, _) in enumerate(checked, 1):
            self._assign(where, timeout_s, stream=stream, steps=count)
        if not checked and steps is not None:
            self._assign([*NONE] * len(self.model.tensors), timeout_s, steps=count)


def _digest(checked: Sequence[Checked], steps: int | None) -> int:
    """Of a state: never 0."""
    found = hashlib.blake2b(repr(steps).encode(), digest_size=8)
    for _, arrays in checked:
        for array in arrays:
            found.update(array.data)
    return int.from_bytes(found.digest(), "big") >> 1 or 1
