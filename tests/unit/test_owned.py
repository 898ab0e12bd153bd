"""Batches that a job owns: each given one is handed out until it is answered, and then no more."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

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
from support.words import Changing, Schedule, Step, interleaved

from gadei_ps.errors import ControlError
from gadei_ps.job.control import Own
from gadei_ps.memory import layout, owned
from gadei_ps.memory.layout import CONTROL, NO_BATCH, Work, batch_id
from gadei_ps.server import ledger
from gadei_ps.watchdog.batches import Batches

pytestmark = pytest.mark.usefixtures("compiled")

ROWS = [0, 1, 255]
BATCHES, EPOCHS = 200, 3
OF_LEDGER = ("owned_range", "owned_at", "requeued")


class Memory:
    """A control segment of its own, as the watchdog's module sees it."""

    def __init__(self) -> None:
        self.control = self
        self.c = np.zeros(1, CONTROL)
        self.c["roster"]["outstanding"] = NO_BATCH
        self.c["owned"] = 1
        self.c["batches"], self.c["epochs"], self.c["work"] = BATCHES, EPOCHS, Work.WORKING

    @property
    def words(self) -> np.void:
        return self.c[0]

    def word(self, struct: np.dtype, name: str) -> int:
        return self.c.ctypes.data + layout.offset(struct, name)

    def ring_bells(self) -> None:
        pass

    def own(self, number: int, **asked: object) -> int:
        batches = Batches(self, 1)  # type: ignore[arg-type]
        return int(batches.assign(Own(number=number, **asked))["given"])  # type: ignore[arg-type]


class Owner(RuleBasedStateMachine):
    """An agent gives and resets, learners answer and die, servers die in a transaction."""

    @initialize(ahead=st.integers(1, 16))
    def begin(self, ahead: int) -> None:
        self.memory, self.ahead = Memory(), ahead
        self.c = self.memory.c
        self.given = 0  # ranges
        self.free = {batch_id(e, i) for e in range(EPOCHS) for i in range(BATCHES)}
        self.waiting: set[int] = set()  # to be handed out
        self.held: dict[int, list[int]] = {row: [] for row in ROWS}
        self.answered: Counter[int] = Counter()
        self.drains = True
        self.dropped: set[int] = set()  # came back meanwhile, and shard 0 has not looked yet

    def _give(self, epoch: int, begin: int, size: int) -> bool:
        """Give what is free of a stretch, in ranges of `size`."""
        free = [i for i in range(begin, BATCHES) if batch_id(epoch, i) in self.free]
        ranges = [(epoch, one, one + 1) for one in free[:size]]
        if size % 2 and free:  # one range instead
            stop = free[0]
            while batch_id(epoch, stop) in self.free and stop < free[0] + size:
                stop += 1
            ranges = [(epoch, free[0], stop)]
        before = self.given
        self.given = self.memory.own(before, ranges=ranges)
        taken = ranges[: self.given - before]
        # A request that comes again, because its reply was lost, counts once.
        assert self.memory.own(before, ranges=taken) == self.given
        batches = {batch_id(e, i) for e, low, high in taken for i in range(low, high)}
        self.free -= batches
        self.waiting |= batches
        if taken:
            self.drains, self.dropped = False, set()
        return bool(taken)

    @property
    def _may_give(self) -> bool:
        """Return whether it may give: after a reset, only once nothing is unanswered."""
        return not self.drains or not owned.unanswered(self.c[0])

    @precondition(lambda self: self._may_give)
    @rule(epoch=st.integers(0, EPOCHS - 1), begin=st.integers(0, BATCHES), size=st.integers(1, 40))
    def give(self, epoch: int, begin: int, size: int) -> None:
        self._give(epoch, begin, size)

    @rule()
    def take_back(self) -> None:
        self.memory.own(self.given, take_back=True)
        self.free |= self.waiting
        self.waiting, self.drains = set(), True
        self.dropped |= set(self.c[0]["requeue"][: int(self.c[0]["requeued"])].tolist())

    @rule(row=st.sampled_from(ROWS), count=st.integers(1, 16))
    def hand_out(self, row: int, count: int) -> None:
        for _ in range(min(count, self.ahead - len(self.held[row]))):
            batch = int(ledger.assign(self.c, row))
            if batch == NO_BATCH:
                assert not self.waiting
                return
            assert batch in self.waiting, "handed out twice, or not owned"
            self.waiting.remove(batch)
            self.held[row].append(batch)

    @rule(row=st.sampled_from(ROWS), size=st.integers(1, 40))
    def server_dies_in_a_transaction(self, row: int, size: int) -> None:
        """Check that its handouts are undone, whatever the watchdog has given since."""
        before = {name: self.c[name].copy() for name in OF_LEDGER}
        entry = self.c["roster"][0][row].copy()
        may_give = self._may_give  # no copy is made amid a transaction
        for _ in range(self.ahead - len(self.held[row])):
            ledger.assign(self.c, row)
        if may_give:
            while self._give(0, 0, size):
                pass
        for name, value in before.items():
            self.c[name] = value
        self.c["roster"][0][row] = entry

    @rule(row=st.sampled_from(ROWS), which=st.integers(0, 15))
    def answer(self, row: int, which: int) -> None:
        if self.held[row]:
            batch = self.held[row].pop(which % len(self.held[row]))
            assert ledger.settle(self.c, row, np.uint64(batch))
            self.answered[batch] += 1

    @rule(row=st.sampled_from(ROWS))
    def die(self, row: int) -> None:
        ledger.requeue_all(self.c, row)
        (self.free if self.drains else self.waiting).update(self.held[row])
        if self.drains:
            self.dropped |= set(self.held[row])
        self.held[row] = []

    @rule()
    def look(self) -> None:
        """Shard 0, after each departure."""
        ledger.take_back(self.c)
        if self.drains:
            self.dropped = set()

    @rule(passes=st.integers(0, EPOCHS))
    def close(self, passes: int) -> None:
        """Only what is answered is said to be done."""
        done = 0
        while done < passes and all(self.answered[batch_id(done, i)] for i in range(BATCHES)):
            done += 1
        self.memory.own(self.given, passes=done)
        ledger.close_epochs(self.c)
        assert int(self.c[0]["epochs_done"]) == max(done, int(self.c[0]["owned_passes"]))
        ended = int(self.c[0]["owned_passes"]) == EPOCHS
        assert int(self.c[0]["work"]) == (Work.DONE if ended else Work.WORKING)

    @invariant()
    def unanswered_batches_are_told(self) -> None:
        if not hasattr(self, "c"):
            return
        ranges = owned.unanswered(self.c[0])
        batches = [batch_id(e, i) for e, begin, end in ranges for i in range(begin, end)]
        held = {batch for held in self.held.values() for batch in held}
        wanted = self.waiting | held
        assert wanted <= set(batches) <= wanted | self.dropped
        assert len(batches) == len(set(batches))
        assert all(one[2] < two[1] for one, two in itertools.pairwise(ranges) if one[0] == two[0])
        assert all(count == 1 for count in self.answered.values())
        if not self.drains:
            assert not self.dropped
            assert owned.left(self.c[0]) or int(self.c[0]["requeued"]) or not self.waiting

    def teardown(self) -> None:
        """All can be answered once, and then the work is done."""
        if not hasattr(self, "c"):
            return
        self.take_back()
        for row in ROWS:
            self.die(row)
        self.look()
        while self.free or self.waiting:
            for epoch in range(EPOCHS):
                self._give(epoch, 0, 199)
            while self.waiting:
                self.hand_out(1, 16)
                for place in range(len(self.held[1])):
                    self.answer(1, place)
        self.close(EPOCHS)
        assert int(self.c[0]["work"]) == Work.DONE
        assert int(ledger.assign(self.c, 0)) == NO_BATCH


def test_ranges_are_handed_out_one_after_the_other() -> None:
    memory = Memory()
    memory.own(0, ranges=[(0, 3, 5), (0, 9, 10)])
    batches = [int(ledger.assign(memory.c, row)) for row in (0, 1, 0, 1)]
    assert batches == [3, 4, 9, NO_BATCH]
    assert memory.c["roster"]["outstanding"][0, 0, :2].tolist() == [3, 9]


def test_a_range_after_one_that_was_revoked_halfway() -> None:
    """Hand it out from its first batch on."""
    memory = Memory()
    given = memory.own(0, ranges=[(0, 0, 10)])
    assert [int(ledger.assign(memory.c, 0)) for _ in range(3)] == [0, 1, 2]
    memory.own(given, take_back=True)
    ledger.take_back(memory.c)
    memory.own(given, ranges=[(0, 20, 30)])
    assert int(ledger.assign(memory.c, 1)) == 20


def test_owned_batches_are_answered_once() -> None:
    run_state_machine_as_test(
        Owner, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize(
    ("number", "ranges", "line"),
    [
        (
            1,
            [(0, 0, 1)],
            "the job was given 2 ranges of batches, not 1: another program",
        ),
        (3, [], "the job was given 2 ranges of batches, not 3"),
        (2, [(0, 5, 5)], "the job has 3 epochs of 200 batches, and none from 5 to 5 of epoch 0"),
        (2, [(0, 0, 201)], "the job has 3 epochs of 200 batches, and none from 0 to 201"),
        (2, [(3, 0, 1)], "the job has 3 epochs of 200 batches, and none from 0 to 1 of epoch 3"),
    ],
)
def test_what_cannot_be_owned_is_refused(
    number: int, ranges: list[tuple[int, int, int]], line: str
) -> None:
    memory = Memory()
    memory.own(0, ranges=[(0, 0, 10), (1, 0, 10)])
    with pytest.raises(ControlError) as error:
        memory.own(number, ranges=ranges)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    assert int(memory.c[0]["owned_given"]) == 2


def test_a_job_that_hands_out_all_batches_owns_none() -> None:
    memory = Memory()
    memory.c["owned"] = 0
    with pytest.raises(ControlError, match="write `owned = true` into its job file"):
        memory.own(0, ranges=[(0, 0, 1)])


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_batch_that_moves_meanwhile_is_awaited(comes_back: bool) -> None:
    """It comes back, or is handed out again: at no instant is it nowhere."""

    def make(schedule: Schedule) -> Any:
        control = np.zeros(1, CONTROL)[0]
        outstanding = control["roster"]["outstanding"]
        outstanding[:] = NO_BATCH
        if comes_back:
            outstanding[3, 0] = 7
        else:
            control["requeued"] = 1
        steps: list[Step] = [
            lambda: control.__setitem__("requeued", 1),
            lambda: outstanding.__setitem__((3, 0), NO_BATCH),
        ]
        if not comes_back:
            steps = [
                lambda: outstanding.__setitem__((3, 0), 7),
                lambda: control.__setitem__("requeued", 0),
            ]
        seen: Any = Changing(control, schedule)
        return lambda: owned.is_awaited(seen), steps

    assert set(interleaved(make)) == {True}
