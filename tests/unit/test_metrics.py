"""The table of counters and gauges agrees with the layout, the status and its replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
