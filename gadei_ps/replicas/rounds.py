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
from dataclasses import dataclass
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
from gadei_ps.groups.coordinator import NOT_FINITE, Go, Model, Reply, Report
from gadei_ps.groups.parts import Floats, is_finite
from gadei_ps.groups.shares import Member, Shares
from gadei_ps.replicas.config import Run
from gadei_ps.replicas.link import Link
from gadei_ps.replicas.owning import OwningTraining
from gadei_ps.replicas.training import Copied, JobTraining

if TYPE_CHECKING:  # PyTorch takes seconds to load
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from gadei_ps.replicas.transport import Transport

PATIENCE_S = 3600.0
"""Time limit until a job has a model (s)."""
AWAY_S = 2.0
"""Time without the coordinator after which a copy is dropped, and learners train on (s)."""
AGAIN_S = 0.1
_RANDOM_BITS = 48  # so that programs that read the status as JSON keep all of them


@dataclass
class Held:
    """The result of an exchange that is not committed yet, and models of other groups."""

    aggregate: Floats
    models: list[Floats]


class Rejoins(Exception):
    """The group continues without this incarnation."""


@dataclass
class Facts:
    """Facts on the exchange that `group status` prints."""

    state: str = "joining"
    incarnation: int = 0
    done: tuple[int, int] = (0, 0)
    """Rounds, and a checksum of the group's weights after them."""
    last: float | None = None
    why: str | None = None
    note: str | None = None
    sent: int = 0
    """Bytes that were sent in exchanges."""

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
        self._link = Link(run.name, number, report)
        self._training: JobTraining  # set once the job has a model
        self._limit_s = max(run.silence_s, 2.0)
        self._store: TCPStore | None = None
        """The store of this generation, if this replica is its first member."""
        self._transport: Transport | None = None
        self._held: Held | None = None
        """The result of an exchange; the report has its round in `ready`."""
        self._weights: Floats | None = None
        """The group's weights after the rounds that are in the report."""
        self._is_over, self._has_left = threading.Event(), threading.Event()
        self._models: dict[Model, bytes] = {}
        self._publishing: deque[Floats] = deque(maxlen=1)
        self._has_models = threading.Event()
        self._feedback: Feedback | None = None

    @property
    def version(self) -> tuple[int, ...]:
        """Epoch and version of the newest state of the group that this replica knows, if any."""
        state = self._link.report.state
        return () if state is None else (state.epoch, state.version)

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
            if self._training.copied is not None:
                with contextlib.suppress(GadeiError):  # the other thread sees it
                    self._training.check()

    def _work(self) -> None:
        run = self._run
        training: JobTraining | None = None
        given = self._job, run.every, run.overlap, PATIENCE_S, self._note
        try:
            if run.divide:
                training = OwningTraining(*given, self._is_over.is_set)
            else:
                training = JobTraining(*given)
            self._training = training
            self.facts.note = None  # that its job had no model
            # PyTorch loads for seconds, in which others would wait for a member.
            import gadei_ps.replicas.transport  # noqa: F401

            self._enroll(self._link.report.member)
            self._link.set(facts=self._same())
            while not self._is_over.is_set():
                try:
                    self._act()
                except Rejoins:
                    self._rejoin()
        except Exception as error:  # members must not wait for a replica that does no more
            is_end = isinstance(error, GadeiError) and not isinstance(error, UsageError)
            if not (self._is_over.is_set() or (is_end and _has_ended(training))):
                self.facts.why = in_words(error)
                self._failed(in_words(error))
        finally:
            self._has_left.set()
            if training is not None:
                with contextlib.suppress(Exception):  # the job may have ended
                    training.close()

    def _same(self) -> dict[str, Any]:
        """Return the settings that must be equal in a group."""
        return {
            "values": self._training.values,
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
        try:
            if reply.place is None or not (self._settle(reply) or self._advance(reply)):
                self._pause()
        except ExchangeFailed as error:  # the next generation repeats it
            self.facts.why = f"exchange failed: {in_words(error)}"
            self._transport = None
            self._report(failed=reply.state.generation)

    def _is_reached(self) -> bool:
        """Return whether the coordinator answers. Otherwise learners must not wait for it."""
        if self._link.silent_s() < AWAY_S:
            return True
        self.facts.state = "away"
        if self._held is not None:
            self._training.resume()
        elif self._training.copied is not None:
            self._drop()
        return False

    def _pause(self) -> None:
        """Wait for a change."""
        if not self._link.sync(waits=True):
            self._is_over.wait(AGAIN_S)

    def _report(self, **facts: Any) -> None:
        self._link.set(**facts)
        self._link.sync()

    def _settle(self, reply: Reply) -> bool:
        """Apply what is committed, and enter a new generation. Returns whether it has."""
        held, report, group = self._held, self._link.report, reply.state
        if held is not None and report.ready is not None:
            if report.ready == group.committed and report.rounds == group.rounds - 1:
                self._apply(held, reply)
                return True
            if report.ready[0] != group.generation:
                self._held = None
                self._link.set(ready=None)
        if report.generation == group.generation:
            return False
        self._transport = self._store = None
        if reply.place == 0 and len(group.members) > 1:
            from gadei_ps.replicas.transport import store_at

            self._store = store_at(self._link.host, 0, self._limit_s)
        address = self._store and (self._link.host, self._store.port)
        self._report(generation=group.generation, connected=0, store=address)
        return True

    def _advance(self, reply: Reply) -> bool:
        """Take a member's next step under this generation. Returns whether there was one."""
        report, generation = self._link.report, reply.state.generation
        if not reply.connects or report.failed == generation:
            return False
        if report.connected != generation:
            self._connect(reply)
            return True
        if self._weights is None:
            return False
        self.facts.state = "member"
        self.facts.why = None
        if reply.go is not None and reply.go.round == report.rounds and self._held is None:
            if self._training.copied is None:  # it was dropped meanwhile
                self._arrive()
            else:
                self._exchange(reply, reply.go, self._training.copied)
            return True
        return (
            self._training.copied is None and report.rounds == reply.state.rounds and self._train()
        )

    def _connect(self, reply: Reply) -> None:
        """Make the process group of a generation; send the group's state to joining members."""
        group, us = reply.state, self._link.report.member
        assert reply.place is not None
        if us == group.source and self._weights is None:
            self._begin(group.lineage)
        if len(group.members) > 1:
            from gadei_ps.replicas.transport import Transport, store_at

            assert reply.store is not None
            store = self._store or store_at(*reply.store, self._limit_s)
            count, host = len(group.members), self._link.host
            transport = Transport(store, reply.place, count, host, self._limit_s)
            self._transport = transport
            if us == group.source and group.joining:
                self._give(transport, [group.members.index(one) for one in group.joining])
            elif us in group.joining and group.source is not None:
                self._take(transport.receive_state(group.members.index(group.source)), reply)
        self._report(connected=group.generation)

    def _begin(self, lineage: int) -> None:
        """Begin as the first member of a group, with the weights that the job has."""
        self._training.begin()
        copied = self._training.copy()
        self._training.drop()
        if not copied.samples:
            raise UsageError(NOT_FINITE)
        self._rule.begin(copied.weights)
        self._weights = copied.weights
        self.facts.done = 0, zlib.crc32(copied.weights.data)
        self._link.set(rounds=0, lineage=lineage)

    def _give(self, transport: Transport, places: list[int]) -> None:
        assert self._weights is not None
        arrays, counts = self._rule.state()
        state = {"rounds": self._link.report.rounds, "arrays": list(arrays), "counts": counts}
        text = json.dumps(state).encode()
        transport.send_state(text, [self._weights, *arrays.values()], places)

    def _take(self, received: tuple[bytes, list[Floats]], reply: Reply) -> None:
        text, (weights, *arrays) = received
        state = json.loads(text)
        self._rule.restore(dict(zip(state["arrays"], arrays, strict=True)), state["counts"])
        self._training.begin()
        self._training.write(weights)
        self._finish(state["rounds"], weights, reply)

    def _train(self) -> bool:
        """Wait for the gradients of a round, and arrive. Returns whether it has."""
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
        copied = self._training.copy()
        rounds = self._link.report.rounds
        self._report(arrived=rounds, samples=copied.samples, copied=copied.report)

    def _drop(self) -> None:
        self._training.drop()
        self._held = None
        self._link.set(arrived=None, ready=None, copied=None)

    def _exchange(self, reply: Reply, go: Go, copied: Copied) -> None:
        assert reply.place is not None
        if bool(go.weights[reply.place]) != bool(copied.samples):
            raise ExchangeFailed("the copy has changed since")
        out = np.empty_like(copied.weights)
        if self._transport is not None:
            before = self._transport.sent
            self._transport.aggregate(copied.weights, go.weights, out)
            self.facts.sent += self._transport.sent - before
        elif len(reply.state.members) == 1:
            out[:] = copied.weights
        else:
            raise ExchangeFailed("the process group of this generation has failed")
        held = self._held = Held(out, [self._decoded(one, len(out)) for one in go.models])
        checksum = zlib.crc32(out.data)
        for one in held.models:
            checksum = zlib.crc32(one.data, checksum)
        self._report(ready=(reply.state.generation, go.round), checksum=checksum)

    def _decoded(self, model: Model, count: int) -> Floats:
        data = self._models.get(model)
        if data is None:
            raise ExchangeFailed("a model of another group is gone")
        values = np.empty(count, np.float32)
        compress.decode(np.frombuffer(data, np.uint8), self._run.wire, values)
        return values

    def _apply(self, held: Held, reply: Reply) -> None:
        """Continue with the result of a committed round, once."""
        weights = held.aggregate
        own = None if self._rule.sends_result else weights.copy()
        self._rule.end_round(weights, held.models)
        if not is_finite(weights):
            raise UsageError(NOT_FINITE)
        self._training.write(weights)
        self._held = None
        self._finish((self._link.report.rounds or 0) + 1, weights, reply)
        if self._is_source and reply.place == 0:
            self._publishing.append(weights if own is None else own)
            self._has_models.set()

    def _finish(self, rounds: int, weights: Floats, reply: Reply) -> None:
        """Record that this replica has the weights of the group after so many rounds."""
        self._weights = weights
        self.facts.last = time.monotonic()
        self.facts.done = rounds, zlib.crc32(weights.data)
        facts = {"rounds": rounds, "lineage": reply.state.lineage}
        self._link.set(**facts, arrived=None, ready=None, copied=None)
        if rounds == reply.state.rounds and reply.state.shares is not None:
            self._own(reply.state.shares)
        self._link.sync()

    def _own(self, shares: Shares) -> None:
        assert isinstance(self._training, OwningTraining)
        ours = self._training.work()
        if shares.work is not None and shares.work != ours:
            raise UsageError(
                f"the group divides {shares.work}, but the job of this replica has {ours}: give "
                "all replicas the same data, batch size, epochs and seed"
            )
        self._training.own(shares.of(self._link.report.member), shares.done)

    def _rejoin(self) -> None:
        """Join again, as a new member without state."""
        self._note("the group has continued without this replica: it joins again")
        self.facts.state = "joining"
        self._held = self._weights = self._transport = None
        member = self._member()
        self._enroll(member)  # before others wait for it
        self._link.set(
            member=member,
            generation=0,
            store=None,
            rounds=None,
            connected=0,
            failed=0,
            arrived=None,
            ready=None,
            copied=None,
        )
        self._link.forget()
        self._link.sync()

    def _enroll(self, member: Member) -> None:
        """Begin as a member without state."""
        self.facts.incarnation = member.incarnation
        self._training.rejoin()
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
                    self._fetch(model)
            except (JobNotFound, ControlError):
                self._is_over.wait(AGAIN_S)
            except Exception as error:
                self.facts.why = in_words(error)
                self._failed(in_words(error))
                return

    def _fetch(self, model: Model) -> None:
        """Fetch a model; keep the one before it, and those that a round is to take."""
        if model in self._models or model in self._link.report.lost:
            return
        try:
            data = self._link.fetch(*model)
        except ControlError:  # its owner is gone, or Ray
            self._link.set(lost=[model])
            return
        reply = self._link.reply
        needed = reply.go.models if reply is not None and reply.go is not None else ()
        for old in [one for one in self._models if one[0] == model[0]][:-1]:
            if old not in needed:
                del self._models[old]
        self._models[model] = data
        self._report(models=list(self._models))

    def _encoded(self, weights: Floats) -> bytes:
        if self._run.wire is Wire.FLOAT32:
            return weights.tobytes()
        if self._feedback is None:
            self._feedback = Feedback(len(weights), self._run.wire)
        data = np.empty(compress.size(len(weights), self._run.wire), np.uint8)
        self._feedback.encode(weights, data)
        return data.tobytes()


def _has_ended(training: JobTraining | None) -> bool:
    """Return whether the job of a replica has ended, or never begun."""
    if training is None:
        return True
    try:
        training.check()
    except GadeiError:
        return True
    return False
