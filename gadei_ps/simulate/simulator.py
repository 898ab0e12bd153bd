"""A discrete-event simulation: learners in virtual time, under the same models that servers drive.

A learner starts an iteration when its clock is below its grant. It pulls, computes for the run time
that is drawn for it, and pushes. If several iterations are one push (a wave), it pulls before the
last of them, the one that waits for other learners, as learners/waves.py does. Memory does not grow
with the number of iterations: each learner has one future event, and gradients are only counted.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from gadei_ps.simulate.descent import Descent
from gadei_ps.simulate.draws import FloatArray, IntArray, Stream, uniform
from gadei_ps.simulate.outcome import Outcome
from gadei_ps.simulate.server import Server
from gadei_ps.simulate.setting import Setting
from gadei_ps.sync import SyncModel

NEVER = -1.0  # no event has this time
TILE = 64  # number of run times that are drawn ahead for a learner
TILES = 2**21  # the same for all learners together, at most


class Kind(IntEnum):
    """Kinds of events. Events at the same time happen in this order."""

    END = 0
    APPLIED = 1
    COMMITTED = 2
    JOIN = 3
    DIE = 4
    GIVE_UP = 5


class Simulator:
    """One run of one model, which must be new. Call `run` once."""

    def __init__(self, model: SyncModel, setting: Setting, training: Descent | None = None) -> None:
        self._model = model
        self._setting = setting
        self._training = training
        self._outcome = Outcome(str(model))
        self._events: list[tuple[float, int]] = []  # a heap of times and keys
        size = self._size = setting.capacity
        self._server = Server(
            model, self._outcome, size, setting.server_s, self._schedule, training
        )
        self._tells = type(model).obsolete_below is not SyncModel.obsolete_below
        # Learners push once a wave, and may start mini-batches of the next wave.
        self._wave = model.wave
        self._outcome.wave = self._wave
        self._unpushed: dict[int, float] = {}  # seconds computed on an incomplete wave
        self._releases = model.releases
        # Columns by learner. begun: iterations ever begun, the index of the next run time. clock:
        # the clock at which it joined, plus the iterations ended since. started, due: start and end
        # of the current iteration. newest: the version pulled last, -1 before the first pull.
        # pulled: the version that the current gradient was begun with. warned: `begun` of the
        # iteration that it was notified to abandon. joined: when it joined.
        self._begun, self._clock, self._newest = [0] * size, [0] * size, [0] * size
        self._pulled, self._warned = [0] * size, [0] * size
        self._started, self._due, self._joined = [0.0] * size, [NEVER] * size, [NEVER] * size
        self._idle = [0.0] * size  # start of its wait for a grant, if it waits
        self._waiting: dict[int, None] = {}
        self._blocked: dict[int, float] = {}  # waits for a free slot: since when
        self._doomed: set[int] = set()  # will die at the end of the current event
        self._leaving: set[int] = set()  # dead, but has gradients to be applied on arrival
        self._returning: set[int] = set()  # of these: joins again when they are applied
        self._movers: dict[int, None] = {}  # may have a new grant although `releases` is the same
        self._tile = max(4, min(TILE, TILES // size))
        self._tiles: list[list[float]] = [[] for _ in range(size)]
        self._tile_at = [0] * size

    def run(self) -> Outcome:
        """Simulate until the end that the setting gives."""
        began = time.perf_counter()
        setting, outcome = self._setting, self._outcome
        self._open()
        size, due, doomed, training = self._size, self._due, self._doomed, self._training
        most_s = math.inf if setting.seconds is None else setting.seconds
        gradients = pushes = math.inf
        if setting.gradients is not None:
            gradients = setting.gradients / self._wave
        if setting.iterations is not None:
            pushes = setting.iterations * setting.learners / self._wave
        now = 0.0
        while self._events:
            moment, key = heapq.heappop(self._events)
            if moment > most_s:
                now = most_s
                break
            if key < size and due[key] != moment:
                continue  # the learner gave the iteration up, or died
            now = moment
            if key >= size:
                self._happen(Kind(key // size), key % size, now)
            elif key in doomed:
                self._die(key, now)
                self._settle(now)
            else:
                self._end(key, now)
            if training is not None:
                done = max(now / most_s, outcome.pushed / pushes, outcome.applied / gradients)
                training.add_point(now, min(done, 1.0), outcome.applied)
            if outcome.pushed >= pushes or outcome.applied >= gradients:
                break
        else:
            outcome.ended = "no learner is left"
        if training is not None:
            training.add_point(now, 1.0, outcome.applied)
        self._close(now)
        outcome.wall_s = time.perf_counter() - began
        return outcome

    def _open(self) -> None:
        faults = self._setting.faults
        for k in range(self._setting.learners):
            self._join(k, 0.0)
        for k, moment in faults.die:
            self._add(moment, Kind.DIE, k)
        for k, moment in faults.join:
            self._add(moment, Kind.JOIN, k)
        self._settle(0.0)

    def _close(self, now: float) -> None:
        outcome = self._outcome
        outcome.seconds = now
        outcome.waiting_s += self._waited(list(self._waiting), now)
        outcome.waiting_s += sum(now - since for since in self._blocked.values())
        outcome.member_s += sum(now - since for since in self._joined if since != NEVER)
        outcome.in_flight = self._server.in_flight

    def _schedule(self, moment: float, learner: int) -> None:
        """Ask for a call of the server's `finish`."""
        self._add(moment, Kind.APPLIED if learner >= 0 else Kind.COMMITTED, max(0, learner))

    def _add(self, moment: float, kind: Kind, k: int) -> None:
        heapq.heappush(self._events, (moment, kind * self._size + k))

    def _happen(self, kind: Kind, k: int, now: float) -> None:
        """Handle any event except the end of an iteration."""
        if kind == Kind.APPLIED:
            self._applied(k, now)
        elif kind == Kind.COMMITTED:
            self._server.finish(-1, now)
        elif kind == Kind.JOIN:
            if k in self._leaving:
                self._returning.add(k)
            elif self._joined[k] == NEVER:
                self._outcome.joins += 1
                self._join(k, now)
        elif kind == Kind.DIE:
            if self._joined[k] != NEVER:
                self._die(k, now)
        elif self._warned[k] == self._begun[k] and self._due[k] != NEVER:
            self._give_up(k, now)
        self._settle(now)

    # -- a learner's life ---------------------------------------------------------------------

    def _join(self, k: int, now: float) -> None:
        self._clock[k] = self._server.join(k, now) * self._wave
        self._joined[k] = now
        self._newest[k] = -1
        self._wait(k, now)

    def _wait(self, k: int, now: float) -> None:
        """The learner waits for a grant; `_settle` looks whether it has one already."""
        self._waiting[k] = None
        self._idle[k] = now
        self._movers[k] = None

    def _waited(self, learners: Sequence[int], now: float) -> float:
        return sum(now - self._idle[k] for k in learners)

    def _begin(self, k: int, now: float) -> None:
        """Start an iteration, with a pull where it needs one."""
        if self._newest[k] < 0 or self._is_last(k):
            self._newest[k] = self._server.version
            if self._training is not None:
                self._training.pull((k,))
        if self._wave == 1 or not self._clock[k] % self._wave:
            self._pulled[k] = self._newest[k]
            if self._training is not None:
                self._training.begin((k,), (self._begun[k],))
        end = now + self._next(k)
        self._add(end, Kind.END, k)
        self._started[k], self._due[k] = now, end
        self._begun[k] += 1

    def _is_last(self, k: int) -> bool:
        """Return whether the iteration that begins or ends now is the last of its wave."""
        return self._wave == 1 or not (self._clock[k] + 1) % self._wave

    def _next(self, k: int) -> float:
        """The learner's next run time. Draws more of them if needed."""
        at = self._begun[k] - self._tile_at[k]
        if at >= len(self._tiles[k]):
            at, self._tile_at[k] = 0, self._begun[k]
            ahead = np.arange(self._begun[k], self._begun[k] + self._tile)
            self._tiles[k] = self._draw(np.array([k]), ahead).tolist()
        took = self._tiles[k][at]
        if took < 0:
            self._doomed.add(k)
        return abs(took)

    def _draw(self, learners: IntArray, iterations: IntArray) -> FloatArray:
        """Run times. If the learner dies in the iteration: minus the time until its death."""
        times = self._setting.times.draw(learners, iterations)
        deaths, seed = self._setting.faults.deaths, self._setting.seed
        if deaths:
            dies = uniform(seed, Stream.DEATH, learners, iterations) < deaths
            moment = uniform(seed, Stream.MOMENT, learners, iterations)
            times = np.where(dies, -times * moment, times)
        return times

    def _end(self, k: int, now: float) -> None:
        self._due[k] = NEVER
        if not self._is_last(k):
            self._unpushed[k] = self._unpushed.get(k, 0.0) + now - self._started[k]
            self._clock[k] += 1
            self._wait(k, now)
        elif self._server.held(k) >= self._setting.slots:
            self._blocked[k] = now
            return
        else:
            self._push(k, now)
        self._settle(now)

    def _push(self, k: int, now: float, *, refused: bool = False) -> None:
        """Publish the learner's gradient. The learner then waits for its next grant."""
        self._clock[k] += 1
        self._unpushed.pop(k, None)
        self._wait(k, now)
        self._server.publish(k, now, self._pulled[k], self._started[k], refused)

    def _give_up(self, k: int, now: float) -> None:
        """Let the learner abandon its iteration and push an empty frame."""
        self._doomed.discard(k)
        self._due[k] = NEVER
        self._outcome.given_up += 1
        self._push(k, now, refused=True)

    def _die(self, k: int, now: float) -> None:
        """The learner dies. Its current iteration is lost; its pushed gradients are not."""
        outcome = self._outcome
        outcome.deaths += 1
        self._doomed.discard(k)
        if self._due[k] != NEVER or k in self._blocked:
            outcome.lost_iterations += 1
            outcome.lost_s += self._blocked.get(k, now) - self._started[k]
        outcome.lost_iterations += self._clock[k] % self._wave
        outcome.lost_s += self._unpushed.pop(k, 0.0)
        if k in self._waiting:
            del self._waiting[k]
            outcome.waiting_s += now - self._idle[k]
        outcome.waiting_s += now - self._blocked.pop(k, now)
        self._due[k] = NEVER
        outcome.member_s += now - self._joined[k]
        self._joined[k] = NEVER
        if self._model.on_arrival and self._server.held(k):
            self._leaving.add(k)
        else:
            self._server.leave(k, now)
        if self._setting.faults.return_s is not None:
            self._add(now + self._setting.faults.return_s, Kind.JOIN, k)

    # -- the server's answers -----------------------------------------------------------------

    def _applied(self, k: int, now: float) -> None:
        """Apply the learner's oldest gradient, which had queued for the server."""
        self._server.finish(k, now)
        if k in self._blocked:
            self._outcome.waiting_s += now - self._blocked.pop(k)
            self._push(k, now)
        if k in self._leaving and not self._server.held(k):
            self._leaving.remove(k)
            self._server.leave(k, now)
            if k in self._returning:
                self._returning.remove(k)
                self._outcome.joins += 1
                self._join(k, now)
        self._movers[k] = None

    def _settle(self, now: float) -> None:
        """Start the next iteration of each waiting learner that has a grant for it."""
        if self._server.busy:
            return
        model, clock, waiting = self._model, self._clock, self._waiting
        grant = model.mini_batches
        if model.releases != self._releases:
            self._releases = model.releases
            if self._tells:
                self._tell(now)
            ready = [k for k in waiting if clock[k] < grant(k)]
        else:
            ready = [k for k in self._movers if k in waiting and clock[k] < grant(k)]
        self._movers.clear()
        if ready:
            self._outcome.waiting_s += self._waited(ready, now)
            if len(ready) == len(waiting):
                waiting.clear()
            else:
                for k in ready:
                    del waiting[k]
            for k in ready:
                self._begin(k, now)

    def _tell(self, now: float) -> None:
        """Notify stragglers that their gradients are no longer wanted."""
        how = self._setting.give_up
        if how.seconds is None:
            return
        due, clock, begun, warned = self._due, self._clock, self._begun, self._warned
        wanted = self._model.obsolete_below
        keys = [
            k
            for k in self._model.learners
            if due[k] != NEVER and warned[k] != begun[k] and wanted(k) > clock[k]
        ]
        for k in keys:
            warned[k] = begun[k]
            late = how.seconds + how.share * (due[k] - self._started[k])
            self._add(now + late, Kind.GIVE_UP, k)
