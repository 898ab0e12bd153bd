"""The work ledger: every batch is answered once an epoch, whichever learners die or are dropped."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gadei_ps.memory import layout
from gadei_ps.memory.layout import NO_BATCH, Work, batch_id
from gadei_ps.server import ledger

pytestmark = pytest.mark.usefixtures("compiled")

ROWS = [0, 1, 2, 255]


def control(batches: int, epochs: int) -> np.ndarray:
    """A control segment with that much work."""
    c = np.zeros(1, layout.CONTROL)
    c["roster"]["outstanding"] = NO_BATCH
    c["batches"], c["epochs"], c["work"] = batches, epochs, Work.WORKING
    return c


class Ledger(RuleBasedStateMachine):
    """Learners take, answer, lose and die at random; the machine keeps books of its own."""

    @initialize(batches=st.integers(1, 6), epochs=st.integers(1, 5), ahead=st.integers(1, 16))
    def begin(self, batches: int, epochs: int, ahead: int) -> None:
        self.batches, self.epochs, self.ahead = batches, epochs, ahead
        self.c = control(batches, epochs)
        self.held: dict[int, list[int]] = {row: [] for row in ROWS}
        self.waiting: list[int] = []  # to be handed out again
        self.answered: Counter[int] = Counter()
        self.requeued = 0
        self.most_held = 0

    @rule(row=st.sampled_from(ROWS))
    def hand_out(self, row: int) -> None:
        if len(self.held[row]) >= self.ahead:
            return
        batch = int(ledger.assign(self.c, row))
        if batch == NO_BATCH:
            assert not self.waiting, "a batch is to be handed out again"
            done = int(self.c[0]["epochs_done"])
            last = batch_id(done + 1, self.batches - 1)
            begun = int(self.c[0]["next"])
            assert begun > min(last, batch_id(self.epochs - 1, self.batches - 1)), (
                "there was a batch to hand out"
            )
            return
        if self.waiting:
            self.waiting.remove(batch)
        everywhere = [*self.waiting, *(one for held in self.held.values() for one in held)]
        assert batch not in everywhere, "with two learners at once"
        assert not self.answered[batch]
        assert batch >> 32 < self.epochs
        assert batch & 0xFFFFFFFF < self.batches
        self.held[row].append(batch)

    @rule(row=st.sampled_from(ROWS), which=st.integers(0, 15))
    def answer(self, row: int, which: int) -> None:
        if self.held[row]:
            batch = self.held[row].pop(which % len(self.held[row]))
            assert ledger.settle(self.c, row, np.uint64(batch))
            self.answered[batch] += 1

    @rule(row=st.sampled_from(ROWS), epoch=st.integers(0, 5), index=st.integers(0, 6))
    def answer_what_was_not_asked(self, row: int, epoch: int, index: int) -> None:
        batch = batch_id(epoch, index)
        if batch not in self.held[row]:
            assert not ledger.settle(self.c, row, np.uint64(batch))
            assert not ledger.requeue(self.c, row, np.uint64(batch))

    @rule(row=st.sampled_from(ROWS))
    def answer_without_a_batch(self, row: int) -> None:
        assert not ledger.settle(self.c, row, np.uint64(NO_BATCH))
        assert not ledger.requeue(self.c, row, np.uint64(NO_BATCH))

    @rule(row=st.sampled_from(ROWS), which=st.integers(0, 15))
    def drop(self, row: int, which: int) -> None:
        if self.held[row]:
            batch = self.held[row].pop(which % len(self.held[row]))
            assert ledger.requeue(self.c, row, np.uint64(batch))
            self.waiting.append(batch)
            self.requeued += 1

    @rule(row=st.sampled_from(ROWS))
    def die(self, row: int) -> None:
        ledger.requeue_all(self.c, row)
        self.waiting += self.held[row]
        self.requeued += len(self.held[row])
        self.held[row] = []

    @rule()
    def close(self) -> None:
        before = int(self.c[0]["epochs_done"]), int(self.c[0]["work"])
        changed = ledger.close_epochs(self.c)
        assert changed == ((int(self.c[0]["epochs_done"]), int(self.c[0]["work"])) != before)
        whole = 0
        while all(self.answered[batch_id(whole, index)] for index in range(self.batches)):
            whole += 1
        assert int(self.c[0]["epochs_done"]) == whole
        assert (int(self.c[0]["work"]) == Work.DONE) == (whole == self.epochs)

    @precondition(lambda self: not any(self.held.values()) and not self.waiting)
    @rule()
    def something_is_left_or_all_is_done(self) -> None:
        ledger.close_epochs(self.c)
        done = int(self.c[0]["work"]) == Work.DONE
        batch = int(ledger.assign(self.c, 1))
        assert (batch == NO_BATCH) == done
        if not done:
            self.held[1].append(batch)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "c"):
            return
        roster = self.c[0]["roster"]
        for row in ROWS:
            kept = roster[row]["outstanding"]
            assert sorted(kept[kept != NO_BATCH].tolist()) == sorted(self.held[row])
            assert ledger.held(self.c, row) == len(self.held[row])
        queue = self.c[0]["requeue"][: int(self.c[0]["requeued"])]
        assert sorted(queue.tolist()) == sorted(self.waiting)
        assert int(self.c[0]["requeued_total"]) == self.requeued
        assert all(count == 1 for count in self.answered.values())
        # Batches are handed out again only when none waits to be handed out again.
        held = sum(len(one) for one in self.held.values())
        assert held + len(self.waiting) <= len(ROWS) * self.ahead
        open_epochs = {int(self.c[0]["epochs_done"])}
        open_epochs |= {batch >> 32 for one in self.held.values() for batch in one}
        open_epochs |= {batch >> 32 for batch in self.waiting}
        assert max(open_epochs) - min(open_epochs) <= 1, "more than two epochs are open"

    def teardown(self) -> None:
        """Whatever has happened, the rest can be finished and every batch is answered once."""
        if not hasattr(self, "c"):
            return
        for row in ROWS:
            self.die(row)
        for _ in range(self.batches * self.epochs + len(self.waiting) + 1):
            self.close()
            batch = int(ledger.assign(self.c, 2))
            if batch != NO_BATCH:
                assert ledger.settle(self.c, 2, np.uint64(batch))
                self.answered[batch] += 1
        everything = {
            batch_id(epoch, index) for epoch in range(self.epochs) for index in range(self.batches)
        }
        assert self.answered == dict.fromkeys(everything, 1)
        assert int(self.c[0]["work"]) == Work.DONE
        assert int(ledger.assign(self.c, 0)) == NO_BATCH


def test_every_batch_once_an_epoch() -> None:
    run_state_machine_as_test(
        Ledger, settings=settings(max_examples=80, stateful_step_count=60, deadline=None)
    )


def test_the_queue_holds_what_all_learners_can_hold() -> None:
    c = control(layout.MAX_LEARNERS * layout.AHEAD + 100, 1)
    for _ in range(2):
        for row in range(layout.MAX_LEARNERS):
            for _ in range(layout.AHEAD):
                assert ledger.assign(c, row) != NO_BATCH
            assert ledger.assign(c, row) == NO_BATCH, "it may hold no more"
        for row in range(layout.MAX_LEARNERS):
            ledger.requeue_all(c, row)
        assert int(c[0]["requeued"]) == layout.MAX_LEARNERS * layout.AHEAD
    assert int(c[0]["next"]) == layout.MAX_LEARNERS * layout.AHEAD


def test_no_work_is_handed_out_before_it_is_set() -> None:
    c = control(3, 1)
    c["work"] = Work.NONE
    assert ledger.assign(c, 0) == NO_BATCH
    assert not ledger.close_epochs(c)
