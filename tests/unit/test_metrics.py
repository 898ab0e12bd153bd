"""The table of counters and gauges agrees with the layout, the status and its replies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from support.words import Changing, Schedule, Step, interleaved

from gadei_ps import _native, metrics
from gadei_ps.job import replies
from gadei_ps.memory import layout, totals
from gadei_ps.metrics import Kind, Lifetime, Metric, Place, Shown
from gadei_ps.server import account
from gadei_ps.show.status import counters

TABLES = metrics.JOB, metrics.LEARNER
# Words that shard 0 or the watchdog writes beside counters, and that are not metrics.
OTHERS = {
    "ps_entry": {
        *("started", "finished", "version", "clock", "reason", "drained", "handed"),
        *("histogram", "items"),
    },
    "ps_control": {"owned_range", "owned_at", "requeued", "requeue"},
}
# Words that are metrics after a calculation: the mean staleness, the loss and the norm if finite.
COMPUTED = {"staleness_sum", "loss", "norm", "outstanding"}
LINE = range(1024, 1088)  # the counters of the watchdog in ps_control


def words(place: Place) -> set[str]:
    return {one.word for table in TABLES for one in table if one.place is place}


@pytest.mark.parametrize(
    ("struct", "place"), [("ps_entry", Place.ROSTER), ("ps_control", Place.CONTROL)]
)
def test_no_counter_of_the_layout_is_missing(struct: str, place: Place) -> None:
    """A new word of shard 0, or on the watchdog's line, is a metric, or is named above."""
    written = {
        name
        for name, (at, *_, writer, _) in _native.layout()[struct][1].items()
        if writer == "0" or (struct == "ps_control" and at in LINE)
    }
    past = {f"past_{word}" for word in totals.SUMMED} if struct == "ps_control" else set()
    missing = written - words(place) - past - OTHERS[struct] - COMPUTED
    assert not missing, "add a row to gadei_ps/metrics.py, or name the word in OTHERS"
    assert not OTHERS[struct] - written, "OTHERS names words that are gone"


@pytest.mark.parametrize(
    "wrong",
    [
        {"word": "nothing_of_that_name"},
        {"word": "roster"},
        {"word": ""},
        {"place": Place.WATCHDOG},
        {"place": Place.ROSTER, "word": "handed"},
        {"name": "samples"},
    ],
)
def test_a_table_that_does_not_agree_is_found(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(next(one for one in metrics.JOB if one.name == "checkpoints"), **wrong)
    monkeypatch.setattr(metrics, "JOB", (*metrics.JOB, row))
    with pytest.raises(AssertionError):
        totals.check()


def test_what_outlives_its_learner_is_in_one_transaction_with_it() -> None:
    """The server remembers these words together (server/account.py)."""
    first = int(account.LEDGER)
    for word in layout.PAST:
        at = layout.offset(layout.CONTROL, f"past_{word}")
        assert first <= at < first + 8 * account.LEDGER_WORDS
        assert layout.offset(layout.ENTRY, word) >= int(account.COUNTED)
        assert layout.ENTRY[word] == layout.CONTROL[f"past_{word}"]
        assert layout.ENTRY[word] in (np.uint64, np.float64), "count_past() adds up no others"


def test_rows_are_complete() -> None:
    for one in (*metrics.JOB, *metrics.LEARNER):
        assert one.help[0].isupper() and not one.help.endswith("."), one.name
        assert one.unit or one.kind is Kind.GAUGE, f"{one.name}: what does it count?"
        assert one.name.endswith("_s") <= (one.unit == "seconds"), one.name
        assert one.name.endswith("_bytes") <= (one.unit == "bytes"), one.name
        if one.place is Place.WATCHDOG and one.kind is Kind.GAUGE:
            assert one.lifetime in (Lifetime.NOW, Lifetime.LEARNER), one.name
    assert {one.lifetime for one in metrics.LEARNER} == {Lifetime.LEARNER}


def test_replies_have_a_field_for_each_metric() -> None:
    for model, table in (
        (replies.JobStatus, metrics.JOB),
        (replies.LearnerStatus, metrics.LEARNER),
    ):
        for one in table:
            field = model.model_fields[one.name]
            assert field.is_required() != one.added, one.name


def test_what_is_saved_is_restored() -> None:
    control, new = np.zeros(2, layout.CONTROL)
    roster = control["roster"]
    for number, word in enumerate(totals.COUNTED):
        roster[word] = number + 1
        control[f"past_{word}"] = 1000
    control["requeued_total"] = 7
    counts = totals.saved(control)
    assert counts["applied"] == 1000 + layout.MAX_LEARNERS
    totals.restore(new, counts)
    assert totals.saved(new) == counts
    assert totals.counts(new) == totals.counts(control)


class Words:
    """Words of a job with one learner, which has reported two losses."""

    def __init__(self, schedule: Schedule) -> None:
        self.control, self.state = np.zeros(1, layout.CONTROL)[0], {"journal": {"used": 0}}
        self.row = self.control["roster"][3]
        self.row["applied"] = self.row["loss_count"] = 2
        self.row["loss_sum"] = 3.0
        self.control["past_applied"] = 10
        self.seen: Any = Changing(self.control, schedule)
        self.seen_state: Any = Changing(self.state, schedule)

    def _use(self, used: int) -> None:
        self.state["journal"]["used"] = used

    def counts_a_gradient(self) -> list[Step]:
        def change(word: str, by: float) -> Step:
            return lambda: self.row.__setitem__(word, self.row[word] + by)

        return [
            lambda: self._use(3),
            change("loss_sum", 0.5),
            change("loss_count", 1),
            lambda: self._use(0),
        ]

    def moves_to_the_past(self, *words: str) -> list[Step]:
        """Return the steps of count_past()."""

        def adds(word: str) -> Step:
            return lambda: self.control.__setitem__(
                f"past_{word}", self.control[f"past_{word}"] + self.row[word]
            )

        def clears(word: str) -> Step:
            return lambda: self.row.__setitem__(word, 0)

        moves = [step(word) for word in words for step in (adds, clears)]
        return [lambda: self._use(3), *moves, lambda: self._use(0)]


def test_losses_and_their_count_are_of_the_same_gradients() -> None:
    def make(schedule: Schedule) -> Any:
        one = Words(schedule)
        return lambda: totals.losses(one.seen, one.seen_state), one.counts_a_gradient()

    assert set(interleaved(make)) == {(2, 3.0), (3, 3.5)}


def test_losses_of_a_learner_are_of_the_same_gradients() -> None:
    def make(schedule: Schedule) -> Any:
        one = Words(schedule)

        def read() -> tuple[int, float]:
            row = totals.row(one.seen, one.seen_state, 3)
            return int(row["loss_count"]), float(row["loss_sum"])

        return read, one.counts_a_gradient()

    assert set(interleaved(make)) == {(2, 3.0), (3, 3.5)}


def test_each_count_is_there_once_while_a_learner_leaves() -> None:
    def losses(schedule: Schedule) -> Any:
        one = Words(schedule)
        steps = one.moves_to_the_past("loss_count", "loss_sum")
        return lambda: totals.losses(one.seen, one.seen_state), steps

    def applied(schedule: Schedule) -> Any:
        one = Words(schedule)
        steps = one.moves_to_the_past("applied")
        return lambda: totals.total(one.seen, "applied", one.seen_state), steps

    assert set(interleaved(losses)) == {(2, 3.0)}
    assert set(interleaved(applied)) == {12}


@pytest.mark.parametrize("value", [-math.inf, -1.5, 0, 7, 1e300, 2**70, math.inf, math.nan])
def test_possible_values_are_those_of_replies(value: float) -> None:
    for one in (*metrics.JOB, *metrics.LEARNER):
        if one.values in metrics.MOST and not isinstance(value, int):
            continue  # words of that type are whole numbers
        possible = one.possible(value)
        assert TypeAdapter(replies._VALUES[one.values][0]).validate_python(possible) == possible
        assert possible == value or not 0 <= value < 2**40


def test_lines_of_the_status() -> None:
    status = {one.name: 0 for one in metrics.JOB} | {"watchdog_starts": 1}
    assert counters(status) == {"gradients": "0 applied, 0 dropped, 0 refused"}
    status |= {"gradients_applied": 1234, "learner_deaths": 1}
    assert counters(status) == {
        "gradients": "1,234 applied, 0 dropped, 0 refused",
        "deaths": "0 servers, 1 learner, 0 watchdogs",
    }
    status |= {"fork_server_deaths": 2, "watchdog_starts": 2}
    assert counters(status)["deaths"] == "0 servers, 1 learner, 1 watchdog, 2 fork servers"


def test_a_new_metric_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that only the table names is shown, too."""
    new = Metric("naps", "Naps", Place.WATCHDOG, unit="naps", shown=Shown("rest", "nap"))
    monkeypatch.setattr(metrics, "JOB", (*metrics.JOB, new))
    status = {one.name: 0 for one in metrics.JOB} | {"watchdog_starts": 1, "naps": 3}
    assert counters(status)["rest"] == "3 naps"
