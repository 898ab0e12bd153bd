"""`python -m gadei_ps.benchmarks.gpu` on the host: everything except CUDA."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from shell import program
from support import PATIENCE_S, eventually

from gadei_ps.benchmarks.gpu import __main__ as suite
from gadei_ps.benchmarks.gpu import (
    bandwidth,
    learners,
    learners_block,
    mps,
    overhead,
    sizes,
    step_profile,
    tables,
    texts,
    timeline,
)
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.nlc_member import HOGWILD, OURS, SINGLE, Done
from gadei_ps.errors import DeviceError
from gadei_ps.machine import gpus, process
from gadei_ps.memory import presence

COMMAND = [sys.executable, "-m", "gadei_ps.benchmarks.gpu"]


def test_each_part_has_its_module_and_sizes() -> None:
    folder = Path(suite.__file__).parent
    for part in suite.PARTS:
        assert (folder / f"{part}.py").exists()
        assert sizes.FULL[part].keys() == sizes.QUICK[part].keys()


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=PATIENCE_S,
        check=False,
    )


def test_an_unknown_part(runtime_dir: Path) -> None:
    done = run("nonsense")
    assert done.returncode == 2
    assert "unknown part 'nonsense': there are overhead, bandwidth, learners" in done.stderr


@pytest.mark.parametrize("text", ["0", "-50", "nan", "inf", "1e300", "soon"])
def test_no_time(runtime_dir: Path, text: str) -> None:
    done = run(f"--seconds={text}", "--device", "host", "bandwidth")
    assert done.returncode == 2
    assert f"--seconds: {text!r} is not a number of seconds" in done.stderr


def test_an_empty_directory(runtime_dir: Path) -> None:
    done = run("--out", "", "--device", "host", "bandwidth")
    assert done.returncode == 2
    assert "--out: it is empty; name a directory" in done.stderr


@pytest.mark.parametrize("part", ["overhead", "learners"])
def test_sentences_outside_of_a_checkout(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runtime_dir: Path,
) -> None:
    """One line says how to give some; any data set is used then."""
    monkeypatch.setattr("gadei_ps.benchmarks.nlc_texts.EXAMPLE", tmp_path / "intents.csv")
    monkeypatch.setattr("gadei_ps.benchmarks.gpu.texts.EXAMPLE", tmp_path / "intents.csv")
    monkeypatch.setenv("GADEI_PS_BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu", "--here", "--device", "host", "--quick", part])
    monkeypatch.setattr("gadei_ps.machine.interrupts.install", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        suite.main()
    error = capsys.readouterr().err
    assert error.startswith(f"gadei-ps: no sentences to train on in {tmp_path}: set $GADEI_PS_")
    assert error.count("\n") == 1
    (tmp_path / "mr").mkdir()
    (tmp_path / "mr" / "all.csv").write_text("text,label\n" + "good,1\nbad,0\n" * 10)
    assert texts.first(Target("host", True, 0.0)).name == "mr"


def test_without_a_gpu(runtime_dir: Path) -> None:
    """One line says what is missing."""
    done = run("bandwidth", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("gadei_ps.benchmarks.gpu: ")
    assert done.stderr.count("\n") == 1


def test_quick_figures_replace_nothing(runtime_dir: Path) -> None:
    results = Path(suite.suite.RESULTS)
    done = run("--device", "host", "--out", str(results), "bandwidth")
    assert done.returncode == 2
    assert "quick figures would replace the full ones" in done.stderr


def test_a_part_on_the_host(runtime_dir: Path, tmp_path: Path, compiled: None) -> None:
    done = run("--device", "host", "--quick", "--out", str(tmp_path), "bandwidth")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu-bandwidth.json").read_text())
    assert (result["benchmark"], result["quick"]) == ("gpu-bandwidth", True)
    assert result["gpu"] == {"device": "host"}
    assert result["command"] == "python -m gadei_ps.benchmarks.gpu --device host --quick bandwidth"
    assert {(row["contender"], row["way"]) for row in result["rows"]} >= {
        ("gadei-ps", "push"),
        ("gadei-ps", "pull"),
        ("gadei-ps", "both ways"),
        ("gadei-ps, end to end", "push"),
    }
    assert all(ratio.keys() >= {"contender", "ratio", "reach"} for ratio in result["ratios"])
    assert not [one.name for one in presence.find() if "gpu-bandwidth" in one.name]


# -- the timeline --------------------------------------------------------------------------------


def event(cat: str, name: str, stream: int, begin: float, end: float, **more: Any) -> dict:
    args = {"stream": stream, **more}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


TRACE = [
    {"ph": "M", "name": "process_name"},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "args": {}},
    event("kernel", "gemm", 7, 0, 10),
    event("kernel", "stage", 7, 10, 12),
    event("kernel", "gemm", 7, 20, 30),
    event("kernel", "other", 9, 1, 2),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 13, 12, 24, bytes=1 << 20),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 13, 24, 25, bytes=64),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 14, 21, 29, bytes=1 << 20),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 18, 19, bytes=1 << 20),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 19, 20, bytes=1 << 20),
]


def test_lanes_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": TRACE}))
    found = timeline.lanes(json.loads(path.read_text())["traceEvents"])
    assert found == {
        "compute": [(0, 10), (10, 12), (18, 19), (19, 20), (20, 30)],
        "push": [(12, 24)],
        "pull": [(21, 29)],
    }
    assert timeline.overlap(found["push"], found["compute"]) == pytest.approx(6 / 12)
    assert timeline.overlap(found["pull"], found["compute"]) == 1
    assert timeline.overlap([], found["compute"]) is None
    assert timeline.overlap([(0, 4)], []) == 0
    assert timeline.union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]


def test_profile_of_a_trace() -> None:
    rows = step_profile.of_trace(TRACE, steps=2)
    assert [(one["of"], one["part"]) for one in rows][:2] == [
        (step_profile.ON_GPU, "gemm"),
        (step_profile.ON_GPU, "Memcpy DtoH (Device -> Pinned)"),
    ]
    assert rows[0]["mean"] == pytest.approx(10e-6)
    assert rows[0]["calls"] == 1


# -- ratios --------------------------------------------------------------------------------------


def figure(contender: str, count: int, network: str, values: list[float]) -> dict[str, Any]:
    return {
        "contender": contender,
        "learners": count,
        "network": network,
        "set": "mr",
        "mini_batch": 1,
        "values": values,
    }


def test_ratios_of_learners() -> None:
    figures = [
        figure(OURS, 1, learners.LSTM, [10, 10]),
        figure(OURS, 4, learners.LSTM, [18, 18]),
        figure(SINGLE, 1, learners.LSTM, [20, 20]),
        figure(HOGWILD, 4, learners.LSTM, [9, 9]),
        figure(HOGWILD, 2, learners.LSTM, [9, 9]),
    ]
    report = bandwidth.Report([])
    learners._tell(report, learners.WITHOUT, figures)
    assert len(report.rows) == len(figures)
    assert [
        (one["contender"], one["ratio"], one["reach"], one["reached"]) for one in report.ratios
    ] == [
        ("gadei-ps, one learner", 1.8, 1.7, True),
        (SINGLE, 0.5, 1.0, False),
        (HOGWILD, 2.0, 1.0, True),
    ]


# -- blocks of learners ----------------------------------------------------------------------------


class Team:
    """Takes the time that a window asks for. fails: from the second mini-batch on."""

    def __init__(self, count: int, *, fails: bool = False) -> None:
        self.count, self._fails = count, fails
        self.sizes: list[tuple[int, int, int]] = []
        self.ended = False

    def train(self, size: int, seconds: float, *_: float, task: int, members: int) -> list[Done]:
        if self._fails and self.sizes:
            raise RuntimeError("out of memory\nmore")
        self.sizes.append((task, size, members))
        return [Done(10, 10 * size, 1.0)] * members

    def profile(self, size: int, steps: int, *, task: int, members: int) -> list[dict[str, Any]]:
        return [{"part": "forward", "mean": 1.0}]

    def end(self, grace_s: float) -> None:
        self.ended = True


def found_by(block: learners_block.Block) -> tuple[list[list[tuple[str, int]]], list[str]]:
    """Return the contenders of each cell, and the notes."""
    found = list(block._cells("mr"))
    cells = [[(one["contender"], one["learners"]) for one in line["figures"]]
             for line in found if "figures" in line]  # fmt: skip
    return cells, [line["note"] for line in found if "note" in line]


def test_a_contender_that_fails_takes_no_further_part() -> None:
    block = learners_block.Block(Target("host", True, time.monotonic() + 100), learners.WITHOUT)
    ours, peer = Team(2), Team(2, fails=True)
    block._teams = {OURS: ours, HOGWILD: peer}  # type: ignore[dict-item]
    cells, notes = found_by(block)
    alone = [(OURS, 1), (OURS, 2)]
    assert cells == [alone] * 4
    assert notes == [f"{HOGWILD} with 2: not measured: out of memory"]
    assert peer.ended
    assert not ours.ended


def test_mini_batches_that_there_is_no_time_for_are_noted() -> None:
    block = learners_block.Block(Target("host", True, until=0.0), learners.WITHOUT)
    block._teams = {OURS: Team(2), HOGWILD: Team(2)}  # type: ignore[dict-item]
    cells, notes = found_by(block)
    assert cells == [[(OURS, 1), (OURS, 2), (HOGWILD, 1), (HOGWILD, 2)]]
    assert notes == [
        f"{learners.CLASSIFIER}: no time for mini-batches [4]",
        f"{learners.LSTM}: no time for mini-batches [1, 4]",
    ]


# -- tables --------------------------------------------------------------------------------------


def lines_of(name: str, report: bandwidth.Report) -> list[str]:
    (table,) = (one for one in tables.TABLES if one.result == f"gpu-{name}")
    result = {"rows": report.rows, "ratios": report.ratios, "notes": report.notes, "commit": "abc"}
    result |= {"gpu": {"gpus": ["H100"], "driver": "580", "cupy": "14"}}
    return table.lines(result | {"machine": {"torch": "2.11", "cores": 16, "cpu": "Xeon"}})


def test_tables_of_learners_and_of_the_timeline() -> None:
    report = bandwidth.Report([])
    figures = [
        figure(OURS, 1, learners.CLASSIFIER, [10, 10]),
        figure(OURS, 4, learners.CLASSIFIER, [2000, 2000]),
        figure(HOGWILD, 4, learners.CLASSIFIER, [1000, 1000]),
    ]
    learners._tell(report, learners.WITHOUT, figures)
    report.rows.append({**figures[0], "block": learners.WITHOUT, "part": "forward"})
    assert lines_of("learners", report) == [
        "| mini-batch | contender | processes | sentence classifier, without MPS, samples/s |",
        "| --- " * 4 + "|",
        "| 1 | gadei-ps | 1 | 10 |",
        "| 1 | gadei-ps | 4 | 2,000 |",
        "| 1 | Hogwild | 4 | 1,000 |",
        "",
        "H100, driver 580, CuPy 14, PyTorch 2.11, 16 cores; commit abc.",
    ]
    report = bandwidth.Report([])
    timeline._tell(report, "vgg", 64, timeline.lanes(TRACE))
    assert lines_of("timeline", report)[2] == "| VGG | 64 | 80% | 50% | 100% |"


def test_notes_are_sentences() -> None:
    report = bandwidth.Report([])
    learners._tell(report, learners.WITHOUT, [figure(OURS, 1, learners.LSTM, [10, 10])])
    report.notes += [
        "nvidia-cuda-mps-control of others runs: no",
        "VGG's images are noise: no data",
        "8 shards",
        "Hogwild with 4: not measured: out of memory",
        "250 MB: not measured: no time",
        "5 MB: not measured: no time",
        "vgg with 32: not measured: no time",
        "without MPS: LSTM: no time for mini-batches [2, 4]",
    ]
    assert lines_of("learners", report)[-1] == (
        "H100, driver 580, CuPy 14, PyTorch 2.11, 16 cores; commit abc. The job has 8 shards. "
        "Hogwild with 4: not measured: out of memory. "
        "Not measured for lack of time: mini-batches 2, 4, 5 MB, VGG at mini-batch 32, 250 MB."
    )


# -- what is around the measured code ------------------------------------------------------------


class Event:
    ptr = 5


class Libcuda:
    """Records calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cuEventRecord = bandwidth.RECORD(lambda *given: self._note("record", *given))
        self.cuMemcpyDtoHAsync_v2 = bandwidth.CALL(lambda *given: self._note("copy", *given))
        self.cuMemcpyHtoDAsync_v2 = bandwidth.CALL(lambda *given: 700)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return 0


def test_copies_of_a_link_are_timed() -> None:
    libcuda = Libcuda()
    timed = bandwidth.Timed(libcuda, Event)
    timed.streams, timed.least = {8}, 100
    assert timed.cuEventRecord is libcuda.cuEventRecord
    copy = timed.cuMemcpyDtoHAsync_v2  # as C calls it
    assert copy(1, 2, 100, 8) == 0
    assert copy(1, 2, 99, 8) == 0  # not a gradient
    assert copy(1, 2, 100, 9) == 0  # on another stream
    timed_copy = [("record", 5, 8), ("copy", 1, 2, 100, 8), ("record", 5, 8)]
    assert libcuda.calls == [*timed_copy, ("copy", 1, 2, 99, 8), ("copy", 1, 2, 100, 9)]
    assert len(timed.spans) == 1
    assert timed.cuMemcpyHtoDAsync_v2(1, 2, 100, 8) == 700


def test_a_transfer_that_begins_too_early_is_repeated() -> None:
    found = iter([None, None, 0.5])
    assert bandwidth._first(lambda: next(found)) == 0.5
    with pytest.raises(RuntimeError, match="the host takes too long"):
        bandwidth._first(lambda: None)


def test_steps_that_begin_too_early_do_not_count() -> None:
    def steps(*aheads: bool) -> dict[str, list[overhead.Taken]]:
        late = [overhead.Taken(0.1, 1.0 if ahead else 9.0, 0.2, False, ahead) for ahead in aheads]
        return {overhead.BUSY: late, overhead.TRAINING: late, overhead.HOST: late}

    report = bandwidth.Report([])
    found = {overhead.OURS: steps(False, True, False), overhead.TORCH: steps(False, False, False)}
    overhead._tell(report, {"network": "LSTM", "bytes": 4}, found)
    assert [(one["of"], one["contender"], one["median"]) for one in report.rows] == [
        (overhead.BUSY, overhead.OURS, 1.0),
        (overhead.BUSY, overhead.TORCH, 9.0),  # whose step() waits for the GPU
        (overhead.TRAINING, overhead.OURS, 9.0),
        (overhead.TRAINING, overhead.TORCH, 9.0),
        (overhead.HOST, overhead.OURS, 0.2),
        (overhead.HOST, overhead.TORCH, 0.2),
    ]
    assert [one.get("host_ahead") for one in report.rows[:3]] == [1 / 3, 0.0, None]
    assert report.notes == []
    overhead._tell(report, {"network": "LSTM", "bytes": 4}, dict.fromkeys(found, steps(False)))
    assert report.notes == ["LSTM: the host was never ahead"]


SERVICE = """
import os, pathlib, signal, sys, time
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    (pipes / "pid").write_text(str(os.getpid()))
    (pipes / "control").touch()
    time.sleep(100)
text = sys.stdin.read()
(pathlib.Path(__file__).parent / "input").write_text(text)
os.kill(int((pipes / "pid").read_text()), signal.SIGTERM)
"""


def test_the_service_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    tool = program(tmp_path / "bin" / mps.CONTROL, SERVICE)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "visible", lambda: ("0",))
    monkeypatch.setattr(gpus, "missing", lambda *arguments: "")
    with mps.directories() as env, mps.started(env):
        pid = int((Path(env[mps.PIPES]) / "pid").read_text())
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(env[mps.PIPES]).exists()
    assert (tool.parent / "input").read_text().startswith("quit")
    monkeypatch.setattr(gpus, "missing", lambda *arguments: "no GPU")
    with pytest.raises(DeviceError, match="no GPU"), mps.directories() as env, mps.started(env):
        pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="is not installed"), mps.started(env):
        pass


# -- lease.sh ------------------------------------------------------------------------------------

LEASE = Path(suite.__file__).resolve().parent / "lease.sh"

# In place of an interpreter. A step has a child that ignores SIGTERM.
STEPS = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[1] == "-c" and "sys.executable" in sys.argv[2]:
    print(__file__)
elif os.environ.get("SKIPPED"):
    print(os.environ["SKIPPED"])
else:
    begun = pathlib.Path(os.environ["BEGUN"]) / str(os.getpid())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    command = [sys.executable, "-c", code + "; time.sleep(1000)"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    child.stdout.readline()
    begun.write_text(str(child.pid))
    time.sleep(1000)
"""


def lease(*words: str | Path, python: str | Path) -> tuple[int, str, str]:
    """Run the script. Returns its exit code and output."""
    done = subprocess.run(
        ["bash", LEASE, *words],
        capture_output=True,
        text=True,
        errors="replace",  # it lists what is left on the machine, other tests' files included
        env=os.environ | {"PYTHON": str(python)},
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("steps", "count"), [(["bench:vision:900", "tests"], 1), (["together"], 2)]
)
def test_a_signal_ends_all_steps(
    tmp_path: Path, number: signal.Signals, steps: list[str], count: int
) -> None:
    (begun := tmp_path / "begun").mkdir()
    python = program(tmp_path / "bin" / "python3", STEPS)
    running = subprocess.Popen(
        ["bash", LEASE, tmp_path / "out", *steps],
        env=os.environ | {"PYTHON": str(python), "BEGUN": str(begun)},
        start_new_session=True,
    )
    try:
        eventually(lambda: sum(bool(one.read_text()) for one in begun.iterdir()) == count)
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            running.send_signal(number)
        assert running.wait(PATIENCE_S) == 128 + number
        pids = [pid for one in begun.iterdir() for pid in (one.name, one.read_text())]
        assert len(pids) == 2 * count  # no further step
        # The kernel takes a while to end what has got SIGKILL.
        eventually(lambda: not any(process.start_ticks(int(pid)) for pid in pids))
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        for one in begun.iterdir():
            with contextlib.suppress(ProcessLookupError):  # the group of timeout
                os.killpg(os.getpgid(int(one.read_text())), signal.SIGKILL)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("nonsense", "unknown step 'nonsense'"),
        ("bench:tables:20", "bench:tables:20: there is no part 'tables', only overhead"),
        ("bench:overhead bandwidth:20", "there is no part 'overhead bandwidth', only"),
        ("bench:vision", "bench:vision: '' is not a whole number of seconds"),
        ("bench:vision:x", "bench:vision:x: 'x' is not a whole number of seconds"),
        ("bench:vision:2.5", "bench:vision:2.5: '2.5' is not a whole number of seconds"),
        ("bench:vision:0", "bench:vision:0: '0' is not a whole number of seconds"),
    ],
)
def test_steps_are_checked_before_the_first(tmp_path: Path, step: str, error: str) -> None:
    code, out, err = lease(tmp_path / "out", "doctor", step, python=sys.executable)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert error in err
    assert not (tmp_path / "out").exists()


def test_each_part_is_a_step() -> None:
    (line,) = (one for one in LEASE.read_text().splitlines() if one.startswith("parts=("))
    assert set(line[len("parts=(") : -1].split()) == suite.PARTS.keys()


def test_the_interpreter_is_checked(tmp_path: Path) -> None:
    code, out, err = lease(tmp_path / "out", "doctor", python=tmp_path / "none")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"PYTHON: '{tmp_path}/none' cannot be run" in err
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    code, out, err = lease(tmp_path / "out", "tests", python=python)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"PYTHON: {python} lacks torch cupy pytest xdist pytest_timeout" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("last", "code"),
    [("=== 3 skipped, 2 deselected in 0.1s ===", 1), ("=== 3 passed, 2 skipped in 0.1s ===", 0)],
)
def test_skipped_tests_have_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, code: int
) -> None:
    monkeypatch.setenv("SKIPPED", last)
    found, out, _ = lease(tmp_path, "tests", python=program(tmp_path / "bin" / "python3", STEPS))
    assert found == code
    assert ("no test has run: === 3 skipped" in out) == bool(code)
