"""Recorded run times: both forms of file, gaps, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support import trace_files

from gadei_ps.errors import UsageError
from gadei_ps.run_times import traces
from gadei_ps.run_times.traces import Trace

OWN = "iteration,learner,started,seconds,censored\n"
ALIBABA = ",worker,gpu,time,batch_time_norm\n"


def put(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_own_form(tmp_path: Path) -> None:
    path = put(tmp_path, OWN + "3,b,1.5,0.25,0\n3,a,,0.5,1\n7,a,9.0,0.75,0\n")
    trace = traces.read(path)
    assert trace.learners == ("b", "a")
    np.testing.assert_array_equal(trace.times, [[0.25, 0.5], [np.nan, 0.75]])
    np.testing.assert_array_equal(trace.censored, [[False, True], [False, False]])
    assert trace.missing == 1


def test_alibaba_form_in_numerical_order(tmp_path: Path) -> None:
    path = put(tmp_path, ALIBABA + "0,10,25,1,476\n1,9,25,1,509\n2,9,25,11,433\n")
    trace = traces.read(path)
    assert trace.learners == ("9", "10")
    np.testing.assert_array_equal(trace.times, [[509, 476], [433, np.nan]])
    assert not trace.censored.any()


def test_a_mark_of_byte_order_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = put(tmp_path, b"\xef\xbb\xbf" + OWN.encode() + b"\r\n0,0,,1,0\r\n\r\n")
    assert traces.read(path).times.tolist() == [[1.0]]


def test_gaps_are_filled_from_before_else_from_after() -> None:
    nan = np.nan
    times = np.array([[nan, 1.0], [2.0, nan], [nan, nan], [3.0, 4.0]])
    censored = np.array([[False, True], [True, False], [False, False], [False, False]])
    filled = Trace(times, censored, ("a", "b")).filled()
    np.testing.assert_array_equal(filled.times, [[2, 1], [2, 1], [2, 1], [3, 4]])
    assert filled.censored.tolist() == [[True, True], [True, True], [True, True], [False, False]]
    assert filled.missing == 0
    with pytest.raises(UsageError, match="learner 'b' has no run time"):
        Trace(np.array([[1.0, nan]]), np.zeros((1, 2), bool), ("a", "b")).filled()


@given(
    times=arrays.arrays(
        np.float64,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(0, 1e300) | st.just(np.nan),
    ),
    names=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1),
        min_size=6,
        max_size=6,
        unique=True,
    ),
    data=st.data(),
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    times: traces.FloatArray,
    names: list[str],
    data: st.DataObject,
) -> None:
    times[:, 0] = np.nan_to_num(times[:, 0])  # so that every iteration has a row
    times[0] = np.nan_to_num(times[0])  # and learners come in this order
    censored = data.draw(arrays.arrays(np.bool_, times.shape)) & ~np.isnan(times)
    learners = names[: times.shape[1]]
    if all(name.isascii() and name.isdigit() for name in learners):
        learners = [f"n{name}" for name in learners]
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    trace_files.write(path, Trace(times, censored, tuple(learners)))
    read = traces.read(path)
    np.testing.assert_array_equal(read.times, times)
    np.testing.assert_array_equal(read.censored, censored)
    assert read.learners == tuple(learners)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", ":1:", "not the header of a trace"),
        ("a,b\n1,2\n", ":1:", "not the header of a trace"),
        (OWN, ":", "no row"),
        (OWN + "0,a,,1,0\n0,a,1\n", ":3:", "3 fields where the header has 5"),
        (OWN + "x,a,,1,0\n", ":2:", "iteration is 'x', not a whole number"),
        (OWN + "-1,a,,1,0\n", ":2:", "iteration is '-1'"),
        (OWN + "0,,,1,0\n", ":2:", "no name"),
        (OWN + "0,a,,,0\n", ":2:", "seconds is '', not a number"),
        (OWN + "0,a,,nan,0\n", ":2:", "seconds is 'nan', not a number"),
        (OWN + "0,a,,-1,0\n", ":2:", "negative"),
        (OWN + "0,a,soon,1,0\n", ":2:", "started is 'soon'"),
        (OWN + "0,a,,1,maybe\n", ":2:", "censored is 'maybe', not 0 or 1"),
        (OWN + "0,a,,1,0\n1,a,,1,0\n0,a,,2,0\n", ":4:", "'a' has iteration 0 twice"),
        (ALIBABA + "0,1,25,1,fast\n", ":2:", "batch_time_norm is 'fast'"),
        (OWN.encode() + b"0,a\xff,,1,0\n", ":2:", "not UTF-8"),
        (OWN + '0,"a,,1,0\n', ":2:", "unexpected end of data"),
        (OWN + "0,0,,1,0\n" + "".join(f"{i},{i},,1,0\n" for i in range(1, 9)), ":", "too many"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | bytes,
    where: str,
    what: str,
) -> None:
    monkeypatch.setattr(traces, "_MOST_CELLS", 50)
    path = put(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        traces.read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{where}")
    assert what in message
    assert "\n" not in message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent: cannot be read \(No such file"):
        traces.read(tmp_path / "absent")


def test_shapes_are_checked() -> None:
    times = np.ones((2, 3))
    with pytest.raises(ValueError, match="for 2 learners"):
        Trace(times, np.zeros((2, 3), bool), ("a", "b"))
    with pytest.raises(ValueError, match="censored"):
        Trace(times, np.zeros((2, 2), bool), ("a", "b", "c"))
