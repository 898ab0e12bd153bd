"""The client for Python and the client for C: one behaviour. Attach, push and pull.

Each case drives both against a real job, by the commands of tests/clients/driver.py and driver.c.
Results are those of gadei.h, for Python the same numbers for the errors it raises.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import support
from clients.both import Makers, answers_of, row_of, with_seconds
from clients.drivers import ERROR, NONFINITE, TIMEOUT, Job, Learner, running

from gadei_ps.memory.layout import FrameKind
from gadei_ps.memory.shm import SHM, segment_name

# Tensors between which there are gaps, with rows of many values, of one and none, and a buffer.
GAPS: dict[str, Any] = {
    "tensors": [
        {"name": "w", "shape": [3, 5]},
        {"name": "table", "shape": [40, 9]},
        {"name": "b", "shape": [7]},
        {"name": "none", "shape": [0, 4]},
        {"name": "seen", "shape": [3], "role": "buffer"},
    ],
    "shards": 2,
}
WORDS = ("sequence", "clock", "version", "kind", "dtype", "payload_bytes", "flags", "blocks")
WORDS += ("batch", "samples", "rate_scale", "loss", "squares")  # of a frame, in both the same


@pytest.fixture(scope="module")
def gaps() -> Iterator[Job]:
    with running(GAPS) as started:
        yield started


def frame(job: Job, one: Learner, sequence: int) -> tuple[dict[str, Any], bytes]:
    """The words and the payload of a frame that has been published."""
    header, payload = job.frame(row_of(job, one)["row"], sequence)
    return {word: header[word].tolist() for word in WORDS}, payload


# -- attach ----------------------------------------------------------------------------------------


def test_the_model_is_the_same(client: Makers, gaps: Job) -> None:
    mine = client.plain()
    mine.do("attach", gaps.socket)
    shown = "w:1:3x5:0:15 table:1:40x9:16:360 b:1:7:384:7 none:1:0x4:400:0 seen:2:3:448:3"
    assert mine.ask("tensors") == (5, shown)
    mine.do("detach")
    gaps.gone()


@pytest.mark.parametrize("part", ["control", "weights"])
def test_a_segment_that_others_may_open_is_refused(client: Makers, small: Job, part: str) -> None:
    """So is what has taken the name: a link, or a FIFO, at which it does not wait either."""
    mine = client.plain()
    path = SHM / segment_name(small.name, part)[1:]
    aside = path.with_name(f"{path.name}.aside")
    path.chmod(0o640)
    try:
        assert mine.ask("attach", small.socket)[0] == ERROR
    finally:
        path.chmod(0o600)
    path.rename(aside)
    try:
        for make in (lambda: path.symlink_to(aside), lambda: os.mkfifo(path, 0o600)):
            make()
            code, message = mine.ask("attach", small.socket)
            assert code == ERROR
            assert path.name in message
            path.unlink()
    finally:
        aside.rename(path)
    mine.do("attach", small.socket)
    mine.do("detach")
    small.gone()


@pytest.mark.parametrize("given", ["", "mine", 'ünusual "näme", cut after 31 bytes'])
def test_names(client: Makers, small: Job, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("GADEI_PS_NAME", "by the launcher")
    mine = client.plain()
    mine.do("attach", small.socket, given)
    expected = given.encode()[:31].decode(errors="ignore") or "by the launcher"
    assert row_of(small, mine)["name"] == expected
    mine.do("detach")
    small.gone()


def test_jobs_that_are_not_there(
    both: dict[str, Makers], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("GADEI_PS_JOB", raising=False)
    long = f"/tmp/{'x' * 70}/y.sock"  # longer than a job's name
    deep = "/" + "x" * 200
    for target in ("-", "nobody", f"{tmp_path}/n.sock", long, deep, "-x", "a.b", "x" * 49):
        answers = {name: make.plain().ask("attach", target) for name, make in both.items()}
        assert answers["c"] == answers["python"], target
        assert answers["c"][0] == ERROR
    assert "gadei-ps ls shows" in answers_of(both, "attach", "nobody")[1]


def test_a_job_without_a_model(both: dict[str, Makers], job: Callable[..., Job]) -> None:
    code, text = answers_of(both, "attach", job().socket)
    assert code == ERROR
    assert text.startswith("the job has no model yet")


def test_a_job_that_is_full(both: dict[str, Makers], small: Job) -> None:
    with small.full():
        code, text = answers_of(both, "attach", small.socket)
    assert (code, text) == (ERROR, "the job has 256 learners, which is the limit")
    small.gone()


def test_attached_again(client: Makers, small: Job) -> None:
    mine = client.plain()
    for _ in range(2):
        mine.do("attach", small.socket)
        assert mine.ask("published") == (0, "")
        mine.do("push", 1, 10_000)
        mine.do("applied", 10_000)
        mine.do("detach")
    small.gone()


# -- push ------------------------------------------------------------------------------------------

FRAMES: dict[str, list[list[object]]] = {
    "flat": [["push_pattern", 3, 10_000]],
    "rows of zeros": [["push_sparse", 4, 8, 10_000]],
    "tensor by tensor": [
        ["claim", 10_000],
        *(["write_pattern", index, 5 + index] for index in (2, 0, 1, 3)),
        ["publish", 0.25, 7, 0.5],
    ],
    "some tensors": [["claim", 10_000], ["write_pattern", 1, 6], ["publish", 0.25, 7, 1]],
    "a tensor without values": [
        ["claim", 10_000],
        ["write_pattern", 0, 6],
        ["write_none", 1],
        ["publish", 0.25, 7, 1],
    ],
    "no tensor": [["claim", 10_000], ["publish", "nan", 0, 1]],
    "rows": [
        ["claim_rows", 10_000],
        ["write_rows", 1, 7, 39, 3, 3, 0, 17, 3],
        ["write_pattern", 0, 8],
        ["publish", 1, 1, 1],
    ],
    "all rows": [["claim_rows", 10_000], ["write_rows", 0, 9, 2, 1, 0], ["publish", 1, 1, 1]],
    "rows of one value": [
        ["claim_rows", 10_000],
        ["write_rows", 2, 9, 6],
        ["write_rows", 3, 9],
        ["publish", 1, 1, 1],
    ],
    "no rows": [["claim_rows", 10_000], ["write_rows", 1, 9], ["publish", 1, 1, 1]],
    "abandoned": [["give_up", 10_000]],
}


@pytest.mark.parametrize(
    ("optimizer", "wire"), [*itertools.product(["sgd", "momentum"], [1, 2, 3]), ("add", 2)]
)
def test_the_same_bytes(
    both: dict[str, Makers], job: Callable[..., Job], wire: int, optimizer: str
) -> None:
    """Both go through the same frames, in slots that hold the remains of others."""
    running = job(**GAPS, optimizer={"kind": optimizer, "lr": 0.25}, slots=1)
    seen: dict[str, list[tuple[dict[str, Any], bytes]]] = {}
    for name, make in both.items():
        mine = make.plain()
        mine.do("wire", wire)
        mine.do("attach", running.socket)
        begin = int(mine.ask("version")[0])
        seen[name] = []
        for commands in FRAMES.values():
            mine.do("turn", 10_000)
            for command in commands:
                mine.do(*command)
            sequence = int(mine.ask("published")[0]) - 1
            words, payload = frame(running, mine, sequence)
            seen[name].append((words | {"version": words["version"] - begin}, payload))
            mine.do("applied", 10_000)
            running.scribble(row_of(running, mine)["row"])
        assert row_of(running, mine)["refused"] == 0
        mine.do("detach")
        running.gone()
    for case, mine_, other in zip(FRAMES, seen["c"], seen["python"], strict=True):
        for word in WORDS:
            one, two = mine_[0][word], other[0][word]
            same = one == two or (math.isnan(one) and math.isnan(two))
            assert same, (case, word, one, two)
        assert mine_[1] == other[1], case
    sparse = dict(zip(FRAMES, seen["c"], strict=True))["rows of zeros"][0]["kind"]
    shorter = optimizer == "sgd" and wire == 1  # a row of nine 16-bit values travels whole
    assert sparse == (FrameKind.ROWS if shorter else FrameKind.DENSE)


def test_nothing_lies_between_tensors(client: Makers, gaps: Job) -> None:
    """Whatever a slot held before."""
    mine = client.plain()
    mine.do("attach", gaps.socket)
    (row,) = gaps.status()["learners"]
    for commands in FRAMES.values():
        gaps.scribble(row["row"])
        for command in commands:
            mine.do(*command)
        mine.do("applied", 10_000)
    mine.do("detach")
    gaps.gone()
    assert gaps.status()["gradients_refused"] == 0
    np.testing.assert_array_equal(gaps.between(), 0)


def test_a_gradient_of_a_buffer_is_refused(client: Makers, gaps: Job) -> None:
    mine = client.plain()
    mine.do("attach", gaps.socket)
    mine.do("claim_rows", 10_000)
    for command in (["write_rows", 4, 9, 1], ["write_pattern", 4, 9]):
        code, message = mine.ask(*command)
        assert code == ERROR
        assert message.startswith("'seen' is a buffer, which no gradient changes: write it with ")
    mine.do("detach")
    gaps.gone()


def test_what_is_wrong_changes_nothing(both: dict[str, Makers], small: Job) -> None:
    asked = []
    before = small.weights()
    for make in both.values():
        mine = make.plain()
        mine.do("attach", small.socket)
        mine.do("claim", 1000)
        answers = [mine.ask("publish", 0, 0, scale) for scale in ("-1", "nan", "inf", "1e300")]
        mine.do("claim_rows", 1000)
        answers += [mine.ask("write_rows", 0, 1, row) for row in (3, -1)]
        mine.do("write_rows", 0, 1, 2)
        assert mine.ask("write_rows", 0, 1, 2)[0] == ERROR  # written already
        answers += [mine.ask("published")]
        mine.do("claim", 1000)
        mine.do("publish", 0, 0, 1)  # what was written before is forgotten
        mine.do("applied", 10_000)
        asked.append(answers)
        mine.do("detach")
    assert asked[0] == asked[1]
    assert asked[0][0] == (ERROR, "rate_scale is negative or not finite")
    assert asked[0][4] == (ERROR, "'w' has no row 3 of 3")
    assert asked[0][-1] == (0, "")
    np.testing.assert_array_equal(small.weights(), before)


def test_rows_without_values_are_left_out(both: dict[str, Makers], gaps: Job) -> None:
    """Check that C reports it: a pointer that should have been set is a likely reason."""
    answers, seen = {}, []
    for name, make in both.items():
        mine = make.plain()
        mine.do("attach", gaps.socket)
        mine.do("claim_rows", 10_000)
        answers[name] = mine.ask("write_none", 1)
        mine.do("write_pattern", 0, 8)
        mine.do("publish", 1, 1, 1)
        words, payload = frame(gaps, mine, 0)
        seen.append((words["kind"], words["blocks"], words["squares"], payload))
        mine.do("applied", 10_000)
        mine.do("detach")
    assert answers == {"c": (ERROR, "'table' is given without values"), "python": (0, "")}
    assert seen[0] == seen[1]
    gaps.gone()


def test_what_is_not_finite_is_told_and_refused(client: Makers, small: Job) -> None:
    before = small.weights()
    mine = client.plain()
    mine.do("attach", small.socket)
    mine.do("claim", 1000)
    assert mine.ask("write_bad", 0) == (NONFINITE, "")
    mine.do("write", 1, 1.0)
    mine.do("publish", 0, 0, 1)
    assert mine.ask("push", "inf", 1000) == (NONFINITE, "")
    mine.do("applied", 10_000)
    row = row_of(small, mine)
    assert (row["applied"], row["refused"]) == (0, 2)
    assert row["refused_because"] == "holds a NaN or an infinity"
    np.testing.assert_array_equal(small.weights(), before)
    mine.do("detach")


def test_an_iteration_begins_after_the_last_push(client: Makers, small: Job) -> None:
    """A learner that reads the live weights computes from those, without waiting for its turn."""
    mine, other = client.plain(), client.plain()
    for one in (mine, other):
        one.do("attach", small.socket)
    for one in (mine, other, other, mine, mine):
        one.do("push", 1, 10_000)
        one.do("applied", 10_000)
    row = row_of(small, mine)["row"]
    first, second = (small.frame(row, sequence)[0] for sequence in (1, 2))
    assert first["started"] < first["finished"] <= second["started"] < second["finished"]
    assert first["version"] < second["version"]
    for one in (mine, other):
        one.do("detach")
    small.gone()


# -- pull ------------------------------------------------------------------------------------------


def test_pulls_see_what_was_applied(client: Makers, small: Job) -> None:
    mine = client.plain()
    mine.do("attach", small.socket)
    mine.do("push", 1, 10_000)
    mine.do("applied", 10_000)
    weights = small.weights()
    expected = (weights.min(), weights.max())
    for command in ("live", "pull", "pull_consistent 10000"):
        assert mine.values(command) == expected
    mine.do("detach")
    small.gone()


def test_a_consistent_pull_under_load(
    both: dict[str, Makers], client: Makers, job: Callable[..., Job]
) -> None:
    """A copy takes longer than the shards wait for it; the learner asks them again."""
    running = job(tensors=[{"name": "w", "shape": [4_000_000]}], shards=2)
    loads = [both["c"].plain() for _ in range(2)]
    for load in loads:
        load.do("attach", running.socket)
        load.do("flood")
    mine = client.plain()
    mine.do("attach", running.socket)
    for _ in range(5):
        mine.values("pull_consistent 60000")
    for load in loads:
        load.kill()
    mine.do("detach")
    running.gone()


def test_a_consistent_pull_asks_until_it_has_one(client: Makers, small: Job) -> None:
    """Pull while a shard seems to write for ever; `hold` is another number at each request."""
    mine = client.plain()
    mine.do("attach", small.socket)
    ring = small.ring(row_of(small, mine)["row"])
    asked: set[int] = set()
    with small.writing():
        mine.begin("pull_consistent", 60_000)
        support.eventually(lambda: asked.add(int(ring["hold"])) or len(asked - {0}) > 3)
    assert len(mine.line().split()) == 2
    assert int(ring["hold"]) == 0
    mine.do("detach")


def test_a_consistent_pull_gives_up(both: dict[str, Makers], small: Job) -> None:
    answers = []
    with small.writing():
        for make in both.values():
            mine = make.plain()
            mine.do("attach", small.socket)
            answers.append(with_seconds(mine.ask("pull_consistent", 40)))
            assert int(small.ring(row_of(small, mine)["row"])["hold"]) == 0
            mine.do("detach")
    assert answers == [(TIMEOUT, "no consistent copy within 0.04 s")] * 2
