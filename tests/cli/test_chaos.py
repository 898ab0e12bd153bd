"""`kill` and `chaos`: faults as users make them."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import support
from shell import FOREVER, Cli, Result, is_running, learning

from gadei_ps.job.faults import Processes
from gadei_ps.memory import presence

pytestmark = pytest.mark.usefixtures("compiled")

MODEL = "[[tensors]]\nname = 'w'\nshape = [8]\n"


def test_kill_wants_to_know_whom(cli: Cli, job_name: str) -> None:
    assert "no job" in cli("kill", job_name, "--server").error
    for whom in ([], ["--server", "--watchdog"], ["--learner", 0, "--standby"]):
        result = cli("kill", job_name, *whom)
        assert (result.code, "give exactly one of" in result.error) == (2, True)
    result = cli("kill", job_name, "--server", "--signal", "NOISE")
    assert result.code == 2
    assert result.error.startswith("there is no signal 'NOISE'; use one of ")
    assert cli("kill", "../x", "--server").code == 1


def test_kill(cli: Cli, job_name: str, learner: list[str]) -> None:
    cli.fork_server = True
    daemon = cli.serve(job_name, "standby = true\n" + MODEL)
    assert "no learner is attached" in cli("kill", job_name, "--learner", 0).error
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    assert "its learners are 0" in cli("kill", job_name, "--learner", 7).error

    sent = cli("kill", job_name, "--learner", 0, "--signal", "stop", "--json").json
    assert sent == {
        "job": job_name,
        "role": "learner",
        "row": 0,
        "pid": attached.pid,
        "signal": "SIGSTOP",
        "ended": False,
    }
    stopped = psutil.Process(attached.pid)
    support.eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
    assert cli("kill", job_name, "--learner", 0, "--signal", "SIGCONT").code == 0

    there = support.eventually(lambda: _with_all(job_name))
    assert f", fork server {there['fork_server_pid']}" in cli("status", job_name).out
    for role in ("fork-server", "standby", "server"):
        now = support.eventually(lambda: _with_all(job_name))
        sent = cli("kill", job_name, f"--{role}", "--json").json
        assert (sent["role"], sent["pid"], sent["ended"]) == (
            role,
            now[f"{role.replace('-', '_')}_pid"],
            True,
        )
    assert "which is gone" in cli("kill", job_name, "--learner", 0).out
    assert attached.wait().code == -signal.SIGKILL
    assert cli("kill", job_name, "--watchdog").code == 0
    assert daemon.wait().code == -signal.SIGKILL
    # The job's memory names it, so a dead watchdog is recognized.
    assert "no watchdog just now" in cli("kill", job_name, "--watchdog").error
    support.eventually(lambda: _with_server(cli, job_name), what="a server outlives its watchdog")
    support.eventually(lambda: _without_servers(cli, job_name))


def _with_standby(job: str) -> dict[str, object] | None:
    now = support.status(job)
    return now if now["standby_pid"] else None


def _with_all(job: str) -> dict[str, object] | None:
    now = _with_standby(job)
    return now if now and now["fork_server_pid"] else None


def _with_server(cli: Cli, job: str) -> bool:
    return cli("kill", job, "--server", "--signal", "CONT").code == 0


def _without_servers(cli: Cli, job: str) -> bool:
    """Kill servers one after the other, because the next one may be taking over or starting."""
    cli("kill", job, "--server")
    return not presence.server_pids(job)


def campaign(cli: Cli, enough: Callable[[dict[str, Any]], bool], *words: object) -> Result:
    """Run a campaign, or on a busy machine longer ones, until it has done enough."""
    for seconds in (3, 20, 60):
        result = cli("chaos", *words, "--for", f"{seconds}s", "--json")
        assert result.code == 0 or not result.json["published"], result
        if enough(result.json):
            break
    return result


def test_chaos_of_its_own(cli: Cli, job_name: str) -> None:
    cli.fork_server = True
    how = ("--every", "150ms", "--shards", 2, "--seed", 3)
    result = campaign(cli, lambda report: sum(report["kills"].values()) > 3, *how)
    report = result.json
    assert report["own_job"]
    assert report["clean"]
    assert sum(report["kills"].values()) > 3
    assert report["kills"].keys() == {"server", "standby", "learner", "watchdog", "fork-server"}
    assert report["missed"] == [who for who, count in report["kills"].items() if not count]
    assert not result.err, "chaos reports deaths that it causes only in its result"
    assert 0 < report["published"] == report["applied"] == report["counters"]["gradients_applied"]
    assert report["lost"] == report["applied_twice"] == report["torn_values"] == 0
    for name in ("failover_ms", "activation_ms", "reclaim_ms", "restart_ms"):
        assert report[name].keys() >= {"p50", "p99", "max", "samples"}
    assert not support.segments(report["job"])


def test_a_campaign_that_is_too_short_is_not_passed(cli: Cli) -> None:
    for _ in range(20):  # on a busy machine a learner may push before it is killed
        result = cli("chaos", "--for", "1ms")
        if re.search(r"\b0 published", result.out):
            break
    assert result.code == 1
    assert "nothing was tested; use a longer --for" in result.out


def test_chaos_is_ended(cli: Cli, runtime_dir: Path) -> None:
    running = cli.start("chaos", "--every", "300ms", "--targets", "learner,watchdog")
    job = f"chaos-{running.pid}"
    support.eventually(lambda: is_running(job))
    seen = Processes(job).control
    support.eventually(lambda: int(seen["learner_deaths"]) and int(seen["watchdog_starts"]) > 1)
    support.eventually(lambda: is_running(job))  # else its servers are waited for, see orphan_s
    assert running.signal(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert not support.segments(job)
    assert not list(runtime_dir.iterdir())


def test_chaos_in_a_running_job(cli: Cli, job_name: str, learner: list[str]) -> None:
    assert "no job" in cli("chaos", job_name, "--for", "1s").error
    cli.serve(job_name, "standby = true\n")
    assert "no model yet" in cli("chaos", job_name, "--for", "1s").error
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    support.eventually(lambda: _with_standby(job_name))
    how = ["--targets", "server", "--every", "0.2s"]
    report = campaign(cli, lambda seen: seen["failover_ms"]["samples"] > 0, job_name, *how).json
    assert not report["own_job"]
    assert report["lost"] is report["applied_twice"] is report["published"] is None
    assert "job of its own" in report["ledger"]
    assert report["kills"]["server"] >= 1
    assert 1 <= report["failover_ms"]["samples"] <= report["kills"]["server"]
    assert attached.process.poll() is None
    shown = cli("chaos", job_name, *how, "--for", "1s")
    assert shown.code == 0
    assert "failover" in shown.out
    assert "needs a job of its own" in shown.out
    shown = cli("chaos", job_name, "--for", "100ms", "--every", "1m", "--targets", "standby,server")
    assert "standby, server: never hit" in shown.out
    refused = cli("chaos", job_name, "--size", "1M", "--learners", 3)
    assert (refused.code, "--learners, --size: only without JOB" in refused.error) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--for", "soon"], "duration 'soon'"),
        (["--targets", "server,cat"], "'cat' is not a role; give some of server, standby, learner"),
        (["--signals", "TERM"], "TERM is not KILL or STOP"),
        (["--size", "1K", "--shards", 4], "too few for 4 shards"),
        (["--size", "much"], "size 'much'"),
    ],
)
def test_chaos_says_what_it_cannot_do(cli: Cli, flags: list[object], message: str) -> None:
    result = cli("chaos", *flags)
    assert result.code == 2
    assert message in result.error
