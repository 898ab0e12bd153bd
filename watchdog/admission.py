"""Admission of a model and of learners. Their segments take time, so the replies come later.

An offer makes the model, unless it is there or being made. An attach gets a ring; where the model
is being made, it waits for that first. Waiting clients get notes of the progress, as long as there
is any. A ring that no client waits for any more is abandoned. A model is not: others need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.errors import ControlError, GadeiError, JobFailed, ModelMismatch, UsageError, in_words
from gadei_ps.job.control import Attach, FirstBatch, Offer
from gadei_ps.job.optimizer_config import NOTHING
from gadei_ps.memory import reserve, segment, shm, weights
from gadei_ps.memory.layout import REPLICA, Role
from gadei_ps.memory.reserve import Cancelled, Progress
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model, Tensor
from gadei_ps.show.counts import counted
from gadei_ps.watchdog import initial_model, model_segments, script
from gadei_ps.watchdog.batches import Batches
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.roster import JoiningLearner, Roster
from gadei_ps.watchdog.script import Script
from gadei_ps.watchdog.sockets import Client, ControlServer, Reply, failure
from gadei_ps.watchdog.stopping import Stopping
from gadei_ps.watchdog.worker import Task, Worker

NOTE_INTERVAL_S = 0.3  # between two notes to those who wait
NOT_YET = "waiting for learner 0, which makes the model"


@dataclass(eq=False)
class File:
    """A learner's file; closed when nothing refers to it any more.

    That may be its last close, which frees its memory: never in the watchdog's own thread.
    """

    fd: int

    def close(self) -> None:
        """Close the file; for a thread that has time."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            reserve.close_later(self.fd)


@dataclass(frozen=True)
class Waiting:
    """A client that waits for the model. request: asked again when that has come or failed."""

    client: Client
    request: Callable[[], Reply]


def _in_words(tensors: Sequence[Tensor]) -> str:
    """`3 tensors ('a', 'b', 'c')`."""
    names = ", ".join(repr(tensor.name) for tensor in tensors[:3])
    return f"{counted(len(tensors), 'tensor')} ({names}{', ...' if len(tensors) > 3 else ''})"


@dataclass(eq=False)
class Admission:
    """Offers and attaches of one job."""

    sockets: ControlServer
    memory: JobMemory
    roster: Roster
    stopping: Stopping
    worker: Worker
    batches: Batches
    log: Any
    _model_task: tuple[Task, Model] | None = None
    _waiting: list[Waiting] = field(default_factory=list)
    """Requests that wait for the model."""
    _early: list[tuple[float, Waiting]] = field(default_factory=list)
    """Offers that wait for learner 0, which makes the model, and since when."""
    _asked: dict[Client, Task] = field(default_factory=dict)
    """Clients whose model or ring is being made."""
    _learning: dict[Client, tuple[int, int]] = field(default_factory=dict)
    """Row and generation of a client's learner."""
    _begun: dict[Client, int] = field(default_factory=dict)
    """Digest of a learner's first mini-batch."""
    _failed: str = ""
    _reported: int = 0
    _noted_at: float = 0.0

    @property
    def model_coming(self) -> str:
        """Describe the progress of the model; empty if none is being made."""
        return self._model_task[0].text if self._model_task is not None else ""

    # -- the model ------------------------------------------------------------------------------

    def offer(self, client: Client, request: Offer) -> Reply:
        """Raise JobStopped, ModelMismatch, UsageError or ControlError."""
        offered = [
            Tensor(
                one.name,
                tuple(one.shape),
                Role(one.role),
                aliases=tuple(one.aliases or ()),
                group=one.group,
                dtype=one.dtype,
            )
            for one in request.tensors
        ]
        own = Script(request.optimizer or NOTHING)
        file = File(client.fds.pop(0)) if client.fds else None
        return self._offer(client, offered, own, file, request.number > 0)

    def _check_same(self, model: Model, offered: list[Tensor]) -> None:
        """Raise ModelMismatch, which names both models: mostly a script has two of them."""
        try:
            weights.check_same(model, offered)
        except ModelMismatch as error:
            ours, other = (_in_words(tensors) for tensors in (model.tensors, offered))
            fresh = ", or start the job from zero (--fresh)" if self.memory.adopted else ""
            raise ModelMismatch(
                f"{error}; job {self.memory.config.name!r} already has a model, of {ours}, and "
                f"this one is of {other}: give another model a job of its own, or put both into "
                f"one module{fresh}"
            ) from None

    def _offer(
        self,
        client: Client,
        offered: list[Tensor],
        own: Script,
        file: File | None,
        early: bool = False,
    ) -> Reply:
        """early: whether another learner is to make the model, where they begin together."""
        self.stopping.refuse()
        memory = self.memory
        there = memory.model or (self._model_task[1] if self._model_task is not None else None)
        if there is not None:
            self._check_same(there, offered)
        if memory.model is not None:
            script.check_members(memory.config, memory.script, memory.model, offered, own.settings)
            return {"made": False}
        if file is None:
            raise ControlError("an offer comes with a file of initial values")
        if self._model_task is not None:
            self._wait(client, lambda: self._offer(client, offered, own, file))
            return None
        if early and self.batches.awaits_first:
            again = Waiting(client, lambda: self._offer(client, offered, own, file))
            self._early.append((time.monotonic(), again))
            return None
        memory.config.optimizer.specs(own.settings)
        placed = weights.place(offered)
        whole = InitialModel(placed, model_segments.read_from(file.fd, placed), script=own)
        first = initial_model.in_groups(memory.config, whole)

        def make(progress: Progress) -> tuple[Segment, Segment]:
            try:
                return self.memory.make_model(first, progress)
            finally:
                file.close()

        def done(made: tuple[Segment, Segment], error: BaseException | None) -> None:
            self._model_made(client, first, made, error)

        task = self.worker.ask("the model", make, done)
        self._model_task = task, first.model
        self._asked[client] = task
        self._admit_early(lambda since: True)
        return None

    def _admit_early(self, which: Callable[[float], bool]) -> None:
        """Process offers that waited for learner 0. which: selects them by their arrival."""
        chosen = [one for since, one in self._early if which(since)]
        self._early = [(since, one) for since, one in self._early if not which(since)]
        for one in chosen:
            self._ask_again(one)

    def _model_made(
        self,
        client: Client,
        first: InitialModel,
        made: tuple[Segment, Segment],
        error: BaseException | None,
    ) -> None:
        self._model_task = None
        del self._asked[client]
        if error is None:
            try:
                initial_model.enter(self.memory, first, made, self.log)
            except (GadeiError, OSError) as problem:
                error = problem
        if error is not None:
            self._refuse(client, error)
        else:
            self.sockets.reply(client, {"made": True})
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._ask_again(one)

    def _wait(self, client: Client, request: Callable[[], Reply]) -> None:
        """Repeat the request when the model is there."""
        assert self._model_task is not None
        self._waiting.append(Waiting(client, request))
        self.sockets.note(client, {"note": "making", **self._model_task[0].facts})

    def _ask_again(self, one: Waiting) -> None:
        if one.client not in self.sockets:
            return
        try:
            answer = one.request()
        except Exception as error:
            self._refuse(one.client, error)
        else:
            if answer is not None:
                self.sockets.reply(one.client, answer)

    # -- learners -------------------------------------------------------------------------------

    def attach(self, client: Client, request: Attach) -> Reply:
        """Raise JobStopped, ModelMismatch without a model, and what Roster.begin() raises.

        UsageError if the learner's script has another optimizer than the job, or for the name of
        replicas.
        """
        self.stopping.refuse()
        if not request.replica and request.name.rstrip("\0") == REPLICA.decode():
            raise UsageError(
                f"the name {REPLICA.decode()!r} is reserved for replicas of a group: give the "
                "learner another name"
            )
        if self._model_task is not None:
            self._wait(client, lambda: self.attach(client, request))
            return None
        if self.memory.model is None:
            raise ModelMismatch(
                "the job has no model yet: attach with the model's tensors, "
                "or give tensors in the job file"
            )
        self._settled(request)
        self.sockets.check_room(client)
        joining = self.roster.begin(
            client.pid, request.name, request.number, has_buffers=request.buffers
        )

        def done(ring: Segment, error: BaseException | None) -> None:
            again = Waiting(client, lambda: self.attach(client, request))
            self._ring_made(again, request, joining, ring, error)

        self._asked[client] = self.worker.ask(
            f"the ring of learner {joining.row}",
            lambda progress: self.memory.make_ring(joining.row, joining.generation, progress),
            done,
        )
        return None

    def _ring_made(
        self,
        one: Waiting,
        request: Attach,
        joining: JoiningLearner,
        ring: Segment,
        error: BaseException | None,
    ) -> None:
        client = one.client
        del self._asked[client]
        if error is None and (self.stopping.begun or client not in self.sockets):
            self._drop(ring)
            error = Cancelled()
        notice = ""
        if error is None:
            try:  # another learner may have been let in meanwhile
                merged, notice = self._settled(request)
                if merged != self.memory.script:
                    self.memory.enter_script(merged)
            except UsageError as problem:
                self._drop(ring)
                error = problem
        if error is not None:
            self.roster.release(joining)
            if isinstance(error, FileExistsError):  # another row's name may be free
                self._ask_again(one)
                return
            if isinstance(error, Cancelled):  # even if the thread is in the middle of it
                name = shm.segment_name(self.memory.config.name, f"ring.{joining.row}")
                segment.unlink(name)
            self._refuse(client, error)
            return
        self.roster.admit(joining, ring)
        self._learning[client] = joining.row, joining.generation
        assert self.memory.weights is not None
        self.sockets.reply(
            client,
            {
                "job": self.memory.config.name,
                "job_id": self.memory.job_id.hex(),
                "row": joining.row,
                "generation": joining.generation,
                "control": self.memory.control.name,
                "weights": self.memory.weights.name,
                "ring": ring.name,
            }
            | ({"notice": notice} if notice else {}),
        )

    def _drop(self, ring: Segment) -> None:
        """Remove a ring that was made in vain."""
        segment.unlink(ring.name)  # first: what goes last frees the memory
        self.worker.drop(ring)

    def _settled(self, request: Attach) -> tuple[Script, str]:
        """Merge the learner's settings with those of other scripts; return them and a note for it.

        Raises UsageError.
        """
        memory = self.memory
        assert memory.model is not None
        own = request.optimizer or NOTHING
        merged, notice = script.settled(memory.config, memory.script, own, memory.changes)
        notices = (notice, initial_model.unused_groups(memory.config, memory.model))
        return merged, "; ".join(filter(None, notices))

    def first_batch(self, client: Client, request: FirstBatch) -> dict[str, bool]:
        """Report whether a learner of another process has begun with the same mini-batch."""
        others = {digest for one, digest in self._begun.items() if one.pid != client.pid}
        if client in self._learning:
            self._begun[client] = request.digest
        return {"alike": request.digest in others}

    def closed(self, client: Client) -> None:
        """A connection has ended. A learner that lives keeps the one by which it attached."""
        if client in self._learning:
            self.roster.look_at(*self._learning.pop(client))
            self._begun.pop(client, None)

    # -- all of them ----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Cancel unwanted segments, and send notes of the progress to clients. Every tick."""
        for client, task in self._asked.items():
            is_model = self._model_task is not None and task is self._model_task[0]
            if self.stopping.begun or (not is_model and client not in self.sockets):
                task.progress.cancel()
        if self._early:
            none = self.stopping.begun or not self.batches.awaits_first
            self._admit_early(lambda since: none or self.batches.is_late(since))
        if now < self._noted_at + NOTE_INTERVAL_S:
            return
        self._noted_at = now
        for _, one in self._early:
            self.sockets.note(one.client, {"note": "waiting", "text": NOT_YET})
        if self.worker.moved == self._reported:
            return
        self._reported = self.worker.moved
        waiting = list(self._asked.items())
        if self._model_task is not None:
            waiting += [(one.client, self._model_task[0]) for one in self._waiting]
        for client, task in waiting:
            self.sockets.note(client, {"note": "making", **task.facts})

    def _refuse(self, client: Client, error: BaseException) -> None:
        """Send the reason of a failure. A client whose watchdog ends asks the next one."""
        if isinstance(error, Cancelled):
            if not self.stopping.begun and not self._failed:
                self.sockets.close(client)
                return
            error = JobFailed(self._failed) if self._failed else self.stopping.refusal()
        if not isinstance(error, GadeiError):
            self.log.error(
                "a request failed",
                reason=in_words(error) if isinstance(error, OSError) else repr(error),
            )
            error = ControlError(f"the watchdog could not do it: {in_words(error)}")
        self.sockets.reply(client, failure(error))

    def close(self, failed: str) -> None:
        """Cancel everything. failed: why the job has failed; empty if it has not."""
        self._failed = failed
        self.worker.close()
