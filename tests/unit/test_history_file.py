"""The file of a job's history: bounded, and whole after each line."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.storage import history_file
from gadei_ps.storage.history_file import HistoryFile, line, parsed, thinned


def _point(time: float, **more: Any) -> dict[str, Any]:
    return {"time": time, "version": int(time), "samples": 1} | more


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.booleans()), max_size=300),
    st.integers(4, 100),
)
def test_thinned_lines(rows: list[tuple[float, bool]], most: int) -> None:
    """Bounded, in their order, from the first to the last, with all changes."""
    lines = [_point(time) | ({"set": {}} if event else {}) for time, event in rows]
    kept = thinned(lines, most)
    numbers = [next(i for i, other in enumerate(lines) if other is one) for one in kept]
    assert numbers == sorted(set(numbers))
    assert [one for one in kept if "set" in one] == [one for one in lines if "set" in one]
    points = [one for one in kept if "set" not in one]
    assert len(points) <= most // 2 + 1
    if len(lines) - len(kept) == 0:
        assert kept == lines


def test_points_are_equally_far_apart() -> None:
    lines = [_point(float(time)) for time in range(1000)]
    times = [one["time"] for one in thinned(lines, 100)]
    assert times[0] == 0
    assert times[-1] >= 960
    assert {round(b - a) for a, b in itertools.pairwise(times)} == {20}
    assert len(thinned([_point(0.0, set={}) for _ in range(5000)])) == history_file.MOST_EVENTS
    many = [_point(0.0, set={})] + [_point(1.0, event="attach") for _ in range(5000)]
    assert len(thinned(many)) == history_file.MOST_EVENTS // 2 + 1, "events displace no changes"


def test_lines_are_appended_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.jsonl"
    with mock.patch.object(history_file, "MOST_EVENTS", 10):
        one = HistoryFile(path, most=40)
        for time in range(500):
            one.append(line(_point(float(time))))
            assert len(parsed(path.read_bytes())) <= 51
        one.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    times = [one["time"] for one in parsed(path.read_bytes())]
    assert (times[0], times[-1]) == (0, 499)
    other = HistoryFile(path, fresh=True)
    other.append(line(_point(1.0)))
    other.close()
    assert [one["time"] for one in parsed(path.read_bytes())] == [1.0]
    assert [one["time"] for one in parsed(history_file.old(path).read_bytes())] == times
    for entry in path.parent.iterdir():
        assert history_file.is_own(entry.name)


def test_what_a_failed_machine_has_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(line(_point(1.0)) + line(_point(2.0))[:-9])
    one = HistoryFile(path)
    one.append(line(_point(3.0)))
    one.close()
    assert [one["time"] for one in parsed(path.read_bytes())] == [1.0, 3.0]


@given(st.binary(max_size=300))
def test_rubbish_is_no_line(raw: bytes) -> None:
    good = line(_point(5.0))
    assert _point(5.0) in parsed(raw.replace(b"\r", b"") + b"\n" + good)


def test_numbers_that_no_float_holds() -> None:
    huge, whole = "9" * 400, b'{"time":1,"loss":0.5}'
    lines = [f'{{"time":{huge}}}', '{"time":NaN}', '{"time":-1}', f'{{"time":1,"loss":{huge}}}']
    assert parsed("\n".join(lines).encode() + b"\n" + whole) == [{"time": 1, "loss": 0.5}]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_has_the_name_of_a_history(tmp_path: Path) -> None:
    """Check a directory of checkpoints that another user has made: nothing is followed, and nothing
    makes the writer wait."""
    path, other = tmp_path / "history.jsonl", tmp_path / "other"
    for make in (os.mkfifo, lambda one: one.symlink_to(other), lambda one: one.touch()):
        make(path)
        if path.is_file():
            os.truncate(path, history_file.MOST_BYTES + 1)
        before = open_files()
        with pytest.raises(OSError):
            HistoryFile(path)
        assert open_files() == before
        path.unlink()
    path.with_name(f".{path.name}.tmp").symlink_to(other)
    with mock.patch.object(history_file, "MOST_EVENTS", 10):
        one = HistoryFile(path, most=40)
        for time in range(100):
            one.append(line(_point(float(time))))
        one.close()
    assert not other.exists()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    one = HistoryFile(path)
    one.append(line(_point(1.0)))
    real = os.write

    def cut_off(fd: int, raw: bytes) -> int:
        if len(raw) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, raw[: len(raw) - 5])

    with mock.patch.object(os, "write", cut_off), pytest.raises(OSError, match="No space"):
        one.append(line(_point(2.0)))
    one.append(line(_point(3.0)))
    one.close()
    assert [json.loads(row)["time"] for row in path.read_bytes().splitlines()] == [1.0, 3.0]


def test_lines_that_no_file_takes() -> None:
    with pytest.raises(ValueError, match="bytes"):
        line({"time": 1.0, "text": "x" * 5000})
    with pytest.raises(ValueError, match="not JSON compliant"):
        line({"time": float("nan")})


@pytest.mark.parametrize(
    "name", ["history.jsonl", "demo.history.jsonl", "a-b_1.history.old.jsonl", ".history.jsonl.tmp"]
)
def test_names_of_histories(name: str) -> None:
    assert history_file.is_own(name)


@pytest.mark.parametrize("name", ["myhistory.jsonl", "loss_history.jsonl", "history.jsonl.gz"])
def test_files_of_others(name: str) -> None:
    assert not history_file.is_own(name)
