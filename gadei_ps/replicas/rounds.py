"""The rounds of a replica: train, copy, exchange with the group, and apply what is committed.

One thread does them, by what the coordinator has replied (`groups/coordinator.py`); another one
reports from time to time that the replica lives; a third one moves models between groups. Where the
coordinator cannot be reached, learners train on, and nothing is exchanged.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from gadei_ps.errors import (
    ControlError,
    ExchangeFailed,
    GadeiError,
    JobNotFound,
    UsageError,
    in_words,
)
from gadei_ps.groups import compress, reading
from gadei_ps.groups.compress import Feedback, Wire
from gadei_ps.groups.coordinator import NOT_FINITE, Reply, Report
from gadei_ps.groups.member import Member
from gadei_ps.groups.parts import Floats, is_finite
from gadei_ps.groups.shares import Span, Work
from gadei_ps.replicas.config import Run
from gadei_ps.replicas.link import Link
from gadei_ps.replicas.owning import OwningTraining
from gadei_ps.replicas.training import Copied, JobTraining

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from gadei_ps.replicas.transport import Transport

PATIENCE_S = 3600.0
"""Time limit until a job has a model (s)."""
AWAY_S = 2.0
"""Time without the coordinator after which a copy is dropped, and learners train on (s)."""
AGAIN_S = 0.1
MOST_KEPT = 2
"""Number of models of another group that are kept."""
_RANDOM_BITS = 48  # so that programs that read the status as JSON keep all of them

Model = tuple[int, int]
"""A model of another group: the group and its version."""


@dataclass
class Held:
    """The result of an exchange that is not committed yet."""

    key: tuple[int, int]
    aggregate: Floats
    models: list[Floats]


@dataclass
class State:
    """The state of the group after so many rounds, as this replica has it."""

    rounds: int
    weights: Floats


class Rejoins(Exception):
    """The group continues without this incarnation."""


@dataclass
class Facts:
    """Facts on the exchange that `group status` prints."""

    state: str = "joining"
    incarnation: int = 0
    done: tuple[int, int] = (0, 0)
    """Rounds, and a checksum of the group's weights after them."""
    generation: int = 0
    last: float | None = None
    why: str | None = None
    note: str | None = None
    sent: int = 0
    """Bytes that were sent in exchanges."""
    members: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts, for JSON."""
        facts = dict(vars(self))
        last, (rounds, checksum) = facts.pop("last"), facts.pop("done")
        facts |= {"rounds": rounds, "checksum": checksum}
        return facts | {"last_round_s": None if last is None else time.monotonic() - last}


class Rounds:
    """Exchange of the weights of a replica's job with its group."""

    def __init__(
        self, run: Run, number: int, group: int, job: str, noted: Callable[[str], None]
    ) -> None:
        """Prepare the exchange of replica `number`. noted: receives lines for users."""
        self._run, self._number, self._group, self._job = run, number, group, job
        self._noted = noted
        self.facts = Facts()
        self._rule = reading.parse(run.rule)
        self._is_source = any(group in run.sources(one) for one in range(len(run.groups)))
        report = Report(self._member(), secrets.randbits(_RANDOM_BITS))
        self._link = Link(run.name, number, group, report)
        self._training: JobTraining | None = None
        self._transport: Transport | None = None
        self._copied: Copied | None = None
        self._held: Held | None = None
        self._state: State | None = None
        self._is_over, self._has_left = threading.Event(), threading.Event()
        self._models: dict[Model, bytes] = {}
        self._publishing: deque[Floats] = deque(maxlen=1)
        self._has_models = threading.Event()
        self._feedback: Feedback | None = None

    def _member(self) -> Member:
        return Member(str(self._number), secrets.randbits(_RANDOM_BITS))

    def start(self, failed: Callable[[str], None]) -> None:
        """Begin. failed: is called with the reason if the replica cannot continue."""
        self._failed = failed
        for target in (self._work, self._beat, self._carry):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def leave(self, patience_s: float) -> None:
        """Leave the group, and wait until it continues without this replica."""
        self._link.set(leaves=True)
        self._has_left.wait(patience_s)

    def end(self) -> None:
        """Stop all exchanges. The job may end from here on."""
        self._is_over.set()
        self._has_models.set()

    # -- threads ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Report that the replica lives."""
        while not self._is_over.wait(self._run.silence_s / 6):
            if not self._link.report.facts:
                continue  # its job has no model yet, so nobody knows whether it fits
            self._link.sync()
            if self._copied is not None and self._training is not None:
                with contextlib.suppress(GadeiError):  # the other thread sees it
                    self._training.check()

    def _work(self) -> None:
        run = self._run
        given = self._job, run.every, run.overlap, PATIENCE_S, self._note
        try:
            if run.divide:
                self._training = OwningTraining(*given, self._is_over.is_set)
            else:
                self._training = JobTraining(*given)
            self.facts.note = None  # that its job had no model
            # PyTorch loads for seconds, in which others would wait for a member.
            import gadei_ps.replicas.transport  # noqa: F401

            self._enroll(self._link.report.member)
            self._link.set(facts=self._same(self._training))
            while not self._is_over.is_set():
                try:
                    self._act()
                except Rejoins:
                    self._rejoin()
        except Exception as error:  # members must not wait for a replica that does no more
            is_end = isinstance(error, GadeiError) and not isinstance(error, UsageError)
            if not (self._is_over.is_set() or (is_end and self._job_has_ended())):
                self.facts.why = in_words(error)
                self._failed(in_words(error))
        finally:
            self._has_left.set()
            if self._training is not None:
                with contextlib.suppress(Exception):  # the job may have ended
                    self._training.close()

    def _job_has_ended(self) -> bool:
        try:
            assert self._training is not None
            self._training.check()
        except (GadeiError, AssertionError):
            return True
        return False

    def _same(self, training: JobTraining) -> dict[str, Any]:
        """Return the settings that must be equal in a group."""
        return {
            "values": training.values,
            "rule": self._run.rule,
            "wire": self._run.wire.value,
            "divide": self._run.divide,
        }

    def _note(self, line: str) -> None:
        self.facts.note = line
        self._noted(line)

    # -- rounds ----------------------------------------------------------------------------------

    def _act(self) -> None:
        """Do what the newest reply asks for; wait if there is nothing to do."""
        reply = self._link.reply
        assert self._training is not None
        self._training.check()
        if reply is None or not self._is_reached():
            self._pause()
            return
        if reply.mistake is not None:
            raise UsageError(reply.mistake)
        if reply.replaced:
            raise UsageError("another process of this replica has taken its place")
        if reply.left:
            self._has_left.set()
            self.facts.state = "left"
        if reply.rejoin:
            raise Rejoins
        if reply.place is None or (not self._settle(reply) and not self._advance(reply)):
            self._pause()

    def _is_reached(self) -> bool:
        """Return whether the coordinator answers. Otherwise learners must not wait for it."""
        if self._link.silent_s() < AWAY_S:
            return True
        self.facts.state = "away"
        if self._training is not None and self._copied is not None:
            if self._held is None:
                self._drop()
            else:
                self._training.resume()
        return False

    def _pause(self) -> None:
        """Wait for a change."""
        if not self._link.sync(waits=True):
            self._is_over.wait(AGAIN_S)

    def _settle(self, reply: Reply) -> bool:
        """Apply what is committed, and enter a new generation. Returns whether it has."""
        held, state = self._held, self._state
        is_committed = held is not None and held.key == reply.committed
        if held is not None and is_committed and state and state.rounds == reply.rounds - 1:
            self._apply(held, reply)
            return True
        if held is not None and held.key[0] != reply.generation:
            self._held = None
            self._link.set(ready=None)
        if self._link.report.generation != reply.generation:
            self._transport = None
            self.facts.generation = reply.generation
            self.facts.members = [int(one.replica) for one in reply.members]
            self._link.set(generation=reply.generation, connected=0)
            self._link.sync()
            return True
        return False

    def _advance(self, reply: Reply) -> bool:
        """Take a member's next step under this generation. Returns whether there was one."""
        report = self._link.report
        if not reply.connects or report.failed == reply.generation:
            return False
        if report.connected != reply.generation:
            try:
                self._connect(reply)
            except ExchangeFailed as error:
                self._fail(error)
            return True
        if self._state is None:
            return False
        self.facts.state = "member"
        self.facts.why = None
        if reply.go is not None and reply.go.round == self._state.rounds and self._held is None:
            if self._copied is None:  # it was dropped meanwhile
                self._arrive()
                return True
            try:
                self._exchange(reply)
            except ExchangeFailed as error:
                self._fail(error)
            return True
        if self._copied is None and self._state.rounds == reply.rounds:
            return self._train()
        return False

    def _fail(self, error: ExchangeFailed) -> None:
        """Report a failed exchange, which the next generation repeats."""
        self.facts.why = f"exchange failed: {in_words(error)}"
        self._transport = None
        self._link.set(failed=self._link.report.generation)
        self._link.sync()

    def _connect(self, reply: Reply) -> None:
        """Make the process group of a generation; send the group's state to joining members."""
        assert reply.place is not None and self._training is not None
        if reply.place == reply.source and self._state is None:
            self._begin(reply)
        limit_s = max(self._run.silence_s, 2.0)
        if len(reply.members) > 1:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            from gadei_ps.replicas.transport import Transport

            host, port = self._link.store
            prefix = f"{self._group}/{reply.state['epoch']}/{reply.generation}"
            try:
                store = TCPStore(
                    host, port, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
                )
            except RuntimeError as error:
                raise ExchangeFailed(in_words(error)) from None
            self._transport = Transport(
                store, prefix, reply.place, len(reply.members), self._link.host, limit_s
            )
            places = [reply.members.index(one) for one in sorted(reply.newcomers)]
            if reply.place == reply.source:
                self._give(places)
            elif reply.place in places:
                self._take(reply)
        self._link.set(connected=reply.generation)
        self._link.sync()

    def _begin(self, reply: Reply) -> None:
        """Begin as the first member of a group, with the weights that the job has."""
        assert self._training is not None
        self._training.begin()
        copied = self._training.copy()
        self._training.drop()
        if not copied.samples:
            raise UsageError(NOT_FINITE)
        weights = copied.weights
        self._rule.begin(weights)
        self._state = State(0, weights)
        self.facts.done = 0, zlib.crc32(weights.data)
        self._link.set(rounds=0, lineage=reply.lineage)

    def _give(self, places: list[int]) -> None:
        if not places:
            return
        assert self._state is not None and self._transport is not None
        arrays, counts = self._rule.state()
        state = {"rounds": self._state.rounds, "arrays": list(arrays), "counts": counts}
        text = json.dumps(state).encode()
        self._transport.send_state(text, [self._state.weights, *arrays.values()], places)

    def _take(self, reply: Reply) -> None:
        assert reply.source is not None and self._transport is not None
        assert self._training is not None
        text, (weights, *arrays) = self._transport.receive_state(reply.source)
        state = json.loads(text)
        self._rule.restore(dict(zip(state["arrays"], arrays, strict=True)), state["counts"])
        self._training.begin()
        self._training.write(weights)
        self._finish(State(state["rounds"], weights), reply)

    def _train(self) -> bool:
        """Wait for the gradients of a round, and arrive. Returns whether it has."""
        assert self._training is not None
        changes = self._link.changes
        while not self._training.is_trained():
            self._training.check()
            if self._link.changes != changes or not self._is_reached():
                return False
            if self._is_over.wait(self._training.look_s()):
                return False
        self._arrive()
        return True

    def _arrive(self) -> None:
        assert self._training is not None and self._state is not None
        copied = self._copied = self._training.copy()
        self._link.set(arrived=self._state.rounds, samples=copied.samples, copied=copied.report)
        self._link.sync()

    def _drop(self) -> None:
        assert self._training is not None
        self._training.drop()
        self._copied = self._held = None
        self._link.set(arrived=None, ready=None, copied=None)

    def _exchange(self, reply: Reply) -> None:
        assert reply.go is not None and reply.place is not None and self._copied is not None
        if bool(reply.go.weights[reply.place]) != bool(self._copied.samples):
            raise ExchangeFailed("the copy has changed since")
        copied, out = self._copied.weights, np.empty(len(self._copied.weights), np.float32)
        if self._transport is not None:
            before = self._transport.sent
            self._transport.aggregate(copied, reply.go.weights, out)
            self.facts.sent += self._transport.sent - before
        elif len(reply.members) == 1:
            out[:] = copied
        else:
            raise ExchangeFailed("the process group of this generation has failed")
        models = [self._decoded(one) for one in reply.go.models]
        key = (reply.generation, reply.go.round)
        checksum = zlib.crc32(out.data)
        for one in models:
            checksum = zlib.crc32(one.data, checksum)
        self._held = Held(key, out, models)
        self._link.set(ready=key, checksum=checksum)
        self._link.sync()

    def _decoded(self, model: Model) -> Floats:
        assert self._copied is not None
        data = self._models.get(model)
        if data is None:
            raise ExchangeFailed("a model of another group is gone")
        values = np.empty(len(self._copied.weights), np.float32)
        compress.decode(np.frombuffer(data, np.uint8), self._run.wire, values)
        return values

    def _apply(self, held: Held, reply: Reply) -> None:
        """Continue with the result of a committed round, once."""
        assert self._training is not None
        weights = held.aggregate
        own = None if self._rule.sends_result else weights.copy()
        self._rule.end_round(weights, held.models)
        if not is_finite(weights):
            raise UsageError(NOT_FINITE)
        self._training.write(weights)
        self._copied = self._held = None
        self._finish(State(held.key[1] + 1, weights), reply)
        if self._is_source and reply.place == 0:
            self._publishing.append(weights if own is None else own)
            self._has_models.set()

    def _finish(self, state: State, reply: Reply) -> None:
        """Record that this replica has the state of the group."""
        self._state = state
        self.facts.last = time.monotonic()
        self.facts.done = state.rounds, zlib.crc32(state.weights.data)
        facts = {"rounds": state.rounds, "lineage": reply.lineage}
        self._link.set(**facts, arrived=None, ready=None, copied=None)
        assert self._training is not None
        if state.rounds == reply.rounds:
            self._own(reply)
        self._link.sync()

    def _own(self, reply: Reply) -> None:
        if not self._run.divide:
            return
        assert isinstance(self._training, OwningTraining)
        theirs, ours = reply.state["shares"]["work"], self._training.work()
        if theirs is not None and Work(*theirs) != ours:
            raise UsageError(
                f"the group divides {Work(*theirs)}, but the job of this replica has {ours}: give "
                "all replicas the same data, batch size, epochs and seed"
            )
        self._training.own([Span(*one) for one in reply.owned], reply.done)

    def _rejoin(self) -> None:
        """Join again, as a new member without state."""
        assert self._training is not None
        self._note("the group has continued without this replica: it joins again")
        self.facts.state = "joining"
        self._copied = self._held = self._state = self._transport = None
        report = self._link.report
        member = self._member()
        self._enroll(member)  # before others wait for it
        self._link.set(
            member=member,
            generation=0,
            rounds=None,
            connected=0,
            failed=0,
            arrived=None,
            ready=None,
            copied=None,
            state=report.state,
        )
        self._link.forget()
        self._link.sync()

    def _enroll(self, member: Member) -> None:
        """Begin as a member without state."""
        assert self._training is not None
        self.facts.incarnation = member.incarnation
        self._training.rejoin(member)
        self._training.begin()

    # -- models between groups -------------------------------------------------------------------

    def _carry(self) -> None:
        """Publish the newest model of the group, and fetch those of its neighbours."""
        began = 0
        while not self._is_over.is_set():
            self._has_models.wait(self._run.silence_s / 6)
            self._has_models.clear()
            if began != self._link.began:  # versions are those of one coordinator
                began = self._link.began
                self._models.clear()
                self._link.set(models=(), lost=())
            try:
                if self._publishing:
                    self._link.publish(self._encoded(self._publishing.pop()))
                reply = self._link.reply
                for model in reply.aims if reply is not None and reply.place is not None else ():
                    self._fetch((model[0], model[1]))
            except (JobNotFound, ControlError):
                self._is_over.wait(AGAIN_S)
            except Exception as error:
                self.facts.why = in_words(error)
                self._failed(in_words(error))
                return

    def _fetch(self, model: Model) -> None:
        if model in self._models or model in self._link.report.lost:
            return
        try:
            data = self._link.fetch(*model)
        except ControlError:  # its owner is gone, or Ray
            self._link.set(lost=[model])
            return
        kept = [one for one in self._models if one[0] == model[0]]
        go = self._link.reply.go if self._link.reply is not None else None
        needed = set(go.models) if go is not None else set()
        for old in kept[: max(0, len(kept) - MOST_KEPT + 1)]:
            if old not in needed:
                del self._models[old]
        self._models[model] = data
        self._link.set(models=list(self._models))
        self._link.sync()

    def _encoded(self, weights: Floats) -> bytes:
        if self._run.wire is Wire.FLOAT32:
            return weights.tobytes()
        if self._feedback is None or len(self._feedback.residual) != len(weights):
            self._feedback = Feedback(len(weights), self._run.wire)
        data = np.empty(compress.size(len(weights), self._run.wire), np.uint8)
        self._feedback.encode(weights, data)
        return data.tobytes()
