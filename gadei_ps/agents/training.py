"""What an agent's machine trains: a job, which goes on or stands still while the group exchanges.

The agent is one more client of the job. It copies the weights, and when the group has agreed on
others, it adds the difference between these and its copy, as one frame, which the servers apply
exactly once. So what the learners have pushed meanwhile stays.

A new agent does not know which differences the one before it has added. It copies the weights once
no frame of that one is left to come, and adds the difference to its copy. Then the job has the
weights of the group, and what was pushed since the copy, whatever was added before.

Or, as in the paper, the job's learners stand still from the copy on, until the weights of the group
are assigned. Then the jobs of all machines have the same bits.

If the copy is not finite, it does not count, and the job gets the weights of the group in its
place: what its learners have trained since is given up, and so is the state of its optimizer.

Only parameters are exchanged: buffers belong to learners, and each job keeps its own copy of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from gadei_ps import _mesh
from gadei_ps.agents.constants import Buffers
from gadei_ps.agents.plan import Floats
from gadei_ps.errors import AgentError, JobNotFound, ModelMismatch, UsageError
from gadei_ps.groups.parts import is_finite
from gadei_ps.job.control import Status, ask
from gadei_ps.learners.client import Client
from gadei_ps.memory.layout import CONTROL
from gadei_ps.memory.totals import total

NAME = "agent"
"""Of the client, in the job's status."""
LOOK_S = 0.005
"""Between two looks at the job's counts, where something is to come soon."""
_MOST_LOOK_S = 0.05
_BEAT_S = 0.1
"""Between two signs of life while learners stand still; a job may give an agent little time."""
_AGAIN_S = 0.05


class JobTraining:
    """The parameters of a job; where buffers are, the group has zeros."""

    look_s = 1.0

    def __init__(
        self,
        job: str,
        every: int,
        patience_s: float,
        told: Callable[[int, int], None],
        noted: Callable[[str], None],
    ) -> None:
        """every: gradients of a round. told: is given the rounds and a checksum of the weights,
        once the job has them. noted: a line that people are to read. patience_s: how long to wait
        for the job, its model, and the end of the agent before this one. Raises JobNotFound,
        ModelMismatch, UsageError."""
        self._every, self._told, self._noted = every, told, noted
        self._interrupted = threading.Event()
        self._client = _attached(job, patience_s)
        self._control = self._client.place.control.view(CONTROL)
        self.values = self._client.model.elements
        self.buffers: Buffers = {}
        self._snapshot = np.zeros(self.values, np.float32)
        self._is_copied = False
        self._is_finite = True
        """Whether the last copy is."""
        self._has_said = False
        """That the copy of this round is not finite."""
        self._counted = total(self._control, "applied")
        self._begun = self._gradients
        self._samples = total(self._control, "samples")

    def copy(self, number: int, into: Floats) -> int:
        """See Training."""
        if number:
            self._train()
        return self._weight(number, self._copy(into), into)

    def write(self, rounds: int, weights: Floats, constants: Sequence[str]) -> None:
        """See Training."""
        if not self._is_copied:
            self._copy_late()
        checksum = _mesh.checksum(weights.data)
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(weights, self._snapshot, out=self._snapshot)
        if self._is_finite and is_finite(self._snapshot):
            self._client.add(self._exchanged(self._snapshot))
        else:
            self._client.assign(self._exchanged(weights), reset=True)
        self._is_copied = self._has_said = False
        self._begun = self._gradients
        self._told(rounds, checksum)

    def check(self) -> None:
        """See Training."""
        self._client.check_job()

    def interrupt(self) -> None:
        """From now on nobody trains for a round. For any thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Leaves the job, which goes on. No other call may be under way, or follow."""
        self._client.detach()

    def _train(self) -> None:
        """Waits for the gradients of a round: looks after half of the time that they may take."""
        begun, first, pause_s = time.monotonic(), self._gradients, LOOK_S
        while not self._is_trained():
            self._client.check_job()
            if self._interrupted.wait(min(max(pause_s, LOOK_S), _MOST_LOOK_S)):
                raise AgentError("the agent ends")
            now = self._gradients
            a_gradient_s = (time.monotonic() - begun) / max(1, now - first)
            pause_s = (self._begun + self._every - now) * a_gradient_s / 2

    def _is_trained(self) -> bool:
        return self._gradients - self._begun >= self._every

    @property
    def _gradients(self) -> int:
        """Applied or refused so far. With weights that are not finite, all may be refused."""
        return total(self._control, "applied") + total(self._control, "refused")

    def _copy(self, into: Floats) -> int:
        """Copies the weights; returns the samples, else gradients, since the last copy."""
        trained = self._trained()
        self._client.pull(into, consistent=True, timeout_s=None)
        self._look_at(into)
        self._keep(into)
        return trained

    def _copy_late(self) -> None:
        """For a write without a copy, or one whose copy has been given up."""
        self._copy(self._snapshot)
        if not self._is_finite and not self._has_said:
            self._say_diverged(self._snapshot, "")

    def _look_at(self, copied: Floats) -> None:
        """Clears the buffers of a copy; whether the rest is finite."""
        copied[self._client.model.parameters :] = 0
        self._is_finite = is_finite(copied)

    def _exchanged(self, weights: Floats) -> dict[str, Floats]:
        """Views of all parameters, by their names."""
        return self._client.model.gradients(weights)

    def _keep(self, copied: Floats) -> None:
        """For the difference to the group's weights."""
        if copied is not self._snapshot:
            np.copyto(self._snapshot, copied)
        self._is_copied = True

    def _weight(self, number: int, trained: int, copied: Floats) -> int:
        """What Training.copy returns. Says so if the copy does not count."""
        if self._is_finite:
            return max(1, trained)
        self._say_diverged(copied, f"they do not count in round {number + 1}, and ")
        self._has_said = True
        return 0

    def _say_diverged(self, copied: Floats, what: str) -> None:
        """The first tensor that is not finite, and what follows from it."""
        views = self._exchanged(copied).items()
        name = next(name for name, one in views if not is_finite(one))
        self._noted(
            f"the weights of this machine ({name!r}) hold a NaN or an infinity: {what}it continues "
            "with those of its group; if this goes on, lower the learning rate"
        )

    def _let_go(self) -> None:
        """Learners that stand still train on."""

    def _trained(self) -> int:
        """Samples, else gradients, since the last call."""
        applied, samples = total(self._control, "applied"), total(self._control, "samples")
        trained = (samples - self._samples) or (applied - self._counted)
        self._counted, self._samples = applied, samples
        return max(0, trained)


class StandingTraining(JobTraining):
    """The weights of a job whose learners stand still from the copy until they are assigned.

    The checksum that is told is of the parameters that the job has then.
    """

    look_s = _BEAT_S
    _stand: contextlib.ExitStack | None = None
    """Ends what has the learners stand still; None: nothing has."""

    def copy(self, number: int, into: Floats) -> int:
        """See Training."""
        if number:
            self._train()
        self._stand_still()
        return self._weight(number, self._copy(into), into)

    def write(self, rounds: int, weights: Floats, constants: Sequence[str]) -> None:
        """See Training. Without a copy before, what has been trained is given up."""
        if self._stand is None:
            self._stand_still()
            self._copy_late()
        self._client.assign(self._exchanged(weights), reset=not self._is_finite)
        self._client.pull(self._snapshot)
        self._snapshot[self._client.model.parameters :] = 0
        checksum = _mesh.checksum(self._snapshot.data)
        self._trained()
        self._has_said = False
        self._begun = self._gradients
        self._let_go()
        self._told(rounds, checksum)

    def check(self) -> None:
        """See Training."""
        self._client.heartbeat()

    def _copy(self, into: Floats) -> int:
        self._client.pull(into)
        self._look_at(into)
        return self._trained()

    def _stand_still(self) -> None:
        if self._stand is None:
            stand = contextlib.ExitStack()
            stand.enter_context(self._client.exclusive())
            self._stand = stand

    def _let_go(self) -> None:
        stand, self._stand = self._stand, None
        if stand is not None:
            stand.close()


def _attached(job: str, patience_s: float) -> Client:
    """A client of the job, once it has a model, and no other agent."""
    until = time.monotonic() + patience_s
    while True:
        try:
            client = Client(job, name=NAME)
            break
        except (JobNotFound, ModelMismatch):
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)
    while other := _other_agent(client.job):
        if time.monotonic() > until:
            client.detach()
            raise UsageError(f"job {job!r} has an agent already (pid {other}): stop that one first")
        time.sleep(_AGAIN_S)
    return client


def _other_agent(job: str) -> int | None:
    """The pid of another agent of the job that lives, or whose frames are not all applied."""
    for one in ask(job, Status())["learners"]:
        if one["name"] == NAME and one["pid"] != os.getpid():
            return int(one["pid"])
    return None
