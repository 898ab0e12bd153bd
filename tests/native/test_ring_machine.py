"""The ring's protocol: any order of what learner, shards and time do."""

from __future__ import annotations

from collections import deque

from clients.ring import GENERATION, Ring
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gadei_ps import _native
from gadei_ps.memory.layout import AHEAD, Stop

STOPPED, EVICTED = _native.PS_STOPPED, _native.PS_EVICTED


class RingMachine(RuleBasedStateMachine):
    """Any order of both sides' steps against plain queues."""

    @initialize(
        shards=st.integers(1, 64),
        slots=st.integers(1, 8),
        begin=st.sampled_from([0, 1, 2**31, 2**32 - 5, 2**63]),
    )
    def make(self, shards: int, slots: int, begin: int) -> None:
        self.ring = Ring(shards, slots, begin)
        self.begin = begin
        self.published: list[int] = []  # the first byte of each payload
        self.done = [0] * shards  # frames that each shard has consumed
        self.handed: deque[int] = deque()
        self.batches = 0
        self.verdict = 0
        self.stop = False

    @property
    def free(self) -> bool:
        return len(self.published) - min(self.done) < self.ring.slots

    @rule(mark=st.integers(0, 255))
    def push(self, mark: int) -> None:
        sequence = self.begin + len(self.published)
        claimed = self.ring.claim()
        if self.verdict or not self.free:
            assert claimed == (self.verdict or _native.PS_TIMEOUT)
            return
        assert claimed == self.ring.slot(sequence)
        self.ring.payload(sequence)[:] = mark
        assert self.ring.publish(clock=len(self.published)) == sequence
        self.published.append(mark)

    @rule(mark=st.integers(0, 255))
    def die_while_writing(self, mark: int) -> None:
        """Die with a claimed slot that is not published; the next claim gets the slot."""
        if not self.verdict and self.free:
            assert self.ring.claim() == self.ring.slot(self.begin + len(self.published))
            self.ring.payload(self.begin + len(self.published))[:] = mark

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        behind = [s for s, done in enumerate(self.done) if done < len(self.published)]
        if not behind:
            return
        shard = data.draw(st.sampled_from(behind))
        sequence = self.begin + self.done[shard]
        assert self.ring.frame(sequence)["sequence"] == sequence
        assert (self.ring.payload(sequence) == self.published[self.done[shard]]).all()
        self.ring.release(shard)
        self.done[shard] += 1

    @rule()
    def consume_all(self) -> None:
        for shard, done in enumerate(self.done):
            for _ in range(len(self.published) - done):
                self.ring.release(shard)
            self.done[shard] = len(self.published)

    @precondition(lambda self: len(self.handed) < AHEAD)
    @rule()
    def hand_out(self) -> None:
        self.ring.hand_out(self.batches << 32 | 1)
        self.handed.append(self.batches << 32 | 1)
        self.batches += 1

    @rule()
    def take(self) -> None:
        taken = self.ring.take()
        if self.stop:
            assert taken == _native.PS_FINISHED
        elif self.handed:
            assert taken == self.handed.popleft()
        else:
            assert taken == (self.verdict or _native.PS_TIMEOUT)

    @rule(verdict=st.sampled_from([0, 0, STOPPED, EVICTED]))
    def judge(self, verdict: int) -> None:
        self.verdict = verdict
        self.stop = verdict == STOPPED
        self.ring.control["stop"] = Stop.NOW if self.stop else Stop.GO
        self.ring.entry["wanted"] = 0 if verdict == EVICTED else GENERATION

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ring"):
            return
        assert self.ring.head() == self.begin + len(self.published)
        assert [self.ring.tail(s) - self.begin for s in range(len(self.done))] == self.done
        last = self.begin + min(self.done) - 1
        if min(self.done):
            assert self.ring.wait_applied(last) == 0
        assert self.ring.wait_applied(last + 1) == (self.verdict or _native.PS_TIMEOUT)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
