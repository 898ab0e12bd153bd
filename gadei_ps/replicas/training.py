"""The weights of a replica's job: copied for a round, and replaced by the result of the group.

The replica is one more client of the job. With `overlap`, learners train on after the copy: the
difference between the group's weights and the copy is added, as one frame, which the servers apply
exactly once. Without, the job's learners are paused from the copy until the group's weights are
assigned, as in the paper. If the group cannot be reached meanwhile, they train on, and the
difference is added, too.

A replica that joins copies the weights late, and adds the difference to the group's weights: what
the job has trained alone is not in them. A copy that is not finite does not count: the job gets the
weights of the group in its place, and its optimizer loses momentum and moments.

Only parameters are exchanged: buffers belong to learners, and each job keeps its own copy of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gadei_ps.errors import JobNotFound, ModelMismatch, UsageError
from gadei_ps.groups.parts import Floats, is_finite
from gadei_ps.groups.shares import CopyReport, Span
from gadei_ps.job.control import Status, ask
from gadei_ps.learners.client import Client
from gadei_ps.memory.layout import CONTROL, REPLICA
from gadei_ps.memory.totals import total

LEAST_LOOK_S, MOST_LOOK_S = 0.005, 0.05
_AGAIN_S = 0.05
SILENT_S = 60.0
"""Time without a model of the job after which it is noted (s)."""


class ReplicaClient(Client):
    """The client of a replica: attached like a learner, and not listed as one."""

    is_replica = True


@dataclass(frozen=True)
class Copied:
    """The weights of a job for a round.

    weights: shape (values,), zeros where buffers are. samples: with which they were trained, or
    gradients; 0: they are not finite. report: batches that are in them, if the group divides these.
    """

    weights: Floats
    samples: int
    report: CopyReport | None = None


class JobTraining:
    """The parameters of a job. All methods but `check` are for one thread."""

    def __init__(
        self,
        job: str,
        every: int,
        overlap: bool,
        patience_s: float,
        noted: Callable[[str], None],
    ) -> None:
        """Attach to a job. Raises JobNotFound, ModelMismatch, UsageError.

        every: gradients of a round. noted: receives lines for users. patience_s: time limit until
        the job has a model.
        """
        self._every, self._overlap, self._noted = every, overlap, noted
        self._client = _attached(job, patience_s, noted)
        self._control = self._client.place.control.view(CONTROL)
        self.values = self._client.model.elements
        self.copied: Copied | None = None
        """The copy for the round that is under way."""
        self._pause: contextlib.ExitStack | None = None
        """Ends the pause of the learners; None: they train."""
        self._has_noted = False
        self._counted = (0, 0)
        """Gradients and samples at the last copy."""
        self._trained()
        self._begun, self._since = self._gradients, time.monotonic()

    def is_trained(self) -> bool:
        """Return whether the gradients of a round have been applied since the last one."""
        return self._gradients - self._begun >= self._every

    def look_s(self) -> float:
        """Return the time until the next call of `is_trained()`: half of the expected rest (s)."""
        done = self._gradients - self._begun
        each_s = (time.monotonic() - self._since) / max(1, done)
        return min(max((self._every - done) * each_s / 2, LEAST_LOOK_S), MOST_LOOK_S)

    def copy(self) -> Copied:
        """Copy the weights for a round. Without overlap, learners pause from here on."""
        if not self._overlap and self._pause is None:
            pause = contextlib.ExitStack()
            pause.enter_context(self._client.exclusive())
            self._pause = pause
        weights = np.empty(self.values, np.float32)
        samples, report = self._copy(weights)
        self.copied = Copied(weights, samples, report)
        if not samples:
            self._note_diverged(weights)
        return self.copied

    def resume(self) -> None:
        """Let learners train on; the copy stays."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.close()

    def drop(self) -> None:
        """Forget the copy: the round needs another one."""
        self.resume()
        self.copied = None

    def write(self, weights: Floats) -> None:
        """Have the job continue with the weights of the group; the copy is used up."""
        copied = self.copied or self.copy()
        if copied.samples and self._pause is None:
            with np.errstate(over="ignore", invalid="ignore"):
                difference = weights - copied.weights
            if is_finite(difference):
                self._client.add(self._named(difference))
            else:
                self._client.assign(self._named(weights), reset=True)
        else:
            self._client.assign(self._named(weights), reset=not copied.samples)
        self.drop()
        self._has_noted = False
        self._begun, self._since = self._gradients, time.monotonic()

    def check(self) -> None:
        """Raise GadeiError if the job has ended, or is to end. For any thread."""
        if self._pause is not None:
            self._client.heartbeat()
        else:
            self._client.check_job()

    def rejoin(self) -> None:
        """Become another member: what was trained since the last round is not in the group."""
        self.drop()

    def begin(self) -> None:
        """Wait until the weights are those with which the replica can begin."""

    def own(self, spans: Sequence[Span], done: int) -> None:
        """Take the batches that the group has assigned to this replica."""

    def close(self) -> None:
        """Leave the job."""
        with contextlib.suppress(Exception):  # the job may have ended
            self.resume()
        self._client.detach()

    @property
    def _gradients(self) -> int:
        """Number of gradients applied or rejected so far.

        With weights that are not finite, all may be rejected.
        """
        return total(self._control, "applied") + total(self._control, "refused")

    def _copy(self, into: Floats) -> tuple[int, CopyReport | None]:
        trained = self._trained()
        if self._pause is not None:
            self._client.pull(into)
        else:
            self._client.pull(into, consistent=True, timeout_s=None)
        return self._count(into, trained), None

    def _count(self, copied: Floats, trained: int) -> int:
        """Clear the buffers of a copy. Returns its samples; 0: it is not finite."""
        copied[self._client.model.parameters :] = 0
        return max(1, trained) if is_finite(copied) else 0

    def _trained(self) -> int:
        """Return the number of samples, else of gradients, since the last call."""
        applied, samples = total(self._control, "applied"), total(self._control, "samples")
        before, self._counted = self._counted, (applied, samples)
        return max(0, (samples - before[1]) or (applied - before[0]))

    def _named(self, weights: Floats) -> dict[str, Floats]:
        """Return views of all parameters, by their names."""
        return self._client.model.gradients(weights)

    def _note_diverged(self, copied: Floats) -> None:
        if self._has_noted:
            return
        self._has_noted = True
        views = self._named(copied).items()
        name = next(name for name, one in views if not is_finite(one))
        self._noted(
            f"the weights of this replica ({name!r}) hold a NaN or an infinity: they do not count; "
            "it continues with those of its group; if this repeats, lower the learning rate"
        )


def _attached(job: str, patience_s: float, noted: Callable[[str], None]) -> Client:
    """Return a client of the job, once it has a model, and no other replica."""
    begin, has_noted = time.monotonic(), False
    until = begin + patience_s
    while True:
        if not has_noted and time.monotonic() > begin + SILENT_S:
            has_noted = True
            noted(
                f"no learner has joined job {job!r} yet: the script makes a gadei_ps Optimizer or "
                "Client"
            )
        try:
            client = ReplicaClient(job, name=REPLICA.decode())
            break
        except (JobNotFound, ModelMismatch):
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)
    while other := _other(client.job):
        if time.monotonic() > until:
            client.detach()
            raise UsageError(f"job {job!r} has a replica already (pid {other}): stop that first")
        time.sleep(_AGAIN_S)
    return client


def _other(job: str) -> int | None:
    """Return the pid of another replica of the job that lives, or has frames not yet applied."""
    pids = (int(one["pid"]) for one in ask(job, Status())["replicas"])
    return next((pid for pid in pids if pid != os.getpid()), None)
