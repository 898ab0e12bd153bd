"""Learners in C against real jobs: what tests/conformance/test_clients.py does not ask of both."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from clients.drivers import ERROR, FAILED, SMALL
from shell import Cli
from support.hostile import NOBODY
from support.supervised import again

from gadei_ps.job import paths
from gadei_ps.job.config import load
from gadei_ps.machine import process

EXAMPLE = Path(__file__).parents[2] / "native" / "examples"


def test_the_example_learns(programs: Any, job: Callable[..., Any]) -> None:
    program = programs.build(EXAMPLE / "least_squares.c")
    example = load(EXAMPLE / "least_squares.toml").model_dump(exclude={"name"})
    running = job(**example)
    environment = os.environ | {"GADEI_PS_JOB": str(running.socket)}
    done = subprocess.run(
        [program], env=environment, capture_output=True, text=True, timeout=support.PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 10 and losses[-1] < 1e-3 * losses[0]
    expected = np.append(0.25 * (np.arange(16) - 8), 0.5)
    np.testing.assert_allclose(running.weights(), expected, atol=1e-2)
    running.gone()
    assert running.status()["gradients_applied"] == 500
    assert running.status()["samples"] == 500 * 32


def test_a_launched_program_waits_for_the_next_watchdog(
    programs: Any, cli: Cli, job_name: str
) -> None:
    program = programs.build(EXAMPLE / "least_squares.c")
    text = (EXAMPLE / "least_squares.toml").read_text().replace('name = "least_squares"\n', "")
    cli.serve(job_name, text).signal(signal.SIGKILL)
    variables = {"GADEI_PS_JOB": str(paths.socket_path(job_name)), "GADEI_PS_LEARNER": "0"}
    with subprocess.Popen([program], env=os.environ | variables, stderr=subprocess.PIPE) as started:
        again(cli, job_name)
        _, error = started.communicate(timeout=support.PATIENCE_S)
    assert started.returncode == 0, error


def test_the_header_in_cpp_and_old_c(programs: Any, small: Any) -> None:
    here = Path(__file__).parent
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{EXAMPLE.parent}"]
    program = programs.build(here / "header.cpp", compiler=["c++", "-std=c++11", *strict])
    running = small
    done = subprocess.run(
        [program, running.socket], capture_output=True, text=True, timeout=support.PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, "2 w\n")
    programs.run(
        ["cc", "-std=c99", *strict, "-fsyntax-only", "-x", "c", EXAMPLE.parent / "gadei.h"]
    )


def test_assignments(programs: Any, job: Callable[..., Any]) -> None:
    """Assign as Client.assign does."""
    program = programs.build(Path(__file__).parent / "assign.c")
    running = job(**SMALL)
    before = running.weights()
    done = subprocess.run(
        [program, running.socket], capture_output=True, text=True, timeout=support.PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "push 0",
        "assign 0",
        f"same 1 other {before[15] - 1:g}",
        "push 0",
        "applied 0",
        "after 99",
        f"null {ERROR} assign: values are NULL",
        f"nan {ERROR} assign: 'w' holds a NaN or an infinity, which the job refuses; nothing is "
        "changed",
        "claim 0",
        f"claimed {ERROR} assign: a gradient is begun and not pushed yet: push it first",
        f"none {ERROR} the learner is NULL",
    ]
    running.gone()
    assert running.status()["gradients_applied"] == 2


def test_model_and_weights(small: Any, learner: Callable[[], Any]) -> None:
    running, mine = small, learner()
    mine.do("attach", running.socket, 'ünusual "name", cut after 31 bytes')
    assert mine.ask("tensors") == (2, "w:1:3x5:0:15 b:1:7:16:7")
    assert mine.ask("find", "b") == (1, "")
    assert mine.ask("find", "c") == (ERROR, "the job's model has no tensor 'c'")
    (row,) = running.status()["learners"]
    assert row["name"] == 'ünusual "name", cut after 31 b' and row["pid"] == mine.process.pid
    before = running.weights()
    mine.do("claim", 1000)
    mine.do("write", 1, 2.0)  # `w` is not written: it stays
    mine.do("publish", 0.25, 4, 0.5)
    mine.do("applied", 10_000)
    expected = before.copy()
    expected[15:] -= 1.0
    np.testing.assert_array_equal(running.weights(), expected)
    assert mine.values("live") == mine.values("pull") == (expected.min(), expected.max())
    assert mine.values("pull_consistent 10000") == (expected.min(), expected.max())
    (row,) = running.status()["learners"]
    assert (row["applied"], row["samples"], row["loss"]) == (1, 4, 0.25)
    mine.do("detach")
    running.gone()


def test_wrong_use_changes_nothing(small: Any, learner: Callable[[], Any]) -> None:
    running, mine = small, learner()
    mine.do("attach", running.socket)
    before = running.weights()
    assert mine.ask("write", 0, 1.0) == (ERROR, "no slot is claimed")
    assert mine.ask("publish", 0, 0, 1) == (ERROR, "no slot is claimed")
    assert mine.ask("wire", 4) == (ERROR, "unknown number format 4")
    mine.do("applied", 0)  # nothing published, nothing to wait for
    mine.do("claim", 1000)
    assert mine.ask("write", 2, 1.0) == (ERROR, "no tensor 2: the model has 2")
    assert mine.ask("wire", 2)[0] == ERROR
    for scale in ("-1", "nan", "inf"):
        assert mine.ask("publish", 0, 0, scale) == (ERROR, "rate_scale is negative or not finite")
    assert mine.ask("published") == (0, "")
    mine.do("write", 0, 1e6)
    mine.do("claim", 1000)  # starts the slot again: what was written is forgotten
    mine.do("publish", 0, 0, 1)
    mine.do("applied", 10_000)
    np.testing.assert_array_equal(running.weights(), before)


def test_what_is_null_is_an_error(small: Any, learner: Callable[[], Any]) -> None:
    """A handle or an array, in each function of gadei.h; the learner can continue after each."""
    running, mine = small, learner()
    mine.do("attach", running.socket)
    mine.begin("nulls")
    assert mine.line() == "done"
    mine.do("push", 0, 1000)
    mine.do("applied", 10_000)


@pytest.mark.parametrize("wire", [1, 2, 3])
def test_wires(wide: Any, learner: Callable[[], Any], wire: int) -> None:
    running, mine = wide, learner()
    mine.do("attach", running.socket)
    mine.do("wire", wire)
    before = running.weights()
    mine.do("push", 0.1, 1000)
    mine.do("applied", 10_000)
    sent = np.array([0.1], np.float32)
    if wire == 2:
        sent = np.array([0x3DCD0000], np.uint32).view(np.float32)
    elif wire == 3:
        sent = sent.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(running.weights(), before - sent)


def test_weights_cannot_be_written(small: Any, learner: Callable[[], Any]) -> None:
    running, mine = small, learner()
    mine.do("attach", running.socket)
    before = running.weights()
    mine.begin("poke")
    assert mine.process.wait(support.PATIENCE_S) == -signal.SIGSEGV
    running.gone()
    np.testing.assert_array_equal(running.weights(), before)


# -- waits ---------------------------------------------------------------------------------------


def fill(running: Any, mine: Any) -> None:
    """Attach and fill the ring while no shard empties it."""
    mine.do("attach", running.socket)
    running.pause(True)
    for _ in range(int(running.control["slots"])):
        mine.do("push", 1, 10_000)


# -- death ---------------------------------------------------------------------------------------


def test_killed_while_it_writes(wide: Any, learner: Callable[[], Any]) -> None:
    """Check that published gradients are applied, unpublished ones not, and the ring is freed."""
    running, mine = wide, learner()
    before, applied = running.weights(), running.status()["gradients_applied"]
    mine.do("attach", running.socket)
    mine.do("push", 1, 10_000)
    mine.do("applied", 10_000)
    running.pause(True)
    mine.do("push", 2, 10_000)
    mine.do("claim", 10_000)
    mine.do("write", 0, 1e6)
    mine.kill()
    running.pause(False)
    running.gone()
    np.testing.assert_array_equal(running.weights(), before - 3)
    assert running.status()["gradients_applied"] == applied + 2


@pytest.mark.parametrize("attempt", range(3))
def test_killed_anywhere(wide: Any, learner: Callable[[], Any], attempt: int) -> None:
    running, mine = wide, learner()
    before, applied = running.weights(), running.status()["gradients_applied"]
    mine.do("attach", running.socket)
    mine.do("flood")
    support.eventually(lambda: running.status()["gradients_applied"] > applied + 10 * attempt)
    mine.kill()
    running.gone()
    count = running.status()["gradients_applied"] - applied
    np.testing.assert_array_equal(running.weights(), before - np.float32(count))


# -- attaching to what is not there --------------------------------------------------------------


def test_no_such_job(
    job: Callable[..., Any],
    learner: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("GADEI_PS_JOB", raising=False)
    mine = learner()
    looked = f"no job 'nobody' is running (looked at {tmp_path}/gadei-ps/nobody.sock); "
    assert mine.ask("attach", "nobody") == (ERROR, looked + "gadei-ps ls shows the jobs there are")
    assert mine.ask("attach", f"{tmp_path}/nobody.sock")[1].startswith("no job ")
    assert mine.ask("attach", f"{tmp_path}")[0] == ERROR
    assert mine.ask("attach", "-")[1].startswith("which job?")
    for name in ("-x", "a.b", "x" * 49):
        assert mine.ask("attach", name)[1].startswith(f"job name '{name}'")
    assert mine.ask("attach", "/" + "x" * 200)[1].endswith("too long for a socket's path")
    (tmp_path / "gadei-ps").mkdir()
    (tmp_path / "gadei-ps").chmod(0o777)
    assert "only you may write" in mine.ask("attach", "nobody")[1]
    if os.getuid() == 0:  # for root, another user's only by its name
        (tmp_path / "gadei-ps").chmod(0o700)
        os.chown(tmp_path / "gadei-ps", NOBODY, NOBODY)
        assert "only you may write" in mine.ask("attach", "nobody")[1]
        monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(tmp_path / "gadei-ps"))
        assert (
            learner().ask("attach", "nobody")[1] == looked + "gadei-ps ls shows the jobs there are"
        )


def test_by_path_and_by_environment(
    small: Any, learner: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = small
    monkeypatch.setenv("GADEI_PS_JOB", running.name)
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(running.socket.parent))
    mine = learner()
    mine.do("attach", "-")
    mine.do("detach")
    mine.do("attach", running.name)
    assert paths.socket_path(running.name) == running.socket


def test_a_wait_notices_reused_pids(small: Any, hurried: Callable[[], Any]) -> None:
    """A process with the server's or the watchdog's pid and another start is neither."""
    running, mine = small, hurried()
    fill(running, mine)
    starts = {who: int(running.control[f"{who}_start"]) for who in ("lease", "watchdog")}
    for who, start in starts.items():
        assert start == process.start_ticks(int(running.control[f"{who}_pid"]))
        running.control[f"{who}_start"] = start + 1
    assert mine.ask("claim", -1)[0] == FAILED
    for who, start in starts.items():
        running.control[f"{who}_start"] = start
    running.pause(False)
    mine.do("applied", 10_000)
