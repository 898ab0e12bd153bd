"""Gaps and verdicts of the count of mutants; the run itself takes hours."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import mutants
import mutated
import places
import pytest

EVERY = list(places.mutants())
NAMES = [one.name for one, _ in EVERY]
SHARED = """
from __future__ import annotations

def f():
    control["phase"] = 1
    self._line["state"] = self._line["confirmed"] = 2
    control.view(CONTROL)["work"][row] |= 4
    s.c[0].roster[row].drained = ONE
    record.steps = record.step + ONE
    entry["wanted"] = 0 if generation == other else 1
"""
PRIVATE = """
def f():
    control = memory.control.view(CONTROL)
    self._control = control
    s.part[0].head[row] = tail
    self.board[0]["ring"][row]["address"] = 0
    self.rings[row] = ring
    ring.tail = tail
    memory.config = new
    one["low"], control["phase"] = 1, 2
"""


def test_stores_that_others_see_are_left_out() -> None:
    left_out = [one.what for one in places._of_python("a.py", SHARED)]
    lines = SHARED.split("def f():\n")[1].splitlines()
    assert [one for one in left_out if " = " in one or "|=" in one] == [
        line.strip() for line in lines
    ]
    assert not list(places._of_python("a.py", PRIVATE))


@pytest.mark.parametrize(
    "part",
    [
        'watchdog/roster.py:{} Roster.admit: entry["wanted"] = ',
        "gadei_ps/server/record.py:{} count_finished: record.steps = ",
        'gadei_ps/server/manager.py:{} Server._try_leases: self.control["lease_pid"] = ',
        "gadei_ps/server/chunks.py:{} save: old[i] = ",
        "native/ps_ring.c:{} ps_publish_frame: *ps_slot(",
        "native/ps_lease.c:{} ps_lease_release: pthread_mutex_unlock(",
        "native/ps_calls.c:{} ps_enter: __atomic_compare_exchange_n(",
    ],
)
def test_every_kind_of_place_is_found(part: str) -> None:
    file, rest = part.split(":{}")
    assert any(one.startswith(f"{file}:") and rest in one for one in NAMES)


def test_places_have_keys_of_their_own() -> None:
    assert len({one.key for one, _ in EVERY}) == len(EVERY)
    assert set(mutants.EQUIVALENT) <= {one.key for one, _ in EVERY}


def test_all_are_built_into_one_tree(tmp_path: Path) -> None:
    by_file: dict[str, list[tuple[int, places.Mutant]]] = {}
    for number, (one, _) in enumerate(EVERY, 1):
        by_file.setdefault(one.file, []).append((number, one))
    compiler = shutil.which("cc")
    (tmp_path / "ps_left_out.h").write_text(mutated.HEADER)
    for file, chosen in by_file.items():
        text = mutated.with_all((places.ROOT / file).read_text(), chosen, compiled=False)
        if file.endswith(".py"):
            ast.parse(text)
        for number, _ in chosen:
            assert f"left_out({number})" in text
        if compiler and file.endswith("ps_calls.c"):
            source = tmp_path / "calls.c"
            source.write_text(text)
            native = places.ROOT / "native"
            command = [compiler, "-Wall", "-Werror", "-fsyntax-only", f"-I{native}", source]
            subprocess.run(command, check=True)


def test_a_place_in_another() -> None:
    """An assignment, and a check of generations in what is assigned."""
    chosen = list(enumerate(places._of_python("a.py", SHARED), 1))
    last = mutated.with_all(SHARED, chosen, compiled=False).splitlines()[-1].strip()
    assert last.startswith("if not _left_out(")
    assert last.count("_left_out(") == 3
    ast.parse(last)


LINES = """
381 places: 300 of kind store
nothing left out: passed in 7 s
failed            12 s  a.py:7 f: put(a, b) -> pass  FAILED tests/x.py::test_y - assert 1
failed            99 s  a.py:8 f: put(c, d) -> pass  FAILED tests/x.py::test_y - Failed: Timeout (>100.0s) from pytest-timeout.
equivalent        12 s  a.py:9 f: fence() (number 2) -> pass  some reason
hung             912 s  a.py:10 f: put(e, f) -> pass  after 912 s
timed out        112 s  a.py:11 f: put(g, h) -> pass  FAILED tests/x.py::test_y - Failed: Timeout (>100.0s) from pytest-timeout.
SURVIVES          12 s  a.py:12 f: put(i, j) -> pass  
failed            12 s  a.py:13 f: x == y -> True
"""  # noqa: E501, W291


def test_earlier_runs_are_known() -> None:
    assert mutants.known_places(LINES) == {
        "a.py f: put(a, b) -> pass",
        "a.py f: fence() (number 2) -> pass",
        "a.py f: x == y -> True",
    }
    one = EVERY[0][0]
    moved = one.name.replace(f":{one.line} ", f":{one.line + 5} ")
    assert mutants.known_places(f"failed  3 s  {moved}  FAILED") == {one.key}


@pytest.mark.parametrize(
    ("line", "out_of_time"),
    [
        ("E   Failed: Timeout (>100.0s) from pytest-timeout.", True),
        ("+++++++++++ Timeout +++++++++++", True),
        ("E       AssertionError: not within 60.0 s: it rests", True),
        ("FAILED tests/x.py::test_y - AssertionError: not within 30.0 s: counts", True),
        ('        raise AssertionError(f"not within {timeout_s} s: {text}")', False),
        ("FAILED tests/x.py::test_y - assert 1 == 2", False),
    ],
)
def test_a_test_that_runs_out_of_time(line: str, out_of_time: bool) -> None:
    assert mutated.ran_out_of_time(["passed", line]) == out_of_time


def test_exit_codes() -> None:
    assert mutants.exit_code({"failed": 3, "equivalent": 1}) == 0
    assert mutants.exit_code({"failed": 3, "timed out": 1}) == 3
    for verdict in ("SURVIVES", "NOT EQUIVALENT", "broken"):
        assert mutants.exit_code({"failed": 3, "timed out": 1, verdict: 1}) == 1


class Scripted:
    """A tree whose runs end as ordered."""

    def __init__(self, **verdicts: list[str]) -> None:
        self.verdicts = verdicts

    def reach(self, tests: tuple[str, ...]) -> tuple[str, str]:
        return self.run(0, places.ROOMS[0])

    def run(self, number: int, room: places.Room) -> tuple[str, str]:
        return self.verdicts[f"of_{number}"].pop(0), ""

    def stop(self) -> None:
        pass


CLEAN = ["passed"] * mutants.CLEAN_RUNS


@pytest.mark.parametrize(
    ("verdicts", "code", "last"),
    [
        ({"of_1": ["timed out", "failed"], "of_2": ["failed"]}, 0, "2 failed"),
        ({"of_1": ["timed out", "timed out"], "of_2": ["failed"]}, 3, "1 failed, 1 timed out"),
        ({"of_1": ["timed out", "passed"], "of_2": ["failed"]}, 1, "1 SURVIVES, 1 failed"),
    ],
)
def test_what_ran_out_of_time_is_tried_once_more(
    verdicts: dict[str, list[str]], code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Scripted(of_0=[*CLEAN], **verdicts)
    chosen = [(number, *EVERY[-number]) for number in (1, 2)]
    assert mutants._run(tree, chosen, jobs=1) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert not any(tree.verdicts.values())


def test_tests_that_fail_now_and_then_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tree = Scripted(of_0=[*CLEAN[1:], "failed"])
    assert mutants._run(tree, [(1, *EVERY[-1])], jobs=1) == 2
    assert "with nothing left out, a test failed" in capsys.readouterr().err
