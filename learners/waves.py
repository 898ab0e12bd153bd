"""Learners that push once a wave: the updates of an optimizer of their own, or sums of gradients.

`Waves` is the virtual worker of Park et al. 2020 (HetPipe), as one process sees it. Each mini-batch
changes the learner's own weights at once. The sum of a wave's changes is pushed as one frame, which
the server adds to the job's weights: the job's optimizer is "add". Before the last mini-batch of a
wave the learner waits for its grant and pulls. Its own changes that are not pushed yet are made
again to what it has pulled.

    client = Client(tensors=..., optimizer={"kind": "add"})
    waves = Waves(client)
    for ... :
        waves.begin()                                # waits if the model requires it
        gradient, loss = ...                         # of waves.weights, or of a copy
        waves.weights["w"] -= 0.1 * gradient         # by any optimizer
        waves.end(loss=loss, samples=4)              # pushes after the last mini-batch of a wave

`GradientWaves` is for a job whose server has the optimizer, and is ours. No mini-batch changes the
learner's weights, which are those of its last pull; the sum of a wave's gradients is pushed. It
waits and pulls where WSP requires it. The bound of WSP holds for its own mini-batches too: of those
before it, a mini-batch misses at most s_global of each learner.

    waves = GradientWaves(client)
    for ... :
        waves.begin()
        waves.gradients["w"] += ...                  # of waves.weights
        waves.end(loss=loss, samples=4)

Under other models than WSP a wave is one mini-batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.kernels import optimizers
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.learners.client import REST_FIRST, Batch, Client
from gadei_ps.learners.gradients import Values
from gadei_ps.memory.weights import FloatArray

NO_LIMIT = 2**31


@dataclass(eq=False)
class _Wave:
    """A wave that is not pushed yet."""

    size: int  # mini-batches, as far as it is known
    version: int  # of the weights that its first mini-batch was computed from
    batch: int | None  # of the server's, which it answers; None: of the learner's own data
    begun: int = 0
    ended: int = 0
    whole: bool = False  # its last mini-batch has begun


class WaveOrder(ABC):
    """The weights of one learner, and its waves: which mini-batch may begin, waits, pulls, pushes.

    A pipeline may begin up to client.wave mini-batches before it ends the first of them; they end
    in the order in which they began. Belongs to the thread that computes.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.flat: FloatArray = client.pull()
        """The weights that this learner computes with, float32, shape (client.model.elements,)."""
        self.weights: dict[str, FloatArray] = client.model.views(self.flat)
        """The same by name."""
        self._waves: deque[_Wave] = deque()  # the first is the current one
        self._pulled = -1  # version of the last pull; -1: none since the learner has joined
        self._losses: list[float] = []
        self._samples = 0
        self._rest: deque[Batch] = deque()  # of a batch of the server's: what has not begun
        self._handed: Batch | None = None  # the last of them that has begun
        self._leaving: tuple[_Wave, int] | None = None  # is being pushed as this frame
        self.most = NO_LIMIT
        """Mini-batches in flight, if the model lets more of them begin."""
        self.before_reading: Callable[[], object] = lambda: None
        """Called before what a wave has changed is read: it fetches what lies elsewhere, as on a
        GPU, into `flat` or `gradients`."""

    @property
    def _room(self) -> int:
        return min(self.client.wave, self.most)

    @property
    def in_flight(self) -> int:
        """Mini-batches that have begun and not ended."""
        return sum(wave.begun - wave.ended for wave in self._waves)

    def may_begin(self, last: bool | None = None) -> bool:
        """Return whether begin(last=last) may be called now, before end() of the oldest one."""
        ends, ahead = self._next_wave(last)[1:]
        return self.in_flight < self._room and not (ends and ahead)

    def _next_wave(
        self, last: bool | None = None, batch: int | None = None
    ) -> tuple[_Wave, bool, bool]:
        """Return the next mini-batch's wave, whether it ends it, and whether another is open."""
        if not self._waves or self._waves[-1].whole:
            wave = _Wave(self.client.wave, self._pulled, batch)
        else:
            wave = self._waves[-1]
        full = wave.begun + 1 >= wave.size
        ends = full if last is None else last or (full and wave.batch is None)
        return wave, ends, bool(self._waves) and wave is not self._waves[0]

    def begin(
        self, *, last: bool | None = None, batch: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Wait until the next mini-batch may begin. Returns whether it has pulled weights for it.

        batch, last: the id of the server's batch that its wave answers, and whether it is the last
        mini-batch of that; see parts(). A wave of the learner's own data ends with the
        client.wave-th, or where last is true. Raises UsageError if another wave is to end first,
        and what Client.wait_mini_batch raises; then nothing has changed.
        """
        self._settle()
        wave, ends, ahead = self._next_wave(last, batch)
        if wave.batch != batch or (batch is None and self._rest):
            raise UsageError(
                REST_FIRST if batch is None else "a wave of other data: flush() it first"
            )
        if self.in_flight >= self._room or (ends and ahead):
            raise UsageError(
                f"mini-batches that have begun: {self.in_flight} of {self._room}; end() the oldest "
                "first"
            )
        # The last number of a wave, however many mini-batches this one has.
        number = self.client.wave - 1 if ends or ahead else 0
        pulls = ends or self._pulled < 0
        self.client.wait_mini_batch(number, timeout_s)
        if pulls:
            self._pull()
            if not wave.begun:
                wave.version = self._pulled
        wave.begun += 1
        wave.whole = ends
        if wave.begun == 1:
            self._waves.append(wave)
        if batch is not None and self._rest:
            self._handed = self._rest.popleft()
        return pulls

    def end(self, *, loss: float = math.nan, samples: int = 0) -> bool:
        """End the oldest mini-batch, which has changed the weights. Returns whether a wave was
        pushed.

        Waits for a free slot then. loss, samples: of this mini-batch. Raises what Client.push
        raises; then the mini-batch has not ended. After a KeyboardInterrupt it may have, and its
        wave be pushed: `in_flight` shows it.
        """
        self._settle()
        if not self.in_flight:
            raise UsageError("no mini-batch is in flight: call begin()")
        wave = self._waves[0]
        known = list(self._losses), self._samples
        wave.ended += 1
        self._samples += samples
        if not math.isnan(loss):
            self._losses.append(loss)
        if not (wave.whole and wave.ended == wave.begun):
            return False
        try:
            self._push()
        except BaseException:
            self._settle()
            if wave in self._waves:  # it is not published: the mini-batch can be ended once more
                wave.ended -= 1
                self._losses, self._samples = known
            raise
        return True

    def flush(self) -> bool:
        """Push what the mini-batches of an unfinished wave have changed. Returns whether there is
        any.

        For the end of data of its own. A batch of the server that is not done goes to others, so
        leave without flush() there.
        """
        self._settle()
        if self.in_flight:
            raise UsageError(f"mini-batches that have begun: {self.in_flight}; end() them first")
        if not self._waves:
            return False
        self._push()
        return True

    def assign(self, values: Values, *, reset: bool = False) -> None:
        """Assign as Client.assign does; this learner continues from the weights that the job has
        then.

        Pushes first what an unfinished wave of the learner's own data has changed. Raises
        UsageError in the middle of a mini-batch or of a batch of the server's.
        """
        self._settle()
        if self.in_flight or self.has_part_of_a_batch or self.answers is not None:
            raise UsageError("assign: a mini-batch or a batch is not done: end it first")
        self.flush()
        self.client.assign(values, reset=reset)
        self._pull()

    @property
    def answers(self) -> int | None:
        """The id of the server's batch that the current wave answers; None: it has other data."""
        return self._waves[0].batch if self._waves else None

    @property
    def has_part_of_a_batch(self) -> bool:
        """Whether some of a batch of the server's has begun, and the rest has not."""
        return bool(self._rest)

    def parts(
        self,
        samples: int,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        *,
        before_wait: Callable[[], object] | None = None,
    ) -> Iterator[tuple[Batch, bool]]:
        """Take mini-batches from the server, with whether each ends its wave: begin() them so.

        A wave is one batch of the server's, so that it is answered once. After a loop that was left
        in the middle of one, the next begins with the rest of that. before_wait: see Client.waves.
        """
        waves = self.client.waves(samples, batch_size, epochs, seed, before_wait=before_wait)
        for parts in chain([self._rest] if self._rest else [], waves):
            self._rest = deque(parts)
            while self._rest:
                yield self._rest[0], len(self._rest) == 1

    def batches(self, samples: int, batch_size: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """Take mini-batches that are begun already; end() each of them. See Client.batches.

        After a loop that was left before end(), the next begins with the same mini-batch.
        """
        if self.in_flight and self._handed is not None and self.answers == self._handed.id:
            yield self._handed
        elif not self.in_flight and not self._rest:
            self.flush()  # an unfinished wave of the learner's own data
        for part, last in self.parts(samples, batch_size, epochs, seed):
            if self.in_flight:
                raise UsageError("end() was not called for a batch: call it once for each")
            try:
                self.begin(last=last, batch=part.id)
            except JobStopped:
                return
            yield part

    def _pull(self) -> None:
        self.client.wait_applied()  # all that was pushed is in the weights, so nothing comes twice
        self._take()
        self._pulled = self.client.version

    def _push(self) -> None:
        wave = self._waves[0]
        update = self._of_wave()
        self._leaving = wave, self.client.published
        self.client.push(
            update,
            loss=sum(self._losses) / len(self._losses) if self._losses else math.nan,
            samples=self._samples,
            batch=wave.batch,
            version=wave.version,
        )
        self._settle()

    def _settle(self) -> None:
        """Remove a wave that is published, even if an interrupt came just then."""
        if self._leaving is None:
            return
        wave, frame = self._leaving
        if self.client.published > frame:
            self._forget()
            self._losses = []
            self._samples = 0
            if wave in self._waves:
                self._waves.popleft()
        self._leaving = None

    @abstractmethod
    def _take(self) -> None:
        """Pull the job's weights into `flat`. All that this learner has pushed is in them."""

    @abstractmethod
    def _of_wave(self) -> FloatArray:
        """Return what is to be pushed of the first wave, shape (client.model.elements,)."""

    @abstractmethod
    def _forget(self) -> None:
        """Start the next wave, after the first one was pushed."""


class Waves(WaveOrder):
    """Weights that each mini-batch changes in place, between begin() and end().

    Raises UsageError unless the job adds what learners push.
    """

    def __init__(self, client: Client) -> None:
        if not adds(client):
            kind = Kind(int(client.hyper[0, optimizers.KIND])).name.lower()
            raise UsageError(
                f"the optimizer of job {client.job!r} is {kind}, which takes gradients: for "
                'updates that learners make, give Client optimizer={"kind": "add"} in all scripts, '
                'or start the job with --optimizer add, or kind = "add" in its job file'
            )
        super().__init__(client)
        self._base = self.flat.copy()  # what the job has of this learner's changes is in it
        self._update = np.zeros_like(self.flat)

    def _of_wave(self) -> FloatArray:
        """Return the changes that are not pushed yet; valid until the next call."""
        self.before_reading()
        end = self.client.model.parameters  # buffers follow, of which nothing is pushed
        np.subtract(self.flat[:end], self._base[:end], out=self._update[:end])
        return self._update

    def _take(self) -> None:
        """Apply the changes again that the job does not have yet."""
        own = self._of_wave()
        self.client.pull(self._base)
        end = self.client.model.parameters
        np.add(self._base[:end], own[:end], out=self.flat[:end])
        self.flat[end:] = self._base[end:]

    def _forget(self) -> None:
        np.copyto(self._base, self.flat)


class GradientWaves(WaveOrder):
    """Weights as they were pulled, and the sum of a wave's gradients.

    Mini-batches end in the order in which they began, so at most one wave has gradients. Raises
    UsageError if the job adds what learners push.
    """

    def __init__(self, client: Client) -> None:
        if adds(client):
            raise UsageError(
                f"job {client.job!r} adds updates, and this learner has no optimizer: give it one, "
                "or start the job with another optimizer than add"
            )
        super().__init__(client)
        self._sum = np.zeros_like(self.flat)
        self.gradients: dict[str, FloatArray] = client.model.gradients(self._sum)
        """Gradients by name. Add to them in place, between begin() and end()."""

    def _take(self) -> None:
        self.client.pull(self.flat)

    def _of_wave(self) -> FloatArray:
        self.before_reading()
        return self._sum

    def _forget(self) -> None:
        self._sum.fill(0)


def adds(client: Client) -> bool:
    """Return whether the job adds what learners push."""
    return int(client.hyper[0, optimizers.KIND]) == Kind.ADD
