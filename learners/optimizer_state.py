"""What a job has trained: read it, and load it, once for all learners that begin together."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import GadeiError, PushTimeout, UsageError
from gadei_ps.job import control
from gadei_ps.job.control import Lasting
from gadei_ps.kernels.optimizers import slots
from gadei_ps.learners.assign import Assigns, Checked, Values
from gadei_ps.learners.frame import NONE
from gadei_ps.learners.waits import limit
from gadei_ps.learners.work import whole
from gadei_ps.memory.layout import SAME_STEPS, Role
from gadei_ps.memory.weights import FloatArray

COPY_S = 120.0  # for the watchdog to have the job copied
ASK_S = 0.02  # between two looks whether another learner has loaded
MOST_STEPS = 2**62  # the server sets no more
GIVE_UP_S = 3.0  # for another watchdog to hear that this learner does not write


class JobState(NamedTuple):
    """A job between two gradients."""

    weights: FloatArray
    """Shape (model.elements,); model.views() cuts it up by name."""
    slots: tuple[FloatArray, ...]
    """Of the optimizer, each of that shape: momentum, Adagrad's sum, or exp_avg and exp_avg_sq."""
    steps: int
    """Of the optimizer."""


What = Literal["state", "weights"]
Write = Callable[[float | None], object]
"""Is given when the time limit is over."""


class OptimizerState(Assigns):
    """The part of a client that reads the optimizer's state, and loads it and weights."""

    generation: int
    goes_on = False
    """Whether this learner follows another one of its process, and is no beginner."""
    _steps_loaded = 0
    _asked: Mapping[What, int] = {"state": 0, "weights": 0}
    """Digests of what it has loaded last."""
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

    @property
    def begins(self) -> bool:
        """Whether it has pushed no gradient yet, so that it shares what it loads with others."""
        return self.published == self.assigned and not self.goes_on

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
        if steps is not None:
            whole("steps", steps, most=MOST_STEPS)

        def write(until: float | None) -> None:
            self._write(checked, steps, timeout_s, until)

        if not self.begins:
            who = self.generation
            again = control.Load(generation=who, digest=1, steps=0, gives=0, after=0, again=True)
            self._write_asked(again, write, timeout_s)
            return True
        done = self._share(
            "state",
            _digest(checked, steps),
            write,
            timeout_s,
            gives=steps or 0,
        )
        if done:
            self._steps_loaded = steps or 0
        return done

    def load_weights(self, values: Values, timeout_s: float | None = None) -> bool:
        """As assign(); before its first gradient shared, as load_optimizer_state() is.

        False if the job has made steps with other weights, and keeps them.
        """
        checked = self._checked(values)
        if not self.begins:
            self._assign(checked[0], timeout_s)
            return True
        return self._share(
            "weights",
            _digest([checked], sorted(values)),
            lambda until: self._assign(checked[0], timeout_s, until=until),
            timeout_s,
            steps=self._steps_loaded,
        )

    def _share(
        self,
        what: What,
        digest: int,
        write: Write,
        timeout_s: float | None,
        *,
        steps: int = 0,
        gives: int = 0,
    ) -> bool:
        """steps, gives: as in control.Load."""
        before = self._asked[what]
        digest = _chained(before, digest)
        asked = control.Load(
            what=what,
            generation=self.generation,
            digest=digest,
            steps=steps,
            gives=gives,
            after=before,
        )
        done = self._write_asked(asked, write, timeout_s)
        self._asked = {**self._asked, what: digest}
        return done

    def _write_asked(self, asked: control.Load, write: Write, timeout_s: float | None) -> bool:
        """Writes if the job wants it; False if it keeps something else. The others do not wait for
        this learner where that fails or is interrupted."""
        until = limit(timeout_s)
        try:
            while (answer := self._ask(asked)) == "wait":
                if until is not None and time.monotonic() >= until:
                    raise PushTimeout(
                        f"another learner has not loaded the {asked.what} within {timeout_s} s"
                    )
                time.sleep(ASK_S)
            if answer == "write":
                write(until)
                self._ask(asked.model_copy(update={"done": True}))
        except BaseException:
            with contextlib.suppress(GadeiError, OSError):
                self._ask(asked.model_copy(update={"gives_up": True}), GIVE_UP_S)
            raise
        return answer != "other"

    def _ask(self, asked: control.Load, patience_s: float = 10.0) -> str:
        return str(self._connection.request(asked, patience_s=patience_s)["answer"])

    def _write(
        self,
        checked: Sequence[Checked],
        steps: int | None,
        timeout_s: float | None,
        until: float | None,
    ) -> None:
        """The last slot first, and the steps at the end: if this learner dies on the way, Adam has
        the new squares beside old moments, which makes steps short, and not the other way round."""
        count = SAME_STEPS if steps is None else steps
        for stream in range(len(checked), 0, -1):
            now = count if stream == 1 else SAME_STEPS
            self._assign(checked[stream - 1][0], timeout_s, stream=stream, steps=now, until=until)
        if not checked and steps is not None:
            self._assign([*NONE] * len(self.model.tensors), timeout_s, steps=count, until=until)


def _chained(before: int, digest: int) -> int:
    """Of all that was loaded; never 0."""
    if not before:
        return digest
    both = hashlib.blake2b(repr((before, digest)).encode(), digest_size=8)
    return int.from_bytes(both.digest(), "big") >> 1 or 1


def _digest(checked: Sequence[Checked], besides: object) -> int:
    """Of what is loaded: never 0."""
    found = hashlib.blake2b(repr(besides).encode(), digest_size=8)
    for _, arrays in checked:
        for array in arrays:
            found.update(array.data)
    return int.from_bytes(found.digest(), "big") >> 1 or 1
